"""Have an ephemeral stack watched by a reaper process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from taskline.infra.local import reaper
from taskline.infra.local.process import ProcessIdentity, spawn
from taskline.infra.local.service import stack_mark


def start_reaper(stack_id: str, folder: Path) -> ProcessIdentity:
    """Start the process that ends the stack and removes its folder once this process is gone."""
    this = psutil.Process()
    command = [
        *(sys.executable, "-P", str(Path(reaper.__file__).resolve())),  # -P: its folder is not a package path
        *(str(this.pid), repr(this.create_time()), stack_mark(stack_id).lstrip("-"), str(folder)),
    ]
    return spawn(command, marker=str(folder), output=Path(os.devnull), cwd=Path("/"))
