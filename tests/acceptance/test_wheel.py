"""The wheel alone, in an empty environment, is a working command and a working producer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from taskline.settings import Settings, as_environment

ROOT = Path(__file__).parents[2]
SUBMIT = """
from taskline import TaskProducer, Registry, load_settings

registry = Registry()

@registry.task("wheel.hello")
def hello(payload: dict[str, str]) -> str:
    return payload["name"]

with TaskProducer(load_settings(), registry.catalogue()) as producer:
    print(producer.submit("wheel.hello", {"name": "world"}).task_id)
"""


def run(*command: str | Path, **kwargs: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], check=False, capture_output=True, text=True, **kwargs
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A clean copy of what git tracks, so that stale build folders can't help.
    source = folder / "source"
    tracked = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split(
        "\0"
    )
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    environment = tmp_path_factory.mktemp("empty") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    run(
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        environment / "bin" / "python",
        wheel,
    )
    return environment / "bin" / "python"


def test_the_wheel_holds_every_module_and_contract(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for top in ("api", "infra", "processors", "producers", "schemas", "state", "workers"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in {".py", ".avsc", ".cql"}:
                assert f"taskline/{path.relative_to(ROOT)}" in names
    assert "taskline/py.typed" in names
    assert not any(name.startswith(("tests/", "examples/", "bench/", ".typing/")) for name in names)


def test_the_command_helps_without_any_extra(python: Path, tmp_path: Path) -> None:
    said = run(python.parent / "taskline", "--help", cwd=tmp_path)
    assert "worker" in said
    missing = subprocess.run(
        [python.parent / "taskline", "api"], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert missing.returncode == 1
    assert "pip install 'taskline[api]'" in missing.stderr


@pytest.mark.servers
def test_it_submits_a_task(python: Path, topics_created: Settings, tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], **as_environment(topics_created)}
    task_id = run(python, "-c", SUBMIT, cwd=tmp_path, env=environ).strip()
    assert len(task_id) == 36
