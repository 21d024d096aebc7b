"""What the behaviour suite runs on: one Taskline behind one surface, in memory or on real servers."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import behaviour_tasks
import orjson

from taskline import Settings, Submission, TaskFailure, TaskHandle
from taskline.errors import TaskNotFound, UndecodableRecord
from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE, InRecord, Position
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import DeadLetter, Priority
from taskline.schemas.ids import TaskId
from taskline.state.fold import TaskHistory
from taskline.state.status import TaskState
from taskline.testing import InMemoryTaskline

# The handlers that run at once while no task has high priority: one slot of six is kept for those.
GENERAL_SLOTS = 5
# Of both systems: few slots, so that work piles up; short intervals, so that the suite does not wait for them.
COMMON_SETTINGS: dict[str, dict[str, Any]] = {
    "topics": {"dispatch_partitions": 3, "lanes": 3, "dlq_partitions": 2, "delay_partitions": 2},
    "delay": {"tiers": ("200ms", "500ms", "1s", "2s", "5s")},
    "worker": {
        "concurrency": 6,
        "commit_interval_seconds": 0.2,
        "grace_seconds": 20,
        "max_result_bytes": 2_000,
    },
    "producer": {"max_payload_bytes": 20_000},
}
# A killed member's partitions are the others' after this: short, so that the suite is.
SESSION_TIMEOUT_MS = 6_000
# How often a condition is looked at in memory, in virtual seconds.
STEP_SECONDS = 0.02


# What is waited for, in words; a function when the words are known only at the end.
What = str | Callable[[], str]


def said(what: What) -> str:
    return what if isinstance(what, str) else what()


class System(ABC):
    """A running Taskline with one worker process, one delay process and one projector."""

    settings: Settings
    # A task of the type that a newer version of the workers runs; queued before any of them was started.
    early: TaskHandle

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        ledger.touch()
        self.codec = Codec()

    # ---- tasks -------------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, task_type: str, payload: Any, **options: Any) -> TaskHandle: ...

    @abstractmethod
    def submit_many(self, items: Iterable[Submission]) -> list[TaskHandle | TaskFailure]: ...

    @abstractmethod
    def status(self, task_id: TaskId, *, tenant: str = "default") -> TaskState: ...

    @abstractmethod
    def history(self, task_id: TaskId, *, tenant: str = "default") -> TaskHistory: ...

    def find(self, task_id: TaskId) -> TaskState | None:
        """As `status`; None: not in the view yet."""
        try:
            return self.status(task_id)
        except TaskNotFound:
            return None

    def result(self, task_id: TaskId) -> Any:
        encoded = self.status(task_id).result
        return None if encoded is None else orjson.loads(encoded)

    # ---- the log -----------------------------------------------------------------------------------------

    @abstractmethod
    def inject(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> Position:
        """Append past all producers."""

    @abstractmethod
    def records(self, topic: str) -> tuple[InRecord, ...]:
        """Everything on a topic; of one partition in order."""

    @property
    def topics(self) -> Topics:
        return Topics(namespace=self.settings.kafka.namespace)

    def dispatch_topics(self) -> list[str]:
        return [self.topics.dispatch("default", priority) for priority in Priority]

    def dead_letters(self) -> list[DeadLetter]:
        letters = []
        for record in self.records(self.topics.dlq):
            # The suite puts rubbish on the dead-letter topic too.
            with contextlib.suppress(UndecodableRecord):
                letters.append(self.codec.decode(record.value, DeadLetter))
        return letters

    def undecodable(self) -> dict[str, InRecord]:
        """Dead letters that are bytes verbatim, by where they came from."""
        return {
            record.headers[HEADER_SOURCE].decode(): record
            for record in self.records(self.topics.dlq)
            if HEADER_CAUSE in record.headers
        }

    # ---- waiting -----------------------------------------------------------------------------------------

    @abstractmethod
    def wait_until(self, condition: Callable[[], bool], what: What, *, seconds: float = 60) -> None:
        """Let time pass until the condition, which may use the system, holds."""

    @abstractmethod
    def settle(self) -> None:
        """Let time pass until all that is in the log was taken, done, projected and committed."""

    def wait_ended(self, task_ids: Iterable[TaskId]) -> dict[TaskId, TaskState]:
        waiting, ended = list(task_ids), {}

        def all_ended() -> bool:
            while waiting:
                state = self.find(waiting[-1])
                if state is None or not state.status.ended:
                    return False
                ended[waiting.pop()] = state
            return True

        self.wait_until(all_ended, f"{len(waiting)} task(s) ended")
        return ended

    # ---- roles -------------------------------------------------------------------------------------------

    @abstractmethod
    def start_worker(self) -> None: ...

    @abstractmethod
    def stop_worker(self) -> None:
        """Ask it to stop, and see it gone."""

    @abstractmethod
    def kill_worker(self) -> None: ...

    @abstractmethod
    def start_delay(self) -> None: ...

    @abstractmethod
    def kill_delay(self) -> None: ...

    @abstractmethod
    def start_projector(self) -> None: ...

    @abstractmethod
    def kill_projector(self) -> None: ...

    # ---- effects -----------------------------------------------------------------------------------------

    def effects(self, what: str) -> Counter[str]:
        """How often each task's handler has come to this point ("begin", "end")."""
        lines = (line.split() for line in self._ledger.read_text().splitlines())
        return Counter(line[1] for line in lines if line[0] == what)


