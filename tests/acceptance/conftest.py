"""What whole-system tests have of their own: a view, and where servers are harmed, the servers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from taskline.infra.local.config import StackConfig
from taskline.infra.local.errors import NotAvailable
from taskline.infra.local.stack import LocalStack
from taskline.settings import Settings


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """A stack of the module's own: its Kafka is killed."""
    try:
        with LocalStack(StackConfig(ephemeral=True)).running() as running:
            yield running
    except NotAvailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"CI needs real servers: {reason}")
        pytest.skip(f"no Kafka and Cassandra: {reason}")


@pytest.fixture(scope="module")
def keyspace() -> str:
    """A view of the module's own: what is said of all dead letters is about its own."""
    return f"test_{secrets.token_hex(4)}"


@pytest.fixture
def view_ready(settings: Settings) -> None:
    from taskline.state.migrations import migrate

    migrate(settings)
