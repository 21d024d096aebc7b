"""What each subscriber does to a delivery, and what must become of the task. Pure.

A subscriber follows its script for every event: the first delivery meets the first answer, and so on; the last one goes on for ever,
until the subscriber is mended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from examples.webhooks.tasks import MAX_RETRIES, POLICY
from taskline.workers.retry import JITTER_LOW

OK = 200
TOO_MANY = 429


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one delivery of an event meets."""

    status: int = OK
    # For how long the sender is asked to stay away, in seconds; told as `asks` says.
    stay_away: float | None = None
    asks: Literal["seconds", "date", "body"] = "seconds"
    # Instead of an answer: nothing at all, or the end of the connection.
    silence: Literal["hang", "drop"] | None = None
    # The event is taken in (once by its key), whatever the sender gets to hear.
    takes: bool = False


TAKEN = Answer(takes=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A subscriber, and what its deliveries must look like in the view."""

    name: str
    what: str
    script: tuple[Answer, ...]
    # The kinds of error of the attempts that fail, in order.
    failures: tuple[str, ...] = ()
    # True: at least these; how many more depends on how long the subscriber is away, or on how loaded the machine is: an attempt
    # that reaches its limit before it has reached the subscriber.
    or_more: bool = False
    # Of a task that ends dead: why; None: it completes.
    reason: str | None = None
    # The receipt says that the event had been taken in before.
    duplicate: bool = False
    # Options of the submission; None: the task type's.
    timeout_seconds: float | None = None
    max_retries: int | None = None
    # Its port refuses connections until it is opened.
    away: bool = False

    def answer(self, delivery: int) -> Answer:
        """What the nth delivery of an event meets, from 1."""
        return self.script[min(delivery, len(self.script)) - 1]

    @property
    def status(self) -> str:
        """How the task ends."""
        return "completed" if self.reason is None else "dead"

    def least_wait(self, failure: int) -> float:
        """What must have passed before the attempt after the nth failed one, from 1, starts; in seconds."""
        asked = None if self.away else self.answer(failure).stay_away
        policy = min(POLICY.cap_seconds, POLICY.base_seconds * POLICY.multiplier ** (failure - 1))
        # A date has whole seconds: how long it is away is the receiver's to say (it counts who comes too early).
        return JITTER_LOW * policy if asked is None or self.answer(failure).asks == "date" else asked


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="steady", what="answers 200", script=(TAKEN,)),
    Scenario(
        name="flaky",
        what="500, 500, then 200",
        script=(Answer(status=500), Answer(status=500), TAKEN),
        failures=("server", "server"),
    ),
    Scenario(
        name="limited",
        what="429 with Retry-After: 1, then 200",
        script=(Answer(status=TOO_MANY, stay_away=1), TAKEN),
        failures=("rate_limited",),
    ),
    Scenario(
        name="dated",
        what="429 with Retry-After: an HTTP date, then 200",
        script=(Answer(status=TOO_MANY, stay_away=1, asks="date"), TAKEN),
        failures=("rate_limited",),
    ),
    Scenario(
        name="busy",
        what="409 with its own word for later: Retry(after=0.8), then 200",
        script=(Answer(status=409, stay_away=0.8, asks="body"), TAKEN),
        failures=("rate_limited",),
    ),
    Scenario(
        name="slow",
        what="takes the event, but hangs beyond the time limit; then 200",
        script=(Answer(silence="hang", takes=True), TAKEN),
        failures=("timeout",),
        or_more=True,
        duplicate=True,
        timeout_seconds=3,
    ),
    Scenario(
        name="dropping",
        what="drops the connection, then 200",
        script=(Answer(silence="drop"), TAKEN),
        failures=("transient",),
    ),
    Scenario(
        name="away",
        what="refuses connections for a while, then 200",
        script=(TAKEN,),
        failures=("transient",),
        or_more=True,
        max_retries=20,
        away=True,
    ),
    Scenario(
        name="strict",
        what="400 until it is mended",
        script=(Answer(status=400),),
        failures=("permanent",),
        reason="permanent",
    ),
    Scenario(
        name="gone",
        what="410: Permanent, until it subscribes again",
        script=(Answer(status=410),),
        failures=("permanent",),
        reason="permanent",
    ),
    Scenario(
        name="broken",
        what="500 until it is mended",
        script=(Answer(status=500),),
        failures=("server",) * (1 + MAX_RETRIES),
        reason="exhausted",
    ),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
