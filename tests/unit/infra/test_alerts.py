"""The alert rules: what they name is exported, and whoever is woken is told what to do."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_kit import Api
from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from taskline.api.problems import PROBLEMS
from taskline.settings import TopicSettings

ROOT = Path(__file__).parents[3]
RULES = ROOT / "infra" / "alerts" / "taskline.rules.yaml"
PACKAGES = ("api", "infra", "processors", "producers", "schemas", "state", "workers")
# What each type of metric is called in an exposition.
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# A metric, its matchers if it has some.
SELECTOR = re.compile(r"\b(taskline_\w+)\s*(?:\{([^}]*)\})?")


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert set(document) == {"groups"}
    for group in document["groups"]:
        assert set(group) == {"name", "rules"}
    return [rule for group in document["groups"] for rule in group["rules"]]


def modules_with_metrics() -> Iterator[str]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "from prometheus_client import" in path.read_text(encoding="utf-8"):
                yield ".".join(("taskline", *path.relative_to(ROOT).with_suffix("").parts))


@pytest.fixture(scope="module")
def exported() -> Mapping[str, frozenset[str]]:
    """The name of each series that a process may export → its labels."""
    for module in modules_with_metrics():
        importlib.import_module(module)
    # An app has a registry of its own; rate limits are counted only where there are some.
    api = Api(rate_limit_reads_per_key="1/second")
    api.close()
    found: dict[str, frozenset[str]] = {}
    for registry in (REGISTRY, api.metrics.registry):
        collectors: list[Collector] = list(registry._collector_to_names)
        for collector in collectors:
            for family in collector.collect():
                labels = frozenset(getattr(collector, "_labelnames", ()))
                for suffix in SUFFIXES.get(family.type, ()):
                    extra = {"le"} if suffix == "_bucket" else set()
                    found[family.name + suffix] = labels | extra
    return {name: labels for name, labels in found.items() if name.startswith("taskline_")}


def expressions() -> list[Any]:
    return [pytest.param(rule["expr"], id=rule["alert"]) for rule in rules()]


def test_metrics_of_every_role_are_known(exported: Mapping[str, frozenset[str]]) -> None:
    for prefix in (
        "taskline_worker_",
        "taskline_projector_",
        "taskline_delay_",
        "taskline_log_",
        "taskline_api_",
    ):
        assert any(name.startswith(prefix) for name in exported), prefix


@pytest.mark.parametrize("expr", expressions())
def test_every_metric_of_an_expression_is_exported(expr: str, exported: Mapping[str, frozenset[str]]) -> None:
    named = {name for name, _ in SELECTOR.findall(expr)}
    assert named
    assert named <= set(exported)


@pytest.mark.parametrize("expr", expressions())
def test_every_label_of_an_expression_is_one_of_its_metrics(
    expr: str, exported: Mapping[str, frozenset[str]]
) -> None:
    for name, matchers in SELECTOR.findall(expr):
        assert {match.group(1) for match in re.finditer(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers)} <= exported[
            name
        ]
        for grouped in re.findall(r"\bby \(([^)]*)\)", expr):
            assert {label.strip() for label in grouped.split(",")} <= exported[name]


@pytest.mark.parametrize("expr", expressions())
def test_counters_are_asked_for_their_growth(expr: str) -> None:
    # A counter's own value says how long the process has lived.
    counters = re.findall(r"\btaskline_\w+_total\b", expr)
    grown = re.findall(r"\b(?:rate|increase)\(taskline_\w+_total(?:\{[^}]*\})?\[\w+\]\)", expr)
    born = re.findall(
        r"\btaskline_\w+_total(?:\{[^}]*\})?\s+unless\s+taskline_\w+_total(?:\{[^}]*\})?\s+offset", expr
    )
    assert len(counters) == len(grown) + 2 * len(born)


@pytest.mark.parametrize("expr", expressions())
def test_brackets_are_balanced(expr: str) -> None:
    for opening, closing in ("()", "[]", "{}"):
        assert expr.count(opening) == expr.count(closing)


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in rules()])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Taskline[A-Z][A-Za-z]+", rule["alert"])
    assert re.fullmatch(r"[0-9]+[smhd]", rule["for"])
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert len(rule["annotations"]["summary"]) <= 120
    assert len(rule["annotations"]["description"]) >= 60


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in rules()])
def test_a_runbook_is_a_heading_of_the_docs(rule: dict[str, Any]) -> None:
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in rules()])
def test_text_uses_only_labels_that_the_result_has(rule: dict[str, Any]) -> None:
    text = " ".join(rule["annotations"].values())
    used = set(re.findall(r"\$labels\.(\w+)", text))
    kept = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for label in by.split(",")}
    assert used <= kept


def test_an_outcome_of_a_submission_is_the_name_of_a_problem() -> None:
    matchers = re.findall(r'\boutcome(?:=~|=)"([^"]*)"', " ".join(rule["expr"] for rule in rules()))
    assert matchers
    assert {slug for matcher in matchers for slug in matcher.split("|")} <= {each.slug for each in PROBLEMS}


def test_a_route_is_one_that_the_api_has() -> None:
    api = Api()
    api.close()
    paths = set(api.app.openapi()["paths"])
    matchers = re.findall(r'\broute(?:=~|!~|!=|=)"([^"]*)"', " ".join(rule["expr"] for rule in rules()))
    assert matchers
    assert {path for matcher in matchers for path in matcher.split("|")} <= paths


def test_names_are_unique() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)


def test_the_age_of_a_dead_letter_is_judged_by_the_default_retention() -> None:
    (expr,) = (rule["expr"] for rule in rules() if rule["alert"] == "TasklineDeadLetterForgottenSoon")
    assert float(expr.rpartition("> ")[2]) == 0.75 * TopicSettings().dlq_retention_days * 86_400
