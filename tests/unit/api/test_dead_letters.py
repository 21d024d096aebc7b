"""`/dead-letters`, on a view and a log in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest
from api_kit import CODEC, NOW_MS, PLACE, Api, FakeTypes, slug
from letter_kit import dead_letter, on_dlq
from view_kit import submission

from taskline.api.letter_desk import LetterDesk
from taskline.api.letter_models import (
    LETTER_MODELS,
    LetterDetail,
    LetterList,
    LetterReplayed,
    LettersReplayed,
)
from taskline.errors import DeliveryFailed, DeliveryUnknown, Unavailable
from taskline.infra.log import InRecord, Position
from taskline.processors.projection import Layout, project
from taskline.producers.replay import replay_id
from taskline.producers.replayer import Replayer
from taskline.schemas.events import DeadLetterResolved, LetterAction, Priority, TaskSubmitted
from taskline.schemas.payloads import PayloadSchema
from taskline.settings import ProducerSettings, Settings
from taskline.state.dead_letters import DeadLetters
from taskline.testing import MemoryView

SETTINGS = Settings(producer=ProducerSettings(max_payload_bytes=2_000))


class Clock:
    def now_ms(self) -> int:
        return NOW_MS


class Records:
    """The dead-letter topic."""

    def __init__(self) -> None:
        self.records: dict[Position, InRecord] = {}
        self.failure: Exception | None = None

    async def fetch(self, places: Sequence[Position]) -> Mapping[Position, InRecord]:
        if self.failure is not None:
            raise self.failure
        return {place: self.records[place] for place in places if place in self.records}


class Types(FakeTypes):
    def writer_schema(self, fingerprint: bytes) -> PayloadSchema | None:
        return PLACE if fingerprint == PLACE.fingerprint else None


class Desk:
    """An API with dead letters."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.view, self.records = MemoryView(Clock()), Records()
        self.types = Types(list(api.types._types.values()))
        replayer = Replayer(api.log, self.records, self.view, CODEC, SETTINGS, by="api-test", clock=Clock())
        api.deps.letters.desk = LetterDesk(
            DeadLetters(self.view, SETTINGS, Clock()),
            replayer,
            self.types,
            CODEC,
            max_payload_bytes=2_000,
            timeout_seconds=5.0,
        )

    def project(self, *records: InRecord) -> None:
        for record in records:
            self.records.records[record.position] = record
        projection = project(records, codec=CODEC, layout=Layout.of(SETTINGS), now_ms=NOW_MS)
        asyncio.run(self.view.apply(projection.writes))

    def project_log(self) -> None:
        """What was appended so far comes into the view."""
        for offset, out in enumerate(self.api.log.records):
            record = on_dlq(out.value, key=out.key, headers=dict(out.headers), offset=offset, now_ms=NOW_MS)
            self.project(replace(record, position=replace(record.position, topic=out.topic)))

    def die(self, number: int = 0, **changes: Any) -> TaskSubmitted:
        task = submission(
            NOW_MS - 600_000 + number,
            **{
                "tenant": "default",
                "task_type": "geo.nearest",
                "queue": "geo",
                "payload": PLACE.encode("geo.nearest", {"iata": "LAX", "lat": 1.5}),
                "payload_fingerprint": PLACE.fingerprint,
                "priority": Priority.LOW,
            }
            | changes,
        )
        self.project(on_dlq(dead_letter(task, NOW_MS - 5_000 + number), offset=100 + number, now_ms=NOW_MS))
        return task

    def post(self, path: str, body: Any = None) -> Any:
        if body is None:
            return self.api.request("POST", path)
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return self.api.request("POST", path, content=content, headers={"content-type": "application/json"})

    def get(self, path: str, **params: Any) -> Any:
        return self.api.request("GET", path, params=params)

    def submitted(self) -> list[TaskSubmitted]:
        return [
            CODEC.decode(each.value, TaskSubmitted)
            for each in self.api.log.records
            if CODEC.kind_of(each.value or b"") is TaskSubmitted
        ]

    def resolved(self) -> list[DeadLetterResolved]:
        return [
            CODEC.decode(each.value, DeadLetterResolved)
            for each in self.api.log.records
            if each.topic == "tasks.dlq"
        ]


@pytest.fixture
def desk(api: Api) -> Desk:
    return Desk(api)


