"""POST /tasks: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import orjson
import pytest
from api_kit import MAX_BODY_BYTES, MAX_PAYLOAD_BYTES, NOW_MS, Api, slug

from taskline.errors import DeliveryFailed, DeliveryUnknown, ProducerClosed, QueueFull
from taskline.infra.log import HEADER_DUE, HEADER_TARGET, HEADER_TASK_ID
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId, created_at_ms

GOOD = {"task_type": "geo.nearest", "payload": {"iata": "LAX", "lat": 33.9}}


def test_an_accepted_task_is_in_the_log_and_its_answer_says_where_to_look(api: Api) -> None:
    response = api.submit(GOOD)
    assert response.status_code == 201
    answer = response.json()
    assert answer == {
        "task_id": answer["task_id"],
        "status": "pending",
        "created_at": "2026-11-29T15:04:05.120Z",
        "scheduled_at": None,
        "task_type": "geo.nearest",
        "priority": "low",
        "queue": "geo",
    }
    assert response.headers["location"] == f"/tasks/{answer['task_id']}"
    (record,) = api.log.records
    (submission,) = api.log.submissions()
    assert record.topic == "tasks.geo.low"
    assert record.key == record.headers[HEADER_TASK_ID] == submission.task_id.bytes
    assert str(submission.task_id) == answer["task_id"]
    assert created_at_ms(submission.task_id) == NOW_MS
    # The task type's, when it runs.
    assert submission.timeout_ms is None
    assert submission.tenant == "default"


def test_options_override_the_defaults_of_the_task_type(api: Api) -> None:
    options = {"priority": "high", "timeout_seconds": 2, "max_retries": 0, "affinity_key": "k"}
    response = api.submit(GOOD | options)
    assert response.json()["priority"] == "high"
    (record,), (submission,) = api.log.records, api.log.submissions()
    assert record.topic == "tasks.geo.high"
    assert record.key == b"k"
    assert submission.priority is Priority.HIGH
    assert (submission.timeout_ms, submission.max_retries) == (2_000, 0)


@pytest.mark.parametrize(
    "asked",
    [{"delay_seconds": 90}, {"scheduled_at": "2026-11-29T16:05:35.12+01:00"}],
    ids=["delay", "instant"],
)
def test_a_task_for_later_waits_among_the_scheduled_ones(api: Api, asked: dict[str, object]) -> None:
    answer = api.submit(GOOD | asked | {"start_by": "2026-11-29T15:10:00Z"}).json()
    assert (answer["status"], answer["scheduled_at"]) == ("scheduled", "2026-11-29T15:05:35.120Z")
    (record,), (submission,) = api.log.records, api.log.submissions()
    assert (submission.not_before, submission.start_by) == (NOW_MS + 90_000, NOW_MS + 354_880)
    assert record.topic == "tasks.scheduled"
    assert record.headers[HEADER_TARGET] == b"tasks.geo.low"
    assert record.headers[HEADER_DUE] == b"%d" % (NOW_MS + 90_000)


@pytest.mark.parametrize("asked", [{"delay_seconds": 0}, {"scheduled_at": "2020-01-01T00:00:00Z"}])
def test_what_is_due_already_is_pending(api: Api, asked: dict[str, object]) -> None:
    assert api.submit(GOOD | asked).json()["status"] == "pending"
    assert api.log.records[0].topic == "tasks.geo.low"


def test_null_counts_as_absent(api: Api) -> None:
    nulls = dict.fromkeys(
        (
            "priority",
            "timeout_seconds",
            "max_retries",
            "affinity_key",
            "delay_seconds",
            "scheduled_at",
            "start_by",
        )
    )
    assert api.submit(GOOD | nulls).json()["priority"] == "low"


def test_the_trace_context_goes_with_the_task(api: Api) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    api.submit(GOOD, headers={"traceparent": parent})
    api.submit(GOOD, headers={"traceparent": "nonsense"})
    assert [each.traceparent for each in api.log.submissions()] == [parent, None]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.acme+json"])
def test_any_json_content_type_will_do(api: Api, content_type: str) -> None:
    assert api.submit(GOOD, headers={"content-type": content_type}).status_code == 201


def test_an_unknown_type_is_answered_with_the_nearest(api: Api) -> None:
    response = api.submit(GOOD | {"task_type": "geo.nearst"})
    assert (response.status_code, slug(response)) == (400, "unknown-task-type")
    assert response.json()["nearest"] == "geo.nearest"
    assert response.json()["task_type"] == "geo.nearst"
    assert "nearest" not in api.submit(GOOD | {"task_type": "???"}).json()
    assert not api.log.records


@pytest.mark.parametrize(
    ("payload", "pointer"),
    [
        ({"iata": 7, "lat": 1.0}, "/iata"),
        ({"iata": "LAX"}, "/lat"),
        ({"iata": "LAX", "lat": 1.0, "runways": 2**40}, "/runways"),
        ([], ""),
        (None, ""),
    ],
)
def test_a_payload_off_its_schema_is_answered_with_the_field(api: Api, payload: object, pointer: str) -> None:
    response = api.submit(GOOD | {"payload": payload})
    assert (response.status_code, slug(response)) == (400, "invalid-payload")
    assert response.json()["pointer"] == pointer
    assert response.json()["task_type"] == "geo.nearest"
    assert not api.log.records


def test_integers_beyond_64_bits_are_refused_rather_than_rounded(api: Api) -> None:
    for number in (2**64, -(2**63) - 1, 10**300):
        response = api.submit(b'{"task_type": "any.json", "payload": {"n": [%d]}}' % number)
        assert (response.status_code, slug(response)) == (400, "invalid-payload")
        assert response.json()["pointer"] == "/n/0"


def test_64_bit_integers_keep_every_digit(api: Api) -> None:
    for number in (2**64 - 1, -(2**63), 2**53 + 1):
        assert api.submit({"task_type": "any.json", "payload": number}).status_code == 201
        assert orjson.loads(api.log.submissions()[-1].payload) == number


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"task_type": "any.json", "payload": NaN}',
        b'{"task_type": "any.json", "payload": Infinity}',
        b'{"task_type": "any.json", "payload": 1e999}',
        b'{"task_type": "any.json", "payload": "\\ud800"}',
        b'{"task_type": "any.json", "payload": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"task_type": "any.json", "payload": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
        b"[" * 4_000,
    ],
)
def test_a_body_that_is_not_one_json_object_is_malformed(api: Api, body: bytes) -> None:
    response = api.submit(body)
    assert (response.status_code, slug(response)) == (422, "malformed-body")
    assert not api.log.records


def test_nesting_is_taken_to_its_limit(api: Api) -> None:
    # The body itself is one level.
    body = b'{"task_type": "any.json", "payload": ' + b"[" * 127 + b"]" * 127 + b"}"
    assert api.submit(body).status_code == 201
    wide = {"task_type": "any.json", "payload": [[]] * 500}
    assert api.submit(wide).status_code == 201


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"priorty": "high"}, "/priorty", "did you mean 'priority'?"),
        ({"Payload": 1}, "/Payload", "did you mean 'payload'?"),
        ({"queue": "geo"}, "/queue", "the queue is the task type's"),
        ({"tenant": "me"}, "/tenant", "the tenant is the caller's"),
        ({"a/b~c": 1}, "/a~1b~0c", "unknown field"),
        ({"priority": "urgent"}, "/priority", "'high', 'normal' or 'low'"),
        ({"priority": 1}, "/priority", "'high', 'normal' or 'low'"),
        ({"timeout_seconds": 0}, "/timeout_seconds", "greater than 0"),
        ({"timeout_seconds": "5"}, "/timeout_seconds", "valid number"),
        ({"timeout_seconds": 1e15}, "/timeout_seconds", "less than or equal"),
        ({"max_retries": -1}, "/max_retries", "greater than or equal to 0"),
        ({"max_retries": 10**25}, "/max_retries", "less than or equal"),
        ({"max_retries": 1.5}, "/max_retries", "valid integer"),
        ({"max_retries": True}, "/max_retries", "valid integer"),
        ({"affinity_key": ""}, "/affinity_key", "at least 1"),
        ({"affinity_key": "k" * 201}, "/affinity_key", "at most 200"),
        ({"task_type": ""}, "/task_type", "at least 1"),
        ({"task_type": 5}, "/task_type", "valid string"),
        ({"delay_seconds": 0.05}, "/delay_seconds", "0.1 s to 365 days"),
        ({"delay_seconds": "5"}, "/delay_seconds", "number"),
        ({"delay_seconds": 365 * 86_400 + 1}, "/delay_seconds", "31536000"),
        ({"delay_seconds": 1, "scheduled_at": "2030-01-01T00:00:00Z"}, "/delay_seconds", "second time"),
        ({"scheduled_at": "2030-01-01T00:00:00Z"}, "/scheduled_at", "365 days"),
        ({"scheduled_at": "2026-12-01T00:00:00"}, "/scheduled_at", "offset"),
        ({"scheduled_at": "soon"}, "/scheduled_at", "RFC 3339"),
        ({"scheduled_at": 1_800_000_000}, "/scheduled_at", "string"),
        ({"start_by": "2026-11-29T15:00:00Z"}, "/start_by", "passed"),
        ({"start_by": "2026-11-29T15:04:06Z", "delay_seconds": 2}, "/start_by", "before the instant"),
    ],
)
def test_each_wrong_field_is_named(api: Api, change: dict[str, object], pointer: str, words: str) -> None:
    response = api.submit(json.dumps(GOOD | change).encode())
    assert (response.status_code, slug(response)) == (422, "invalid-fields")
    (entry,) = response.json()["errors"]
    assert entry["pointer"] == pointer
    assert words in entry["detail"]
    assert words in response.json()["detail"]
    assert not api.log.records


def test_missing_and_unknown_fields_are_listed_together(api: Api) -> None:
    response = api.submit({"task_typ": "geo.nearest", "payloads": {}})
    pointers = {entry["pointer"] for entry in response.json()["errors"]}
    assert pointers == {"/task_type", "/payload", "/task_typ", "/payloads"}


def test_a_flood_of_fields_is_not_answered_one_by_one(api: Api) -> None:
    response = api.submit({f"f{n}": n for n in range(200)})
    assert (response.status_code, slug(response)) == (422, "invalid-fields")
    assert "200 fields" in response.json()["detail"]
    few = api.submit({f"f{n}": n for n in range(20)})
    assert len(few.json()["errors"]) == 10


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application"]
)
def test_other_content_types_are_refused(api: Api, content_type: str) -> None:
    response = api.submit(GOOD, headers={"content-type": content_type})
    assert (response.status_code, slug(response)) == (415, "unsupported-media-type")


def test_a_compressed_body_is_refused(api: Api) -> None:
    response = api.submit(GOOD, headers={"content-encoding": "gzip"})
    assert (response.status_code, slug(response)) == (415, "unsupported-media-type")


def test_a_payload_over_the_limit_is_too_large(api: Api) -> None:
    response = api.submit({"task_type": "any.json", "payload": "x" * MAX_PAYLOAD_BYTES})
    assert (response.status_code, slug(response)) == (413, "too-large")
    assert response.json()["limit_bytes"] == MAX_PAYLOAD_BYTES
    assert response.json()["size_bytes"] == MAX_PAYLOAD_BYTES + 2
    assert not api.log.records


def test_a_body_over_the_limit_is_refused_unread(api: Api) -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    headers = {"content-type": "application/json", "content-length": "1" + "0" * 30}
    response = api.request("POST", "/tasks", content=never(), headers=headers)
    assert (response.status_code, slug(response)) == (413, "too-large")
    assert response.json()["limit_bytes"] == MAX_BODY_BYTES


def test_a_body_of_undeclared_length_is_cut_off_at_the_limit(api: Api) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1_000
            yield b"x" * 1_000

    response = api.request("POST", "/tasks", content=endless(), headers={"content-type": "application/json"})
    assert (response.status_code, slug(response)) == (413, "too-large")
    assert sent <= 2 * MAX_BODY_BYTES


def test_a_slow_body_runs_into_the_timeout(make_api: Callable[..., Api]) -> None:
    api = make_api(request_timeout_seconds=0.05)

    async def stalling() -> AsyncIterator[bytes]:
        yield b'{"task_type":'
        await asyncio.Event().wait()

    response = api.request("POST", "/tasks", content=stalling(), headers={"content-type": "application/json"})
    assert (response.status_code, slug(response)) == (408, "body-timeout")
    assert response.headers["connection"] == "close"


def test_without_acknowledgement_the_truth_is_unknown_and_the_id_is_told(
    make_api: Callable[..., Api],
) -> None:
    api = make_api(request_timeout_seconds=0.05)
    for failure, silent in ((DeliveryUnknown("timed out"), False), (None, True)):
        api.log.failure, api.log.silent = failure, silent
        response = api.submit(GOOD)
        assert (response.status_code, slug(response)) == (503, "delivery-unknown")
        assert TaskId(response.json()["task_id"]) == api.log.submissions()[-1].task_id


@pytest.mark.parametrize("failure", [QueueFull("x"), DeliveryFailed("t-secret: no"), ProducerClosed("x")])
def test_what_is_certainly_not_in_the_log_is_said_to_be(api: Api, failure: Exception) -> None:
    api.log.failure = failure
    response = api.submit(GOOD)
    assert (response.status_code, slug(response)) == (503, "not-accepted")
    assert "task_id" not in response.json()
    assert "secret" not in response.text


def test_numbers_that_json_has_not_do_not_slip_in_through_python(api: Api) -> None:
    body = b'{"task_type": "any.json", "payload": [' + b"1" * 25 + b", NaN]}"
    assert slug(api.submit(body)) == "malformed-body"
