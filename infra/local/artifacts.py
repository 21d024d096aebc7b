"""Jars from Maven, cached per user.

A cache entry is a folder named after the hash of the pom that describes it. It is filled beside its place and renamed
into it, so a folder that exists is complete: a second run starts no Maven, and a killed one leaves no half entry.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

from taskline.infra.local.errors import FetchFailed, MavenNotFound
from taskline.infra.local.progress import FetchProgress, fetch_progress

CACHE_VARIABLE = "TASKLINE_CACHE_DIR"

# Pinned, so that the cache's content follows from the pom alone; any Maven since 3.2.5 runs it.
_DEPENDENCY_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"

# Another process may be fetching the same jars over a slow line; beyond this something hangs.
_LOCK_TIMEOUT_S = 1_800.0

# Enough of Maven's output to show its reason, which it gives last.
_ERROR_LINES = 15


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A set of files that Maven resolves from one pom."""

    # For messages: `Kafka 4.3.1`.
    title: str
    # For folder names: `kafka-4.3.1`.
    slug: str
    # The pom's text.
    pom: str
    # About how much is downloaded, for messages.
    megabytes: int
    # A file that must be there afterwards: tells a resolution that went wrong from one that went well.
    landmark: str
    # The dependency plugin's goal: copy-dependencies, or unpack-dependencies for an archive.
    goal: str = "copy-dependencies"

    @property
    def key(self) -> str:
        """The name of its folder in the cache."""
        digest = hashlib.sha256("\0".join((self.pom, _DEPENDENCY_PLUGIN, self.goal)).encode()).hexdigest()
        return f"{self.slug}-{digest[:12]}"


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of all cached downloads: TASKLINE_CACHE_DIR, or the user's cache folder."""
    chosen = (os.environ if environ is None else environ).get(CACHE_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("taskline")


def ensure_bundle(bundle: Bundle, *, java_home: Path, cache: Path | None = None) -> Path:
    """The folder that holds the bundle's files, which are fetched first if need be.

    Args:
        bundle: What is needed.
        java_home: A Java that Maven may run on.
        cache: The folder of cached downloads; None = `cache_directory()`.

    Raises:
        MavenNotFound: The files are not there yet and there is no Maven.
        FetchFailed: Maven failed, or another process has been at it for too long.
    """
    root = (cache_directory() if cache is None else cache) / "jars"
    target = root / bundle.key
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(root / f"{bundle.key}.lock", timeout=_LOCK_TIMEOUT_S):
            if not target.is_dir():
                _fetch(bundle, target, java_home)
    except filelock.Timeout as error:
        raise FetchFailed(
            f"another process has been fetching {bundle.title} for {_LOCK_TIMEOUT_S:.0f} s (lock {error.lock_file})"
        ) from error
    return target


def _fetch(bundle: Bundle, target: Path, java_home: Path) -> None:
    """Run Maven into a folder beside the target and rename it into place."""
    maven = _find_maven(bundle)
    work = Path(tempfile.mkdtemp(prefix=f".{bundle.key}-", dir=target.parent))
    try:
        pom, files = work / "pom.xml", work / "files"
        pom.write_text(bundle.pom, encoding="utf-8")
        command = [
            *(maven, "-B", "-f", str(pom), f"{_DEPENDENCY_PLUGIN}:{bundle.goal}"),
            *("-DincludeScope=runtime", f"-DoutputDirectory={files}"),
        ]
        with fetch_progress(bundle.title, bundle.megabytes) as progress:
            _run_maven(command, bundle, java_home, progress)
        if not (files / bundle.landmark).exists():
            raise FetchFailed(f"Maven fetched {bundle.title} without {bundle.landmark}: is a mirror broken?")
        files.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _find_maven(bundle: Bundle) -> str:
    home = os.environ.get("MAVEN_HOME")
    found = shutil.which("mvn") or (shutil.which("mvn", path=str(Path(home) / "bin")) if home else None)
    if found is None:
        raise MavenNotFound(
            f"{bundle.title} is not in the cache ({cache_directory()}) and there is no Maven (mvn) on the PATH to "
            "fetch it. Install one (Debian, Ubuntu: the package maven), or copy a filled cache folder here and "
            f"set {CACHE_VARIABLE} to it."
        )
    return found


def _run_maven(command: list[str], bundle: Bundle, java_home: Path, progress: FetchProgress) -> None:
    """Run Maven and pass its lines to the progress display; its last ones are the error's if it fails."""
    tail: deque[str] = deque(maxlen=_ERROR_LINES)
    with subprocess.Popen(  # noqa: S603 - mvn with arguments made here
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "JAVA_HOME": str(java_home)},
    ) as process:
        try:
            for line in process.stdout or ():
                if not line.startswith(("Downloading", "Downloaded", "Progress")):
                    tail.append(line.rstrip())
                progress.line(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise FetchFailed(
            f"Maven could not fetch {bundle.title} (exit {process.returncode}). It said last:\n"
            + "\n".join(tail)
        )
