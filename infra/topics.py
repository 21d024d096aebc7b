"""The topics and groups, declared once; `taskline topics create` makes them and every role checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from taskline.schemas.events import Priority
from taskline.settings import Settings

_DAY_MS = 86_400_000
DEFAULT_QUEUE = "default"
# How long cancel notices are kept. A worker looks older tasks than half of that up in the view instead.
CANCEL_NOTICES_MS = _DAY_MS
# So that what is over that age goes soon: a worker reads what is there when it starts.
_CANCELS_SEGMENT_MS = _DAY_MS // 24
# Kafka rolls segments by size; with sparse traffic a segment must still close to be deleted or compressed away.
_SEGMENT_MS = 7 * _DAY_MS


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicSpec:
    """How one topic must be."""

    name: str
    partitions: int
    replication_factor: int
    # Broker-side topic settings that Taskline's guarantees rest on.
    config: Mapping[str, str]
    # True: the number of partitions never changes after creation (lanes).
    fixed_partitions: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Topics:
    """Names of topics and groups under a namespace (`kafka.namespace`, "" or ending in a dot)."""

    namespace: str = ""

    def dispatch(self, queue: str, priority: Priority) -> str:
        """The topic that carries a queue's tasks of one priority."""
        middle = "" if queue == DEFAULT_QUEUE else f"{queue}."
        return f"{self.namespace}tasks.{middle}{priority.value}"

    @property
    def lifecycle(self) -> str:
        """The topic of lifecycle batches; its partitions are the lanes."""
        return f"{self.namespace}tasks.lifecycle"

    @property
    def dlq(self) -> str:
        """The topic of dead letters."""
        return f"{self.namespace}tasks.dlq"

    def cancels(self, queue: str) -> str:
        """The topic of a queue's cancel notices (one partition)."""
        return f"{self.namespace}tasks.cancels.{queue}"

    def leases(self, queue: str) -> str:
        """The topic of a queue's lease guards that have come due (tasks lent to workers of the HTTP protocol)."""
        return f"{self.namespace}tasks.leases.{queue}"

    @property
    def scheduled(self) -> str:
        """The topic of submissions that are not due yet; the delay role moves them into the tiers."""
        return f"{self.namespace}tasks.scheduled"

    @property
    def delay_prefix(self) -> str:
        """What the names of all delay tiers begin with."""
        return f"{self.namespace}tasks.delay."

    def delay(self, tier: str) -> str:
        """The topic of a delay tier, by the tier's name."""
        return f"{self.delay_prefix}{tier}"

    @property
    def delay_group(self) -> str:
        """The consumer group that forwards what waits."""
        return f"{self.namespace}taskline-delay"

    @property
    def types(self) -> str:
        """The topic of task-type registrations (one partition, kept for ever)."""
        return f"{self.namespace}tasks.types"

    def worker_group(self, queue: str, priority: Priority) -> str:
        """The consumer group that runs a queue's tasks of one priority."""
        return f"{self.namespace}taskline-worker-{queue}-{priority.value}"

    def lease_group(self, queue: str) -> str:
        """The consumer group that looks after a queue's leases: its gateways."""
        return f"{self.namespace}taskline-leases-{queue}"

    @property
    def projector_group(self) -> str:
        """The consumer group of the view's projectors."""
        return f"{self.namespace}taskline-projector"


def topology(settings: Settings) -> tuple[TopicSpec, ...]:
    """Every topic that these settings declare."""
    names = Topics(namespace=settings.kafka.namespace)
    declared = settings.topics
    durable = {
        "cleanup.policy": "delete",
        "compression.type": "zstd",
        "max.message.bytes": str(declared.max_record_bytes),
        "message.timestamp.type": "LogAppendTime",
        "min.insync.replicas": str(declared.min_insync_replicas),
        "retention.bytes": "-1",
        "retention.ms": str(round(declared.retention_days * _DAY_MS)),
        "segment.ms": str(_SEGMENT_MS),
        "unclean.leader.election.enable": "false",
    }

    def spec(name: str, partitions: int, *, fixed: bool = False, **changed: str) -> TopicSpec:
        config = durable | {key.replace("_", "."): value for key, value in changed.items()}
        return TopicSpec(
            name=name,
            partitions=partitions,
            replication_factor=declared.replication_factor,
            config=config,
            fixed_partitions=fixed,
        )

    def waiting(name: str) -> TopicSpec:
        # The broker never deletes what is still owed; the delay role deletes what it has forwarded.
        return spec(name, declared.delay_partitions, retention_ms="-1")

    return (
        *(
            spec(names.dispatch(queue, priority), declared.dispatch_partitions)
            for queue in declared.queues
            for priority in Priority
        ),
        *(
            spec(
                names.cancels(queue),
                1,
                fixed=True,
                retention_ms=str(CANCEL_NOTICES_MS),
                segment_ms=str(_CANCELS_SEGMENT_MS),
            )
            for queue in declared.queues
        ),
        # As many gateways share them as a queue can have workers.
        *(spec(names.leases(queue), declared.dispatch_partitions) for queue in declared.queues),
        spec(names.lifecycle, declared.lanes, fixed=True),
        *(waiting(name) for name in waiting_topics(settings)),
        spec(
            names.dlq,
            declared.dlq_partitions,
            max_message_bytes=str(2 * declared.max_record_bytes),
            retention_ms=str(round(declared.dlq_retention_days * _DAY_MS)),
        ),
        spec(names.types, 1, fixed=True, retention_ms="-1"),
    )


def waiting_topics(settings: Settings) -> tuple[str, ...]:
    """The declared topics that the delay role reads: scheduled submissions, and the tiers."""
    names = Topics(namespace=settings.kafka.namespace)
    return (names.scheduled, *map(names.delay, settings.delay.tiers))


def projected_topics(settings: Settings) -> tuple[str, ...]:
    """The topics that a projector reads."""
    names = Topics(namespace=settings.kafka.namespace)
    dispatch = (names.dispatch(queue, priority) for queue in settings.topics.queues for priority in Priority)
    return (*dispatch, names.scheduled, names.lifecycle, names.dlq)
