"""Instants on the command line."""

from __future__ import annotations

from datetime import datetime

import click


class _Instant(click.ParamType):
    name = "instant"

    def convert(
        self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no ISO 8601 instant, e.g. 2030-01-31T08:00:00Z", param, ctx)
        # Somebody at a terminal means their own time.
        return found.astimezone() if found.tzinfo is None else found


# An ISO 8601 instant; without an offset it is local time.
INSTANT = _Instant()
