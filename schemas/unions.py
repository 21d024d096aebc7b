"""Strict checks of unions: which branch a value means.

A value whose class means a branch at first sight goes there first; then the branches are tried in the schema's order, and the first that
takes the value has it. An instance goes to the record of its class's name. The outcome is (branch name, value), which
fastavro takes as told, or None.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from taskline.schemas.refusal import Refused, mismatch
from taskline.schemas.scalars import Check


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """One compiled place of a schema."""

    # What belongs here, in words with their article.
    wanted: str
    # The branch's name inside a union, as fastavro calls it.
    branch: str
    # Classes whose values mean this branch at first sight.
    takes: tuple[type, ...]
    check: Check


class Tried(threading.local):
    """What union branches have said of a value during one check.

    Without it, unions of records that hold each other would be tried again at every level: 2^depth attempts.
    """

    def __init__(self) -> None:
        """Nothing was tried yet in this thread."""
        # (id of the value, id of the branch) → what to write, or the refusal's reason and path.
        self.taken: dict[tuple[int, int], Any] = {}
        self.refused: dict[tuple[int, int], tuple[str, tuple[str | int, ...]]] = {}

    def clear(self) -> None:
        """Forget, since ids are only unique while the values live."""
        self.taken.clear()
        self.refused.clear()


def optional(branch: Node) -> Check:
    """Null or one thing."""
    name, inner = branch.branch, branch.check
    return lambda value: None if value is None else (name, inner(value))


def choice(branches: Sequence[Node], *, nullable: bool, wanted: str, tried: Tried) -> Check:
    """One of several things, or null if it may be."""
    order: dict[type, list[Node]] = {}

    def check(value: Any) -> tuple[str, Any] | None:  # noqa: ANN401
        if value is None and nullable:
            return None
        kind = type(value)
        candidates = order.get(kind)
        if candidates is None:
            candidates = order[kind] = sorted(branches, key=lambda branch: not _at_first_sight(kind, branch))
        deepest: Refused | None = None
        for branch in candidates:
            try:
                return branch.branch, _try(branch, value, tried)
            except Refused as refused:
                if refused.path and (deepest is None or len(refused.path) > len(deepest.path)):
                    deepest = refused
        raise deepest or mismatch(value, wanted)

    return check


def _at_first_sight(kind: type, branch: Node) -> bool:
    return kind in branch.takes or (
        dict in branch.takes and kind.__name__ == branch.branch.rpartition(".")[2]
    )


def _try(branch: Node, value: Any, tried: Tried) -> Any:  # noqa: ANN401
    key = (id(value), id(branch))
    if key in tried.taken:
        return tried.taken[key]
    if key in tried.refused:
        refused = Refused(tried.refused[key][0])
        refused.path.extend(tried.refused[key][1])
        raise refused
    try:
        native = branch.check(value)
    except Refused as refused:
        tried.refused[key] = (refused.reason, tuple(refused.path))
        raise
    tried.taken[key] = native
    return native
