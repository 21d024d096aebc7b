"""The error tree: one root, shallow, with the facts of each error as attributes.

Callers catch `TasklineError` for "anything Taskline says", or a leaf for a decision. Errors of other libraries
are chained (`raise … from error`), never hidden.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from datetime import timedelta


class TasklineError(Exception):
    """The root of every error that Taskline raises on purpose."""


# ---- what a caller got wrong -------------------------------------------------------------------------------


class InvalidRequest(TasklineError):
    """The caller's input can't be accepted; nothing was produced."""


class UnknownTaskType(InvalidRequest):
    """A submission names a task type that is not registered."""

    def __init__(self, task_type: str, known: Iterable[str] = ()) -> None:
        """Name the type and the nearest of the `known` ones."""
        self.task_type = task_type
        self.nearest = nearest(task_type, known)
        super().__init__(f"unknown task type {task_type!r}{did_you_mean(self.nearest)}")


class InvalidPayload(InvalidRequest):
    """A payload is off its task type's schema."""

    def __init__(self, task_type: str, pointer: str, reason: str) -> None:
        """Name the field by its JSON pointer (RFC 6901; "" is the whole payload) and say what is wrong."""
        self.task_type = task_type
        self.pointer = pointer
        self.reason = reason
        super().__init__(f"payload of {task_type!r} at {pointer or '/'!r}: {reason}")


class InvalidOption(InvalidRequest):
    """An option of a submission has an impossible value."""

    def __init__(self, option: str, reason: str) -> None:
        """Name the option and say what is wrong with its value."""
        self.option = option
        self.reason = reason
        super().__init__(f"{option}: {reason}")


class PayloadTooLarge(InvalidRequest):
    """An encoded payload is over the limit; refused before anything was produced."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        """Give both sizes in bytes."""
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"the payload has {size_bytes} bytes encoded; the limit is {limit_bytes}")


class InvalidTaskId(InvalidRequest):
    """A task id is not a UUIDv7 that Taskline can have minted."""


class InvalidCursor(InvalidRequest):
    """A cursor that no listing gave, or that belongs to a listing with other filters."""


class TaskNotFound(TasklineError):
    """No task of that id is visible to that tenant: unknown, another tenant's, forgotten, or not in the view yet."""

    def __init__(self, task_id: object) -> None:
        """Name the task."""
        self.task_id = task_id
        super().__init__(f"no task {task_id}")


class InvalidTaskType(InvalidRequest):
    """A task-type definition is unusable: bad name, no schema can be derived, bad defaults."""


class IncompatibleSchema(InvalidRequest):
    """A task type's new payload schema can't read what was queued under an earlier one."""

    def __init__(self, task_type: str, problems: Iterable[str]) -> None:
        """List each incompatibility in words."""
        self.task_type = task_type
        self.problems = tuple(problems)
        super().__init__(
            f"the new schema of {task_type!r} can't read tasks queued under an earlier one: {'; '.join(self.problems)}"
        )


class InvalidRegistry(InvalidRequest):
    """A `module:attribute` reference does not lead to a task registry that can serve."""


class InvalidResult(TasklineError):
    """What a handler returned can't be recorded: it is not JSON, or larger than the limit."""


class SoftTimeout(TasklineError):
    """Raised inside a handler when its soft time limit has passed: finish now, the hard limit is near."""


class Retry(TasklineError):
    """Raised by a handler: try again later. It counts as a retry; without one left the task is a dead letter."""

    def __init__(self, after: float | timedelta | None = None, reason: str = "") -> None:
        """Ask for another attempt.

        Args:
            after: exactly how long from now, in seconds or as a timedelta; None: as the retry policy says.
            reason: for whoever reads the task's last error.

        Raises:
            ValueError: `after` is negative or no number.
        """
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"Retry(after={after!r}): not a time from 0 s")
        self.after_seconds = None if seconds is None else float(seconds)
        self.reason = reason
        super().__init__(reason or "the handler asked for another attempt")

    def __reduce__(self) -> tuple[type[Retry], tuple[float | None, str]]:
        """Pickled by its fields, since `args` is the text."""
        return (type(self), (self.after_seconds, self.reason))


class HandBack(TasklineError):
    """Raised by a handler that was asked to stop: begin again elsewhere. While its worker leaves, that spends no attempt.

    At any other time (nobody asked, or a time limit is near) it is a transient error like others, which spends one: else a handler that always
    raises it would run for ever. Of a task that is being aborted it is the end.
    """


class Permanent(TasklineError):
    """Raised by a handler: no attempt can help; the task is a dead letter at once."""

    def __init__(self, reason: str = "") -> None:
        """Say why, for whoever reads the dead letter."""
        self.reason = reason
        super().__init__(reason)


class InvalidSettings(TasklineError):
    """A setting is unknown or has an impossible value; the message names it and the nearest right name."""


# ---- records -----------------------------------------------------------------------------------------------


class UndecodableRecord(TasklineError):
    """Bytes on a topic are not a Taskline record; they go to the dead-letter topic verbatim."""


class UnknownSchema(UndecodableRecord):
    """The bytes are well-framed, but their writer's schema is not known here: most likely a newer Taskline wrote them."""

    def __init__(self, fingerprint: str) -> None:
        """Name the writer's schema by its fingerprint (hex) or registry id."""
        self.fingerprint = fingerprint
        super().__init__(
            f"written under schema {fingerprint}, which this version does not know; deploy readers before writers"
        )


class UndecodablePayload(TasklineError):
    """A task's payload can't be read under its type's schema; no attempt can help, so the task goes to the dead letters."""


# ---- Kafka -------------------------------------------------------------------------------------------------


