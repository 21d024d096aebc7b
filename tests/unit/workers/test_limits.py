"""Limits per task type and per key: the bookkeeping, the file, and an engine under them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import InvalidSettings, InvalidTaskType
from taskline.schemas.events import Priority
from taskline.workers.limits import FOREVER, Limits, TypeLimits
from taskline.workers.limits_file import read_limits
from taskline.workers.registry import Registry


@given(st.floats(0.1, 100), st.lists(st.floats(0, 3), min_size=1, max_size=80))
def test_in_no_span_more_begin_than_the_rate_allows(rate: float, pauses: list[float]) -> None:
    limits = Limits({"t": TypeLimits(rate_per_second=rate)})
    gates = limits.gates("t", None)
    now, begun = 0.0, []
    for pause in pauses:
        now += pause
        until = limits.closed_until(gates[0], now)
        if until is not None:
            assert now < until < math.inf
            # At the moment that was told, it is open.
            now = until
            assert limits.closed_until(gates[0], now + 1e-9) is None
        limits.enter(gates, now)
        limits.leave(gates)
        begun.append(now)
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            assert last - first + 1 <= rate * (begun[last] - begun[first] + 1) + 1 + 1e-6


@given(st.lists(st.sampled_from(["enter a", "enter b", "leave a", "leave b"]), max_size=60))
def test_no_more_than_allowed_are_inside(steps: list[str]) -> None:
    limits = Limits({"t": TypeLimits(max_concurrency=3, max_concurrency_per_key=2)})
    inside = {"a": 0, "b": 0}
    for step in steps:
        move, key = step.split()
        gates = limits.gates("t", key)
        if move == "leave":
            if inside[key]:
                limits.leave(gates)
                inside[key] -= 1
            continue
        closed = [gate for gate in gates if limits.closed_until(gate, 0) == FOREVER]
        assert bool(closed) == (inside[key] == 2 or sum(inside.values()) == 3)
        if not closed:
            limits.enter(gates, 0)
            inside[key] += 1


def test_what_has_no_limits_stands_behind_no_gate_until_it_is_given_some() -> None:
    limits = Limits({})
    assert limits.gates("t", "k") == ()
    limits.configure({"t": TypeLimits(max_concurrency=1)})
    (gate,) = limits.gates("t", "k")
    limits.enter((gate,), 0)
    assert limits.closed_until(gate, 0) == FOREVER
    limits.configure({})
    assert limits.closed_until(gate, 0) is None


@pytest.mark.parametrize(
    "limits",
    [{"max_concurrency": 0}, {"max_concurrency": 1.5}, {"rate_per_second": 0}, {"rate_per_second": math.inf}],
)
def test_limits_under_which_nothing_runs_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"from 1|above 0"):
        TypeLimits(**limits)


def test_a_file_of_limits(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text('[types."mail.send"]\nmax_concurrency = 2\nrate_per_second_per_key = 0.5\n')
    assert read_limits(path) == {"mail.send": TypeLimits(max_concurrency=2, rate_per_second_per_key=0.5)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[types."t"]\nmax_concurency = 2\n', "did you mean 'max_concurrency'"),
        ('[types."t"]\nmax_concurrency = 0\n', "from 1"),
        ("[limits]\n", "limits"),
        ("[types]\nt = 3\n", "not 3"),
        ("types = 3\n", "tables"),
        ("[", "limits file"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(InvalidSettings, match=said):
        read_limits(path)
    with pytest.raises(InvalidSettings, match="limits file"):
        read_limits(tmp_path / "none.toml")


class Watched:
    """Handlers that say how many of them run."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.running: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.begun: list[tuple[float, Any]] = []

    async def work(self, name: str, payload: Any, seconds: float = 1.0) -> None:
        loop = asyncio.get_running_loop()
        self.begun.append((loop.time(), payload))
        self.running[name] = self.running.get(name, 0) + 1
        self.most[name] = max(self.most.get(name, 0), self.running[name])
        await asyncio.sleep(seconds)
        self.running[name] -= 1


def test_a_limited_type_leaves_slots_to_the_others_and_new_limits_apply_at_once(bench, virtually) -> None:
    watched = Watched()

    @watched.registry.task("few", limits=TypeLimits(max_concurrency=2))
    async def few(payload: Any) -> None:
        await watched.work("few", payload)

    @watched.registry.task("many")
    async def many(payload: Any) -> None:
        await watched.work("many", payload)

    async def scenario() -> None:
        async with bench(watched.registry, concurrency=8, high_reserve=0) as b:
            b.assign(0)
            b.push(
                *(b.submission("few", n) for n in range(20)), *(b.submission("many", n) for n in range(20))
            )
            await asyncio.sleep(0.5)
            assert watched.running == {"few": 2, "many": 6}
            await asyncio.sleep(4)
            assert watched.running == {"few": 2, "many": 0}
            b.engine.limit({"few": TypeLimits(max_concurrency=5)})
            await asyncio.sleep(1)
            assert watched.running["few"] == 5
            await asyncio.sleep(10)
            assert (watched.most["few"], len(watched.begun)) == (5, 40)

    virtually(scenario())


