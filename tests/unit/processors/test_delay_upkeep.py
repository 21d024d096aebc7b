"""What is deleted from the delay topics, and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping

import pytest
from structlog.testing import capture_logs

from taskline.errors import Unavailable
from taskline.infra.intake import Commit, TopicPartition
from taskline.infra.kafka.offsets import GroupTopic
from taskline.infra.kafka.records import LogEnds
from taskline.infra.tiers import Tiers, tier_of
from taskline.infra.topics import Topics
from taskline.processors import delay_metrics, delay_upkeep
from taskline.processors.delay_core import Router
from taskline.processors.delay_lane import Lane, Room
from taskline.processors.delay_upkeep import LOOK_SECONDS, Upkeep
from taskline.settings import Settings
from taskline.testing.clock import DEFAULT_START, VirtualClock
from taskline.testing.loop import VirtualLoop

TIER = TopicPartition("tasks.delay.5s", 0)
RETIRED = TopicPartition("tasks.delay.3s", 0)
SCHEDULED = TopicPartition("tasks.scheduled", 0)
DAY_MS = 86_400_000


class Ends(LogEnds):
    """Answers from memory."""

    def __init__(self) -> None:
        self.first: dict[TopicPartition, int] = {}
        self.end: dict[TopicPartition, int] = {}
        self.old: dict[TopicPartition, int] = {}
        self.asked_before_ms: list[int] = []
        self.deleted: list[dict[TopicPartition, int]] = []
        self.requests = 0
        self.away = False

    def earliest(
        self, places: Collection[TopicPartition], timeout_seconds: float
    ) -> dict[TopicPartition, int]:
        self.requests += 1
        return {name: self.first.get(name, 0) for name in places}

    def latest(self, places: Collection[TopicPartition], timeout_seconds: float) -> dict[TopicPartition, int]:
        self.requests += 1
        if self.away:
            raise Unavailable("away")
        return {name: self.end.get(name, 0) for name in places}

    def at(
        self, places: Collection[TopicPartition], time_ms: int, timeout_seconds: float
    ) -> dict[TopicPartition, int]:
        self.requests += 1
        self.asked_before_ms.append(time_ms)
        return {name: self.old.get(name, 0) for name in places}

    def delete_before(self, bounds: Mapping[TopicPartition, int], timeout_seconds: float) -> None:
        self.deleted.append(dict(bounds))


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close()


@pytest.fixture
def projected(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The projector's committed offsets on tasks.scheduled."""
    offsets: dict[int, int] = {}

    def committed(
        kafka: object, readers: tuple[GroupTopic, ...], partitions: object, timeout: float
    ) -> dict[GroupTopic, dict[int, int]]:
        assert readers == (GroupTopic("taskline-projector", "tasks.scheduled"),)
        return {readers[0]: offsets}

    monkeypatch.setattr(delay_upkeep, "committed", committed)
    return offsets


SETTINGS = Settings.model_validate({"delay": {"tiers": ("1s", "5s"), "purge_interval_seconds": 60}})
ROUTER = Router(Topics(), Tiers.of(("1s", "5s")), ["default"])


def lane(name: TopicPartition, committed: int) -> Lane:
    if name == SCHEDULED:
        stage = ROUTER.scheduled()
    else:
        stage = ROUTER.stage(tier_of(name.topic.removeprefix("tasks.delay.")))
    return Lane(name, stage, Room(records=10, bytes=10_000), Commit(offset=committed))


def upkeep(loop: VirtualLoop, ends: Ends, lanes: list[Lane]) -> Upkeep:
    retired = [ROUTER.stage(tier_of("3s"))]
    return Upkeep(SETTINGS, ends, lambda: lanes, retired=retired, clock=VirtualClock(loop, DEFAULT_START))


def test_a_tier_is_deleted_up_to_the_committed_offset_and_only_when_there_is_something(
    loop: VirtualLoop,
) -> None:
    ends = Ends()
    made = upkeep(loop, ends, [])
    assert made.purge({TIER: 0}) == {}
    assert ends.requests == 0
    assert made.purge({TIER: 10}) == {TIER: 10}
    assert made.purge({TIER: 10}) == {}
    assert ends.deleted == [{TIER: 10}]
    assert ends.requests == 1
    assert made.purge({TIER: 12}) == {TIER: 12}
    # Another owner deleted in between, and after a restart nobody remembers.
    ends.first[TIER] = 12
    assert upkeep(loop, ends, []).purge({TIER: 12}) == {}
    assert ends.deleted == [{TIER: 10}, {TIER: 12}]


@pytest.mark.parametrize(
    ("own", "projector", "old", "expected"),
    [(50, 40, 30, 30), (50, 20, 30, 20), (10, 40, 30, 10), (50, None, 30, 0), (50, 40, 0, 0)],
)
def test_submissions_are_deleted_when_nobody_can_want_them_any_more(
    loop: VirtualLoop, projected: dict[int, int], own: int, projector: int | None, old: int, expected: int
) -> None:
    ends = Ends()
    ends.old[SCHEDULED] = old
    if projector is not None:
        projected[0] = projector
    made = upkeep(loop, ends, [])
    assert made.purge({SCHEDULED: own}) == ({SCHEDULED: expected} if expected else {})
    retention_ms = round(SETTINGS.topics.retention_days * DAY_MS)
    assert ends.asked_before_ms == [round(DEFAULT_START.timestamp() * 1_000) - retention_ms]


def test_what_waits_is_counted_and_an_empty_retired_tier_is_reported_once(
    loop: VirtualLoop, projected: dict[int, int]
) -> None:
    ends = Ends()
    retired = lane(RETIRED, 3)
    lanes = [lane(TIER, 10), lane(TopicPartition(TIER.topic, 1), 4), retired]
    ends.end = {TIER: 15, TopicPartition(TIER.topic, 1): 5, RETIRED: 7}

    async def look() -> None:
        task = asyncio.create_task(upkeep(loop, ends, lanes).run())
        await asyncio.sleep(LOOK_SECONDS + 1)
        assert _waiting() == {"5s": 6.0, "3s": 4.0}
        ends.away = True
        await asyncio.sleep(LOOK_SECONDS)
        ends.away = False
        retired.committed = Commit(offset=7)
        await asyncio.sleep(LOOK_SECONDS * 3)
        assert _waiting() == {"5s": 6.0, "3s": 0.0}
        task.cancel()

    with capture_logs() as lines:
        loop.run_until_complete(look())
    assert [line["event"] for line in lines if "retired" in line["event"]] == [
        "retired tier is empty: when it is so in all partitions, its topic can be deleted"
    ]
    assert [line["event"] for line in lines].count("upkeep put off") == 1
    # One request a look, and the purge's two.
    assert ends.requests <= 4 + 2
    assert ends.deleted == [{TIER: 10, TopicPartition(TIER.topic, 1): 4, RETIRED: 7}]


def _waiting() -> dict[str, float]:
    return {
        sample.labels["tier"]: sample.value
        for metric in delay_metrics.WAITING.collect()
        for sample in metric.samples
    }
