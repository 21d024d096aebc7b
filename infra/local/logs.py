"""Read the servers' logs: the last lines, and on from there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from taskline.infra.local.service import Site

# Lines of a dead server's log that an error shows: a Java stack trace with its cause.
_NOTICE_LINES = 30

# How often a followed log is looked at, in seconds.
_FOLLOW_INTERVAL_S = 0.25


def tail(path: Path, count: int) -> list[str]:
    """The last lines of a file, without their ends; none if there is no such file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as source:
            return [line.rstrip("\n") for line in deque(source, maxlen=count)]
    except FileNotFoundError:
        return []


def last_words(site: Site) -> str:
    """The last lines of a server's log, and below them what its JVM printed."""
    return "\n".join([*tail(site.log, _NOTICE_LINES), *tail(site.output, _NOTICE_LINES)])


def follow(path: Path, count: int) -> Iterator[str]:
    """The last lines of a file, then each line that is added, over rotations and restarts, until closed."""
    keep: int | None = count
    while True:
        while not path.exists():
            time.sleep(_FOLLOW_INTERVAL_S)
        with path.open(encoding="utf-8", errors="replace") as source:
            inode = path.stat().st_ino
            lines = deque(source, maxlen=keep)
            keep = None  # of a file that replaces this one all is new
            part = ""
            while True:
                for line in lines:
                    part += line
                    if part.endswith("\n"):
                        yield part.rstrip("\n")
                        part = ""
                replaced = _replaced(path, inode)
                lines = deque(source)  # after the look: what was written before the change is not lost
                if not lines:
                    if replaced:
                        break
                    time.sleep(_FOLLOW_INTERVAL_S)


def _replaced(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino != inode
    except FileNotFoundError:
        return True
