"""The compose file, as far as it can be checked without an engine: it is read, not run."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from taskline.infra.local.cassandra import CassandraServer
from taskline.infra.local.config import CassandraConfig, KafkaConfig
from taskline.infra.local.kafka import KafkaServer
from taskline.infra.local.registry import RegistryConfig, RegistryServer
from taskline.settings import load_settings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "infra" / "compose"
ROLES = ("api", "projector", "worker")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document = yaml.safe_load((FOLDER / "docker-compose.yml").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    found = compose["services"]
    assert isinstance(found, dict)
    return found


def test_all_services_are_there(services: dict[str, Any]) -> None:
    assert set(services) == {"kafka", "cassandra", "registry", "setup", *ROLES}


def test_servers_are_the_local_stacks_releases(services: dict[str, Any]) -> None:
    assert services["kafka"]["image"] == f"apache/kafka:{KafkaServer(KafkaConfig()).version}"
    assert services["cassandra"]["image"] == f"cassandra:{CassandraServer(CassandraConfig()).version}"
    assert (
        services["registry"]["image"]
        == f"apicurio/apicurio-registry:{RegistryServer(RegistryConfig()).version}"
    )


def test_every_dependency_exists_and_can_be_waited_for(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            condition = how["condition"]
            assert condition in {"service_healthy", "service_completed_successfully"}, name
            assert (condition == "service_healthy") == ("healthcheck" in services[other]), (name, other)


def test_roles_start_after_the_setup_and_are_restarted(services: dict[str, Any]) -> None:
    for role in ROLES:
        assert services[role]["depends_on"]["setup"]["condition"] == "service_completed_successfully"
        assert services[role]["restart"] == "unless-stopped"
        assert services[role]["command"][0] == role
        assert "healthcheck" in services[role]
    assert "restart" not in services["setup"]
    assert services["setup"]["entrypoint"][-1] == "taskline topics create && taskline view migrate"


def test_every_setting_is_one_and_points_at_the_services(services: dict[str, Any]) -> None:
    for name in ("setup", *ROLES):
        environment = services[name]["environment"]
        assert all(isinstance(value, str) for value in environment.values()), "YAML must not guess types"
        settings = load_settings(environment)
        host, _, port = settings.kafka.bootstrap_servers.partition(":")
        assert f"INTERNAL://:{port}" in services[host]["environment"]["KAFKA_LISTENERS"]
        assert set(settings.cassandra.contact_points) <= set(services)
        registry = re.fullmatch(r"http://(\w+):(\d+)/apis/ccompat/v7", settings.schemas.registry_url or "")
        assert registry is not None
        assert services[registry[1]]["environment"]["QUARKUS_HTTP_PORT"] == registry[2]
    assert load_settings(services["api"]["environment"]).api.host == "0.0.0.0"


def test_checks_and_published_ports_agree_with_the_settings(services: dict[str, Any]) -> None:
    api = load_settings(services["api"]["environment"]).api
    assert f":{api.port}/readyz" in services["api"]["healthcheck"]["test"][-1]
    assert services["api"]["ports"] == [f"127.0.0.1:{api.port}:{api.port}"]
    for role in ("worker", "projector"):
        port = load_settings(services[role]["environment"]).telemetry.metrics_port
        assert f":{port}/metrics" in services[role]["healthcheck"]["test"][-1]


def test_a_stop_leaves_time_to_drain(services: dict[str, Any]) -> None:
    for role in ROLES:
        grace = float(services[role]["stop_grace_period"].removesuffix("s"))
        assert grace > load_settings({}).worker.grace_seconds


def test_only_the_loopback_is_published(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_kafka_creates_no_topics_and_its_host_address_is_published(services: dict[str, Any]) -> None:
    environment = services["kafka"]["environment"]
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert int(environment["KAFKA_OFFSETS_RETENTION_MINUTES"]) >= 30 * 24 * 60
    (port,) = services["kafka"]["ports"]
    assert f"HOST://{port.rpartition(':')[0]}" in environment["KAFKA_ADVERTISED_LISTENERS"]


def test_volumes_are_declared(compose: dict[str, Any], services: dict[str, Any]) -> None:
    used = {
        volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", ())
    }
    assert used == set(compose["volumes"])


def test_the_image_installs_extras_that_exist() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    installed = re.search(r"'\.\[([a-z,]+)\]'", dockerfile)
    assert installed is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(installed[1].split(",")) <= set(project["optional-dependencies"])
    assert 'ENTRYPOINT ["taskline"]' in dockerfile
    assert "FROM python:3.11-slim" in dockerfile


def test_the_images_constraints_are_the_locks_pins_with_their_markers() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    command = re.search(r"^RUN (sed .*) > constraints\.txt$", dockerfile, re.MULTILINE)
    assert command is not None
    done = subprocess.run(shlex.split(command[1]), cwd=ROOT, capture_output=True, text=True, check=True)
    constraints = done.stdout.splitlines()
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line.removesuffix("\\").strip() for line in lock if "==" in line and line[0].isalpha()]
    assert constraints == pins
    assert any(" ; " in line for line in constraints)
    assert not any("--hash" in line for line in constraints)


def test_the_builds_paths_exist(services: dict[str, Any]) -> None:
    build = services["api"]["build"]
    context = (FOLDER / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    assert (context / "examples" / "airports" / "tasks.py").is_file()
    default = re.search(r":-([\w.:]+)\}", services["worker"]["command"][1])
    assert default is not None
    assert default[1] == "examples.airports.tasks:registry"
