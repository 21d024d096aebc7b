"""GET /tasks/{id}?wait=: the wait at the API's edge; the waiting itself is in tests/unit/state/test_waiting.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from api_kit import NOW_MS, Api, slug
from read_kit import event, started, submitted

from taskline.api.middleware import CLIENT_LEFT
from taskline.errors import Unavailable
from taskline.schemas.events import Succeeded, TaskSubmitted
from taskline.schemas.ids import new_task_id


def running(api: Api) -> tuple[TaskSubmitted, Callable[[], None]]:
    """A task that runs, and how it is ended."""
    task, execution = submitted(), new_task_id(NOW_MS)
    begun = started(task, execution)
    api.store.put(task, begun)

    def end() -> None:
        api.store.put(task, begun, event(Succeeded, task, execution=execution, result=b"1"))

    return task, end


def waiting(api: Api, count: int) -> Callable[[], bool]:
    return lambda: api.deps.metrics.waiting.collect()[0].samples[0].value == count


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is nothing to be told by
            await asyncio.sleep(0.005)


def test_an_ended_task_is_answered_at_once(api: Api) -> None:
    task, end = running(api)
    end()
    assert api.request("GET", f"/tasks/{task.task_id}?wait=60").json()["status"] == "completed"
    assert api.store.reads == 1


def test_an_end_is_told_to_all_who_wait_when_it_comes(api: Api) -> None:
    task, end = running(api)

    async def scenario() -> list[httpx.Response]:
        asked = [asyncio.create_task(api.send("GET", f"/tasks/{task.task_id}?wait=60")) for _ in range(5)]
        await until(waiting(api, 5))
        # They hold none of the places that other requests need.
        assert api.deps.metrics.in_flight.collect()[0].samples[0].value == 0
        end()
        return await asyncio.gather(*asked)

    assert {answer.json()["status"] for answer in api.run(scenario())} == {"completed"}
    assert waiting(api, 0)()


def test_when_the_time_is_over_the_present_state_is_told(api: Api) -> None:
    task, _ = running(api)
    answer = api.request("GET", f"/tasks/{task.task_id}?wait=0.05")
    assert (answer.status_code, answer.json()["status"]) == (200, "running")
    tag = {"if-none-match": answer.headers["etag"]}
    assert api.request("GET", f"/tasks/{task.task_id}?wait=0.05", headers=tag).status_code == 304


@pytest.mark.parametrize("wait", ["", "-1", "60.1", "1e9", "nan", "inf", "x", "+1", " 1", "1_0", "0" * 40])
def test_an_impossible_wait_is_a_bad_request(api: Api, wait: str) -> None:
    task, _ = running(api)
    answer = api.request("GET", f"/tasks/{task.task_id}", params={"wait": wait})
    assert (answer.status_code, slug(answer)) == (400, "bad-request")


def test_who_waits_for_an_unknown_task_is_told_so(api: Api) -> None:
    foreign = submitted(tenant="other")
    api.store.put(foreign)
    for task_id in (new_task_id(NOW_MS - 60_000), foreign.task_id):
        assert api.request("GET", f"/tasks/{task_id}?wait=60").status_code == 404


def test_beyond_the_bound_a_wait_is_refused_and_a_read_is_not(make_api: Callable[..., Api]) -> None:
    api = make_api(max_waiting=1)
    task, end = running(api)

    async def scenario() -> None:
        first = asyncio.create_task(api.send("GET", f"/tasks/{task.task_id}?wait=60"))
        await until(waiting(api, 1))
        refused = await api.send("GET", f"/tasks/{task.task_id}?wait=60")
        assert (refused.status_code, slug(refused)) == (503, "overloaded")
        assert (await api.send("GET", f"/tasks/{task.task_id}")).status_code == 200
        end()
        assert (await first).json()["status"] == "completed"

    api.run(scenario())


def test_those_who_wait_do_not_fill_the_process(make_api: Callable[..., Api]) -> None:
    api = make_api(max_requests_in_flight=1)
    task, end = running(api)

    async def scenario() -> None:
        asked = []
        for number in range(1, 4):
            asked.append(asyncio.create_task(api.send("GET", f"/tasks/{task.task_id}?wait=60")))
            await until(waiting(api, number))
        end()
        await asyncio.gather(*asked)

    api.run(scenario())


def test_a_stop_answers_all_who_wait(api: Api) -> None:
    task, _ = running(api)

    async def scenario() -> httpx.Response:
        asked = asyncio.create_task(api.send("GET", f"/tasks/{task.task_id}?wait=60"))
        await until(waiting(api, 1))
        api.health.stop()
        async with asyncio.timeout(10):
            assert (await api.send("GET", f"/tasks/{task.task_id}?wait=60")).json()["status"] == "running"
            return await asked

    assert api.run(scenario()).json()["status"] == "running"


def test_a_client_that_leaves_stops_its_wait(api: Api) -> None:
    task, _ = running(api)

    async def scenario() -> None:
        left = asyncio.Event()
        sent: list[Any] = []
        messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Any:
            for message in messages:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "GET",
            "path": f"/tasks/{task.task_id}",
            "query_string": b"wait=60",
            "headers": [],
        }
        serving = asyncio.ensure_future(api.app(scope, receive, send))
        await until(waiting(api, 1))
        left.set()
        await serving
        assert sent[0]["status"] == CLIENT_LEFT
        reads = api.store.reads
        await asyncio.sleep(0.2)
        assert api.store.reads == reads

    api.run(scenario())
    assert waiting(api, 0)()


def test_a_view_that_is_away_when_the_time_is_over_is_a_503(api: Api) -> None:
    task, _ = running(api)

    async def scenario() -> httpx.Response:
        asked = asyncio.create_task(api.send("GET", f"/tasks/{task.task_id}?wait=0.3"))
        await until(waiting(api, 1))
        api.store.failure = Unavailable("away")
        return await asked

    answer = api.run(scenario())
    assert (answer.status_code, slug(answer)) == (503, "view-unavailable")
