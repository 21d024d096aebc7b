"""What `taskline dlq` works with: the view, the log, and the clients of both, for the length of a command."""

from __future__ import annotations

import asyncio
import getpass
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.fetch import KafkaRecords, RecordFetcher
from taskline.infra.kafka.types import TypeDirectory
from taskline.producers.preparation import codec_of
from taskline.producers.replayer import Replayer
from taskline.schemas.codec import Codec
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.dead_letters import DeadLetters
from taskline.state.reader import StatusReader

T = TypeVar("T")

_CLIENT_ID = "taskline-dlq"


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Open connections."""

    settings: Settings
    codec: Codec
    letters: DeadLetters
    tasks: StatusReader
    replayer: Replayer

    @asynccontextmanager
    async def types(self) -> AsyncIterator[TypeDirectory]:
        """The registered task types, read when they are first needed.

        Raises:
            Unavailable: the log does not answer.
        """
        directory = TypeDirectory(self.settings)
        try:
            await asyncio.to_thread(directory.start)
            yield directory
        finally:
            await asyncio.to_thread(directory.close)


def run_session(settings: Settings, body: Callable[[Session, asyncio.Event], Awaitable[T]]) -> T:
    """Connect, run `body`, disconnect. The event that it gets is set by the first SIGINT or SIGTERM.

    Raises:
        Unavailable: Kafka or Cassandra does not answer.
        WrongTopology: the view's tables are missing.
    """
    return asyncio.run(_run(settings, body))


async def _run(settings: Settings, body: Callable[[Session, asyncio.Event], Awaitable[T]]) -> T:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    codec = codec_of(settings.schemas)
    async with AsyncExitStack() as cleanup:
        store = await CassandraStore.connect(settings)
        cleanup.push_async_callback(store.close)
        log = KafkaLog(settings, client_id=_CLIENT_ID)
        cleanup.push_async_callback(log.close)
        fetcher = RecordFetcher(settings.kafka, client_id=_CLIENT_ID)
        cleanup.push_async_callback(asyncio.to_thread, fetcher.close)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        session = Session(
            settings=settings,
            codec=codec,
            letters=DeadLetters(store, settings),
            tasks=StatusReader(store, codec, settings.api),
            replayer=Replayer(log, KafkaRecords(fetcher), store, codec, settings, by=_operator()),
        )
        return await body(session, stop)


def _operator() -> str:
    """Who runs the command, as far as the machine knows."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "?"
    return f"{user}@{socket.gethostname()}"
