"""The local stack: Kafka and Cassandra as child processes, for tests, demos and development.

A *persistent* stack outlives the process that started it and keeps its data and ports over stops. An *ephemeral* one
ends with that process, however that ends (see `reaper`), and its folder with it.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taskline.infra.local.cassandra import CassandraServer
from taskline.infra.local.config import DEFAULT_DIRECTORY, SERVICES, ServiceName, StackConfig
from taskline.infra.local.crew import STATE_FILE, Crew
from taskline.infra.local.errors import InvalidStackConfig, NotRunning
from taskline.infra.local.kafka import KafkaServer
from taskline.infra.local.ports import LOOPBACK
from taskline.infra.local.process import ProcessIdentity, end, find, send
from taskline.infra.local.service import CLIENT_PORT, StackServer, runtime_for
from taskline.infra.local.state import ServiceState
from taskline.infra.local.status import StackStatus, stack_status
from taskline.infra.local.watch import start_reaper


class LocalStack:
    """Kafka and Cassandra on this machine.

    Its methods may be called from several threads and processes; they take turns.

    Example:
        with LocalStack(StackConfig(ephemeral=True)).running() as stack:
            print(stack.bootstrap_servers, stack.contact_points, stack.cassandra_port)
    """

    def __init__(self, config: StackConfig | None = None) -> None:
        """Describe a stack; nothing is started or written yet."""
        self.config = StackConfig() if config is None else config
        self._servers: dict[ServiceName, StackServer] = {
            "kafka": KafkaServer(self.config.kafka),
            "cassandra": CassandraServer(self.config.cassandra),
        }
        self._crew: Crew | None = None
        if not self.config.ephemeral:
            directory = (self.config.directory or DEFAULT_DIRECTORY).expanduser().absolute()
            if "," in str(directory):
                raise InvalidStackConfig(f"Kafka cannot keep its data under a path with a comma: {directory}")
            self._crew = Crew(directory=directory, servers=self._servers)
        # Whether a start of ours went well: clients may know the ports.
        self._published = False
        self._reaper: ProcessIdentity | None = None
        self._mutex = threading.RLock()

    @property
    def directory(self) -> Path:
        """The stack's folder.

        Raises:
            NotRunning: It is ephemeral and not running, so it has none.
        """
        return self._the_crew().directory

    @property
    def bootstrap_servers(self) -> str:
        """Kafka's address, as clients take it.

        Raises:
            NotRunning: Kafka is not running.
        """
        return self._running("kafka").address

    @property
    def contact_points(self) -> tuple[str, ...]:
        """Cassandra's hosts; the port is `cassandra_port`."""
        return (LOOPBACK,)

    @property
    def cassandra_port(self) -> int:
        """Cassandra's native-protocol port.

        Raises:
            NotRunning: Cassandra is not running.
        """
        return self._running("cassandra").ports[CLIENT_PORT]

    def fetch(self) -> None:
        """Find Java and fetch the jars, so that a start needs no network; `start` does it by itself.

        Raises:
            NotAvailable: Java, Maven or a download is missing.
        """
        for name in self.config.services:
            runtime_for(self._servers[name])

    def start(self, service: ServiceName | None = None) -> tuple[ServiceName, ...]:
        """Start one server, or all of the stack's, and wait until they answer; those that run are left alone.

        A server that was stopped or killed comes back on its port and with its data.

        Returns:
            The servers that this call started.

        Raises:
            NotAvailable: Java, Maven or a download is missing.
            InvalidStackConfig: It is not one of the stack's, or runs on another port than the one asked for.
            PortInUse: A port that must be had is taken.
            ServerDied: A server ended by itself.
            NotReady: A server did not answer in time.
        """
        with self._mutex:
            if service is not None and service not in self.config.services:
                raise InvalidStackConfig(
                    f"this stack has no {service!r}, only {', '.join(self.config.services)}"
                )
            crew = self._crew or self._new_ephemeral_crew()
            crew.directory.mkdir(parents=True, exist_ok=True)
            try:
                with crew.lock():
                    state = crew.load_or_new()
                    if self.config.ephemeral and (self._reaper is None or find(self._reaper) is None):
                        self._reaper = start_reaper(state.stack_id, crew.directory)
                    started = crew.start(
                        state,
                        self.config.services if service is None else (service,),
                        keep_ports=self._published or bool(crew.running(state)),
                        timeout_s=self.config.start_timeout_s,
                    )
            except BaseException:
                if self.config.ephemeral and not self._published:
                    self._tear_down(crew)
                raise
            self._published = True
            return started

    def stop(self, service: ServiceName | None = None) -> tuple[ServiceName, ...]:
        """Stop one server, or all that run: SIGTERM, and SIGKILL after the grace period.

        To stop all of an ephemeral stack removes it.

        Returns:
            The servers that ran until now.
        """
        with self._mutex:
            crew = self._crew
            if crew is None or not crew.directory.is_dir():
                return ()
            if service is None and self.config.ephemeral:
                return self._tear_down(crew)
            return crew.end(SERVICES if service is None else (service,), grace_s=self.config.stop_grace_s)

    def kill(self, service: ServiceName) -> None:
        """Kill a server with SIGKILL, as a crash would; `start` brings it back.

        Raises:
            NotRunning: It is not running.
        """
        with self._mutex:
            self._running(service)
            self._the_crew().end((service,), grace_s=0.0)

    def pause(self, service: ServiceName) -> None:
        """Freeze a server (SIGSTOP): its connections stay, it answers nothing.

        Raises:
            NotRunning: It is not running.
        """
        self._signal(service, signal.SIGSTOP)

    def resume(self, service: ServiceName) -> None:
        """Let a frozen server go on (SIGCONT).

        Raises:
            NotRunning: It is not running.
        """
        self._signal(service, signal.SIGCONT)

    def status(self) -> StackStatus:
        """Look at the processes and ask the servers that run; takes a few seconds if they do not answer."""
        with self._mutex:
            return (
                StackStatus(directory=None, services=()) if self._crew is None else stack_status(self._crew)
            )

    def log_file(self, service: ServiceName) -> Path:
        """The path of a server's log; it need not exist yet.

        Raises:
            NotRunning: The stack is ephemeral and not running.
        """
        crew = self._the_crew()
        return crew.site(crew.load_or_new(), service, {}).log

    def reset(self) -> None:
        """Kill all servers and delete their data and logs; other files in the folder are left alone."""
        with self._mutex:
            crew = self._crew
            if crew is None or not crew.directory.is_dir():
                return
            if self.config.ephemeral:
                self._tear_down(crew)
                return
            crew.end(SERVICES, grace_s=0.0)
            with crew.lock():
                for name in SERVICES:
                    shutil.rmtree(crew.directory / name, ignore_errors=True)
                (crew.directory / STATE_FILE).unlink(missing_ok=True)
            self._published = False

    @contextmanager
    def running(self) -> Iterator[LocalStack]:
        """Start what is not running, and at the end stop what this call started."""
        started = self.start()
        try:
            yield self
        finally:
            if self.config.ephemeral:
                self.stop()
            else:
                for name in started:
                    self.stop(name)

    def _the_crew(self) -> Crew:
        if self._crew is None:
            raise NotRunning("an ephemeral stack has a folder only while it runs")
        return self._crew

    def _new_ephemeral_crew(self) -> Crew:
        directory = Path(tempfile.mkdtemp(prefix="taskline-local-")).resolve()
        self._crew = Crew(directory=directory, servers=self._servers)
        return self._crew

    def _running(self, name: ServiceName) -> ServiceState:
        with self._mutex:
            state = None if self._crew is None else self._crew.load()
            service = None if state is None else state.services.get(name)
            if service is None or service.process is None or find(service.process) is None:
                raise NotRunning(f"{name} is not running")
            return service

    def _signal(self, service: ServiceName, signum: signal.Signals) -> None:
        process = self._running(service).process
        if process is None or not send(process, signum):
            raise NotRunning(f"{service} is not running")

    def _tear_down(self, crew: Crew) -> tuple[ServiceName, ...]:
        """End an ephemeral stack at once (nobody needs its data) and remove its folder."""
        ended = crew.end(SERVICES, grace_s=0.0)
        if self._reaper is not None:
            end(self._reaper, grace_s=0.0)
            self._reaper = None
        shutil.rmtree(crew.directory, ignore_errors=True)
        self._crew = None
        self._published = False
        return ended