class DeliveryError(TasklineError):
    """A record was not acknowledged."""

    # The task that the record would have submitted, where it was one: look there before you submit again.
    task_id: str | None = None


class DeliveryFailed(DeliveryError):
    """The broker or the client refused the record: it is certainly not in the log."""


class DeliveryUnknown(DeliveryError):
    """No acknowledgement came in time: the record may or may not be in the log."""


class QueueFull(DeliveryError):
    """The local send buffer stayed full for longer than the caller was willing to wait; nothing was produced."""


class ProducerClosed(DeliveryError):
    """The producer was closed before the call; nothing was produced."""


class Undelivered(DeliveryError):
    """`close()` ran out of time with records still unacknowledged."""

    def __init__(self, task_ids: Iterable[str]) -> None:
        """List the tasks whose delivery is unknown."""
        self.task_ids = tuple(task_ids)
        super().__init__(f"{len(self.task_ids)} task(s) were not acknowledged before the producer closed")


class Unavailable(TasklineError):
    """A server that the operation needs (Kafka, Cassandra, a schema registry) does not answer."""


class WrongTopology(TasklineError):
    """Topics or tables are not as this version declares them; the message names the command that mends it."""

    def __init__(self, problems: Iterable[str], command: str) -> None:
        """List what is wrong and the command that mends it."""
        self.problems = tuple(problems)
        self.command = command
        super().__init__(f"{'; '.join(self.problems)} — run `{command}`")


class OffsetLost(TasklineError):
    """A group's committed offset is not in its partition's log any more, so records were lost or the topic was made anew."""

    def __init__(self, group: str, topic: str, partition: int | None, reason: str) -> None:
        """Name the group and the place."""
        self.group = group
        self.topic = topic
        self.partition = partition
        place = topic if partition is None else f"{topic}/{partition}"
        super().__init__(
            f"the offset that group {group} committed on {place} is not in the log ({reason}): records were deleted before they "
            "were run, or the topic was deleted and made again. Decide where to go on, and set the group's offsets "
            "(kafka-consumer-groups --reset-offsets)"
        )


class RecordGone(TasklineError):
    """The record is not in the log any more: retention has deleted it, or the topic was made anew."""

    def __init__(self, position: object) -> None:
        """Say where it stood."""
        self.position = position
        super().__init__(f"there is no record at {position} any more")


# ---- dead letters ------------------------------------------------------------------------------------------


class DeadLetterError(TasklineError):
    """A dead letter can't be read, or nothing can be done about it any more."""

    def __init__(self, letter_id: object, message: str) -> None:
        """Name the letter."""
        self.letter_id = letter_id
        super().__init__(message)


class LetterNotFound(DeadLetterError):
    """No dead letter of that id is visible to that tenant: there is none, its retention is over, or it is not in the view yet."""

    def __init__(self, letter_id: object) -> None:
        """Name the letter."""
        super().__init__(letter_id, f"no dead letter {letter_id}")


class LetterResolved(DeadLetterError):
    """The dead letter was replayed or discarded before."""

    def __init__(self, letter_id: object, action: str, replayed_as: object | None = None) -> None:
        """Say what was done, and as which task it was replayed."""
        self.action = action
        self.replayed_as = replayed_as
        what = action if replayed_as is None else f"{action} as {replayed_as}"
        super().__init__(letter_id, f"dead letter {letter_id} was {what} before")


class LetterGone(DeadLetterError):
    """The dead letter is still listed, but the log has deleted it: its retention is over."""

    def __init__(self, letter_id: object, position: object) -> None:
        """Name the letter and where it stood."""
        self.position = position
        super().__init__(
            letter_id,
            f"dead letter {letter_id} is not in the log any more (it stood at {position}; topics.dlq_retention_days)",
        )


class GenerationsExhausted(DeadLetterError):
    """The task has been replayed as often as is allowed, and has died each time."""

    def __init__(self, letter_id: object, generation: int, limit: int) -> None:
        """Give the generation that a replay would have, and the limit."""
        self.generation = generation
        self.limit = limit
        super().__init__(
            letter_id,
            f"dead letter {letter_id} can't be replayed: it would be generation {generation}, and dlq.max_generations is {limit}",
        )


class NotReplayable(DeadLetterError):
    """The dead letter holds nothing that could be run again."""


# ---- leases --------------------------------------------------------------------------------------------------


class StaleLease(TasklineError):
    """A worker reports about a lease that is over, or that nobody gave it; nothing was changed."""

    def __init__(self, task_id: object, reason: str) -> None:
        """Name the task, and say why the lease does not hold."""
        self.task_id = task_id
        self.reason = reason
        super().__init__(f"the lease of task {task_id} does not hold: {reason}")


class OutcomeUnknown(TasklineError):
    """Whether a worker's report counts was not known in time; the same report may be made again."""

    def __init__(self, task_id: object, reason: str) -> None:
        """Name the task, and say what was waited for."""
        self.task_id = task_id
        super().__init__(f"what became of the report about task {task_id} is not known yet: {reason}")


# ---- the local machine -------------------------------------------------------------------------------------


class MissingExtra(TasklineError):
    """A command needs an optional dependency group that is not installed."""

    def __init__(self, extra: str, module: str) -> None:
        """Name the extra to install and the module that was missing."""
        self.extra = extra
        super().__init__(
            f"this needs the {extra!r} extra (missing module {module!r}): pip install 'taskline[{extra}]'"
        )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The closest of `known` to `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(candidate: str | None) -> str:
    """The clause that a message appends for a near miss ("" when there is none)."""
    return f"; did you mean {candidate!r}?" if candidate else ""