def test_a_rate_is_kept_and_each_key_has_its_own_share(bench, virtually) -> None:
    watched = Watched()

    @watched.registry.task("paced", limits=TypeLimits(rate_per_second=5))
    async def paced(payload: Any) -> None:
        await watched.work("paced", payload, 0.001)

    @watched.registry.task(
        "shared", limits=TypeLimits(max_concurrency_per_key=1), concurrency_key=lambda payload: payload["who"]
    )
    async def shared(payload: Any) -> None:
        await watched.work(f"shared {payload['who']}", payload)

    async def scenario() -> None:
        async with bench(watched.registry, concurrency=8) as b:
            b.assign(0)
            b.push(*(b.submission("paced", n) for n in range(20)))
            await asyncio.sleep(10)
            first = watched.begun[0][0]
            at = [round(when - first, 3) for when, _ in watched.begun]
            assert at[:5] == pytest.approx([0] * 5, abs=0.1)
            # A second's worth at once, then evenly.
            assert at[5:] == pytest.approx([0.2 * n for n in range(1, 16)], abs=0.1)
            watched.begun.clear()
            b.push(*(b.submission("shared", {"who": who}) for who in "aaaabb"))
            await asyncio.sleep(1.5)
            assert watched.running["shared a"] == watched.running["shared b"] == 1
            await asyncio.sleep(5)
            assert watched.most["shared a"] == watched.most["shared b"] == 1
            assert len(watched.begun) == 6

    virtually(scenario())


def test_ordered_tasks_of_one_key_run_one_after_another_and_others_beside_them(bench, virtually) -> None:
    watched = Watched()

    @watched.registry.task("ordered", ordering="key")
    async def ordered(payload: Any) -> None:
        await watched.work("ordered", payload, 1.0 if payload % 2 else 0.1)

    async def scenario() -> None:
        async with bench(watched.registry, concurrency=8) as b:
            b.assign(0)
            b.push(*(b.submission("ordered", n, affinity_key="k") for n in range(6)))
            b.push(*(b.submission("ordered", n, affinity_key="other") for n in (10, 11)))
            b.push(*(b.submission("ordered", n) for n in (21, 23)))
            await asyncio.sleep(20)
            order = [payload for _, payload in watched.begun]
            assert [n for n in order if n < 10] == list(range(6))
            begun = {payload: when for when, payload in watched.begun}
            assert begun[1] - begun[0] >= 0.1
            assert begun[2] - begun[1] >= 1
            # What has no key, or another one, waits for nobody.
            assert begun[10] == begun[21] == begun[23] == begun[0]

    virtually(scenario())


def test_high_finds_a_slot_while_all_others_are_busy_and_low_gets_its_share(bench, virtually) -> None:
    watched = Watched()

    @watched.registry.task("work")
    async def work(payload: Any) -> None:
        await watched.work("work", payload, 100.0 if payload == "long" else 0.1)

    async def scenario() -> None:
        async with bench(watched.registry, concurrency=10, high_reserve=0.1) as b:
            for priority in Priority:
                b.assign(0, priority=priority)
            b.push(
                *(b.submission("work", "long", priority=Priority.LOW) for _ in range(30)),
                priority=Priority.LOW,
            )
            await asyncio.sleep(1)
            assert watched.running["work"] == 9
            before = asyncio.get_running_loop().time()
            b.push(b.submission("work", "urgent", priority=Priority.HIGH), priority=Priority.HIGH)
            await asyncio.sleep(0.05)
            at, payload = watched.begun[-1]
            assert (payload, at - before < 0.01) == ("urgent", True)

    virtually(scenario())


def test_the_reserve_does_not_grow_by_the_high_tasks_in_other_slots(bench, virtually) -> None:
    """However the ends of high tasks are spread: else a flood of them would leave nothing to the others."""
    watched = Watched()

    @watched.registry.task("work")
    async def work(payload: Any) -> None:
        await watched.work(payload[0], payload[0], payload[1])

    async def scenario() -> None:
        async with bench(watched.registry, concurrency=10, high_reserve=0.2) as b:
            for priority in Priority:
                b.assign(0, priority=priority)
            for priority, count in ((Priority.HIGH, 900), (Priority.LOW, 200)):
                b.push(
                    # Of many lengths, so that no two end together.
                    *(b.submission("work", [priority.value, 1 + n * 0.007 % 0.1]) for n in range(count)),
                    priority=priority,
                )
            await asyncio.sleep(50)
            assert watched.most["low"] <= 8
            begun = [payload for _, payload in watched.begun]
            # By weight 1 in 17 of the slots that are not reserved.
            assert begun.count("low") >= len(begun) * 0.8 / 17 * 0.9
            assert begun.count("high") >= len(begun) * 0.9

    virtually(scenario())


@pytest.mark.parametrize(
    "options",
    [{"limits": {"max_concurrency": 1}}, {"concurrency_key": "who"}, {"ordering": "strict"}],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    async def handler(payload: Any) -> None: ...

    with pytest.raises(InvalidTaskType):
        Registry().task("t", **options)(handler)


def test_a_key_that_can_t_be_made_is_a_dead_letter(bench, virtually) -> None:
    registry = Registry()

    @registry.task("t", concurrency_key=lambda payload: payload["who"])
    async def handler(payload: Any) -> None: ...

    async def scenario() -> None:
        async with bench(registry) as b:
            b.assign(0)
            b.push(b.submission("t", {}))
            await asyncio.sleep(1)
            assert b.log.kinds() == ["DeadLettered"]

    virtually(scenario())
