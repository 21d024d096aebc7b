"""Cancel notices' look-up of where they end, when the topic is made anew under it; what a broker does is in tests/integration."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from taskline.infra.kafka.cancel_lookup import Bounds, EndLookup
from taskline.infra.kafka.cancel_notices import KafkaNotices
from taskline.infra.role import elapsed_seconds
from taskline.schemas.codec import Codec
from taskline.settings import KafkaSettings


@dataclass
class Place:
    """What a broker says of a partition."""

    offset: int
    error: None = None


@dataclass
class Broker:
    """A consumer whose topic holds the offsets from `begin` to `end`."""

    begin: int
    end: int

    def offsets_for_times(self, _places: list[Any], timeout: float) -> list[Place]:
        """The end."""
        return [Place(self.end)]

    def get_watermark_offsets(self, _place: object, timeout: float, cached: bool) -> tuple[int, int]:
        """Both."""
        return self.begin, self.end


def bounds(broker: Broker, *, known: int) -> Bounds:
    """An answer of this broker to one who has read up to `known`."""

    async def ask() -> Bounds:
        lookup = EndLookup(
            KafkaSettings(), "cancels", client_id="test", known=lambda: known, answered=lambda *_: None
        )
        return lookup._request(broker)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("broker", "known", "expected"),
    [
        (Broker(0, 0), 0, Bounds(end=0, empty=False)),
        (Broker(0, 7), 7, Bounds(end=7, empty=False)),
        (Broker(0, 7), 3, Bounds(end=7, empty=False)),
        (Broker(7, 7), 3, Bounds(end=7, empty=True)),
    ],
)
def test_the_end_is_what_the_broker_says(broker, known, expected):
    assert bounds(broker, known=known) == expected


def test_an_end_before_what_was_read_is_of_another_topic():
    with pytest.raises(KafkaException) as raised:
        bounds(Broker(0, 3), known=50)
    assert raised.value.args[0].code() == KafkaError.OFFSET_OUT_OF_RANGE


def test_an_end_of_the_old_topic_is_not_waited_for():
    async def scenario():
        notices = KafkaNotices(KafkaSettings(), "cancels", Codec(), client_id="test")
        # Asked of the old topic, taken in after the restart.
        notices._answered(Bounds(end=51, empty=False), elapsed_seconds())
        waiting = asyncio.ensure_future(notices.catch_up())
        await asyncio.sleep(0)
        assert not waiting.done()
        notices._answered(Bounds(end=0, empty=False), elapsed_seconds())
        await asyncio.wait_for(waiting, 1)

    asyncio.run(scenario())
