"""The examples of the how-to pages on handlers run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from taskline import Registry
from taskline.testing import InMemoryTaskline

PAGES = Path(__file__).parents[3] / "docs" / "how-to"


def run_page(name: str) -> dict[str, Any]:
    """The names that the page's Python blocks define, run one after another."""
    text = (PAGES / name).read_text(encoding="utf-8")
    blocks = re.findall(r"(?<!-->\n)^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("page", "task_type", "payload", "result"),
    [
        ("progress.md", "photos.import", {"names": ["a", "b"]}, 2),
        ("progress.md", "index.rebuild", {"chunks": 2}, None),
    ],
)
def test_the_handlers_of_the_page_run(page: str, task_type: str, payload: Any, result: Any) -> None:
    registry: Registry = run_page(page)["registry"]
    with InMemoryTaskline(registry) as tl:
        task = tl.submit(task_type, payload)
        tl.run_until_idle()
        assert (tl.status(task.task_id).status, tl.result(task.task_id)) == ("completed", result)


def test_the_middleware_of_the_page_runs() -> None:
    names = run_page("middleware.md")
    registry: Registry = names["registry"]

    @registry.task("fails", max_retries=0)
    def fails(payload: Any) -> None:
        raise ValueError

    @registry.task("coroutine")
    async def coroutine(payload: Any) -> int:
        return 1

    with InMemoryTaskline(registry) as tl:
        tl.submit("fails", None)
        good = tl.submit("coroutine", None)
        tl.run_until_idle()
        assert tl.result(good.task_id) == 1
    assert registry.middleware[1].by_type == {"fails": 1}  # type: ignore[attr-defined]
