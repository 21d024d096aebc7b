"""API keys in Cassandra: one row by prefix.

Invariant: rows come and change by conditional writes only, so that a prefix belongs to one key for ever and a revocation can't be
undone by a writer that was late. Reads ask a local quorum, which sees what a conditional write has acknowledged. One that ran into a time-out may
or may not have been applied: then the truth is read from the row by a SERIAL read, which finishes what others have begun, and what is not there is
written again. So a key that is said to be stored, or revoked, is; and a secret is never thrown away whose key is stored, but by a server that stays away.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog
from cassandra import ConsistencyLevel, InvalidRequest
from cassandra.cluster import Session
from cassandra.protocol import ErrorMessage

from taskline.errors import Unavailable, WrongTopology
from taskline.settings import Settings
from taskline.state.keys import ApiKey, Scope
from taskline.state.session import TRANSIENT, Requests, Row, connect, in_thread, open_cluster, unavailable

log = structlog.get_logger(__name__)

_MIGRATE_COMMAND = "taskline view migrate"
_COLUMNS = "prefix, secret_hash, tenant, scopes, queues, name, created_at, expires_at, revoked_at"
_FIND = "SELECT {columns} FROM {keyspace}.api_keys WHERE prefix = ?"
# All partitions: keys are made by people, and read this way by people.
_LIST = "SELECT {columns} FROM {keyspace}.api_keys"
_ADD = """
INSERT INTO {keyspace}.api_keys (prefix, secret_hash, tenant, scopes, queues, name, created_at, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) IF NOT EXISTS
"""
_ADD_ENDLESS = """
INSERT INTO {keyspace}.api_keys (prefix, secret_hash, tenant, scopes, queues, name, created_at)
VALUES (?, ?, ?, ?, ?, ?, ?) IF NOT EXISTS
"""
_REVOKE = "UPDATE {keyspace}.api_keys SET revoked_at = ? WHERE prefix = ? IF EXISTS"
# Paxos rounds of others may be in the way; more often than this it is the server.
_ATTEMPTS = 3
# The driver knows no class for some of the newer errors (e.g. CAS_WRITE_UNKNOWN), and raises this.
_TRANSIENT = (*TRANSIENT, ErrorMessage)


class CassandraKeys:
    """The `KeyStore` of the real system."""

    def __init__(self, session: Session, requests: Requests, keyspace: str) -> None:
        """Prepare the statements; blocks.

        Raises:
            WrongTopology: the table is missing.
            Unavailable: Cassandra does not answer.
        """
        self._requests = requests

        def prepared(query: str, *, conditional: bool = False) -> Any:  # noqa: ANN401 - the driver is untyped
            statement = session.prepare(query.format(keyspace=keyspace, columns=_COLUMNS).strip())
            # What may have been applied must not be sent twice by the driver.
            statement.is_idempotent = not conditional
            if conditional:
                statement.serial_consistency_level = ConsistencyLevel.LOCAL_SERIAL
            return statement

        try:
            self._find, self._learn = prepared(_FIND), prepared(_FIND)
            self._learn.consistency_level = ConsistencyLevel.LOCAL_SERIAL
            self._list = prepared(_LIST)
            # In one answer: whoever lists wants them all.
            self._list.fetch_size = None
            self._add = prepared(_ADD, conditional=True)
            self._add_endless = prepared(_ADD_ENDLESS, conditional=True)
            self._revoke = prepared(_REVOKE, conditional=True)
        except InvalidRequest as error:
            raise WrongTopology(
                [f"keyspace {keyspace!r} lacks the table of API keys ({error})"], _MIGRATE_COMMAND
            ) from error
        except _TRANSIENT as error:
            raise unavailable(error) from error

    async def find(self, prefix: str) -> ApiKey | None:
        """As `KeyReader.find`: one read of one partition."""
        rows = await self._rows(self._find.bind((prefix,)))
        return _key(rows[0]) if rows else None

    async def add(self, key: ApiKey) -> bool:
        """As `KeyStore.add`."""
        values: tuple[object, ...] = (
            key.prefix,
            key.secret_hash,
            key.tenant,
            {str(scope) for scope in key.scopes},
            set(key.queues),
            key.name,
            key.created_at,
        )
        statement = (
            self._add_endless.bind(values)
            if key.expires_at is None
            else self._add.bind((*values, key.expires_at))
        )
        for _ in range(_ATTEMPTS):
            applied = await self._applied(statement)
            if applied is not None:
                return applied
            found = await self._truth(key.prefix)
            if found is not None:
                return found.secret_hash == key.secret_hash
        raise Unavailable("Cassandra does not say whether the key is stored")

    async def revoke(self, prefix: str, at_ms: int) -> ApiKey | None:
        """As `KeyStore.revoke`."""
        key = await self.find(prefix)
        if key is None or key.revoked_at is not None:
            return key
        for _ in range(_ATTEMPTS):
            if await self._applied(self._revoke.bind((at_ms, prefix))) is not None:
                return replace(key, revoked_at=at_ms)
            found = await self._truth(prefix)
            if found is None or found.revoked_at is not None:
                return found
        raise Unavailable("Cassandra does not say whether the key is revoked")

    async def keys(self) -> Sequence[ApiKey]:
        """As `KeyStore.keys`."""
        found = [_key(row) for row in await self._rows(self._list.bind(()))]
        return sorted(found, key=lambda key: (key.created_at, key.prefix))

    async def _applied(self, statement: Any) -> bool | None:  # noqa: ANN401
        """What a conditional write says; None: nobody knows."""
        try:
            return bool((await self._requests.execute(statement))[0][0])
        except _TRANSIENT as error:
            log.warning("the outcome of a write is unknown", error=str(unavailable(error)))
            return None

    async def _truth(self, prefix: str) -> ApiKey | None:
        rows = await self._rows(self._learn.bind((prefix,)))
        return _key(rows[0]) if rows else None

    async def _rows(self, statement: Any) -> Sequence[Row]:  # noqa: ANN401
        try:
            return await self._requests.execute(statement)
        except _TRANSIENT as error:
            raise unavailable(error) from error


@asynccontextmanager
async def open_keys(settings: Settings) -> AsyncIterator[CassandraKeys]:
    """The keys over a connection of their own, for a command.

    Raises:
        Unavailable: Cassandra does not answer.
        WrongTopology: the table is missing.
    """
    cluster = open_cluster(settings.cassandra)
    try:
        session: Session = await in_thread(lambda: connect(cluster))
        requests = Requests(session)
        keys: CassandraKeys = await in_thread(
            lambda: CassandraKeys(session, requests, settings.cassandra.keyspace)
        )
        yield keys
    finally:
        await in_thread(cluster.shutdown)


def _key(row: Row) -> ApiKey:
    prefix, secret_hash, tenant, scopes, queues, name, created_at, expires_at, revoked_at = row
    return ApiKey(
        prefix=prefix,
        secret_hash=secret_hash,
        tenant=tenant,
        scopes=_scopes(prefix, scopes or ()),
        queues=frozenset(queues or ()),
        name=name or "",
        created_at=created_at,
        expires_at=expires_at,
        revoked_at=revoked_at,
    )


def _scopes(prefix: str, names: Collection[str]) -> frozenset[Scope]:
    """The scopes that this version knows; one of a newer version grants nothing here."""
    known = frozenset(Scope(name) for name in names if name in set(Scope))
    if len(known) < len(names):
        log.warning("scopes that this version does not know", key=prefix, scopes=sorted(names))
    return known
