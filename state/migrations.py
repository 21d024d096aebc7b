"""The view's keyspace and tables: made by `taskline view migrate`, checked by every role that uses the view.

Each `cql/NNNN_name.cql` is applied once, in order, and noted in `schema_migrations`. Every statement says IF NOT EXISTS,
so that two processes may migrate at once and a broken-off run is simply run again. What can't change after
the first row (lanes, bucket length: they are in every row's key) stands in `view_meta`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files

import structlog
from cassandra import AlreadyExists, InvalidRequest
from cassandra.cluster import Session

from taskline.errors import WrongTopology
from taskline.settings import CassandraSettings, Settings
from taskline.state.cassandra import MIGRATE_COMMAND
from taskline.state.session import TRANSIENT, connect, open_cluster, unavailable

log = structlog.get_logger(__name__)

# DDL waits for all nodes to agree; a small machine with a busy disk needs a while.
_SCHEMA_TIMEOUT_SECONDS = 60.0

# The row of view_meta that describes the tasks table.
_VIEW = "tasks"

_CREATE_KEYSPACE = """
CREATE KEYSPACE IF NOT EXISTS {keyspace}
WITH replication = {{'class': 'NetworkTopologyStrategy', '{local_dc}': {replication_factor}}}
"""
_BOOKKEEPING = (
    """CREATE TABLE IF NOT EXISTS {keyspace}.schema_migrations (name text PRIMARY KEY, applied_at timestamp)
    WITH comment = 'Migrations that were applied; written by taskline view migrate'""",
    """CREATE TABLE IF NOT EXISTS {keyspace}.view_meta (name text PRIMARY KEY, lanes int, bucket_seconds int)
    WITH comment = 'What is part of every key and never changes; written by taskline view migrate'""",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """One file of `cql/`."""

    name: str
    statements: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewReport:
    """How a keyspace stands."""

    keyspace: str
    lanes: int
    bucket_seconds: int
    # Migrations that are in place, in order.
    applied: tuple[str, ...]
    # Those of them that this call applied.
    newly_applied: tuple[str, ...] = ()


def migrations() -> tuple[Migration, ...]:
    """Every shipped migration, in the order in which they apply."""
    found = [entry for entry in files("taskline.state.cql").iterdir() if entry.name.endswith(".cql")]
    return tuple(
        Migration(name=entry.name.removesuffix(".cql"), statements=_statements(entry.read_text("utf-8")))
        for entry in sorted(found, key=lambda entry: entry.name)
    )


def migrate(settings: Settings) -> ViewReport:
    """Make the keyspace and bring its tables up to date. Blocks; safe to run again, also by several at once.

    Raises:
        Unavailable: Cassandra does not answer.
        WrongTopology: the keyspace was made for other lanes or another bucket length.
    """
    cassandra = settings.cassandra
    with _session(cassandra) as session:
        _run(session, _CREATE_KEYSPACE, cassandra)
        for statement in _BOOKKEEPING:
            _run(session, statement, cassandra)
        before = _applied(session, cassandra.keyspace)
        newly_applied = []
        for migration in migrations():
            if migration.name in before:
                continue
            for statement in migration.statements:
                _run(session, statement, cassandra)
            session.execute(
                f"INSERT INTO {cassandra.keyspace}.schema_migrations (name, applied_at) "  # noqa: S608
                "VALUES (%s, toTimestamp(now()))",
                (migration.name,),
            )
            newly_applied.append(migration.name)
            log.info("migration applied", keyspace=cassandra.keyspace, migration=migration.name)
        # Conditional, so that of two that begin with different settings one is told.
        session.execute(
            f"INSERT INTO {cassandra.keyspace}.view_meta (name, lanes, bucket_seconds) "  # noqa: S608
            "VALUES (%s, %s, %s) IF NOT EXISTS",
            (_VIEW, settings.topics.lanes, cassandra.bucket_seconds),
        )
        return _report(session, settings, tuple(newly_applied))


def check_view(settings: Settings) -> ViewReport:
    """See that the keyspace is as these settings and this version need it. Blocks.

    Raises:
        Unavailable: Cassandra does not answer.
        WrongTopology: tables are missing or were made for other settings.
    """
    with _session(settings.cassandra) as session:
        return _report(session, settings, ())


def _report(session: Session, settings: Settings, newly_applied: tuple[str, ...]) -> ViewReport:
    keyspace = settings.cassandra.keyspace
    try:
        applied = _applied(session, keyspace)
        rows = list(
            session.execute(
                f"SELECT lanes, bucket_seconds FROM {keyspace}.view_meta WHERE name = %s",  # noqa: S608
                (_VIEW,),
            )
        )
    except InvalidRequest as error:
        raise WrongTopology([f"there is no view in keyspace {keyspace!r}"], MIGRATE_COMMAND) from error
    problems = [
        f"migration {migration.name} is not applied in keyspace {keyspace!r}"
        for migration in migrations()
        if migration.name not in applied
    ]
    if not rows:
        problems.append(f"keyspace {keyspace!r} does not say how its view is laid out")
    if problems:
        raise WrongTopology(problems, MIGRATE_COMMAND)
    lanes, bucket_seconds = rows[0]
    _check_layout(settings, lanes, bucket_seconds)
    return ViewReport(
        keyspace=keyspace,
        lanes=lanes,
        bucket_seconds=bucket_seconds,
        applied=tuple(sorted(applied)),
        newly_applied=newly_applied,
    )


def _check_layout(settings: Settings, lanes: int, bucket_seconds: int) -> None:
    keyspace = settings.cassandra.keyspace
    problems = [
        f"the view in keyspace {keyspace!r} was made for {name} = {made}, the settings say {wanted}: "
        "set it back, or choose another cassandra.keyspace"
        for name, made, wanted in (
            ("topics.lanes", lanes, settings.topics.lanes),
            ("cassandra.bucket_seconds", bucket_seconds, settings.cassandra.bucket_seconds),
        )
        if made != wanted
    ]
    if problems:
        raise WrongTopology(problems, MIGRATE_COMMAND)


def _applied(session: Session, keyspace: str) -> set[str]:
    return {name for (name,) in session.execute(f"SELECT name FROM {keyspace}.schema_migrations")}  # noqa: S608


def _run(session: Session, statement: str, cassandra: CassandraSettings) -> None:
    text = statement.format(
        keyspace=cassandra.keyspace,
        local_dc=cassandra.local_dc,
        replication_factor=cassandra.replication_factor,
    )
    try:
        session.execute(text.strip(), timeout=_SCHEMA_TIMEOUT_SECONDS)
    except AlreadyExists:
        # Another process made it between the server's look and its own attempt.
        log.info("already there", statement=text.strip().splitlines()[0])


def _statements(text: str) -> tuple[str, ...]:
    """The statements of a file: comments (`--` at the start of a line) go, `;` at the end of a line separates."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("--")]
    parts = "\n".join(lines).split(";\n")
    return tuple(part.strip().removesuffix(";") for part in parts if part.strip())


@contextmanager
def _session(cassandra: CassandraSettings) -> Iterator[Session]:
    cluster = open_cluster(cassandra)
    try:
        yield connect(cluster)
    except TRANSIENT as error:
        raise unavailable(error) from error
    finally:
        cluster.shutdown()
