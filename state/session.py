"""One connection to Cassandra for the life of a process: a cluster, a session, and driver calls as asyncio futures.

The driver runs its sockets on a libev thread of its own. `Requests` carries completions into the loop with one wake-up for
all that have piled up, not one each.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from cassandra import ConsistencyLevel, OperationTimedOut, RequestExecutionException
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import (
    EXEC_PROFILE_DEFAULT,
    Cluster,
    ExecutionProfile,
    NoHostAvailable,
    Session,
)
from cassandra.connection import ConnectionException
from cassandra.io.libevreactor import LibevConnection
from cassandra.policies import (
    DCAwareRoundRobinPolicy,
    ExponentialReconnectionPolicy,
    FallthroughRetryPolicy,
    TokenAwarePolicy,
)
from cassandra.protocol import RequestExecutionException as UnmappedExecutionException
from cassandra.protocol import ServerError
from cassandra.query import tuple_factory

from taskline.errors import Unavailable
from taskline.settings import CassandraSettings

log = structlog.get_logger(__name__)

# The newest protocol of Cassandra 4 and 5; fixed, so that the driver does not find it by failing.
_PROTOCOL_VERSION = 5
# Without it small batches stall on delayed acknowledgements of 40 ms.
_SOCKET_OPTIONS = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),)
# A node that comes back is found within seconds, also after a long absence.
_RECONNECT_FIRST_SECONDS = 0.5
_RECONNECT_LONGEST_SECONDS = 5.0

Row = tuple[Any, ...]


def open_cluster(cassandra: CassandraSettings) -> Cluster:
    """A cluster that is not connected yet. One per process, made after any fork."""
    credentials = (
        None
        if cassandra.username is None
        else PlainTextAuthProvider(
            cassandra.username,
            "" if cassandra.password is None else cassandra.password.get_secret_value(),
        )
    )
    profile = ExecutionProfile(
        load_balancing_policy=TokenAwarePolicy(DCAwareRoundRobinPolicy(local_dc=cassandra.local_dc)),
        # Reads that follow each other never go back: what a quorum has acknowledged the next quorum sees.
        consistency_level=ConsistencyLevel.LOCAL_QUORUM,
        # Who asks decides whether to ask again.
        retry_policy=FallthroughRetryPolicy(),
        request_timeout=cassandra.request_timeout_seconds,
        # The default builds a class per result: twice the cost of a read.
        row_factory=tuple_factory,
    )
    return Cluster(
        list(cassandra.contact_points),
        port=cassandra.port,
        auth_provider=credentials,
        protocol_version=_PROTOCOL_VERSION,
        connection_class=LibevConnection,
        sockopts=list(_SOCKET_OPTIONS),
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        reconnection_policy=ExponentialReconnectionPolicy(
            _RECONNECT_FIRST_SECONDS, _RECONNECT_LONGEST_SECONDS, max_attempts=None
        ),
        connect_timeout=cassandra.request_timeout_seconds,
        control_connection_timeout=cassandra.request_timeout_seconds,
    )


def connect(cluster: Cluster) -> Session:
    """Connect, without a keyspace. Blocks.

    Raises:
        Unavailable: no contact point answers.
    """
    try:
        return cluster.connect()
    except (NoHostAvailable, ConnectionException, OSError) as error:
        raise unavailable(error) from error


def unavailable(error: BaseException) -> Unavailable:
    """The driver's words for a server that does not answer, in one line."""
    if isinstance(error, NoHostAvailable):
        causes = sorted({f"{host}: {cause}" for host, cause in error.errors.items()})
        return Unavailable(f"Cassandra does not answer ({'; '.join(causes) or error.args[0]})")
    return Unavailable(f"Cassandra does not answer ({type(error).__name__}: {error})")


# Failures that say nothing about the request itself: asking again later may succeed.
TRANSIENT: tuple[type[BaseException], ...] = (
    NoHostAvailable,
    ConnectionException,
    # Read, write and coordination time-outs, too few replicas alive.
    RequestExecutionException,
    # An overloaded or starting coordinator.
    UnmappedExecutionException,
    ServerError,
    # No answer within the request time-out.
    OperationTimedOut,
)


class Requests:
    """Driver requests as asyncio futures, for the loop in which it was made."""

    def __init__(self, session: Session) -> None:
        """Send over `session`; call from the loop that will await the answers."""
        self._session = session
        self._loop = asyncio.get_running_loop()
        # Answers that the loop has not seen yet, oldest first: future, rows, error.
        self._answers: deque[tuple[asyncio.Future[Sequence[Row]], Any, BaseException | None]] = deque()
        self._woken = False

    def execute(self, statement: Any) -> asyncio.Future[Sequence[Row]]:  # noqa: ANN401 - the driver is untyped
        """Send a bound statement or a batch; the future gives the rows or raises what the driver raised."""
        future: asyncio.Future[Sequence[Row]] = self._loop.create_future()
        response = self._session.execute_async(statement)
        response.add_callbacks(self._answered, self._failed, callback_args=(future,), errback_args=(future,))
        return future

    # The two below run on the driver's thread, or in `execute` when the driver refuses at once.

    def _answered(self, rows: Any, future: asyncio.Future[Sequence[Row]]) -> None:  # noqa: ANN401
        self._hand_over(future, rows, None)

    def _failed(self, error: BaseException, future: asyncio.Future[Sequence[Row]]) -> None:
        self._hand_over(future, None, error)

    def _hand_over(
        self,
        future: asyncio.Future[Sequence[Row]],
        rows: Any,  # noqa: ANN401
        error: BaseException | None,
    ) -> None:
        self._answers.append((future, rows, error))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                log.debug("answer after the loop closed")

    def _deliver(self) -> None:
        # Cleared before the queue is emptied: an answer that comes in between wakes the loop once more.
        self._woken = False
        while self._answers:
            future, rows, error = self._answers.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(rows or ())
            else:
                future.set_exception(error)


async def in_thread(blocking: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Run a blocking driver call (connect, prepare, shutdown) off the loop."""
    return await asyncio.get_running_loop().run_in_executor(None, blocking)
