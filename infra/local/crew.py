"""The servers of one stack folder: started and ended under the state file.

Invariant: a server's process is in the state file from the moment it runs until it was seen to be gone, and only the very
process that is written there is ever signalled. Whoever reads the file (another shell, the next test run) can therefore
end what this process began. If this process is killed between starting a server and writing it down, the next start finds
that server by its marker and ends it: two servers never share a data folder.
"""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from taskline.infra.local.config import ServiceName
from taskline.infra.local.errors import InvalidStackConfig, ServerDied
from taskline.infra.local.launcher import Launched, launch, lost_a_port, wait_ready
from taskline.infra.local.ports import LOOPBACK, assign
from taskline.infra.local.process import end, find, find_marked, send
from taskline.infra.local.service import CLIENT_PORT, Runtime, Site, StackServer, runtime_for
from taskline.infra.local.state import ServiceState, StackState, read_state, write_state

STATE_FILE = "state.json"
LOCK_FILE = "lock"

# Another process may be downloading under this lock; beyond this something hangs.
_LOCK_TIMEOUT_S = 1_800.0

# Free ports are chosen outside the kernel's own range: to lose one is rare, to lose three in a row is a fault.
_PORT_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Starts and ends the servers of one folder."""

    # The stack's folder; absolute.
    directory: Path
    servers: Mapping[ServiceName, StackServer]

    def lock(self) -> filelock.BaseFileLock:
        """Keeps other processes from starting or stopping servers here; not re-entrant."""
        return filelock.FileLock(self.directory / LOCK_FILE, timeout=_LOCK_TIMEOUT_S)

    def load(self) -> StackState | None:
        """Read the state file; None if nothing was ever started here.

        Raises:
            UnreadableState: The file is damaged.
        """
        return read_state(self.directory / STATE_FILE)

    def load_or_new(self) -> StackState:
        """Read the state file, or begin one."""
        return self.load() or StackState(stack_id=uuid.uuid4().hex[:12])

    def site(self, state: StackState, name: ServiceName, ports: Mapping[str, int]) -> Site:
        """Where a server lives."""
        return Site(stack_id=state.stack_id, service=name, folder=self.directory / name, ports=ports)

    def running(self, state: StackState) -> tuple[ServiceName, ...]:
        """The servers whose processes live."""
        return tuple(
            name
            for name, service in state.services.items()
            if service.process is not None and find(service.process) is not None
        )

    def start(
        self, state: StackState, names: Sequence[ServiceName], *, keep_ports: bool, timeout_s: float
    ) -> tuple[ServiceName, ...]:
        """Start those that do not run, and wait until all answer; on failure none that was started is left.

        Args:
            state: The state as it was read; the caller holds the lock.
            names: The servers that are to run.
            keep_ports: Whether clients know the earlier client ports, so that these must not move.
            timeout_s: How long all may take until they answer.

        Returns:
            Those that were started.

        Raises:
            NotAvailable: Java, Maven or a download is missing.
            InvalidStackConfig: One runs already on another port than the one asked for.
            PortInUse: A port that must be had is taken.
            ServerDied: One ended by itself.
            NotReady: One did not answer in time.
        """
        for name in set(names) & set(self.running(state)):
            self._check_port(state, name)
        running = self._wait_for_running(state, names, timeout_s)
        missing = sorted(name for name in names if name not in running)  # Cassandra first: it takes longest
        runtimes = {name: runtime_for(self.servers[name]) for name in missing}
        for name in missing:
            self._end_remains(state, name)
        for attempt in range(_PORT_ATTEMPTS):
            ports = self._assign_ports(state, missing, keep=keep_ports, afresh=attempt > 0)
            try:
                self._attempt(state, ports, runtimes, timeout_s)
                break
            except ServerDied as error:
                if not lost_a_port(error) or attempt == _PORT_ATTEMPTS - 1:
                    raise
        return tuple(missing)

    def end(self, names: Sequence[ServiceName], *, grace_s: float) -> tuple[ServiceName, ...]:
        """End servers (SIGTERM, after the grace period SIGKILL) and write down that they are gone.

        Returns:
            Those that ran until now.
        """
        with self.lock():
            state = self.load()
            if state is None:
                return ()
            ended = tuple(name for name in self.running(state) if name in names)
            if grace_s > 0:
                for name in ended:
                    self._ask_to_stop(state, name)  # all at once; below they are waited for one by one
            for name in names:
                service = state.services.get(name)
                if service is not None and service.process is not None:
                    end(service.process, grace_s=grace_s)
                    state = state.without_process(name)
                    self._save(state)
                self._end_remains(state, name)
            return ended

    def _attempt(
        self,
        state: StackState,
        ports: Mapping[ServiceName, Mapping[str, int]],
        runtimes: Mapping[ServiceName, Runtime],
        timeout_s: float,
    ) -> None:
        """Start servers on the given ports; if anything goes wrong, end all of them."""
        launched: list[Launched] = []
        try:
            for name, its_ports in ports.items():
                item = launch(self.servers[name], self.site(state, name, its_ports), runtimes[name])
                launched.append(item)
                state = state.with_service(name, _entry(item))
                self._save(state)
            wait_ready(launched, timeout_s=timeout_s)
        except BaseException:
            for item in launched:
                end(item.process, grace_s=0.0)
            for name in ports:
                state = state.without_process(name)
            self._save(state)
            raise

    def _wait_for_running(
        self, state: StackState, names: Sequence[ServiceName], timeout_s: float
    ) -> tuple[ServiceName, ...]:
        """Wait for those that somebody else started; give those that run then."""
        running = [
            Launched(
                server=self.servers[name], site=self.site(state, name, service.ports), process=service.process
            )
            for name, service in state.services.items()
            if name in names and name in self.running(state) and service.process is not None
        ]
        with contextlib.suppress(ServerDied):  # one that was on its way out is started again
            wait_ready(running, timeout_s=timeout_s)
        return self.running(state)

    def _assign_ports(
        self, state: StackState, names: Sequence[ServiceName], *, keep: bool, afresh: bool
    ) -> dict[ServiceName, dict[str, int]]:
        """Choose the ports of the servers that are about to start."""
        chosen: dict[ServiceName, dict[str, int]] = {}
        for name in names:
            server = self.servers[name]
            earlier = state.services[name].ports if name in state.services else {}
            fixed: dict[str, int] = {}
            if server.wanted_port is not None:
                fixed[CLIENT_PORT] = server.wanted_port
            elif keep and CLIENT_PORT in earlier:
                fixed[CLIENT_PORT] = earlier[CLIENT_PORT]
            chosen[name] = assign(
                server.port_purposes,
                fixed=fixed,
                earlier={} if afresh else earlier,
                exclude=self._spoken_for(state, chosen, by_others_than=name),
            )
        return chosen

    def _spoken_for(
        self,
        state: StackState,
        chosen: Mapping[ServiceName, Mapping[str, int]],
        *,
        by_others_than: ServiceName,
    ) -> frozenset[int]:
        """The ports that the stack's other servers have, had, are about to have, or were asked to have."""
        ports: set[int] = set()
        for other, server in self.servers.items():
            if other != by_others_than:
                had = state.services[other].ports if other in state.services else {}
                ports.update(chosen.get(other, had).values())
                ports.update(() if server.wanted_port is None else (server.wanted_port,))
        return frozenset(ports)

    def _check_port(self, state: StackState, name: ServiceName) -> None:
        wanted, actual = self.servers[name].wanted_port, state.services[name].ports[CLIENT_PORT]
        if wanted not in (None, actual):
            raise InvalidStackConfig(
                f"{name} of this stack runs already on port {actual}; stop it to move it to {wanted}"
            )

    def _end_remains(self, state: StackState, name: ServiceName) -> None:
        """Wait for the end of one that is dying, and end one that was never written down: they hold the data."""
        service = state.services.get(name)
        if service is not None and service.process is not None:
            end(service.process, grace_s=0.0)
        for process in find_marked(self.site(state, name, {}).marker):
            end(process, grace_s=0.0)

    def _ask_to_stop(self, state: StackState, name: ServiceName) -> None:
        process = state.services[name].process
        if process is not None:
            send(process, signal.SIGTERM)

    def _save(self, state: StackState) -> None:
        write_state(self.directory / STATE_FILE, state)


def _entry(item: Launched) -> ServiceState:
    return ServiceState(
        version=item.server.version,
        address=f"{LOOPBACK}:{item.site.ports[CLIENT_PORT]}",
        ports=item.site.ports,
        process=item.process,
    )