def test_letters_are_listed_newest_first_page_by_page(desk: Desk) -> None:
    tasks = [desk.die(number) for number in range(3)]
    desk.die(7, tenant="other")
    first = desk.get("/dead-letters", limit=2)
    assert first.status_code == 200
    LetterList.model_validate_json(first.content)
    shown = first.json()["dead_letters"]
    assert [row["letter_id"] for row in shown] == [str(tasks[2].task_id), str(tasks[1].task_id)]
    assert (shown[0]["reason"], shown[0]["error_class"], shown[0]["resolution"]) == (
        "exhausted",
        "builtins.ValueError",
        None,
    )
    assert not {"dlq_offset", "source", "tenant"} & set(shown[0])
    rest = desk.get("/dead-letters", limit=2, cursor=first.json()["cursor"]).json()
    assert [row["letter_id"] for row in rest["dead_letters"]] == [str(tasks[0].task_id)]
    assert rest["cursor"] is None


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({"task_type": "geo.nearest"}, 1),
        ({"task_type": "any.json"}, 0),
        ({"reason": "poison"}, 0),
        ({"error": "BOOM"}, 1),
        ({"after": "2000-01-01T00:00:00Z", "before": "2100-01-01T00:00:00+02:00"}, 1),
        ({"before": "2000-01-01T00:00:00Z"}, 0),
        ({"resolved": "true"}, 1),
    ],
)
def test_filters(desk: Desk, params: dict[str, str], count: int) -> None:
    desk.die()
    assert len(desk.get("/dead-letters", **params).json()["dead_letters"]) == count


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"limit": "0"}, "bad-request"),
        ({"limit": "201"}, "bad-request"),
        ({"limit": "x"}, "bad-request"),
        ({"resolved": "maybe"}, "bad-request"),
        ({"after": "yesterday"}, "bad-request"),
        ({"task_type": "x" * 201}, "bad-request"),
        ({"after": "2026-01-01T00:00:00"}, "invalid-fields"),
        ({"cursor": "nonsense"}, "invalid-cursor"),
    ],
)
def test_a_query_that_can_t_be_is_refused(desk: Desk, params: dict[str, str], expected: str) -> None:
    assert slug(desk.get("/dead-letters", **params)) == expected


def test_a_letter_is_shown_whole(desk: Desk) -> None:
    task = desk.die()
    answer = desk.get(f"/dead-letters/{task.task_id}")
    assert answer.status_code == 200
    LetterDetail.model_validate_json(answer.content)
    told = answer.json()
    assert told["payload"] == {"iata": "LAX", "lat": 1.5, "runways": 1}
    assert (told["payload_unread"], told["priority"], told["worker"]) == (None, "low", "w1")


def test_other_tenants_letters_and_raw_bytes_are_unknown(desk: Desk) -> None:
    other = desk.die(1, tenant="other")
    desk.project(on_dlq(b"garbage", offset=3, now_ms=NOW_MS))
    assert desk.get("/dead-letters").json() == {"dead_letters": [], "cursor": None}
    for method, path in (("GET", ""), ("POST", "/replay"), ("POST", "/discard")):
        assert (
            slug(desk.api.request(method, f"/dead-letters/{other.task_id}{path}")) == "dead-letter-not-found"
        )
    raw_id = "00000000-0000-8000-8000-000000000001"
    assert slug(desk.get(f"/dead-letters/{raw_id}")) == "invalid-task-id"
    assert desk.api.log.records == []


def test_a_replay_answers_once_everything_is_acknowledged(desk: Desk) -> None:
    task = desk.die()
    answer = desk.post(f"/dead-letters/{task.task_id}/replay")
    assert answer.status_code == 201
    told = LetterReplayed.model_validate_json(answer.content)
    assert told.task_id == replay_id(task.task_id, NOW_MS - 5_000, 1)
    assert answer.headers["location"] == f"/tasks/{told.task_id}"
    (again,) = desk.submitted()
    assert (again.task_id, again.replay_of, again.payload) == (told.task_id, task.task_id, task.payload)
    (resolution,) = desk.resolved()
    assert (resolution.action, resolution.replayed_as, resolution.by) == (
        LetterAction.REPLAYED,
        told.task_id,
        "api-test",
    )
    desk.project_log()
    refused = desk.post(f"/dead-letters/{task.task_id}/replay")
    assert (refused.status_code, slug(refused)) == (409, "dead-letter-resolved")
    assert refused.json()["replayed_as"] == str(told.task_id)
    assert slug(desk.post(f"/dead-letters/{task.task_id}/discard")) == "dead-letter-resolved"
    assert len(desk.submitted()) == 1


def test_a_replay_with_another_payload_is_checked_first(desk: Desk) -> None:
    task = desk.die()
    refused = desk.post(f"/dead-letters/{task.task_id}/replay", {"payload": {"iata": 7, "lat": 1}})
    assert (slug(refused), refused.json()["pointer"]) == ("invalid-payload", "/iata")
    assert slug(desk.post(f"/dead-letters/{task.task_id}/replay", {"payload": None})) == "invalid-payload"
    too_large = {"payload": {"iata": "x" * 3_000, "lat": 1}}
    assert slug(desk.post(f"/dead-letters/{task.task_id}/replay", too_large)) == "too-large"
    assert slug(desk.post(f"/dead-letters/{task.task_id}/replay", {"paylod": 1})) == "invalid-fields"
    assert slug(desk.post(f"/dead-letters/{task.task_id}/replay", b"[1]")) == "malformed-body"
    assert desk.api.log.records == []
    done = desk.post(f"/dead-letters/{task.task_id}/replay", {"payload": {"iata": "HHR", "lat": 2}})
    assert done.status_code == 201
    (again,) = desk.submitted()
    assert PLACE.decode(again.payload, PLACE)["iata"] == "HHR"


