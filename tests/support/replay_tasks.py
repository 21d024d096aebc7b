"""Tasks that die until a file says that they are mended, and leave a line each time that they come through."""

from __future__ import annotations

import os
from pathlib import Path

from acceptance_tasks import note

from taskline import Registry

MENDED_VARIABLE = "TEST_MENDED"

registry = Registry()


@registry.task("replay.mine", max_retries=0)
async def mine(payload: int) -> int:
    """Its effect is its payload in the ledger."""
    if not is_mended():
        raise ValueError("not mended")
    note(str(payload))
    return payload


@registry.task("replay.other", max_retries=0)
async def other(payload: int) -> None:
    """Never mended."""
    raise LookupError("never")


def is_mended() -> bool:
    return Path(os.environ[MENDED_VARIABLE]).exists()
