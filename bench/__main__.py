"""`make bench`: what a task costs, stage by stage, on servers started for it.

Each stage is a script of its own that takes its servers from TASKLINE_* variables and makes its own topics, so it can
also be run alone: `TASKLINE_KAFKA__BOOTSTRAP_SERVERS=… python -m bench.producer`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version

import click

from taskline.infra.local.config import StackConfig
from taskline.infra.local.stack import LocalStack
from taskline.settings import Settings, as_environment

STAGES = ("producer", "worker", "projector", "view_read", "api_read")
_LIBRARIES = ("confluent-kafka", "fastavro", "faust-streaming", "cassandra-driver", "fastapi", "uvicorn")


@click.command()
@click.argument("stages", nargs=-1, type=click.Choice(STAGES))
def main(stages: tuple[str, ...]) -> None:
    """Run the STAGES (all by default), one after another."""
    libraries = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; {libraries}")
    failed = []
    with LocalStack(StackConfig(ephemeral=True)).running() as stack:
        settings = Settings.model_validate(
            {
                "kafka": {"bootstrap_servers": stack.bootstrap_servers},
                "cassandra": {"contact_points": stack.contact_points, "port": stack.cassandra_port},
            }
        )
        for stage in stages or STAGES:
            print(f"\n== {stage}", flush=True)
            command = [sys.executable, "-m", f"bench.{stage}"]
            if subprocess.run(
                command, env=dict(os.environ) | as_environment(settings), check=False
            ).returncode:
                failed.append(stage)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