class MemorySystem(System):
    """On `taskline.testing`: what users test with is itself held to the suite."""

    def __init__(self, ledger: Path) -> None:
        super().__init__(ledger)
        os.environ[behaviour_tasks.LEDGER_VARIABLE] = str(ledger)
        settings = Settings.model_validate(
            {**COMMON_SETTINGS, "kafka": {"session_timeout_ms": SESSION_TIMEOUT_MS}}
        )
        self._kit = InMemoryTaskline(behaviour_tasks.submitted, settings=settings, workers=False)

    def __enter__(self) -> MemorySystem:
        self._kit.__enter__()
        self.settings = self._kit.settings
        self.early = self.submit("behave.evolves", {"name": "Ada"})
        self.start_worker()
        return self

    def __exit__(self, *error: object) -> None:
        self._kit.__exit__(None, None, None)
        del os.environ[behaviour_tasks.LEDGER_VARIABLE]

    def submit(self, task_type: str, payload: Any, **options: Any) -> TaskHandle:
        return self._kit.submit(task_type, payload, **options)

    def submit_many(self, items: Iterable[Submission]) -> list[TaskHandle | TaskFailure]:
        return self._kit.submit_many(items)

    def status(self, task_id: TaskId, *, tenant: str = "default") -> TaskState:
        return self._kit.status(task_id, tenant=tenant)

    def history(self, task_id: TaskId, *, tenant: str = "default") -> TaskHistory:
        return self._kit.history(task_id, tenant=tenant)

    def inject(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> Position:
        return self._kit.inject(topic, value, key=key, headers=headers, partition=partition)

    def records(self, topic: str) -> tuple[InRecord, ...]:
        return self._kit.records(topic)

    def wait_until(self, condition: Callable[[], bool], what: What, *, seconds: float = 60) -> None:
        deadline = self._kit.elapsed_seconds + seconds
        while not condition():
            assert self._kit.elapsed_seconds < deadline, f"not {said(what)} after {seconds} virtual seconds"
            self._kit.advance(STEP_SECONDS)

    def settle(self) -> None:
        self._kit.run_until_idle()

    def start_worker(self) -> None:
        self._kit.start_worker(behaviour_tasks.registry)

    def stop_worker(self) -> None:
        self._kit.stop_worker()

    def kill_worker(self) -> None:
        self._kit.crash_worker()

    def start_delay(self) -> None:
        self._kit.start_delay()

    def kill_delay(self) -> None:
        self._kit.crash_delay()

    def start_projector(self) -> None:
        self._kit.start_projector()

    def kill_projector(self) -> None:
        self._kit.crash_projector()
