"""Errors of the local stack: one branch of Taskline's tree, the facts as attributes."""

from __future__ import annotations

from pathlib import Path

from taskline.errors import TasklineError


class LocalStackError(TasklineError):
    """The root of all that the local stack raises by itself."""


class InvalidStackConfig(LocalStackError):
    """The configuration contradicts itself, or the stack that is already running."""


class NotAvailable(LocalStackError):
    """Something that this machine lacks (Java, Maven, a download) keeps a server from being run at all."""


class JavaNotFound(NotAvailable):
    """No installed Java fits the server; the message names what was found and how to get one."""


class MavenNotFound(NotAvailable):
    """The jars are not in the cache yet and there is no Maven to fetch them."""


class FetchFailed(NotAvailable):
    """Maven ran and failed; the message holds the end of its output."""


class PortInUse(LocalStackError):
    """A port that must be had is taken."""

    def __init__(self, message: str, *, port: int) -> None:
        """Keep the TCP port on 127.0.0.1 beside the message."""
        self.port = port
        super().__init__(message)


class ServerDied(LocalStackError):
    """A server ended by itself while it was being started."""

    def __init__(self, message: str, *, service: str, log_tail: str) -> None:
        """Keep the server's name and the end of its log beside the message."""
        self.service = service
        self.log_tail = log_tail
        super().__init__(message)


class NotReady(LocalStackError):
    """A server lives but did not answer by its protocol in time."""

    def __init__(self, message: str, *, service: str, timeout_s: float) -> None:
        """Keep the server's name and how long it was waited for (seconds) beside the message."""
        self.service = service
        self.timeout_s = timeout_s
        super().__init__(message)


class NotRunning(LocalStackError):
    """The operation needs a running server (an address, a pause) and there is none."""


class UnreadableState(LocalStackError):
    """The state file is damaged or from another version."""

    def __init__(self, message: str, *, path: Path) -> None:
        """Keep the file's path beside the message."""
        self.path = path
        super().__init__(message)
