"""The cache of jars, with a shell script that plays Maven."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from taskline.infra.local.artifacts import Bundle, cache_directory, ensure_bundle
from taskline.infra.local.errors import FetchFailed, MavenNotFound, NotAvailable

BUNDLE = Bundle(title="Thing 1.0", slug="thing-1.0", pom="<project/>", megabytes=1, landmark="thing.jar")
JAVA_HOME = Path("/jdk")

# Finds -DoutputDirectory=…, counts its calls, and leaves one file there.
_MAVEN = """#!/bin/sh
echo call >> "{calls}"
for argument in "$@"; do
  case "$argument" in -DoutputDirectory=*) out="${{argument#-DoutputDirectory=}}";; esac
done
echo "Downloaded from central: https://maven.invalid/thing/thing.jar (1 kB at 1 kB/s)"
{extra}
mkdir -p "$out" && echo "$JAVA_HOME" > "$out/{creates}"
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


def make_maven(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, *, extra: str = "", creates: str = "thing.jar"
) -> None:
    binaries = folder / "maven"
    binaries.mkdir(exist_ok=True)
    program = binaries / "mvn"
    program.write_text(_MAVEN.format(calls=calls, extra=extra, creates=creates))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(binaries), prepend=":")


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def leftovers(cache: Path) -> list[str]:
    return [entry.name for entry in (cache / "jars").iterdir() if entry.name.startswith(".")]


def test_fetched_once(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_maven(tmp_path, calls, monkeypatch)
    cache = tmp_path / "cache"
    folder = ensure_bundle(BUNDLE, java_home=JAVA_HOME, cache=cache)
    assert (folder / "thing.jar").read_text() == "/jdk\n"
    assert "fetching Thing 1.0 from Maven" in capsys.readouterr().err
    assert ensure_bundle(BUNDLE, java_home=JAVA_HOME, cache=cache) == folder
    assert count(calls) == 1
    assert capsys.readouterr().err == ""
    assert leftovers(cache) == []


def test_a_full_cache_needs_no_maven(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_maven(tmp_path, calls, monkeypatch)
    folder = ensure_bundle(BUNDLE, java_home=JAVA_HOME, cache=tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert ensure_bundle(BUNDLE, java_home=JAVA_HOME, cache=tmp_path) == folder


def test_a_changed_pom_is_another_entry(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_maven(tmp_path, calls, monkeypatch)
    first = ensure_bundle(BUNDLE, java_home=JAVA_HOME, cache=tmp_path)
    second = ensure_bundle(replace(BUNDLE, pom="<project></project>"), java_home=JAVA_HOME, cache=tmp_path)
    assert first != second
    assert count(calls) == 2


def test_without_maven_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("MAVEN_HOME", raising=False)
    with pytest.raises(MavenNotFound, match=r"no Maven \(mvn\) on the PATH.*TASKLINE_CACHE_DIR") as error:
        ensure_bundle(BUNDLE, java_home=JAVA_HOME, cache=tmp_path)
    assert isinstance(error.value, NotAvailable)
    assert leftovers(tmp_path) == []


def test_a_failure_shows_mavens_last_words_and_leaves_nothing(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_maven(tmp_path, calls, monkeypatch, extra='echo "[ERROR] Could not resolve thing"; exit 3')
    with pytest.raises(FetchFailed, match=r"exit 3(?s:.*)Could not resolve thing") as error:
        ensure_bundle(BUNDLE, java_home=JAVA_HOME, cache=tmp_path)
    assert "Downloaded" not in str(error.value)
    assert leftovers(tmp_path) == []
    make_maven(tmp_path, calls, monkeypatch)
    assert (ensure_bundle(BUNDLE, java_home=JAVA_HOME, cache=tmp_path) / "thing.jar").exists()


def test_a_resolution_without_the_landmark_is_not_cached(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_maven(tmp_path, calls, monkeypatch, creates="other.jar")
    with pytest.raises(FetchFailed, match=r"without thing\.jar"):
        ensure_bundle(BUNDLE, java_home=JAVA_HOME, cache=tmp_path)
    assert not (tmp_path / "jars" / BUNDLE.key).exists()


def test_two_processes_at_once_fetch_once(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_maven(tmp_path, calls, monkeypatch, extra="sleep 1")
    code = (
        "from pathlib import Path\n"
        "from taskline.infra.local.artifacts import Bundle, ensure_bundle\n"
        f"print(ensure_bundle({BUNDLE!r}, java_home=Path('/jdk'), cache=Path({str(tmp_path)!r})))\n"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [run.communicate(timeout=60) for run in runs]
    assert {out.strip() for out, _ in answers} == {str(tmp_path / "jars" / BUNDLE.key)}, answers
    assert count(calls) == 1


def test_the_caches_place(tmp_path: Path) -> None:
    assert cache_directory({"TASKLINE_CACHE_DIR": str(tmp_path)}) == tmp_path
    assert cache_directory({}).name == "taskline"
