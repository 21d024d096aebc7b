"""`python -m simulation 1..500`, `17`, `3,8,20..30`: run seeds; those that fail are told with what is wrong and what came last."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from rich.console import Console
from rich.progress import track

from simulation.run import run


def seeds_of(text: str) -> list[int]:
    """The seeds that a text names."""
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        found += range(int(first), int(last) + 1) if dots else [int(first)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("seeds", help="1..500, 17, or 3,8,20..30")
    parser.add_argument("--tail", type=int, default=40, help="lines of a failing seed's trace")
    parser.add_argument("--about", help="only lines of the trace with this in them, e.g. a task id")
    parser.add_argument("--trace", action="store_true", help="show the trace of good seeds, too")
    asked = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    seeds, failed, reached = seeds_of(asked.seeds), [], Counter[str]()
    began = time.perf_counter()
    for seed in track(
        seeds, "simulating", console=console, disable=not console.is_terminal or len(seeds) < 2
    ):
        report = run(seed)
        reached += report.reached
        if report.wrong:
            failed.append(seed)
        if report.wrong or asked.trace:
            console.print(str(report.plan))
            for wrong in report.wrong:
                console.print(f"  WRONG {wrong}")
            for line in report.tail(asked.tail, asked.about):
                console.print(f"    {line}")
        if len(seeds) == 1:
            console.print(f"digest {report.digest}, {report.seconds:.0f} virtual seconds")
    console.print(
        f"{len(seeds)} seeds in {time.perf_counter() - began:.1f} s, {len(failed)} failed"
        + (f": {','.join(map(str, failed))}" if failed else "")
    )
    if len(seeds) > 1:
        console.print("reached: " + ", ".join(f"{name} {reached[name]}" for name in sorted(reached)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
