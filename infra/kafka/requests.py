"""Admin requests about topics: thin, each bounded in time, all futures of one kind in flight together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from taskline.errors import Unavailable
from taskline.infra.kafka.client import MOVING, client_config, kafka_error, new_client, translated
from taskline.infra.kafka.drift import ObservedTopic
from taskline.infra.topics import TopicSpec
from taskline.settings import KafkaSettings

# A healthy cluster answers each of these requests in milliseconds; a role should say soon that it has none.
CHECK_TIMEOUT_SECONDS = 15.0
# Making things may wait for more: a new cluster makes its own topic of group offsets at the first request for one.
CREATE_TIMEOUT_SECONDS = 60.0
# Between attempts, and between looks at the metadata while new topics get their leaders.
RETRY_SECONDS = 0.05
_NO_LEADER = -1
# One attempt of a request that is repeated: on a new cluster the first look for a group's coordinator goes unanswered.
_ATTEMPT_SECONDS = 5.0
# The same for the making of topics, which takes a small broker a while when there are many.
_CREATE_ATTEMPT_SECONDS = 15.0
_SILENT = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._TRANSPORT,
        KafkaError.REQUEST_TIMED_OUT,
    }
)
# What a broker says for a moment after topics were made, or after it started.
_NOT_READY = MOVING | frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._NOENT,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)


@contextmanager
def admin_client(kafka: KafkaSettings) -> Iterator[AdminClient]:
    """An admin client for the length of the block."""
    admin = new_client(AdminClient, client_config(kafka, client_id="taskline-admin"))
    try:
        yield admin
    finally:
        # Writes the log lines that librdkafka has queued.
        admin.poll(0)


def is_not_ready(error: BaseException) -> bool:
    """Whether the same request may well succeed in a moment."""
    cause = kafka_error(error)
    return cause is not None and cause.code() in _NOT_READY


def ask(
    request: Callable[[float], Mapping[Any, Future[Any]]], doing: str, timeout_seconds: float
) -> dict[Any, Any]:
    """Make an idempotent request and wait for all its futures, again while the cluster is only not ready yet.

    Args:
        request: makes the request within so many seconds; key → future.
        doing: what is attempted, for messages.
        timeout_seconds: for all attempts together.

    Returns:
        key → answer.

    Raises:
        Unavailable: no answer in time.
        TasklineError: the broker refused; chained.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        left = max(RETRY_SECONDS, deadline - time.monotonic())
        futures = request(min(left, _ATTEMPT_SECONDS))
        try:
            return {key: future.result(timeout=left) for key, future in futures.items()}
        except (KafkaException, TimeoutError) as error:
            if not is_not_ready(error) or time.monotonic() >= deadline:
                raise translated(error, doing) from error
        time.sleep(RETRY_SECONDS)


