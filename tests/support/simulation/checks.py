"""The invariants, looked at when everything has come to rest.

They look at three things and compare them: what callers were told and handlers did (the ledger), the raw log, and the view.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from simulation.ledger import Entry
from simulation.plan import MOST_SKEW_MS
from taskline.infra.log import HEADER_ATTEMPT, HEADER_CAUSE, HEADER_DUE, HEADER_TASK_ID, InRecord
from taskline.infra.topics import projected_topics, waiting_topics
from taskline.processors.projection import Layout
from taskline.processors.projector import Projector
from taskline.schemas.events import (
    DeadLetter,
    LifecycleBatch,
    LifecycleEvent,
    Succeeded,
    TaskSubmitted,
    sequence_of,
)
from taskline.schemas.ids import TaskId
from taskline.state.fold import LaneEvent, Marks, TaskHistory, history
from taskline.state.stored import events_of
from taskline.testing import MemoryView

if TYPE_CHECKING:
    from simulation.run import Simulation

# Timers are due a little early, and the log's clock is in whole ms.
_ROUNDING_MS = 1


def check(simulation: Simulation) -> None:
    """Look at everything; what is wrong is told to the simulation."""
    if any(wrong.startswith(("I6", "deadlock")) for wrong in simulation.ledger.wrong):
        # What is not at rest breaks the others too.
        return
    folded = _fold_of_the_log(simulation)
    _view_is_the_fold(simulation, folded)
    _ends(simulation, folded)
    _starts(simulation, folded)
    _letters(simulation, folded)
    _bounded(simulation)


# ---- I2 ------------------------------------------------------------------------------------------------------------


def _fold_of_the_log(simulation: Simulation) -> dict[TaskId, TaskHistory]:
    """Every task, from the raw records and nothing but the codec and the fold."""
    codec, topics, broker = simulation.codec, simulation.topics, simulation.broker
    events: dict[TaskId, list[LaneEvent]] = defaultdict(list)
    for record in broker.records(topics.lifecycle):
        for index, entry in enumerate(codec.decode(record.value, LifecycleBatch).events):
            sequence = sequence_of(record.position.offset, index)
            event = codec.decode(entry.event, LifecycleEvent)
            events[entry.task_id].append(LaneEvent.at_sequence(sequence, event))
    submissions: dict[TaskId, TaskSubmitted] = {}
    dispatched: set[TaskId] = set()
    replayed: dict[TaskId, TaskId] = {}
    for topic in projected_topics(simulation.plan.settings):
        if topic in (topics.lifecycle, topics.dlq):
            continue
        for record in broker.records(topic):
            if int(record.headers.get(HEADER_ATTEMPT, b"1")) > 1:
                continue
            submission = codec.decode(record.value, TaskSubmitted)
            submissions[submission.task_id] = submission
            if HEADER_DUE in record.headers and topic != topics.scheduled:
                dispatched.add(submission.task_id)
            if submission.replay_of is not None:
                replayed[submission.replay_of] = submission.task_id
    return {
        task_id: history(
            submission,
            events.get(task_id, []),
            Marks(dispatched=task_id in dispatched, replayed_as=replayed.get(task_id)),
        )
        for task_id, submission in submissions.items()
    }


def _view_is_the_fold(simulation: Simulation, folded: dict[TaskId, TaskHistory]) -> None:
    records = [
        record
        for topic in projected_topics(simulation.plan.settings)
        for record in simulation.broker.records(topic)
    ]
    rebuilt = _rebuilt(simulation, records)
    for name, view in (("the view", simulation.view), ("a rebuilt view", rebuilt)):
        for task_id, expected in folded.items():
            stored = view._stored(task_id)
            if stored is None or stored.submission is None:
                simulation.wrong(f"I2 {task_id} is not in {name}")
                continue
            submission = simulation.codec.decode(stored.submission, TaskSubmitted)
            told = history(submission, events_of(simulation.codec, stored), stored.marks)
            if told != expected:
                simulation.wrong(
                    f"I2 {task_id} is {told.state.status} in {name} ({len(told.events)} events), and "
                    f"{expected.state.status} in the log ({len(expected.events)} events)"
                )
        extra = set(view.task_ids()) - set(folded)
        if extra:
            simulation.wrong(f"I2 {len(extra)} task(s) in {name} that are not in the log: {sorted(extra)[0]}")


def _rebuilt(simulation: Simulation, records: list[InRecord]) -> MemoryView:
    """The view that a projector makes of the whole log, its partitions mixed in another order."""
    partitions: dict[tuple[str, int], list[InRecord]] = defaultdict(list)
    for record in records:
        partitions[record.position.topic, record.position.partition].append(record)
    order = [key for key, found in partitions.items() for _ in found]
    simulation.rng.shuffle(order)
    turns = {
        key: iter(sorted(found, key=lambda each: each.position.offset)) for key, found in partitions.items()
    }
    mixed = [next(turns[key]) for key in order]
    view = MemoryView(simulation.clock)
    projector = Projector(
        view,
        None,
        simulation.codec,
        Layout.of(simulation.plan.settings),
        clock=simulation.clock,  # type: ignore[arg-type]
    )

    async def rebuild() -> None:
        for first in range(0, len(mixed), 50):
            await projector.fold(mixed[first : first + 50])

    asyncio.get_event_loop().run_until_complete(rebuild())
    return view


# ---- I1 ------------------------------------------------------------------------------------------------------------


def _ends(simulation: Simulation, folded: dict[TaskId, TaskHistory]) -> None:
    ledger = simulation.ledger
    for task_id, entry in ledger.accepted.items():
        told = folded.get(task_id)
        if told is None:
            simulation.wrong(f"I1 {task_id} was acknowledged and is not in the log")
            continue
        simulation.reached(f"end {told.state.status}")
        if not told.state.status.ended:
            simulation.wrong(f"I1 {task_id} (job {entry.job.number}) is {told.state.status} for ever")
        else:
            _end_is_possible(simulation, task_id, entry, told)
    for task_id, number in ledger.numbers.items():
        if number in ledger.refused:
            simulation.wrong(f"I1 {task_id} ran, and job {number} was refused")
        elif ledger.entry(task_id) is None and number not in ledger.lost and task_id not in folded:
            simulation.wrong(f"I1 {task_id} ran and was never submitted")
    for task_id, told in folded.items():
        if not told.state.status.ended and task_id not in ledger.accepted:
            simulation.wrong(f"I1 {task_id}, in the log, is {told.state.status} for ever")
        for attempt in told.attempts:
            simulation.reached(f"execution {attempt.outcome}")


def _end_is_possible(simulation: Simulation, task_id: TaskId, entry: Entry, told: TaskHistory) -> None:
    status, job = told.state.status, entry.job
    possible = set()
    if entry.asked:
        possible.add("cancelled")
    if told.state.start_by is not None:
        possible.add("expired")
    if job.leased:
        possible |= {"completed", "dead"}
        if "completed" in simulation.ledger.taken.get(task_id, ()) and status != "completed":
            simulation.wrong(f"I1 a worker was told that {task_id} is completed; it is {status}")
    else:
        possible.add(expected_end(job.acts, told.state.max_retries))
        if simulation.froze or told.state.start_by is not None:
            # Time limits pass while a process stands still.
            possible |= {"completed", "dead"}
    if status not in possible:
        simulation.wrong(
            f"I1 {task_id} (job {job.number}: {job.acts}, {told.state.max_retries} retries) is {status}, not {sorted(possible)}"
        )
    if status == "completed" and not simulation.ledger.starts.get(task_id) and not job.leased:
        simulation.wrong(f"I1 {task_id} is completed and never ran")


def expected_end(acts: tuple[str, ...], max_retries: int) -> str:
    """What becomes of a task whose every attempt does what it says."""
    deaths = 0
    for attempt in range(1, max_retries + 2):
        verb = acts[min(attempt, len(acts)) - 1].split()[0]
        if verb == "ok":
            return "completed"
        if verb == "permanent":
            return "dead"
        # What died beside others is run again alone, and does the same.
        deaths += verb in ("die", "beside")
        if deaths >= 3:
            return "dead"
    return "dead"


# ---- I4, I5, I7 ----------------------------------------------------------------------------------------------------


def _starts(simulation: Simulation, folded: dict[TaskId, TaskHistory]) -> None:
    ledger, plan = simulation.ledger, simulation.plan
    faultless = not simulation.disturbed and not (plan.append_faults or plan.commit_faults)
    ahead = max(0, *simulation.skews["delay"], *simulation.skews["api"], *simulation.skews["worker"])
    waited = _dues(simulation)
    for task_id, starts in ledger.starts.items():
        entry, told = ledger.entry(task_id), folded.get(task_id)
        per_attempt = Counter(start.attempt for start in starts)
        for attempt, count in per_attempt.items():
            simulation.reached("repeated start" if count > 1 else "start once")
            job = simulation.plan.jobs[ledger.numbers[task_id]]
            if count > 1 and faultless and "beside" not in " ".join(job.acts):
                simulation.wrong(f"I4 attempt {attempt} of {task_id} ran {count} times without a fault")
        if told is not None:
            dues = {1: 0 if told.state.not_before is None else _ms(told.state.not_before)}
            for start in starts:
                due = dues.get(start.attempt, waited.get((task_id, start.attempt)))
                if due is not None and start.now_ms + ahead + _ROUNDING_MS < due:
                    simulation.wrong(
                        f"I5 attempt {start.attempt} of {task_id} started {due - start.now_ms} ms early (skew {ahead})"
                    )
        if entry is None:
            continue
        if entry.cancelled_at is not None:
            late = [start for start in starts if start.at > entry.cancelled_at]
            if late:
                simulation.wrong(
                    f"I7 {task_id} was cancelled at {entry.cancelled_at:.4f}, and started at {late[0].at:.4f} on {late[0].process}"
                )
    assert ahead <= MOST_SKEW_MS


def _dues(simulation: Simulation) -> dict[tuple[TaskId, int], int]:
    """Before when no attempt may start, by the records that waited for it; of two copies the sooner one."""
    dues: dict[tuple[TaskId, int], int] = {}
    for topic in waiting_topics(simulation.plan.settings):
        for record in simulation.broker.records(topic):
            if HEADER_TASK_ID not in record.headers:
                # The guard of a lease.
                continue
            key = TaskId(bytes=record.headers[HEADER_TASK_ID]), int(record.headers.get(HEADER_ATTEMPT, b"1"))
            due = int(record.headers[HEADER_DUE])
            dues[key] = min(due, dues.get(key, due))
    return dues


def _ms(instant: Any) -> int:
    return round(instant.timestamp() * 1000)


# ---- the dead letters ------------------------------------------------------------------------------------------------


def _letters(simulation: Simulation, folded: dict[TaskId, TaskHistory]) -> None:
    letters: Counter[TaskId] = Counter()
    for record in simulation.broker.records(simulation.topics.dlq):
        if HEADER_CAUSE in record.headers:
            simulation.wrong(f"I8 a record was refused: {record.headers[HEADER_CAUSE].decode()}")
            continue
        if simulation.codec.kind_of(record.value or b"") is DeadLetter:
            letters[simulation.codec.decode(record.value, DeadLetter).task_id] += 1
    for task_id, told in folded.items():
        if told.state.status == "dead" and not letters[task_id]:
            simulation.wrong(f"I1 {task_id} is dead and has no letter")
        if any(isinstance(placed.event, Succeeded) for placed in told.events) and not told.state.status.ended:
            simulation.wrong(f"I1 {task_id} succeeded and is {told.state.status}")


# ---- I9 ------------------------------------------------------------------------------------------------------------


def _bounded(simulation: Simulation) -> None:
    for worker in simulation.roles["worker"]:
        engine = worker.engine
        if engine is None:
            continue
        left = {
            "running": len(engine._running),
            "unsettled": engine._unsettled,
            "aside": len(engine._aside),
            "returning": len(engine._returning),
            "buffered": len(engine._lobby) + sum(feed.buffered for feed in engine._feeds.values()),
            "slots": engine._slots.used,
            "undone": sum(
                each.tracker.unfinished for feed in engine._feeds.values() for each in feed.assignments
            ),
        }
        _told_left(simulation, worker.name, left)
    for delay in simulation.roles["delay"]:
        if delay.engine is not None:
            left = {"undone": sum(lane.tracker.unfinished for lane in delay.engine.lanes)}
            _told_left(simulation, delay.name, left)


def _told_left(simulation: Simulation, name: str, left: dict[str, int]) -> None:
    found = {what: count for what, count in left.items() if count}
    if found:
        simulation.wrong(f"I9 {name} at rest still holds {found}")
