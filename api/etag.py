"""Entity tags (RFC 9110 §8.8.3) of task states, and the answers that carry them.

A tag is a hash of the very bytes that it stands for: strong, the same in every process, and another one whenever anything that a
reader would see is another, also after a change of the software.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

_DIGEST_BYTES = 12
# `W/"…"` or `"…"`; the comparison for If-None-Match is the weak one, which leaves the W/ out of account.
_TAG = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')
_JSON = (b"content-type", b"application/json")
# A shared cache would have to know who may see what; a state that can still change is asked about each time.
FLEETING = "private, no-cache"
# How long a client may keep a state that can't change, without asking.
MAX_AGE_SECONDS = 3_600


def etag_of(body: bytes) -> str:
    """The strong tag of an answer's bytes, quoted."""
    return f'"{hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()}"'


def none_match(header: str | None, etag: str) -> bool:
    """Whether `If-None-Match` lets the answer be sent in full."""
    if header is None:
        return True
    return header.strip() != "*" and etag not in _TAG.findall(header)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A state as it is answered."""

    body: bytes
    etag: str
    # For how long the client may keep it without asking; 0: it must ask.
    max_age_seconds: int

    @classmethod
    def of(cls, body: bytes, *, max_age_seconds: int = 0) -> Rendered:
        """These bytes with their tag."""
        return cls(body=body, etag=etag_of(body), max_age_seconds=max_age_seconds)


class StateAnswer(Response):
    """A rendered state, or 304 when the client has it already."""

    def __init__(self, rendered: Rendered, if_none_match: str | None) -> None:
        """Answer a request with this If-None-Match."""
        age = rendered.max_age_seconds
        headers = [
            (b"etag", rendered.etag.encode("ascii")),
            (b"cache-control", (f"private, max-age={age}" if age else FLEETING).encode("ascii")),
            (b"vary", b"authorization"),
        ]
        if none_match(if_none_match, rendered.etag):
            length = (b"content-length", str(len(rendered.body)).encode("ascii"))
            super().__init__(rendered.body, headers=[_JSON, length, *headers])  # type: ignore[arg-type]
        else:
            super().__init__(b"", status_code=304, headers=headers)  # type: ignore[arg-type]

    def init_headers(self, headers: Any = None) -> None:  # noqa: ANN401 - as Starlette declares it
        """Take the header fields as they are."""
        found: Sequence[tuple[bytes, bytes]] = headers
        self.raw_headers = list(found)
