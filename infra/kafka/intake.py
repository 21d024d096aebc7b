"""The intake on Kafka: one consumer on a thread of its own, which never waits for a handler.

Invariants:
- The consumer is polled all the time (short stalls aside), whatever the handlers do: long tasks never cost the membership.
- Records are handed over in batches, one wake-up of the loop each, and one batch at a time.
- Partitions are let go only after the engine has finished with them and their final commit was attempted, all inside the
  rebalance callback, so that the next owner reads the newest offsets.
- An error that will not pass ends the worker with its reason; nothing is skipped, reset or left unread in silence.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition

from taskline.errors import OffsetLost, TasklineError, WrongTopology
from taskline.infra.intake import Commit, Intake, IntakeSink, TopicPartition
from taskline.infra.kafka.client import new_client, reason_of
from taskline.infra.kafka.consumer import ErrorKind, IntakeOptions, consumer_config, kind_of
from taskline.infra.kafka.flow import Flow, Gate
from taskline.infra.kafka.group_offsets import FINAL_ATTEMPTS, Offsets
from taskline.infra.kafka.messages import in_record
from taskline.infra.log import InRecord
from taskline.settings import KafkaSettings

log = structlog.get_logger(__name__)

# How long the thread waits for a record at a time: how soon it notices a held partition, or that it shall end.
_POLL_SECONDS = 0.1
# The engine needs its grace period, and then some for cancelled handlers and Released.
_HAND_OVER_MARGIN_SECONDS = 15.0
# Leaving a group is a request; with the brokers away librdkafka waits for up to the session time-out, and a worker that
# leaves does not.
_CLOSE_SECONDS = 10.0
# The final commit of a member that leaves waits for a rebalance that is under way, about a heartbeat's interval.
_FINAL_COMMIT_SECONDS = 6.0
_FINAL_POLL_SECONDS = 0.05
# A topic that is missing for longer is not on its way.
_NO_TOPIC_SECONDS = 15.0
# Between two lines about errors that pass.
_QUIET_SECONDS = 10.0


class KafkaIntake(Intake):
    """One member of one group, on one topic or on several."""

    def __init__(
        self,
        kafka: KafkaSettings,
        options: IntakeOptions,
        *,
        topics: Sequence[str],
        group: str,
        client_id: str,
    ) -> None:
        """Make the consumer; it joins at `start`.

        Raises:
            InvalidSettings: the client refuses the configuration.
        """
        self._topics = tuple(topics)
        self._group = group
        config = consumer_config(kafka, options, group=group, client_id=client_id)
        self._consumer: Consumer = new_client(
            Consumer, config | {"error_cb": self._on_error, "on_commit": self._on_commit}
        )
        self._offsets = Offsets(self._consumer, group, unseeded=options.unseeded)
        # The final commits of a member that leaves, until they are stored.
        self._final: Mapping[TopicPartition, Commit] = {}
        self._flow = Flow()
        self._batch = options.batch
        self._hand_over_seconds = options.grace_seconds + _HAND_OVER_MARGIN_SECONDS
        self._sink: IntakeSink | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = threading.Event()
        # Resolve when a leaving member has made its final commit, and when it has left.
        self._committed: Future[None] | None = None
        self._ended: Future[None] | None = None
        # Asked for by the loop, done by the thread; a deque's ends are atomic.
        self._commits: deque[_CommitRequest] = deque()
        # What a callback found; raised once it has returned, since librdkafka must be told the outcome first.
        self._fault: Exception | None = None
        self._missing_since: float | None = None
        self._last_line = float("-inf")

    # ---- the port, on the loop -----------------------------------------------------------------------------------

    async def start(self, sink: IntakeSink) -> None:
        """Join the group; see `Intake`."""
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._committed = self._loop.create_future()
        self._ended = self._loop.create_future()
        threading.Thread(target=self._consume, name=f"taskline-intake-{self._group}", daemon=True).start()

    def commit(self, commits: Mapping[TopicPartition, Commit]) -> Future[None]:
        """Store progress; see `Intake`."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._commits.append((commits, done))
        self._flow.wake()
        return asyncio.wrap_future(done)

    def pause(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """See `Intake`."""
        self._flow.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """See `Intake`."""
        self._flow.resume(partitions)

    async def close(self) -> None:
        """Hand over what is assigned, and leave the group; see `Intake`."""
        self._ending.set()
        self._flow.wake()
        if self._ended is None or self._committed is None:
            return
        await asyncio.wait((self._committed,), timeout=self._hand_over_seconds + _FINAL_COMMIT_SECONDS)
        _, late = await asyncio.wait((self._ended,), timeout=_CLOSE_SECONDS)
        if late:
            log.warning("the consumer did not leave its group in time", group=self._group)

    # ---- the consumer's thread -----------------------------------------------------------------------------------

    def _consume(self) -> None:
        try:
            self._consumer.subscribe(
                list(self._topics),
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self._ending.is_set():
                gate = self._flow.wait()
                self._commit()
                if gate is Gate.WAITING or self._ending.is_set():
                    continue
                self._apply_flow(flowing=gate is Gate.OPEN)
                self._read()
                self._check_topic()
                if self._fault is not None:
                    raise self._fault  # noqa: TRY301 - found in a callback
        except Exception as error:
            self._report(error)
        finally:
            self._leave()

    def _leave(self) -> None:
        for step, over in ((self._commit_finally, self._committed), (self._consumer.close, self._ended)):
            try:
                step()
            except Exception as error:
                log.warning("leaving the group failed", group=self._group, error=reason_of(error))
            self._call(_resolve, over)

    def _read(self) -> None:
        first = self._consumer.poll(_POLL_SECONDS)
        if first is None:
            return
        # poll() returns with the first record, which consume() does not: it waits until its batch is full. So one
        # record is waited for, and the rest taken as it lies there.
        messages = [first]
        if self._batch > 1:
            messages += self._consumer.consume(self._batch - 1, timeout=0)
        records: list[InRecord] = []
        for message in messages:
            error = message.error()
            if error is None:
                records.append(in_record(message))
            else:
                self._judge(error, message)
        if records:
            self._flow.delivering()
            self._call(self._deliver, records)

    def _apply_flow(self, *, flowing: bool) -> None:
        change = self._flow.change(flowing=flowing)
        if change is None:
            return
        if change.pause:
            self._consumer.pause(_kafka(change.pause))
        if change.resume:
            self._consumer.resume(_kafka(change.resume))

    def _report(self, error: Exception) -> None:
        if self._ending.is_set():
            log.warning("consumer error while leaving", group=self._group, error=reason_of(error))
            return
        log.error("intake failed", group=self._group, error=reason_of(error))
        known = (
            error
            if isinstance(error, TasklineError)
            else TasklineError(f"group {self._group}: {reason_of(error)}")
        )
        if known is not error:
            known.__cause__ = error
        if self._sink is not None:
            self._call(self._sink.failed, known)

    # ---- rebalances, on the consumer's thread ------------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        if not partitions:
            # A rebalance that changed nothing for this member.
            return
        names = _names(partitions)
        try:
            begin = self._offsets.begin(names, self._ending.is_set)
        except Exception as error:
            self._fault = self._fault or error
            return
        self._flow.assigned(names)
        if self._sink is not None:
            self._call(self._sink.assigned, begin)
        consumer.incremental_assign(
            [KafkaPartition(name.topic, name.partition, commit.offset) for name, commit in begin.items()]
        )

    def _on_revoke(self, consumer: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        names = _names(partitions)
        final = {name: self._final[name] for name in names if name in self._final} | self._finish(names)
        try:
            # Who leaves has tried for long enough (`_commit_finally`).
            self._offsets.store(final, attempts=1 if self._ending.is_set() else FINAL_ATTEMPTS)
        except Exception as error:
            # The next owner runs again what was done since the last commit that was stored.
            log.warning("final commit failed", group=self._group, error=reason_of(error))
        self._offsets.forget(names)
        self._let_go(consumer, names)

    def _on_lost(self, consumer: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        names = _names(partitions)
        self._offsets.forget(names)
        if self._sink is not None:
            self._call(self._sink.lost, names)
        self._let_go(consumer, names)

    def _let_go(self, consumer: Consumer, names: Sequence[TopicPartition]) -> None:
        paused = self._flow.gone(names)
        if paused:
            with contextlib.suppress(KafkaException):
                consumer.resume(_kafka(paused))

    def _finish(self, names: Sequence[TopicPartition]) -> dict[TopicPartition, Commit]:
        """Let the engine finish with partitions; nothing to commit when it can't any more."""
        if self._sink is None or self._loop is None:
            return {}
        coroutine = self._sink.revoked(names)
        try:
            waiting = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            # The loop is closed: the process leaves without a drain.
            coroutine.close()
            return {}
        try:
            return dict(waiting.result(self._hand_over_seconds))
        except concurrent.futures.TimeoutError:
            log.error(  # noqa: TRY400 - the time-out itself explains nothing
                "partitions were not handed over in time; they go uncommitted",
                group=self._group,
                partitions=[f"{name.topic}/{name.partition}" for name in names],
            )
            self._call(self._sink.lost, names)
        except Exception as error:
            self._fault = self._fault or error
        return {}

    # ---- commits, on the consumer's thread ---------------------------------------------------------------------------

    def _commit(self) -> None:
        while self._commits:
            commits, done = self._commits.popleft()
            if done.set_running_or_notify_cancel():
                self._offsets.send(commits, partial(_answer, done))

    def _commit_finally(self) -> None:
        """Finish, and commit while the group still counts on this member; in a rebalance that takes some polls."""
        names = self._flow.names
        if not names:
            return
        self._final = self._finish(names)
        deadline = time.monotonic() + _FINAL_COMMIT_SECONDS
        while time.monotonic() < deadline:
            answers: list[Exception | None] = []
            self._offsets.send(self._final, answers.append)
            while not answers and time.monotonic() < deadline:
                # What is read meanwhile was never handed over: its next owner reads it again.
                self._consumer.poll(_FINAL_POLL_SECONDS)
            if answers and answers[0] is None:
                return
            self._consumer.poll(_FINAL_POLL_SECONDS)

    def _on_commit(self, error: KafkaError | None, partitions: Sequence[KafkaPartition]) -> None:
        self._offsets.answered(error, partitions)

    # ---- errors ---------------------------------------------------------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        """Librdkafka's news about the whole client; called while polling."""
        self._judge(error, None)

    def _judge(self, error: KafkaError, message: Message | None) -> None:
        kind = kind_of(error)
        if kind is ErrorKind.OFFSET_LOST:
            topic = message.topic() if message is not None else ", ".join(self._topics)
            partition = None if message is None else message.partition()
            self._fault = self._fault or OffsetLost(self._group, topic, partition, error.str())
        elif kind is ErrorKind.FATAL:
            self._fault = self._fault or KafkaException(error)
        elif kind is ErrorKind.NO_TOPIC:
            self._missing_since = self._missing_since or time.monotonic()
        if kind is ErrorKind.PASSING and time.monotonic() < self._last_line + _QUIET_SECONDS:
            return
        self._last_line = time.monotonic()
        log.warning("consumer error", group=self._group, kind=kind.name, error=reason_of(error))

    def _check_topic(self) -> None:
        """A missing topic may have been created a moment ago, or a broker be starting: ask before giving up."""
        if self._missing_since is None or time.monotonic() < self._missing_since + _NO_TOPIC_SECONDS:
            return
        self._missing_since = None
        problems: list[str] = []
        for topic in self._topics:
            try:
                found = self._consumer.list_topics(topic, timeout=_NO_TOPIC_SECONDS).topics[topic]
            except KafkaException as error:
                log.warning("topic can't be looked up", topic=topic, error=reason_of(error))
                self._missing_since = time.monotonic()
                return
            if found.error is not None:
                problems.append(f"topic {topic}: {reason_of(found.error)}")
        if problems:
            self._fault = WrongTopology(problems, "taskline topics create")

    # ---- to the loop ------------------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        # A closed loop: the process leaves without a drain.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, records: Sequence[InRecord]) -> None:
        if self._sink is None:
            return
        try:
            self._sink.received(records)
        except Exception as error:
            # Raised into the event loop it would only be logged, and nothing would be read any more.
            self._sink.failed(error)
        self._flow.delivered()


_CommitRequest = tuple[Mapping[TopicPartition, Commit], "concurrent.futures.Future[None]"]


def _resolve(future: Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _answer(done: concurrent.futures.Future[None], error: Exception | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _names(partitions: Sequence[KafkaPartition]) -> list[TopicPartition]:
    return [TopicPartition(each.topic, each.partition) for each in partitions]


def _kafka(names: Collection[TopicPartition]) -> list[KafkaPartition]:
    return [KafkaPartition(name.topic, name.partition) for name in names]
