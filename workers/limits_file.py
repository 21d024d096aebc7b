"""The file of limits per task type (worker.limits_file): read at the start, and again whenever it has changed.

Invariant: a file that can't be read or makes no sense changes nothing: at the start it ends the worker, later the limits that apply go on.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import structlog

from taskline.errors import InvalidSettings, did_you_mean, nearest
from taskline.workers.limits import TypeLimits

log = structlog.get_logger(__name__)

# How soon a change applies: one look at the file's times.
_LOOK_SECONDS = 1.0
_TABLE = "types"
_NAMES = tuple(field.name for field in fields(TypeLimits))


def read_limits(path: Path) -> dict[str, TypeLimits]:
    """The limits per task type.

    Raises:
        InvalidSettings: the file can't be read, or says something else.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidSettings(f"limits file {path}: {error}") from error
    unknown = sorted(found.keys() - {_TABLE})
    if unknown or not isinstance(found.get(_TABLE, {}), Mapping):
        raise InvalidSettings(f'limits file {path}: it has tables [types."…"] only, not {", ".join(unknown)}')
    return {name: _limits(path, name, table) for name, table in found.get(_TABLE, {}).items()}


def _limits(path: Path, name: str, table: Any) -> TypeLimits:  # noqa: ANN401 - what a file says
    where = f'limits file {path}, [types."{name}"]'
    if not isinstance(table, Mapping):
        raise InvalidSettings(f"{where}: it is a table of limits, not {table!r}")
    for key in table:
        if key not in _NAMES:
            raise InvalidSettings(f"{where}: there is no limit {key!r}{did_you_mean(nearest(key, _NAMES))}")
    try:
        return TypeLimits(**table)
    except ValueError as error:
        raise InvalidSettings(f"{where}: {error}") from error


async def follow_limits(path: Path, apply: Callable[[Mapping[str, TypeLimits]], None]) -> None:
    """Apply the file's limits each time that it has changed, for ever."""
    seen = _stamp(path)
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        stamp = _stamp(path)
        if stamp == seen:
            continue
        seen = stamp
        try:
            limits = read_limits(path)
        except InvalidSettings as error:
            log.error("limits not changed", error=str(error))  # noqa: TRY400 - the message says it all
        else:
            apply(limits)
            log.info("limits changed", types=sorted(limits))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
