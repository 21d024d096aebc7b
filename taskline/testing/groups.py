"""Consumer groups in memory: who owns which partition, and how far each has been committed.

Invariant: a partition has at most one owner, and only its owner commits. A move is cooperative, as Kafka's: the old owner
finishes and commits before the new one is told, and what need not move stays. A member that died keeps its
partitions until its session is over, since nobody can know earlier.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from taskline.infra.intake import Commit, TopicPartition
from taskline.testing.errors import FencedCommit

# Virtual seconds after which a silent member's partitions move (Kafka's session.timeout.ms).
SESSION_SECONDS = 45.0
# Virtual seconds that a member may take to hand partitions over before it is fenced (Kafka's max.poll.interval.ms).
HAND_OVER_SECONDS = 300.0
_BEGINNING = Commit(offset=0)


class GroupMember(Protocol):
    """What a group says to its members."""

    def assigned(self, committed: Mapping[TopicPartition, Commit]) -> None:
        """These partitions are the member's now, from where the group has come to."""
        ...

    async def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Finish, commit and let go; the partitions move when this returns."""
        ...

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """The partitions went to others without a hand-over."""
        ...


class MemoryGroup:
    """One group's members, assignment and commits."""

    def __init__(self, name: str, partitions_of: Callable[[str], Sequence[TopicPartition]]) -> None:
        """`partitions_of` gives the partitions of a topic."""
        self.name = name
        self._partitions_of = partitions_of
        self._members: dict[GroupMember, tuple[str, ...]] = {}
        self._owners: dict[TopicPartition, GroupMember] = {}
        self._commits: dict[TopicPartition, Commit] = {}
        # Members that said nothing more, each with what tells that the group has noticed.
        self._silent: dict[GroupMember, asyncio.Event] = {}
        self._rebalancing: asyncio.Task[None] | None = None
        self._stale = False

    # ---- commits -----------------------------------------------------------------------------------------

    def commit(self, member: GroupMember, commits: Mapping[TopicPartition, Commit]) -> None:
        """Note how far a member is; all or nothing.

        Raises:
            FencedCommit: the member does not own one of the partitions.
        """
        for partition in commits:
            if self._owners.get(partition) is not member:
                raise FencedCommit(
                    f"{self.name}: {partition.topic}/{partition.partition} belongs to another member"
                )
        self._commits.update(commits)

    def committed(self, partition: TopicPartition) -> Commit:
        """How far the group is in a partition; it begins at the first record."""
        return self._commits.get(partition, _BEGINNING)

    # ---- membership --------------------------------------------------------------------------------------

    def owned_by(self, member: GroupMember) -> tuple[TopicPartition, ...]:
        """The partitions of a member, sorted."""
        return tuple(sorted(key for key, owner in self._owners.items() if owner is member))

    @property
    def members(self) -> tuple[GroupMember, ...]:
        """The members, longest-standing first."""
        return tuple(self._members)

    @property
    def settled(self) -> bool:
        """False while partitions are on the move."""
        return self._rebalancing is None

    def join(self, member: GroupMember, topics: Sequence[str]) -> None:
        """Add a member; its partitions come with a call of `assigned`."""
        self._members[member] = tuple(topics)
        self._rebalance()

    async def leave(self, member: GroupMember) -> None:
        """Hand a member's partitions over and remove it."""
        if member not in self._members:
            return
        del self._members[member]
        self._rebalance()
        while self._rebalancing is not None:
            await asyncio.shield(self._rebalancing)

    def abandon(self, member: GroupMember, *, after_seconds: float = SESSION_SECONDS) -> None:
        """A member died: it says nothing more, and the group notices after `after_seconds`."""
        self._silent[member] = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.call_later(after_seconds, self._expel, member, context=contextvars.Context())

    def expel(self, member: GroupMember) -> None:
        """Give up on a member that lives and was not heard of: its partitions go to others. Nobody tells it."""
        self._members.pop(member, None)
        for partition in self.owned_by(member):
            del self._owners[partition]
        self._rebalance()

    def _expel(self, member: GroupMember) -> None:
        self._silent.pop(member).set()
        self._members.pop(member, None)
        for partition in self.owned_by(member):
            del self._owners[partition]
        self._rebalance()

    # ---- moves -------------------------------------------------------------------------------------------

    def _rebalance(self) -> None:
        self._stale = True
        if self._rebalancing is None:
            # A context of its own: the move must outlive the member that asked for it.
            self._rebalancing = asyncio.get_running_loop().create_task(
                self._move(), name=f"rebalance {self.name}", context=contextvars.Context()
            )

    async def _move(self) -> None:
        try:
            while self._stale:
                self._stale = False
                target = self._target()
                leaving = _by_owner(
                    (key, owner) for key, owner in self._owners.items() if target.get(key) is not owner
                )
                await asyncio.gather(*(self._hand_over(owner, keys) for owner, keys in leaving.items()))
                if not self._stale:
                    self._hand_out(target)
        finally:
            self._rebalancing = None

    async def _hand_over(self, owner: GroupMember, keys: Sequence[TopicPartition]) -> None:
        silent = self._silent.get(owner)
        try:
            async with asyncio.timeout(HAND_OVER_SECONDS):
                # A member that died meanwhile hands nothing over; it is waited for until its session is over.
                await (owner.revoked(keys) if silent is None else silent.wait())
        except TimeoutError:
            owner.lost(keys)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"{self.name}: a member failed to hand over", "exception": error}
            )
        for key in keys:
            if self._owners.get(key) is owner:
                del self._owners[key]

    def _hand_out(self, target: Mapping[TopicPartition, GroupMember]) -> None:
        arriving = _by_owner(
            (key, owner) for key, owner in target.items() if self._owners.get(key) is not owner
        )
        self._owners = dict(target)
        for owner in self._members:
            if owner in arriving:
                owner.assigned({key: self.committed(key) for key in arriving[owner]})

    def _target(self) -> dict[TopicPartition, GroupMember]:
        target: dict[TopicPartition, GroupMember] = {}
        for topic in sorted({topic for topics in self._members.values() for topic in topics}):
            readers = [member for member, topics in self._members.items() if topic in topics]
            target |= assign(self._partitions_of(topic), readers, self._owners)
        return target


def assign(
    partitions: Sequence[TopicPartition],
    members: Sequence[GroupMember],
    current: Mapping[TopicPartition, GroupMember],
) -> dict[TopicPartition, GroupMember]:
    """Share a topic's partitions: as evenly as can be, and moving none that need not move.

    Args:
        partitions: the topic's.
        members: who reads it, longest-standing first; they get the larger shares.
        current: the owners now.
    """
    if not members:
        return {}
    small, larger = divmod(len(partitions), len(members))
    room = {member: small + (index < larger) for index, member in enumerate(members)}
    target: dict[TopicPartition, GroupMember] = {}
    for partition in sorted(partitions):
        owner = current.get(partition)
        if owner is not None and room.get(owner, 0) > 0:
            target[partition] = owner
            room[owner] -= 1
    free = iter([member for member in members for _ in range(room[member])])
    for partition in sorted(partitions):
        if partition not in target:
            target[partition] = next(free)
    return target


def _by_owner(moves: Iterable[tuple[TopicPartition, GroupMember]]) -> dict[GroupMember, list[TopicPartition]]:
    grouped: dict[GroupMember, list[TopicPartition]] = {}
    for key, owner in sorted(moves, key=lambda move: move[0]):
        grouped.setdefault(owner, []).append(key)
    return grouped
