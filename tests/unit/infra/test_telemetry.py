"""Logs name what failed and never show what a handler held."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import structlog
from taskline.infra.telemetry import configure_logging
from taskline.settings import TelemetrySettings

configure_logging(TelemetrySettings(log_format={log_format!r}))

def handler(payload):
    raise ValueError("boom")

try:
    handler("pay" + "load-1234")
except ValueError:
    structlog.get_logger("test").exception("failed", task_id="t1")
"""


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    code = CODE.format(log_format=log_format)
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr
    assert "boom" in said
    assert "t1" in said
    assert "payload-1234" not in said
