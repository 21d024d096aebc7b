"""The worker's hold on its children: the fork server that makes them, what became of each, and their common end.

Invariant: every child that was asked for is reported once, by `Spawned.died`, with how it ended; if the fork server itself
dies, its children are ended too, and nobody is to blame for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field

import structlog

from taskline.workers.child import ChildConfig, Kind
from taskline.workers.child_server import BORN, CONFIG_LENGTH, KILL, ORDER, REPORT, SPAWN, UP

log = structlog.get_logger(__name__)

# The fork server gives its children a second to end; longer than this only a process that the system can't end.
_CLOSE_SECONDS = 5.0
# After its line broke it has all but ended.
_REAP_SECONDS = 0.2
_READ_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended."""

    # In words: "exit status 3", "signal SIGSEGV".
    cause: str
    # False: it was ended from outside of what ran in it.
    own: bool = True


@dataclass(kw_only=True, slots=True)
class Spawned:
    """A child that was asked for."""

    number: int
    # The worker's end of the line; whoever asked closes it.
    sock: socket.socket
    died: asyncio.Future[Death]
    # Known once it was forked.
    pid: int | None = None


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    control: socket.socket
    # Resolves when it has imported the registry, or has ended before.
    up: asyncio.Future[None]
    children: dict[int, Spawned] = field(default_factory=dict)
    unread: bytearray = field(default_factory=bytearray)


class ForkServer:
    """Makes children of one registry; begins with `start`, or with the first child. Belongs to one event loop."""

    def __init__(self, config: ChildConfig) -> None:
        """Children are told `config`."""
        self._config = config
        self._numbers = itertools.count(1)
        self._process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """The fork server's process; None: it has not begun, or is over."""
        return None if self._process is None else self._process.popen.pid

    def start(self) -> asyncio.Future[None]:
        """Begin to import the registry; what is returned resolves when that is over, and children start in milliseconds.

        Raises:
            OSError: the system lets no further process or socket be made.
        """
        return (self._process or self._start()).up

    def spawn(self, kind: Kind) -> Spawned:
        """Ask for a child; it can be written to at once.

        Raises:
            OSError: the system lets no further process or socket be made.
        """
        process = self._process or self._start()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        died: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        spawned = Spawned(number=next(self._numbers), sock=ours, died=died)
        process.children[spawned.number] = spawned
        with theirs:
            try:
                order = ORDER.pack(SPAWN, spawned.number, kind)
                socket.send_fds(process.control, [order], [theirs.fileno()])
            except OSError:
                self._lost(process)
        return spawned

    def kill(self, spawned: Spawned) -> None:
        """Kill a child and all that it has started, at once; nothing if it has died."""
        process = self._process
        if process is None or spawned.number not in process.children:
            return
        try:
            process.control.sendall(ORDER.pack(KILL, spawned.number, 0))
        except OSError:
            self._lost(process)

    async def close(self) -> None:
        """End the fork server and all children."""
        process, self._process = self._process, None
        if process is None:
            return
        asyncio.get_running_loop().remove_reader(process.control)
        process.control.close()
        try:
            await asyncio.to_thread(process.popen.wait, _CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the fork server does not end; it is killed", pid=process.popen.pid)
            process.popen.kill()
            process.popen.wait()
        _bury(process, Death("the worker ended it", own=False))

    def _start(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            # Deaf to signals from its first moment, as `child_server` is later; and its imports are those of this process, whatever has
            # been done to its path.
            code = (
                "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                f"sys.path[:] = {sys.path!r}; from taskline.workers.child_server import main; main({theirs.fileno()})"
            )
            warnings = [f"-W{option}" for option in sys.warnoptions]
            popen = subprocess.Popen(  # noqa: S603 - this interpreter, and this package
                [sys.executable, *warnings, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        process = self._process = _Process(popen, ours, asyncio.get_running_loop().create_future())
        config = pickle.dumps(self._config)
        try:
            ours.sendall(CONFIG_LENGTH.pack(len(config)) + config)
        except OSError as error:
            # Its end will be read.
            log.warning("the fork server died at its start", pid=popen.pid, error=str(error))
        asyncio.get_running_loop().add_reader(ours, self._read, process)
        return process

    def _read(self, process: _Process) -> None:
        try:
            data = process.control.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(process)
            return
        process.unread += data
        whole = len(process.unread) // REPORT.size * REPORT.size
        for what, number, value in REPORT.iter_unpack(process.unread[:whole]):
            if what == UP:
                _resolve(process.up)
            elif what == BORN:
                process.children[number].pid = value
            else:
                spawned = process.children.pop(number)
                if not spawned.died.done():
                    spawned.died.set_result(Death(in_words(value)))
        del process.unread[:whole]

    def _lost(self, process: _Process) -> None:
        if self._process is not process:
            return
        self._process = None
        asyncio.get_running_loop().remove_reader(process.control)
        process.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(_REAP_SECONDS)
        process.popen.kill()
        ended = in_words(process.popen.wait())
        log.error("the fork server died; it is started anew", pid=process.popen.pid, cause=ended)
        _bury(process, Death(f"its fork server ended: {ended}", own=False))


def _bury(process: _Process, death: Death) -> None:
    _resolve(process.up)
    # Their lines are closed by those who watch for this, which ends what is left of them.
    for spawned in process.children.values():
        if not spawned.died.done():
            spawned.died.set_result(death)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def in_words(code: int) -> str:
    """How a process ended, of its status as subprocess has it."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
