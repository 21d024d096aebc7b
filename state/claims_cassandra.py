"""Claims in Cassandra: one row by name, won by conditional writes.

Invariant: what `take` and `renew` say is what the row's Paxos says. A conditional write that ran into a time-out may or may not have been
applied, so the truth is read from the row (a SERIAL read finishes what others have begun): each request has an `owner` of its
own, so that it knows its write. A row that is not there after that may yet come to be, by the write that timed out; taking
again settles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cassandra import ConsistencyLevel, InvalidRequest
from cassandra.cluster import Session
from cassandra.protocol import ErrorMessage

from taskline.errors import Unavailable, WrongTopology
from taskline.schemas.ids import TaskId
from taskline.state.claims import Claim, ClaimKey
from taskline.state.session import TRANSIENT, Requests, Row, unavailable

_MIGRATE_COMMAND = "taskline view migrate"
_SELECT = """
SELECT task_id, owner, request_hash, deadline, expires_at, outcome FROM {keyspace}.claims
WHERE tenant = ? AND kind = ? AND name = ?
"""
_INSERT = """
INSERT INTO {keyspace}.claims (tenant, kind, name, task_id, owner, request_hash, deadline, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) IF NOT EXISTS USING TTL ?
"""
_RENEW = """
UPDATE {keyspace}.claims USING TTL ? SET task_id = ?, owner = ?, request_hash = ?, deadline = ?, expires_at = ?
WHERE tenant = ? AND kind = ? AND name = ? IF owner = ?
"""
_SETTLE = """
UPDATE {keyspace}.claims USING TTL ? SET outcome = ? WHERE tenant = ? AND kind = ? AND name = ?
"""
# Paxos rounds of others may be in the way, or a row may end between two looks; more often than this it is the server.
_ATTEMPTS = 3
# The server's TTL ends at a whole second, up to one early; readers go by `expires_at`.
_TTL_SLACK_SECONDS = 1
# The driver knows no class for some of the newer errors (e.g. CAS_WRITE_UNKNOWN), and raises this.
_TRANSIENT = (*TRANSIENT, ErrorMessage)


class CassandraClaims:
    """The `ClaimStore` of the real system."""

    def __init__(self, session: Session, requests: Requests, keyspace: str) -> None:
        """Prepare the statements; blocks.

        Raises:
            WrongTopology: the table is missing.
            Unavailable: Cassandra does not answer.
        """
        self._requests = requests

        def prepared(query: str) -> Any:  # noqa: ANN401 - the driver is untyped
            return session.prepare(query.format(keyspace=keyspace).strip())

        def conditional(query: str) -> Any:  # noqa: ANN401
            statement = prepared(query)
            # What may have been applied must not be sent twice by the driver.
            statement.is_idempotent = False
            statement.serial_consistency_level = ConsistencyLevel.LOCAL_SERIAL
            return statement

        try:
            self._insert, self._renew = conditional(_INSERT), conditional(_RENEW)
            self._find, self._settle, self._learn = prepared(_SELECT), prepared(_SETTLE), prepared(_SELECT)
        except InvalidRequest as error:
            raise WrongTopology(
                [f"keyspace {keyspace!r} lacks the table of claims ({error})"], _MIGRATE_COMMAND
            ) from error
        except _TRANSIENT as error:
            raise unavailable(error) from error
        self._settle.is_idempotent = self._find.is_idempotent = self._learn.is_idempotent = True
        self._learn.consistency_level = ConsistencyLevel.LOCAL_SERIAL

    async def take(self, wanted: Claim, now_ms: int) -> Claim:
        """As `ClaimStore.take`."""
        statement = self._insert.bind(
            (*_place(wanted.key), *_values(wanted), _ttl(wanted, now_ms) + _TTL_SLACK_SECONDS)
        )
        for _ in range(_ATTEMPTS):
            if await self._applied(statement):
                return wanted
            found = await self._truth(wanted.key)
            if found is not None:
                return found
        raise Unavailable("Cassandra does not say who has the name")

    async def find(self, key: ClaimKey) -> Claim | None:
        """As `ClaimStore.find`: one read of one partition, which sees every acknowledged write."""
        return _claim(key, await self._rows(self._find.bind(_place(key))))

    async def renew(self, held: Claim, wanted: Claim, now_ms: int) -> bool:
        """As `ClaimStore.renew`."""
        ttl = _ttl(wanted, now_ms) + _TTL_SLACK_SECONDS
        statement = self._renew.bind((ttl, *_values(wanted), *_place(held.key), held.owner))
        if await self._applied(statement):
            return True
        found = await self._truth(held.key)
        return found is not None and found.owner == wanted.owner

    async def settle(self, claim: Claim, outcome: TaskId, now_ms: int) -> None:
        """As `ClaimStore.settle`: not conditional. It ends before the row does, so that it never stands alone."""
        ttl = _ttl(claim, now_ms)
        if ttl >= 1:
            await self._rows(self._settle.bind((ttl, outcome, *_place(claim.key))))

    async def _applied(self, statement: Any) -> bool:  # noqa: ANN401
        """True: it was; False: it was not, or nobody knows."""
        try:
            return bool((await self._requests.execute(statement))[0][0])
        except _TRANSIENT:
            return False

    async def _truth(self, key: ClaimKey) -> Claim | None:
        return _claim(key, await self._rows(self._learn.bind(_place(key))))

    async def _rows(self, statement: Any) -> Sequence[Row]:  # noqa: ANN401
        try:
            return await self._requests.execute(statement)
        except _TRANSIENT as error:
            raise unavailable(error) from error


def _place(key: ClaimKey) -> tuple[str, str, str]:
    return key.tenant, key.kind.value, key.name


def _values(claim: Claim) -> tuple[object, ...]:
    return claim.task_id, claim.owner, claim.request_hash, claim.deadline, claim.expires_at


def _ttl(claim: Claim, now_ms: int) -> int:
    """Whole seconds that the claim has left."""
    return max(0, (claim.expires_at - now_ms) // 1000)


def _claim(key: ClaimKey, rows: Sequence[Row]) -> Claim | None:
    # Without an owner it is a late `outcome`, whose row is over.
    if not rows or rows[0][1] is None:
        return None
    task_id, owner, request_hash, deadline, expires_at, outcome = rows[0]
    return Claim(
        key=key,
        task_id=task_id,
        owner=owner,
        request_hash=request_hash,
        deadline=deadline,
        expires_at=expires_at,
        outcome=outcome,
    )
