"""What the two producers share: from a task type's name to the record that is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from taskline.errors import InvalidRequest
from taskline.infra.log import OutRecord
from taskline.infra.role import Clock
from taskline.infra.topics import Topics
from taskline.infra.trace_context import current_traceparent
from taskline.producers.submission import (
    Submission,
    SubmitOptions,
    build_submission,
    dispatch_record,
)
from taskline.producers.type_source import TypeSource
from taskline.schemas.codec import Codec
from taskline.schemas.ids import TaskId
from taskline.settings import SchemaSettings, Settings

# Items of one `submit_many` that wait for their acknowledgement at once. Far more than a round trip's worth at any speed that
# was measured, and little enough memory.
MAX_WINDOW = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A task that is ready to be sent."""

    task_id: TaskId
    record: OutRecord


class Preparation:
    """Turns submissions into records; holds what all of them share."""

    def __init__(
        self, settings: Settings, types: Callable[[], TypeSource], clock: Clock, codec: Codec | None
    ) -> None:
        """Prepare under `settings`; `types` is asked when the first task is submitted."""
        self._settings = settings.producer
        self._max_record_bytes = settings.topics.max_record_bytes
        self._topics = Topics(namespace=settings.kafka.namespace)
        self._types = types
        self._clock = clock
        self._codec = codec or codec_of(settings.schemas)
        # Where the records of tasks that are not due go.
        self.scheduled_topic = self._topics.scheduled
        self.window = min(MAX_WINDOW, self._settings.max_buffered_records)

    def prepare(self, task_type: str, payload: Any, options: SubmitOptions) -> Prepared:  # noqa: ANN401 - the schema's
        """Check, encode, mint an id.

        Raises:
            InvalidRequest: unknown type, wrong payload, impossible option, too large.
        """
        if options.traceparent is None:
            traceparent = current_traceparent()
            if traceparent is not None:
                options = replace(options, traceparent=traceparent)
        submission = build_submission(
            self._types().get(task_type),
            payload,
            options,
            now_ms=self._clock.now_ms(),
            settings=self._settings,
        )
        record = dispatch_record(
            submission, self._topics, self._codec, max_record_bytes=self._max_record_bytes
        )
        return Prepared(task_id=submission.task_id, record=record)

    def prepare_item(self, item: object) -> Prepared:
        """As `prepare`, for an item of `submit_many`."""
        if not isinstance(item, Submission):
            raise InvalidRequest(f"a {type(item).__name__} where a Submission belongs")
        return self.prepare(item.task_type, item.payload, item)


def codec_of(schemas: SchemaSettings) -> Codec:
    """The codec that the settings ask for; the schema registry's client is loaded only when one is set."""
    if schemas.registry_url is None:
        return Codec()
    from taskline.schemas.confluent import codec_for  # noqa: PLC0415 - see above

    return codec_for(schemas)
