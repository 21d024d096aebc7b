"""Exact cancel, in every order of events: one task, two cancels, two attempts, a crash, a hand-back, and a view that lags.

The fold and the worker's judgement are the real ones; what surrounds them is reduced to its steps, each of which happens at once. Every
interleaving is walked through. The recipes that leave out one of its points show that the model would find it.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from taskline.schemas.events import (
    CancelRequested,
    Failed,
    LifecycleEvent,
    Priority,
    Released,
    RetryScheduled,
    Started,
    Succeeded,
    TaskSubmitted,
)
from taskline.schemas.ids import new_task_id
from taskline.state.fold import LaneEvent, fold
from taskline.state.status import TaskStatus
from taskline.workers.cancels import Verdict, verdict_of

NOW = 1_800_000_000_000
TASK = new_task_id(NOW)
SUBMITTED = TaskSubmitted(
    task_id=TASK,
    tenant="acme",
    task_type="t",
    queue="default",
    priority=Priority.NORMAL,
    payload=b"{}",
    retain_until=NOW + 86_400_000,
    max_retries=1,
    root_id=TASK,
)
CANCELS, ATTEMPTS, CRASHES, RELEASES = 2, 2, 1, 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """The points that make it exact; all True: as it is built."""

    # The API appends the notice before the request.
    notice_first: bool = True
    # The worker asks after its Started is acknowledged whether what it knows of the notices is fresh enough.
    look_after_started: bool = True
    # The API lets the time pass between notice and request after which what did not know the notice is not fresh any more.
    spread: bool = True
    # A named task waits until its own Started is in the view.
    wait_for_view: bool = True
    # The API answers when its own request is in the view.
    wait_for_answer: bool = True


@dataclass(frozen=True, slots=True)
class Cancel:
    step: str = "idle"
    # The place of its request in the lane.
    place: int | None = None
    # 200 or 409.
    answer: int | None = None


@dataclass(frozen=True, slots=True)
class World:
    # The events in the lane, by their numbers in EVENTS: a world is looked up often, and numbers are hashed quickly.
    lane: tuple[int, ...] = ()
    # How many events of the lane the view has.
    shown: int = 0
    notices: int = 0
    cancels: tuple[Cancel, ...] = (Cancel(),) * CANCELS
    # The attempt whose record is at hand; None: all are done.
    attempt: int | None = 1
    # What the worker does with it: idle, looked, opened, named, clear, running.
    worker: str = "idle"
    # How many of the notices it knows, of what it looked up last and may still rely on; None: it must look anew.
    fresh: int | None = None
    # Of `looked`: whether the task was named.
    named: bool = False
    execution: int = 0
    crashes: int = 0
    releases: int = 0
    # How often the handler was begun.
    begun: int = 0

    def common(self) -> dict[str, object]:
        return {
            "task_id": TASK,
            "tenant": "acme",
            "attempt": self.attempt or 1,
            "worker": "w",
            "at": NOW,
            "retain_until": SUBMITTED.retain_until,
        }

    def append(self, *events: LifecycleEvent, **changes: object) -> World:
        return replace(self, lane=self.lane + tuple(map(numbered, events)), **changes)  # type: ignore[arg-type]

    def with_cancel(self, number: int, cancel: Cancel, **changes: object) -> World:
        cancels = tuple(cancel if each == number else other for each, other in enumerate(self.cancels))
        return replace(self, cancels=cancels, **changes)  # type: ignore[arg-type]


EVENTS: list[LifecycleEvent] = []


@functools.cache
def numbered(event: LifecycleEvent) -> int:
    EVENTS.append(event)
    return len(EVENTS) - 1


@functools.cache
def status(lane: tuple[int, ...]) -> TaskStatus:
    return fold(SUBMITTED, [EVENTS[number] for number in lane]).status


@functools.cache
def verdict(lane: tuple[int, ...], execution: int) -> Verdict | None:
    events = [LaneEvent(offset=place, index=0, event=EVENTS[number]) for place, number in enumerate(lane)]
    return verdict_of(SUBMITTED, events, uuid.UUID(int=execution), abort=False)


def told(lane: tuple[int, ...]) -> int:
    return 200 if status(lane) is TaskStatus.CANCELLED else 409


def moves(world: World, recipe: Recipe) -> Iterator[World]:
    """Whatever can happen next."""
    if world.shown < len(world.lane):
        yield replace(world, shown=world.shown + 1)
    for number, cancel in enumerate(world.cancels):
        yield from cancel_moves(world, number, cancel, recipe)
    if world.attempt is not None:
        yield from worker_moves(world, recipe)


def cancel_moves(world: World, number: int, cancel: Cancel, recipe: Recipe) -> Iterator[World]:
    view = world.lane[: world.shown]
    request = numbered(
        CancelRequested(**world.common(), request_id=uuid.UUID(int=number), abort=False)  # type: ignore[arg-type]
    )
    if cancel.step == "idle":
        if status(view).ended:
            yield world.with_cancel(number, Cancel("answered", None, told(view)))
            return
        if recipe.notice_first:
            yield world.with_cancel(number, Cancel("noticed"), notices=world.notices + 1)
        else:
            asked = Cancel("asked", len(world.lane))
            yield world.with_cancel(number, asked, lane=(*world.lane, request))
    elif cancel.step == "noticed" and recipe.spread:
        # Knowledge that does not have this notice is too old from now on.
        fresh = None if world.fresh is not None and world.fresh < world.notices else world.fresh
        yield world.with_cancel(number, Cancel("spread"), fresh=fresh)
    elif cancel.step in ("noticed", "spread"):
        asked = Cancel("placed", len(world.lane))
        yield world.with_cancel(number, asked, lane=(*world.lane, request))
    elif cancel.step == "asked":
        yield world.with_cancel(number, replace(cancel, step="placed"), notices=world.notices + 1)
    elif cancel.step == "placed" and cancel.place is not None:
        if not recipe.wait_for_answer:
            yield world.with_cancel(number, replace(cancel, step="answered", answer=told((*view, request))))
        elif world.shown > cancel.place:
            answer = told(world.lane[: cancel.place + 1])
            yield world.with_cancel(number, replace(cancel, step="answered", answer=answer))


def worker_moves(world: World, recipe: Recipe) -> Iterator[World]:
    execution = uuid.UUID(int=world.execution)
    common = world.common()

    def opened(after: str) -> World:
        number = world.execution + 1
        started = Started(
            **common,  # type: ignore[arg-type]
            execution=uuid.UUID(int=number),
            source_topic="t",
            source_partition=0,
            source_offset=world.attempt or 0,
        )
        return world.append(started, worker=after, execution=number)

    if world.worker == "idle":
        if recipe.look_after_started:
            yield opened("opened")
        else:
            yield replace(world, worker="looked", named=world.notices > 0)
        if world.fresh != world.notices:
            # For another task, or in time for this one.
            yield replace(world, fresh=world.notices)
    elif world.worker == "looked":
        yield opened("named" if world.named else "clear")
    elif world.worker == "opened":
        if world.fresh is not None:
            yield replace(world, worker="named" if world.fresh else "clear")
        yield replace(world, worker="named" if world.notices else "clear", fresh=world.notices)
    elif world.worker == "named":
        yield from judged(world, recipe)
    elif world.worker == "clear":
        yield replace(world, worker="running", begun=world.begun + 1)
    elif world.worker == "running":
        yield world.append(Succeeded(**common, execution=execution), attempt=None, worker="idle")  # type: ignore[arg-type]
        if world.attempt is not None and world.attempt < ATTEMPTS:
            failed = Failed(**common, execution=execution, error_class="E", message="", retryable=True)  # type: ignore[arg-type]
            retry = RetryScheduled(**common, due=NOW)  # type: ignore[arg-type]
            yield world.append(failed, retry, attempt=world.attempt + 1, worker="idle")
    if world.worker != "idle" and world.crashes < CRASHES:
        # Its record comes to another one.
        yield replace(world, worker="idle", crashes=world.crashes + 1)
    if world.worker in ("opened", "named", "clear", "running") and world.releases < RELEASES:
        released = Released(**common, execution=execution, reason="revoked")  # type: ignore[arg-type]
        yield world.append(released, worker="idle", releases=world.releases + 1)


def judged(world: World, recipe: Recipe) -> Iterator[World]:
    view = world.lane[: world.shown]
    found = verdict(view, world.execution)
    if found is None and not recipe.wait_for_view:
        found = Verdict.OVER if status(view).ended else Verdict.RUN
    if found is Verdict.RUN:
        yield replace(world, worker="clear")
    elif found is Verdict.OVER:
        yield replace(world, attempt=None, worker="idle")
    elif found is Verdict.AGAIN:
        yield replace(world, worker="idle")


def walk(recipe: Recipe, seen: set[World]) -> Iterator[str]:
    """What goes wrong in any order of events; every world that was reached is added to `seen`."""
    todo = [World()]
    seen.update(todo)
    while todo:
        world = todo.pop()
        following = list(moves(world, recipe))
        answers = [cancel.answer for cancel in world.cancels]
        for after in following:
            if after.begun > world.begun and 200 in answers:
                yield "a handler was begun after 200"
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if not following:
            yield from faults_at_rest(world, answers)


def faults_at_rest(world: World, answers: list[int | None]) -> Iterator[str]:
    """Nothing more can happen."""
    end = status(world.lane)
    if None in answers or world.attempt is not None:
        yield "something hangs"
    if 200 in answers and end is not TaskStatus.CANCELLED:
        yield "200, and not cancelled"
    if 200 not in answers and (world.begun == 0 or end is not TaskStatus.COMPLETED):
        yield "409 only, and it did not run to its end"


def test_in_every_order_of_events_the_answer_is_true() -> None:
    seen: set[World] = set()
    assert next(walk(Recipe(), seen), None) is None
    print(len(seen), "worlds")
    # It is not true of nothing.
    assert len(seen) > 10_000


@pytest.mark.parametrize(
    ("recipe", "fault"),
    [
        (Recipe(notice_first=False), "a handler was begun after 200"),
        (Recipe(look_after_started=False), "a handler was begun after 200"),
        (Recipe(spread=False), "a handler was begun after 200"),
        (Recipe(wait_for_view=False), "a handler was begun after 200"),
        (Recipe(wait_for_answer=False), "200, and not cancelled"),
    ],
    ids=[
        "request before notice",
        "look before Started",
        "rely on what is too old",
        "judge any view",
        "answer from any view",
    ],
)
def test_every_point_of_the_recipe_is_needed(recipe: Recipe, fault: str) -> None:
    assert fault in walk(recipe, set())
