"""Instants in requests: RFC 3339, as the answers write them."""

from __future__ import annotations

from datetime import datetime


def instant_of(value: object) -> datetime:
    """An aware datetime from RFC 3339 text.

    Raises:
        ValueError: it is no such text.
    """
    if not isinstance(value, str):
        raise ValueError("must be a string, e.g. 2030-01-31T08:00:00Z")  # noqa: TRY004 - pydantic wants it
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("must be an RFC 3339 instant, e.g. 2030-01-31T08:00:00Z") from None
    if found.tzinfo is None:
        raise ValueError("must say its offset from UTC, e.g. 2030-01-31T08:00:00Z")
    return found
