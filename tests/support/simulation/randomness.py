"""Every source of chance that the roles have, from one seed."""

from __future__ import annotations

import logging
import random
import secrets
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import structlog

from taskline.processors.delay_lane import Lane
from taskline.workers import lease_desk, lease_follow
from taskline.workers.execution import Execution
from taskline.workers.feed import Assignment
from taskline.workers.lease_feed import LeaseAssignment
from taskline.workers.lease_tokens import new_token

# What is kept in sets and would be hashed by its address there.
_BY_PLACE: dict[type, Callable[[Any], object]] = {
    Execution: lambda run: run.position,
    Assignment: lambda assignment: assignment.name,
    LeaseAssignment: lambda assignment: assignment.name,
    Lane: lambda lane: lane.name,
}


@contextmanager
def seeded(seed: int, told: Callable[[str], None]) -> Iterator[None]:
    """Draw ids, tokens, jitter and hashes from `seed`; `told` gets the roles' warnings."""
    ids, secret, jitter = (random.Random(f"{seed} {name}") for name in ("ids", "secrets", "jitter"))

    def new_task_id(now_ms: int) -> uuid.UUID:
        tail = ids.getrandbits(12) << 64 | 2 << 62 | ids.getrandbits(62)
        return uuid.UUID(int=now_ms << 80 | 7 << 76 | tail)

    def random_uuid() -> uuid.UUID:
        return uuid.UUID(int=ids.getrandbits(128), version=4)

    class _Rng(random.Random):
        def __init__(self) -> None:
            super().__init__(jitter.getrandbits(64))

    before, logging_before = random.getstate(), structlog.get_config()
    random.seed(seed)
    structlog.configure(
        processors=[_Told(told)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    with ExitStack() as patches:
        patch: Callable[..., Any] = lambda *arguments: patches.enter_context(  # noqa: E731
            mock.patch.object(*arguments)
        )
        patch(uuid, "uuid4", random_uuid)
        patch(secrets, "token_bytes", secret.randbytes)
        patches.enter_context(mock.patch("taskline.producers.submission.new_task_id", new_task_id))
        patch(lease_desk, "new_token", lambda task_id: new_token(task_id, secret.randbytes))
        patch(lease_follow, "random", SimpleNamespace(Random=_Rng))
        for kind, place in _BY_PLACE.items():
            patches.enter_context(
                mock.patch.object(
                    kind, "__hash__", lambda self, place=place: zlib.crc32(repr(place(self)).encode())
                )
            )
        try:
            yield
        finally:
            random.setstate(before)
            structlog.configure(**logging_before)


class _Told:
    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told

    def __call__(self, logger: object, method: str, event: dict[str, Any]) -> Any:
        error = event.pop("exc_info", None)
        words = " ".join(f"{name}={event[name]}" for name in sorted(event) if name != "event")
        self._told(f"{method}: {event['event']} {words}{'' if error is None else f' {error!r}'}")
        raise structlog.DropEvent
