"""Every subpackage says what is public, in order, and keeps heavy imports out."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = (
    "taskline",
    "taskline.client",
    "taskline.producers",
    "taskline.schemas",
    "taskline.state",
    "taskline.testing",
    "taskline.workers",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_true(package: str) -> None:
    module = importlib.import_module(package)
    # As ruff (RUF022) sorts: constants, classes, functions.
    assert module.__all__ == sorted(
        module.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize(
    "package", ["taskline", "taskline.producers", "taskline.workers", "taskline.testing"]
)
def test_what_users_import_needs_no_extra(package: str) -> None:
    code = (
        f"import sys, {package} as p; [getattr(p, n) for n in p.__all__];"
        "print([m for m in ('cassandra', 'faust', 'fastapi', 'psutil', 'httpx', 'opentelemetry') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "[]"
