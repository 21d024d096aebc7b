"""What passes between the pure core and the shells that have a connection: requests, pauses, and what came back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One HTTP request, relative to the API's base URL."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    # JSON.
    body: bytes | None = None
    # How long the server may hold the answer back on purpose; added to the time-out.
    held_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """No answer came."""

    error: Exception
    # False: the server certainly saw nothing of the request.
    sent: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Sleep so long."""

    seconds: float


# A conversation gives requests and pauses, gets answers (None after a pause), and ends in a result. Both clients run the same ones.
Talk = Generator[Request | Pause, Answer | Lost | None, T]


class Repeat(Enum):
    """When a request may be sent again."""

    # A second one does no harm: reads, cancels, submissions with an idempotency key.
    ALWAYS = auto()
    # Only when the first was certainly not acted on.
    IF_REFUSED = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[T]):
    """A request with what its answer means."""

    request: Request
    parse: Callable[[Answer], T]
    repeat: Repeat = Repeat.ALWAYS
    # What errors are about: a task's or a dead letter's id.
    subject: str = ""
    # It puts a task in, so that a lost answer leaves its fate unknown.
    submits: bool = False
    idempotency_key: str | None = None
    # Types of problems that end the call at once, unless an earlier try may have been acted on: the caller knows another way.
    unless: frozenset[str] = frozenset()


def exchange(request: Request) -> Talk[Answer | Lost]:
    """One request and what came back."""
    reply = yield request
    if reply is None:
        raise TypeError("a request was answered as a pause is")
    return reply
