"""The query parameters that all lists have in common."""

from __future__ import annotations

from collections.abc import Mapping

from taskline.api.problems import BAD_REQUEST, ProblemError

# int() of a longer one is somebody's attack.
_MAX_LIMIT_CHARS = 4


def limit_of(given: Mapping[str, str], *, default: int, most: int) -> int:
    """The parameter `limit`; `default` when it is absent.

    Raises:
        ProblemError: it is no number from 1 to `most`.
    """
    text = given.get("limit", str(default))
    if text.isascii() and text.isdigit() and len(text) <= _MAX_LIMIT_CHARS and 1 <= int(text) <= most:
        return int(text)
    raise ProblemError(BAD_REQUEST, f"limit is a number from 1 to {most}")
