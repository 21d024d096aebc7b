"""The whole service on real servers as its users meet it: API, worker, projector and delay role as processes, with API keys."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import http_tasks
from api_process import ApiProcess, eventually, running_api

from taskline.client import Client
from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.requests import admin_client
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.local.roles import Role
from taskline.settings import Settings
from taskline.state.keys import Scope, mint
from taskline.state.keys_cassandra import open_keys

SUPPORT = Path(__file__).parent
DELETE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class HttpSystem:
    settings: Settings
    api: ApiProcess

    def key(self, tenant: str, *scopes: Scope) -> str:
        """A new key's token; with every scope, unless some are named."""
        minted = mint(tenant=tenant, scopes=scopes or tuple(Scope), now_ms=time.time_ns() // 1_000_000)

        async def add() -> None:
            async with open_keys(self.settings) as store:
                assert await store.add(minted.key)

        asyncio.run(add())
        return minted.token

    def client(self, tenant: str, **options: Any) -> Client:
        return Client(self.api.url, self.key(tenant), **options)


def http_settings(servers: Any, keyspace: str, **sections: dict[str, Any]) -> Settings:
    values: dict[str, dict[str, Any]] = {
        "kafka": {
            "bootstrap_servers": servers.bootstrap_servers,
            "namespace": f"t{secrets.token_hex(4)}.",
            "session_timeout_ms": 6_000,
        },
        "topics": {"dispatch_partitions": 2, "lanes": 3, "dlq_partitions": 1, "delay_partitions": 1},
        "delay": {"tiers": ("200ms", "1s", "5s")},
        "worker": {"coroutines": "inline", "children": 1, "grace_seconds": 2.0},
        "cassandra": {
            "contact_points": servers.contact_points,
            "port": servers.cassandra_port,
            "keyspace": keyspace,
        },
        "api": {"auth": "keys", "shutdown_delay_seconds": 0.0},
        "telemetry": {"log_format": "json"},
    }
    for section, changes in sections.items():
        values[section] |= changes
    return Settings.model_validate(values)


@contextmanager
def http_system(settings: Settings, folder: Path) -> Iterator[HttpSystem]:
    """Made, started, and when it is over stopped, with its topics deleted. The keyspace is there already."""
    create_topics(settings)
    try:
        with TypeDirectory(settings) as types:
            types.register(http_tasks.registry.types)
        with ExitStack() as stack:
            roles = {
                "worker": ("worker", "http_tasks:registry"),
                "projector": ("projector",),
                "delay": ("delay",),
            }
            for name, arguments in roles.items():
                role = Role(arguments, settings, log=folder / f"{name}.log", cwd=SUPPORT)
                stack.callback(role.stop)
                role.start()
            api = stack.enter_context(running_api(settings, folder))
            eventually(api.ready, "the API is ready", 60)
            yield HttpSystem(settings=settings, api=api)
    finally:
        with admin_client(settings.kafka) as admin:
            names = [
                name
                for name in admin.list_topics(timeout=DELETE_SECONDS).topics
                if name.startswith(settings.kafka.namespace)
            ]
            for deleted in admin.delete_topics(names).values():
                deleted.result(DELETE_SECONDS)
