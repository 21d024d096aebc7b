"""The client's messages as the records that the roles know."""

from __future__ import annotations

from confluent_kafka import Message

from taskline.infra.log import Headers, InRecord, Position

_NO_HEADERS: Headers = {}


def in_record(message: Message) -> InRecord:
    """A message without an error, as a record."""
    try:
        headers = message.headers()
    except UnicodeDecodeError:
        # A header's name that is not UTF-8 can't be had from the client, nor be written again.
        headers = None
    return InRecord(
        position=Position(topic=message.topic(), partition=message.partition(), offset=message.offset()),
        value=message.value(),
        key=message.key(),
        headers=dict(headers) if headers else _NO_HEADERS,
        timestamp_ms=message.timestamp()[1],
    )
