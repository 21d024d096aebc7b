"""Start servers and wait until they answer.

Ready means: answered by its own protocol, as this stack's server. The wait ends early when a child dies.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from taskline.infra.local.errors import NotReady, ServerDied
from taskline.infra.local.logs import last_words, tail
from taskline.infra.local.process import ProcessIdentity, find, spawn
from taskline.infra.local.service import Runtime, Server, Site

# Between two rounds of asking: a fraction of the fastest start.
_POLL_S = 0.2

# How long one probe may wait for its answer; short, so that a child's death is noticed soon.
_PROBE_TIMEOUT_S = 3.0

# Lines of a slow server's log that an error shows.
_LATE_LINES = 10

_PORT_TAKEN = re.compile(r"address already in use|in use by another process|failed to bind", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A server that was started and has not answered yet."""

    server: Server
    site: Site
    process: ProcessIdentity


def launch(server: Server, site: Site, runtime: Runtime) -> Launched:
    """Prepare the server's folder and start its process; it does not answer yet.

    Raises:
        ServerDied: Its storage could not be formatted.
    """
    shutil.rmtree(site.scratch, ignore_errors=True)  # a killed JVM leaves its native libraries
    for folder in (site.folder, site.log.parent, site.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    command = server.prepare(site, runtime)
    process = spawn(command, marker=site.marker, output=site.output, cwd=site.folder)
    return Launched(server=server, site=site, process=process)


def wait_ready(launched: Sequence[Launched], *, timeout_s: float) -> None:
    """Wait until all answer.

    Raises:
        ServerDied: One ended by itself.
        NotReady: One did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(launched)
    while True:
        missing = {id(item): _ask(item) for item in waiting}
        waiting = [item for item in waiting if missing[id(item)] is not None]
        if not waiting:
            return
        if time.monotonic() >= deadline:
            raise _late(waiting[0], missing[id(waiting[0])], timeout_s)
        time.sleep(_POLL_S)


def lost_a_port(error: ServerDied) -> bool:
    """Whether the server died because one of its ports was taken."""
    return _PORT_TAKEN.search(error.log_tail) is not None


def _ask(item: Launched) -> str | None:
    if find(item.process) is None:
        raise _died(item)
    return item.server.probe(item.site, timeout_s=_PROBE_TIMEOUT_S)


def _died(item: Launched) -> ServerDied:
    words = last_words(item.site)
    return ServerDied(
        f"{item.site.service} ended while it was being started. Its log ({item.site.log}) ends:\n{words}",
        service=item.site.service,
        log_tail=words,
    )


def _late(item: Launched, missing: str | None, timeout_s: float) -> NotReady:
    lines = "\n".join(tail(item.site.log, _LATE_LINES))
    return NotReady(
        f"{item.site.service} did not answer within {timeout_s:.0f} s ({missing}). "
        f"Its log ({item.site.log}) ends:\n{lines}",
        service=item.site.service,
        timeout_s=timeout_s,
    )
