"""Conversations that put tasks in, one or many. Pure but for the keys that are minted here.

A submission without an idempotency key gets one of the client's own, so that it can be repeated after a lost answer. When the API can't
keep keys just then and has accepted nothing, it goes without: submissions shall not need Cassandra because they might be repeated.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from taskline.client import calls
from taskline.client.asking import Patience, Refusal, ask, final_error, refusal_of
from taskline.client.calls import CLAIMS_UNAVAILABLE, MAX_BATCH, Submit, SubmitFields
from taskline.client.encoding import to_json
from taskline.client.errors import ServiceUnavailable, SubmissionUnknown
from taskline.client.results import SubmittedTask
from taskline.client.wire import Pause, Talk
from taskline.errors import TasklineError

# Bytes of a batch's submissions: below the largest body that the API takes by default.
_BATCH_BYTES = 1_000_000
_KEY_BYTES = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitFailure:
    """One item of `submit_many` that is not known to be in the log."""

    # Its place among the items, from 0.
    index: int
    item: Submit
    error: TasklineError


@dataclass(kw_only=True, slots=True)
class _Entry:
    """An item under way."""

    index: int
    item: Submit
    key: str | None
    minted: bool
    body: bytes = b""
    # Some try of it may have been acted on.
    doubt: bool = False
    result: SubmittedTask | SubmitFailure | None = None

    def encode(self) -> None:
        """Write the body; a payload that can't be written fails the entry."""
        options: SubmitFields = {**self.item.options, "idempotency_key": self.key}
        try:
            body = calls.submission(self.item.task_type, self.item.payload, options)
            self.body = to_json(body, self.item.task_type)
        except TasklineError as error:
            self.fail(error)

    def fail(self, error: TasklineError) -> None:
        """Give it up."""
        told = final_error(error, self.key, doubt=self.doubt)
        if isinstance(told, SubmissionUnknown) and told.idempotency_key is None:
            told = SubmissionUnknown(str(told), task_id=told.task_id, idempotency_key=self.key)
            told.__cause__ = error
        self.result = SubmitFailure(index=self.index, item=self.item, error=told)


def submit(
    task_type: str,
    payload: Any,  # noqa: ANN401 - the schema's
    options: SubmitFields,
    patience: Patience,
    *,
    safe: bool,
) -> Talk[SubmittedTask]:
    """Submit one task; with `safe`, under a key of its own if it has none."""
    if safe and options.get("idempotency_key") is None:
        keyed: SubmitFields = {**options, "idempotency_key": _new_key()}
        try:
            return (yield from ask(calls.submit(task_type, payload, keyed, minted=True), patience))
        except ServiceUnavailable as error:
            if error.type != CLAIMS_UNAVAILABLE:
                raise
    return (yield from ask(calls.submit(task_type, payload, options), patience))


def batches(items: Iterable[Submit], *, safe: bool) -> Iterator[list[_Entry]]:
    """The items as they go into requests: no more than 500, nor than the API takes at once."""
    chunk: list[_Entry] = []
    size = 0
    for index, item in enumerate(items):
        key = item.options.get("idempotency_key")
        entry = _Entry(
            index=index,
            item=item,
            key=_new_key() if safe and key is None else key,
            minted=safe and key is None,
        )
        entry.encode()
        if chunk and (len(chunk) == MAX_BATCH or size + len(entry.body) > _BATCH_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(entry)
        size += len(entry.body)
    if chunk:
        yield chunk


def submit_batch(entries: Sequence[_Entry], patience: Patience) -> Talk[list[SubmittedTask | SubmitFailure]]:
    """Submit a batch; those of its tasks that may go better later are submitted again, the others not."""
    began, pauses = patience.now(), patience.pauses()
    while waiting := [entry for entry in entries if entry.result is None]:
        call = calls.submit_batch(
            [entry.body for entry in waiting], keyed=all(entry.key is not None for entry in waiting)
        )
        try:
            outcomes = yield from ask(call, patience)
        except TasklineError as error:
            for entry in waiting:
                entry.fail(error)
            break
        after: float | None = None
        refused: list[tuple[_Entry, TasklineError]] = []
        for entry, outcome in zip(waiting, outcomes, strict=True):
            if isinstance(outcome, SubmittedTask):
                entry.result = outcome
                continue
            refusal = refusal_of(outcome, idempotency_key=entry.key)
            if _again(entry, refusal):
                refused.append((entry, refusal.error))
                after = max(after or 0.0, refusal.after or 0.0) or None
            else:
                entry.fail(refusal.error)
        pause = patience.pause(after, next(pauses))
        if refused and patience.now() - began + pause > patience.budget_seconds:
            for entry, reason in refused:
                entry.fail(reason)
        elif refused:
            yield Pause(seconds=pause)
    return [entry.result for entry in entries if entry.result is not None]


def _again(entry: _Entry, refusal: Refusal) -> bool:
    """Whether to submit a refused one again; one with a minted key may have to go without it."""
    if refusal.type == CLAIMS_UNAVAILABLE and entry.minted and not entry.doubt:
        entry.key, entry.minted = None, False
        entry.encode()
        return entry.result is None
    entry.doubt = entry.doubt or refusal.in_doubt
    return refusal.passing and (entry.key is not None or not refusal.in_doubt)


def _new_key() -> str:
    return secrets.token_urlsafe(_KEY_BYTES)
