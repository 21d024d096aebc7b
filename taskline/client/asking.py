"""When a request is sent again: one conversation that both clients run.

Invariant: what puts a task in is repeated only under an idempotency key, or when the last try certainly did nothing. If any try may have
been acted on and none succeeds, the error says so (`SubmissionUnknown`), whatever the last answer was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from taskline.client.errors import Problem, SubmissionUnknown
from taskline.client.refusals import error_of, problem_in
from taskline.client.wire import Answer, Call, Lost, Pause, Repeat, Talk, exchange
from taskline.errors import TasklineError, Unavailable

T = TypeVar("T")

# Refusals of which the API promises that this request did nothing.
_NOTHING_DONE = frozenset(
    {
        "rate-limited",
        "not-accepted",
        "types-unavailable",
        "keys-unavailable",
        "log-unavailable",
        "overloaded",
        # Another request's outcome is not known; so the error, if it comes to that, says that nobody knows.
        "submission-in-progress",
        "claims-unavailable",
        # The task that was to make way may be cancelled; the one that was submitted is not there.
        "replacement-undecided",
    }
)
_FIRST_ERROR = 400
_RATE_LIMITED = 429
# What may pass by itself; 502 and 504 are a balancer's.
_PASSING = frozenset({_RATE_LIMITED, 502, 503, 504})
# Of these it can't be told whether the API behind the balancer has seen the request.
_IN_DOUBT = frozenset({500, 502, 503, 504})
_SPREAD = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a call is tried, and how time and chance are known."""

    # From the first try to the start of the last one.
    budget_seconds: float
    # A monotonic clock, in seconds.
    now: Callable[[], float]
    # Growing pauses for errors that do not say how long to wait.
    pauses: Callable[[], Iterator[float]]
    # From 0 to below 1: spreads callers who were told the same Retry-After.
    chance: Callable[[], float]

    def pause(self, after: float | None, usual: float) -> float:
        """Seconds until the next try: never before the instant that the API named, if it named one."""
        return usual if after is None else after * (1 + _SPREAD * self.chance())


def ask(call: Call[T], patience: Patience) -> Talk[T]:
    """Send a request until it is answered, refused for good, or the time is over.

    Raises:
        TasklineError: the refusal, or what was in the way when the time was over.
    """
    began, pauses, doubt = patience.now(), patience.pauses(), False
    while True:
        reply = yield from exchange(call.request)
        if isinstance(reply, Answer) and reply.status < _FIRST_ERROR:
            return call.parse(reply)
        refusal = _refusal(reply, call)
        doubt = doubt or (call.submits and refusal.in_doubt)
        pause = patience.pause(refusal.after, next(pauses))
        again = refusal.passing and (call.repeat is Repeat.ALWAYS or not refusal.in_doubt)
        again = again and (doubt or refusal.type not in call.unless)
        if not again or patience.now() - began + pause > patience.budget_seconds:
            raise final_error(refusal.error, call.idempotency_key, doubt=doubt)
        yield Pause(seconds=pause)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """What one try came to."""

    error: TasklineError
    # It may go better a little later.
    passing: bool
    # The request may have been acted on.
    in_doubt: bool
    # The problem's; "" when it was none of Taskline's.
    type: str = ""
    # Seconds after which the API wants to be asked again.
    after: float | None = None


def refusal_of(problem: Problem, *, subject: str = "", idempotency_key: str | None = None) -> Refusal:
    """A problem, judged."""
    return Refusal(
        error=error_of(problem, subject=subject, idempotency_key=idempotency_key),
        passing=problem.status in _PASSING,
        in_doubt=problem.status in _IN_DOUBT and problem.type not in _NOTHING_DONE,
        type=problem.type,
        after=problem.retry_after,
    )


def final_error(error: TasklineError, idempotency_key: str | None, *, doubt: bool) -> TasklineError:
    """The error of a submission that is given up; with `doubt`, some try of it may have been acted on."""
    if not doubt or isinstance(error, SubmissionUnknown):
        return error
    unknown = SubmissionUnknown(
        f"the task may or may not be in the log: {error}", idempotency_key=idempotency_key
    )
    unknown.__cause__ = error
    return unknown


def _refusal(reply: Answer | Lost, call: Call[T]) -> Refusal:
    if isinstance(reply, Answer):
        return refusal_of(problem_in(reply), subject=call.subject, idempotency_key=call.idempotency_key)
    said = str(reply.error) or type(reply.error).__name__
    error = Unavailable(f"no answer from the API: {said}")
    error.__cause__ = reply.error
    return Refusal(error=error, passing=True, in_doubt=reply.sent)