def test_what_can_t_be_replayed_is_said_why(desk: Desk) -> None:
    often, deleted = desk.die(1, generation=5), desk.die(2)
    answer = desk.post(f"/dead-letters/{often.task_id}/replay")
    assert (answer.status_code, slug(answer)) == (409, "generations-exhausted")
    for position in [place for place in desk.records.records if place.offset == 102]:
        del desk.records.records[position]
    for answer in (
        desk.get(f"/dead-letters/{deleted.task_id}"),
        desk.post(f"/dead-letters/{deleted.task_id}/replay"),
    ):
        assert (answer.status_code, slug(answer)) == (410, "dead-letter-gone")
        assert "tasks.dlq" not in answer.text
    desk.records.failure = Unavailable("kafka.internal:9092 is away")
    answer = desk.get(f"/dead-letters/{often.task_id}")
    assert slug(answer) == "log-unavailable"
    assert "internal" not in answer.text
    unreadable = replace(dead_letter(submission(NOW_MS, tenant="default"), NOW_MS), submission=b"x")
    desk.records.failure = None
    desk.project(on_dlq(unreadable, offset=500, now_ms=NOW_MS))
    assert slug(desk.post(f"/dead-letters/{unreadable.task_id}/replay")) == "not-replayable"


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(DeliveryUnknown("no ack"), "delivery-unknown"), (DeliveryFailed("no"), "not-accepted")],
)
def test_what_was_not_acknowledged_is_not_said_to_be_done(
    desk: Desk, failure: Exception, expected: str
) -> None:
    task = desk.die()
    desk.api.log.failure = failure
    for path in ("replay", "discard"):
        answer = desk.post(f"/dead-letters/{task.task_id}/{path}")
        assert (answer.status_code, slug(answer)) == (503, expected)


def test_an_interrupted_replay_is_resumed_as_the_same_task(desk: Desk) -> None:
    task = desk.die()
    desk.post(f"/dead-letters/{task.task_id}/replay")
    submitted = desk.api.log.records[0]
    # The resolution was lost.
    del desk.api.log.records[1:]
    desk.project_log()
    told = desk.post(f"/dead-letters/{task.task_id}/replay").json()
    assert told["outcome"] == "resumed"
    assert desk.api.log.records[0] is submitted
    assert len(desk.submitted()) == 1
    assert len(desk.resolved()) == 1


def test_a_discard_keeps_its_reason(desk: Desk) -> None:
    task = desk.die()
    answer = desk.post(f"/dead-letters/{task.task_id}/discard", {"note": "closed"})
    assert (answer.status_code, answer.json()["outcome"]) == (200, "discarded")
    (resolution,) = desk.resolved()
    assert (resolution.action, resolution.note) == (LetterAction.DISCARDED, "closed")
    desk.project_log()
    assert desk.get("/dead-letters").json()["dead_letters"] == []
    (row,) = desk.get("/dead-letters", resolved="true").json()["dead_letters"]
    assert (row["resolution"]["action"], row["resolution"]["note"]) == ("discarded", "closed")


def test_many_are_replayed_by_filter_oldest_first(desk: Desk) -> None:
    tasks = [desk.die(number) for number in range(4)]
    exhausted = desk.die(4, generation=5)
    selection = {"filter": {"task_type": "geo.nearest"}, "limit": 2}
    dry = desk.post("/dead-letters/replay", selection | {"dry_run": True})
    LettersReplayed.model_validate_json(dry.content)
    assert [each["outcome"] for each in dry.json()["results"]] == ["matched"] * 2
    assert desk.api.log.records == []
    first = desk.post("/dead-letters/replay", selection).json()
    assert [each["letter_id"] for each in first["results"]] == [str(each.task_id) for each in tasks[:2]]
    rest = desk.post("/dead-letters/replay", {"filter": {}, "cursor": first["cursor"]}).json()
    assert [each["outcome"] for each in rest["results"]] == ["replayed", "replayed", "refused"]
    assert rest["results"][2]["letter_id"] == str(exhausted.task_id)
    assert rest["results"][2]["problem"] == "urn:taskline:problem:generations-exhausted"
    assert rest["cursor"] is None
    assert [each.replay_of for each in desk.submitted()] == [each.task_id for each in tasks]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"filter": {}, "limit": 101},
        {"filter": {"tasktype": "x"}},
        {"filter": {"after": "x"}},
        {"filter": {}, "dry_run": "yes"},
        {"filter": {"after": "2026-01-01T00:00:00"}},
    ],
)
def test_a_selection_that_can_t_be_replays_nothing(desk: Desk, body: dict[str, Any]) -> None:
    desk.die()
    answer = desk.post("/dead-letters/replay", body)
    assert (answer.status_code, slug(answer)) == (422, "invalid-fields")
    assert desk.api.log.records == []


def test_before_the_view_is_there_it_says_so(api: Api) -> None:
    assert slug(api.request("GET", "/dead-letters")) == "view-unavailable"


@pytest.mark.parametrize("model", LETTER_MODELS)
def test_the_examples_are_valid(model: Any) -> None:
    examples = model.model_config["json_schema_extra"]["examples"]
    assert examples
    for example in examples:
        # As from a body: instants are texts.
        model.model_validate_json(orjson.dumps(example))