class TopicRequests:
    """What can be asked and changed about topics."""

    def __init__(self, admin: AdminClient, timeout_seconds: float) -> None:
        """Use `admin` for requests that may each take `timeout_seconds`."""
        self._admin = admin
        self._timeout = timeout_seconds

    def observe(self, specs: Sequence[TopicSpec]) -> dict[str, ObservedTopic | None]:
        """The topics of `specs` as the broker has them; None: missing.

        One metadata request for the whole cluster (one that names topics may create them on some brokers), one for topic
        settings.
        """
        try:
            listed = self._admin.list_topics(timeout=self._timeout).topics
        except KafkaException as error:
            raise translated(error, "listing topics") from error
        present = [spec.name for spec in specs if spec.name in listed]
        configs = self._configs(present)
        observed: dict[str, ObservedTopic | None] = {spec.name: None for spec in specs}
        for name in present:
            partitions = listed[name].partitions
            observed[name] = ObservedTopic(
                name=name,
                partitions=len(partitions),
                replication_factor=min((len(each.replicas) for each in partitions.values()), default=0),
                leaderless=tuple(
                    sorted(each.id for each in partitions.values() if each.leader == _NO_LEADER)
                ),
                config=configs[name],
            )
        return observed

    def create(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create topics; one that somebody else makes at the same moment counts as theirs.

        Asked again while there is no answer: a broker that stood still was seen to give none to a request of that time, and answered the next at once.

        Returns:
            The names of those created here.
        """
        deadline = time.monotonic() + self._timeout
        unanswered: dict[str, TopicSpec] = {}
        missing = {spec.name: spec for spec in specs}
        created = []
        while missing:
            seconds = min(max(RETRY_SECONDS, deadline - time.monotonic()), _CREATE_ATTEMPT_SECONDS)
            patience = time.monotonic() + seconds
            silent: dict[str, TopicSpec] = {}
            for name, future in self._creations(missing.values(), seconds).items():
                try:
                    future.result(timeout=max(0.0, patience - time.monotonic()))
                except (KafkaException, TimeoutError) as error:
                    cause = kafka_error(error)
                    code = None if cause is None else cause.code()
                    if code == KafkaError.TOPIC_ALREADY_EXISTS:
                        # Its request may have been answered by deeds alone.
                        created += [name] if name in unanswered else []
                    elif (isinstance(error, TimeoutError) or code in _SILENT) and time.monotonic() < deadline:
                        silent[name] = missing[name]
                    else:
                        raise translated(error, f"creating topic {name}") from error
                else:
                    created.append(name)
            missing = silent
            unanswered |= silent
        return created

    def _creations(self, specs: Iterable[TopicSpec], seconds: float) -> Mapping[str, Future[Any]]:
        wanted = [
            NewTopic(
                spec.name,
                num_partitions=spec.partitions,
                replication_factor=spec.replication_factor,
                config=dict(spec.config),
            )
            for spec in specs
        ]
        made: Mapping[str, Future[Any]] = self._admin.create_topics(
            wanted, operation_timeout=seconds, request_timeout=seconds
        )
        return made

    def await_topics(
        self, specs: Sequence[TopicSpec], *, settled: Callable[[TopicSpec, ObservedTopic], bool]
    ) -> dict[str, ObservedTopic]:
        """Wait until the metadata shows every topic with leaders and as `settled` asks; brokers learn of changes one by one.

        Raises:
            Unavailable: not so in time.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            observed = self.observe(specs)
            ready = {
                spec.name: seen
                for spec in specs
                if (seen := observed[spec.name]) and not seen.leaderless and settled(spec, seen)
            }
            if len(ready) == len(specs):
                return ready
            if time.monotonic() > deadline:
                late = ", ".join(spec.name for spec in specs if spec.name not in ready)
                raise Unavailable(f"not ready after {self._timeout:g} s (is a broker down?): {late}")
            time.sleep(RETRY_SECONDS)

    def grow(
        self, specs: Sequence[TopicSpec], present: Mapping[str, ObservedTopic]
    ) -> dict[str, tuple[int, int]]:
        """Add partitions to topics that have fewer than declared.

        Returns:
            topic → partitions before and after.
        """
        if not specs:
            return {}
        futures = self._admin.create_partitions(
            [NewPartitions(spec.name, spec.partitions) for spec in specs],
            operation_timeout=self._timeout,
            request_timeout=self._timeout,
        )
        # Not repeated: the broker refuses to grow a topic to the number it already has.
        for name, future in futures.items():
            try:
                future.result(timeout=self._timeout)
            except (KafkaException, TimeoutError) as error:
                raise translated(error, f"adding partitions to {name}") from error
        return {spec.name: (present[spec.name].partitions, spec.partitions) for spec in specs}

    def alter(self, changes: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
        """Set topic settings (topic → name → value); topics without changes are skipped."""
        wanted = {topic: values for topic, values in changes.items() if values}
        if not wanted:
            return {}
        resources = [
            ConfigResource(
                ResourceType.TOPIC,
                topic,
                incremental_configs=[
                    ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
                    for name, value in values.items()
                ],
            )
            for topic, values in wanted.items()
        ]
        ask(
            lambda seconds: self._admin.incremental_alter_configs(resources, request_timeout=seconds),
            "changing topic settings",
            self._timeout,
        )
        return wanted

    def _configs(self, names: Sequence[str]) -> dict[str, dict[str, str | None]]:
        if not names:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        answers = ask(
            lambda seconds: self._admin.describe_configs(resources, request_timeout=seconds),
            "reading topic settings",
            self._timeout,
        )
        return {
            resource.name: {name: entry.value for name, entry in entries.items()}
            for resource, entries in answers.items()
        }
