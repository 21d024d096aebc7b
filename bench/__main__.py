"""`make bench`: what a task costs, stage by stage, on servers started for it.

Each stage is a script of its own that takes its servers from TASKLINE_* variables and makes its own topics, so it can
also be run alone: `TASKLINE_KAFKA__BOOTSTRAP_SERVERS=… python -m bench.producer`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import click

from taskline.infra.local.config import StackConfig
from taskline.infra.local.stack import LocalStack
from taskline.settings import Settings, as_environment

# Stages that need no servers.
ALONE = ("children", "memory")
STAGES = ("producer", *ALONE, "worker", "projector", "view_read", "api_load", "delay", "replay", "pickup")
# By name only: it needs several GB and minutes.
ON_REQUEST = ("joining",)
_LIBRARIES = ("confluent-kafka", "fastavro", "faust-streaming", "cassandra-driver", "fastapi", "uvicorn")


@click.command()
@click.argument("stages", nargs=-1, type=click.Choice((*STAGES, *ON_REQUEST)))
def main(stages: tuple[str, ...]) -> None:
    """Run the STAGES (all by default), one after another."""
    libraries = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; {libraries}")
    chosen = stages or STAGES
    if set(chosen) <= set(ALONE):
        failed = run(chosen, {})
    else:
        with LocalStack(StackConfig(ephemeral=True)).running() as stack:
            settings = Settings.model_validate(
                {
                    "kafka": {"bootstrap_servers": stack.bootstrap_servers},
                    "cassandra": {"contact_points": stack.contact_points, "port": stack.cassandra_port},
                }
            )
            failed = run(chosen, as_environment(settings))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(stages: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Run stages in processes of their own; those that failed."""
    failed = []
    for stage in stages:
        print(f"\n== {stage}", flush=True)
        command = [sys.executable, "-m", f"bench.{stage}"]
        if subprocess.run(command, env=os.environ | dict(environment), check=False).returncode:
            failed.append(stage)
    return failed


if __name__ == "__main__":
    main()
