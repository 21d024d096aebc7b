"""Single records by their places, from the broker in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from taskline.errors import Unavailable
from taskline.infra.intake import TopicPartition
from taskline.infra.kafka.fetch import RecordSource
from taskline.infra.log import InRecord, Position
from taskline.testing.broker import MemoryBroker


class MemoryRecords(RecordSource):
    """A `RecordSource` on a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker) -> None:
        """Read from `broker`."""
        self._broker = broker

    async def fetch(self, places: Sequence[Position]) -> Mapping[Position, InRecord]:
        """As `RecordSource.fetch`."""
        await asyncio.sleep(0)
        if not self._broker.available:
            raise Unavailable("the broker is away")
        found = {}
        for place in places:
            records = self._broker.read(TopicPartition(place.topic, place.partition), place.offset, 1)
            if records:
                found[place] = records[0]
        return found
