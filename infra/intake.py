"""Where the records of a worker or of the delay role come from, as ports: Kafka implements `Intake`, and so does `taskline.testing`.

The invariant between the two sides: an intake hands every record of an assigned partition over once, in offset
order, beginning at the committed offset; it commits what it is told and nothing else. All calls on a sink happen on
the sink's event loop, and for one partition in the order assigned → received* → revoked | lost.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from taskline.infra.log import InRecord


class TopicPartition(NamedTuple):
    """A partition's name; a plain tuple, because it is looked up once per record."""

    topic: str
    partition: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """How far a group has come in one partition."""

    # The next offset to read: every record below it is done.
    offset: int
    # What is done, and what runs, above it (taskline.infra.holes); "" when nothing is and does.
    metadata: str = ""


class IntakeSink(Protocol):
    """What an intake tells; an engine implements it. Every call is made on its loop."""

    def assigned(self, committed: Mapping[TopicPartition, Commit]) -> None:
        """These partitions are ours from here on; their records follow, from the committed offsets."""
        ...

    def received(self, records: Sequence[InRecord]) -> None:
        """Records of assigned partitions, in offset order within each. Never blocks and never refuses."""
        ...

    async def revoked(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Commit]:
        """These partitions go to another owner once this returns: finish within the grace period.

        Returns:
            The final commits. Nothing of these partitions runs any more, except plain functions that can't be stopped.
        """
        ...

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """These partitions already have another owner; nothing of them can be committed."""
        ...

    def failed(self, error: Exception) -> None:
        """The intake can't go on at all; the engine drains and its `run` raises `error`."""
        ...


class Intake(Protocol):
    """The records of a member of one consumer group."""

    async def start(self, sink: IntakeSink) -> None:
        """Begin to hand records to `sink`."""
        ...

    def commit(self, commits: Mapping[TopicPartition, Commit]) -> Future[None]:
        """Store progress; the future fails when it was not stored (the engine commits its newest state later).

        The engine has at most one commit of an intake under way.
        """
        ...

    def pause(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """Hand over no more of these partitions, or of any, also of those assigned later, when None.

        What was already on its way (at most one batch) may still be handed over. The two kinds are independent: a record
        flows when neither the whole intake nor its own partition is paused. A partition that goes away forgets its pause.
        """
        ...

    def resume(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """Undo `pause` of the same kind."""
        ...

    async def close(self) -> None:
        """Leave: partitions that are still assigned are revoked first, with their final commits. Idempotent."""
        ...
