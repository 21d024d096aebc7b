"""docs/http-api.md says what the code does."""

from __future__ import annotations

from pathlib import Path

from api_kit import Api

from taskline.api.problems import PROBLEMS

PAGE = Path(__file__).parents[3] / "docs" / "http-api.md"


def problem_table() -> str:
    rows = [
        f"| {kind.status} | `{kind.slug}` | {kind.meaning} |"
        for kind in sorted(PROBLEMS, key=lambda kind: kind.status)
    ]
    return "\n".join(["| status | type | when |", "| --- | --- | --- |", *rows])


def test_the_problem_table_is_the_code_s() -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- problems: ")
    _, _, rest = rest.partition("-->\n")
    table, found, _ = rest.partition("\n<!-- /problems -->")
    assert found
    assert table == problem_table(), f"paste this:\n{problem_table()}"


def test_every_path_is_on_the_page(api: Api) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path, operations in api.app.openapi()["paths"].items():
        for method in operations:
            assert f"`{method.upper()} {path}`" in text
