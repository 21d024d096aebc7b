"""Every setting of every role: typed, with its unit in its name, checked once.

Read by `load_settings` at an entry point only; everything below takes a `Settings` (or a section) as an argument.
Sources, strongest first: explicit overrides, environment (`TASKLINE_KAFKA__BOOTSTRAP_SERVERS`), a TOML file
(`--config`, or `taskline.toml` in the working directory). `docs/settings.md` is generated from this module.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from taskline.errors import InvalidSettings, did_you_mean, nearest

ENV_PREFIX = "TASKLINE_"
CONFIG_FILE = "taskline.toml"
# Variables of the same prefix that are not settings: where to look, not what to do.
_NOT_SETTINGS = frozenset({"TASKLINE_API_KEY", "TASKLINE_API_URL", "TASKLINE_CACHE_DIR", "TASKLINE_CONFIG"})
# Variables of the project's own tests.
_TEST_PREFIX = "TASKLINE_TEST_"

QUEUE_NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"
_DURATION = r"([1-9][0-9]{0,8})(ms|s|m|h|d)"
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
# Steps of about two: a delay takes fewest hops then.
_DEFAULT_TIERS = ("500ms", "1s", "2s", "5s", "10s", "20s", "1m", "2m", "5m", "10m", "20m", "1h", "2h", "5h", "12h", "1d", "2d", "7d")  # fmt: skip
# Lists of names, which a variable gives separated by commas.
_LISTS = frozenset({"queues", "tiers"})
# Two thirds of a year: with its random factor a wait stays within the longest delay.
MAX_RETRY_CAP_SECONDS = 365 * 86_400 / 1.5
QueueName = Annotated[str, Field(pattern=QUEUE_NAME)]


def duration_ms(text: str) -> int:
    """A duration in milliseconds from a whole number with its unit (500ms, 20m, 7d).

    Raises:
        ValueError: it is no such thing.
    """
    matched = re.fullmatch(_DURATION, text)
    if matched is None:
        raise ValueError(f"{text!r} is no duration: a whole number and ms, s, m, h or d")
    return int(matched[1]) * _UNIT_MS[matched[2]]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class KafkaSettings(_Section):
    """How to reach the log."""

    bootstrap_servers: str = Field("127.0.0.1:9092", description="Comma-separated host:port list of brokers.")
    namespace: str = Field(
        "",
        pattern=r"^([a-zA-Z0-9_-]+\.)?$",
        description="Prefix of every topic and group, ending in a dot; lets several Tasklines share a cluster.",
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="As librdkafka's security.protocol."
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(
        None, description="With a SASL protocol: the mechanism."
    )
    sasl_username: str | None = Field(None, description="With a SASL protocol: the user.")
    sasl_password: SecretStr | None = Field(None, description="With a SASL protocol: the password.")
    ssl_ca_location: str | None = Field(None, description="With an SSL protocol: file of CA certificates.")
    session_timeout_ms: int = Field(
        45_000,
        ge=1_000,
        description='A consumer silent for longer is taken for dead and its partitions move. Shorter: faster recovery after kill -9; longer: fewer moves on a slow machine. With group_protocol = "consumer" the broker\'s group.consumer.session.timeout.ms holds instead.',
    )
    group_protocol: Literal["classic", "consumer"] = Field(
        "classic",
        description="How workers and delay roles share partitions: among themselves (classic, cooperative), or told by the broker (consumer, KIP-848; Kafka 4.0 or newer), where a member that comes or goes pauses nobody else. Members of both kinds may be in a group while it is changed over.",
    )


class TopicSettings(_Section):
    """The topology that `taskline topics create` makes and every role checks."""

    queues: tuple[QueueName, ...] = Field(
        ("default",), min_length=1, description="The worker capabilities; each has three dispatch topics."
    )
    dispatch_partitions: int = Field(
        6,
        ge=1,
        le=1000,
        description="Partitions of each dispatch topic: the most worker processes of one queue that work at once. May grow.",
    )
    lanes: int = Field(
        6,
        ge=1,
        le=1000,
        description="Partitions of tasks.lifecycle: the most projector processes that work at once. Fixed when created.",
    )
    dlq_partitions: int = Field(3, ge=1, le=1000, description="Partitions of tasks.dlq. May grow.")
    delay_partitions: int = Field(
        3,
        ge=1,
        le=1000,
        description="Partitions of tasks.scheduled and of each delay tier: the most delay processes that work at once. May grow.",
    )
    replication_factor: int = Field(1, ge=1, le=9, description="Copies of each partition. Production: 3.")
    min_insync_replicas: int = Field(
        1, ge=1, le=9, description="Copies that must have a record before it is acknowledged. Production: 2."
    )
    retention_days: float = Field(
        30,
        gt=0,
        description="How long the log keeps dispatch and lifecycle records; at least task_retention_days.",
    )
    dlq_retention_days: float = Field(
        14, gt=0, description="How long dead letters can be listed and replayed, in the log and in the view."
    )
    max_record_bytes: int = Field(
        1_048_576,
        ge=16_384,
        description="Largest record of the dispatch and lifecycle topics; the dead-letter topic takes twice as much.",
    )


class CassandraSettings(_Section):
    """How to reach the view."""

    contact_points: tuple[str, ...] = Field(("127.0.0.1",), min_length=1, description="Hosts to begin with.")
    port: int = Field(9042, ge=1, le=65_535, description="Native-protocol port.")
    keyspace: str = Field(
        "taskline", pattern=r"^[a-z][a-z0-9_]{0,47}$", description="Where the view's tables are."
    )
    local_dc: str = Field("datacenter1", description="The data centre that this process talks to.")
    replication_factor: int = Field(
        1,
        ge=1,
        le=9,
        description="Copies of each row in local_dc, used when the keyspace is created. Production: 3.",
    )
    username: str | None = Field(None, description="With password authentication: the user.")
    password: SecretStr | None = Field(None, description="With password authentication: the password.")
    request_timeout_seconds: float = Field(
        10.0, gt=0, description="How long one request may take before it counts as failed."
    )
    bucket_seconds: int = Field(
        600,
        ge=1,
        description="Time span of one view partition (per lane); fixed when the keyspace is created. Keep a partition below 100 MB.",
    )

    @field_validator("contact_points", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class SchemaSettings(_Section):
    """How records are framed."""

    registry_url: str | None = Field(
        None,
        description="URL of a Confluent-compatible schema registry: records are then written in its wire format. None: Avro single-object encoding.",
    )


class ProducerSettings(_Section):
    """How tasks are put in."""

    max_payload_bytes: int = Field(262_144, ge=1, description="Largest encoded payload.")
    delivery_timeout_seconds: float = Field(
        30.0,
        gt=0,
        description="How long a record may wait for its acknowledgement before the outcome is reported as unknown.",
    )
    linger_ms: float = Field(
        2.0,
        ge=0,
        description="How long the client waits for more records to share a request. Higher: cheaper; lower: faster when idle.",
    )
    max_buffered_records: int = Field(
        20_000, ge=1, description="Records that may wait for acknowledgement; submitters wait beyond it."
    )
    max_block_seconds: float = Field(
        30.0, ge=0, description="How long a submitter waits for room in the buffer before QueueFull."
    )
    compression: Literal["none", "lz4", "zstd", "gzip", "snappy"] = Field(
        "lz4", description="Of each request's records."
    )
    task_retention_days: float = Field(
        30, gt=0, description="How long a task stays readable after its submission."
    )


class WorkerSettings(_Section):
    """How handlers are run."""

    concurrency: int = Field(32, ge=1, le=10_000, description="Handlers that run at once in a process.")
    prefetch: int = Field(
        64, ge=1, le=10_000, description="Records per priority that wait in memory for a slot."
    )
    dispatch: Literal["weighted", "drain"] = Field(
        "weighted",
        description="How free slots are shared among priorities. weighted: by weights, high first; drain: strictly, so that low waits for as long as there is anything else.",
    )
    weight_high: int = Field(
        16,
        ge=1,
        le=1_000,
        description="High's share of what is begun while all priorities have tasks waiting (dispatch = weighted). More: sooner.",
    )
    weight_normal: int = Field(4, ge=1, le=1_000, description="As weight_high, of normal.")
    weight_low: int = Field(
        1,
        ge=1,
        le=1_000,
        description="As weight_high, of low. With 16, 4 and 1 every 21st task that is begun is a low one, however many others wait.",
    )
    high_reserve: float = Field(
        0.1,
        ge=0,
        le=0.9,
        description="Share of the slots, and of each executor's places, that only high-priority tasks may use, rounded up; fewer than four are not divided. More: high starts sooner while long tasks run; less: more slots for the rest.",
    )
    limits_file: Path | None = Field(
        None,
        description="A TOML file of limits per task type, [types.\"mail.send\"] with max_concurrency, rate_per_second, and both with _per_key; it is read again when it changes. Its limits replace the task's own. They are a process's own: n workers let n times as much through.",
    )
    window: int = Field(
        1_000,
        ge=1,
        le=4_000,
        description="Records of one partition that were read and are not done; bounds what a crash can repeat and the size of the commit's metadata. Those that are done behind a long task do not count.",
    )
    lifecycle_linger_ms: float = Field(
        5.0,
        ge=0,
        description="Under load, how long events of a lane wait to share a batch. An idle lane never waits.",
    )
    commit_interval_seconds: float = Field(
        0.5,
        gt=0,
        description="How often progress is committed. Longer: cheaper, more to repeat after a crash.",
    )
    grace_seconds: float = Field(
        30.0,
        ge=0,
        description="How long running handlers may take to finish at a shutdown or when their partition moves.",
    )
    default_timeout_seconds: float = Field(
        300.0, gt=0, description="Time limit of handlers whose task type and task give none."
    )
    max_result_bytes: int = Field(
        65_536, ge=0, description="Largest encoded result; a bigger one is a permanent failure."
    )
    children: int = Field(
        4,
        ge=1,
        le=1_000,
        description="Child processes for plain (not async) handlers, each of which runs one at a time: so many run at once. About the number of cores for handlers that compute; more for handlers that wait.",
    )
    coroutines: Literal["child", "inline"] = Field(
        "child",
        description="Where async handlers run. child: in child processes, so that a blocked loop or a crash takes no more than them; inline: on the worker's own loop, cheaper, for handlers that are trusted never to block.",
    )
    child_memory_mb: int = Field(
        0,
        ge=0,
        description="How much memory a child process may have more than at its birth, in MB; 0: any. Beyond it a handler gets MemoryError, and its process is replaced. memory_mb of a task type goes before it. What many coroutines share is one process.",
    )
    child_max_tasks: int = Field(
        0,
        ge=0,
        description="A child process that has been given so many tasks gets no more and is replaced; 0: never. For handlers whose libraries leak. Fewer: less can leak, and more processes are started (some ms of processor time each).",
    )
    child_max_rss_mb: int = Field(
        0,
        ge=0,
        description="A child process whose resident memory is beyond so many MB after a task, as looked at about once a second, gets no more tasks and is replaced; 0: never. Well above what the registry's imports take, or each child is replaced within a second.",
    )
    loop_children: int = Field(
        1,
        ge=1,
        le=1_000,
        description="Child processes for async handlers, each of which runs many at once. More: more cores used, fewer handlers hit by a crash.",
    )
    progress_interval_seconds: float = Field(
        1.0,
        ge=0.1,
        le=3_600,
        description="How often a handler's progress is written at most; the longer an execution takes, the longer the pauses: a fiftieth of its time so far. Shorter: a livelier status; longer: fewer events, which are kept as long as their task.",
    )
    loop_stall_seconds: float = Field(
        30.0,
        gt=0,
        description="A child process whose event loop has not turned for so long is killed, with all handlers in it. Shorter: less time lost to a handler that blocks; longer: kinder to ones that compute.",
    )
    threads: int = Field(
        16, ge=1, le=1_000, description='Threads for plain handlers that ask for them (isolation="thread").'
    )
    cancels: bool = Field(
        True,
        description="Whether a worker looks for cancel notices between an attempt's Started and its handler, which costs an idle worker about a millisecond per pickup. false: cancelled tasks run all the same, and tasks that have waited over 12 hours are not looked up in the view.",
    )
    retry_base_seconds: float = Field(
        10.0,
        ge=0,
        description="The wait before the first retry of a task whose type has no policy of its own; each wait is multiplied by a random 0.5 to 1.5. Shorter: quicker over a hiccup; longer: kinder to what is broken.",
    )
    retry_multiplier: float = Field(
        10.0,
        ge=1,
        description="How much longer each further wait is than the one before it.",
    )
    retry_cap_seconds: float = Field(
        3_600.0,
        ge=0,
        le=MAX_RETRY_CAP_SECONDS,
        description="The longest wait between two attempts, before its random factor.",
    )
    poison_deaths: int = Field(
        3,
        ge=1,
        le=1_000,
        description="A task that has killed so many processes in which nothing else ran is put on the dead-letter topic, whatever its retries. Fewer: less harm; more: kinder to tasks that died of something else, such as a machine without memory.",
    )


class DelaySettings(_Section):
    """How tasks wait: delayed submissions and retries."""

    tiers: tuple[str, ...] = Field(
        _DEFAULT_TIERS,
        min_length=1,
        description="Lengths of the delay topics (ms, s, m, h, d). More: fewer hops per delay; fewer: fewer topics. One that is taken out is still emptied by the delay role, and can be deleted then.",
    )
    buffer_records: int = Field(
        200,
        ge=1,
        le=100_000,
        description="Records per partition that the delay role holds in memory; what waits beyond them stays in the log.",
    )
    buffer_bytes: int = Field(
        262_144, ge=1_024, description="Bytes per partition that the delay role holds in memory."
    )
    near_records: int = Field(
        4_000,
        ge=1,
        le=1_000_000,
        description="As buffer_records, for the shortest tier, whose records leave in the order in which they are due: more of them due within its length make each other late.",
    )
    near_bytes: int = Field(4_194_304, ge=1_024, description="As buffer_bytes, for the shortest tier.")
    commit_interval_seconds: float = Field(
        0.5,
        gt=0,
        description="How often progress is committed. Longer: cheaper, more to repeat after a crash.",
    )
    purge_interval_seconds: float = Field(
        60.0,
        gt=0,
        description="How often the delay role deletes what it has forwarded from the delay topics.",
    )

    @field_validator("tiers")
    @classmethod
    def _durations(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        lengths = [duration_ms(name) for name in value]
        if lengths != sorted(set(lengths)):
            raise ValueError("tiers stand in ascending order, each length once")
        return value


class DeadLetterSettings(_Section):
    """How dead letters are replayed."""

    max_generations: int = Field(
        5,
        ge=1,
        le=1_000,
        description="How often a task may be replayed, replays of its replays included; a task that dies each time must not go round for ever.",
    )
    replay_rate: float = Field(
        100.0, gt=0, description="Replays per second of `taskline dlq replay`, unless it is told otherwise."
    )


class ProjectorSettings(_Section):
    """How the log is folded into the view."""

    flush_records: int = Field(1_000, ge=1, le=100_000, description="Most records folded into one flush.")
    flush_interval_ms: float = Field(
        20.0,
        ge=0,
        description="How long records wait for others before a flush. Longer: cheaper; shorter: fresher view.",
    )
    write_concurrency: int = Field(32, ge=1, le=1_000, description="Batches in flight to Cassandra.")
    max_batch_bytes: int = Field(
        40_000,
        ge=1_000,
        description="Largest single-partition batch; stay under the server's batch_size_fail_threshold.",
    )


class ApiSettings(_Section):
    """The HTTP API."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(
        8080, ge=0, le=65_535, description="Port to listen on; 0: a free one, printed at start."
    )
    read_your_writes_seconds: float = Field(
        2.0,
        ge=0,
        description="How long a GET waits for the projector before it says 404 about an id that is only seconds old.",
    )
    young_task_seconds: float = Field(
        30.0, ge=0, description="An id younger than this may still be on its way into the view."
    )
    request_timeout_seconds: float = Field(
        15.0,
        gt=0,
        description="How long a request waits for its body (then 408), for Kafka's acknowledgement or for the view (then 503). Bounds producer.delivery_timeout_seconds here.",
    )
    max_requests_in_flight: int = Field(
        2_000,
        ge=1,
        description="Requests that a process serves at once; more are refused with 503. Bounds memory: each may hold a body.",
    )
    max_waiting: int = Field(
        2_000,
        ge=0,
        description="Requests that may wait for a task's end (?wait=) at once; more are refused with 503. They do not count as in flight. Each holds a connection and a few KB; all together read the view at most 200 times a second.",
    )
    ended_cache_bytes: int = Field(
        16_777_216,
        ge=0,
        description="Memory for answers about ended tasks, whose state can't change, so that asking again does not read the view; 0: none are kept.",
    )
    shutdown_delay_seconds: float = Field(
        1.0,
        ge=0,
        description="How long the API goes on serving, with /readyz at 503, after it was asked to stop. Behind a balancer: at least the interval of its checks.",
    )
    auth: Literal["keys", "off"] = Field(
        "keys",
        description="keys: every request but probes, metrics and the API's description needs an API key. off: everybody is let in, as anonymous_tenant; logged at start and shown by the metric taskline_api_authentication_off.",
    )
    anonymous_tenant: str = Field(
        "default", min_length=1, max_length=200, description="With auth = off: whose every task is."
    )
    key_cache_seconds: float = Field(
        30.0,
        ge=0,
        description="How long a process goes on with what it last read of an API key. A revoked key works for that long; shorter: more reads of Cassandra.",
    )
    key_stale_seconds: float = Field(
        3_600.0,
        ge=0,
        description="While Cassandra does not answer: how long a key that was read before goes on working. Longer: submissions outlast longer outages; a revoked key does too.",
    )
    idempotency_hours: float = Field(
        24.0,
        ge=0.1,
        le=24 * 30,
        description="How long an idempotency key is remembered. Longer: retries are safe for longer; each key is a row of some 200 bytes in Cassandra.",
    )
    max_batch_bytes: int = Field(
        4_194_304,
        ge=1_024,
        description="Largest body of POST /tasks/batch. Larger: fewer requests for many large payloads; each holds as much memory, and a multiple while it is read.",
    )
    rate_limit_storage: SecretStr = Field(
        SecretStr("memory://"),
        description="Where rate limits are counted. memory:// (the default): in each process, so that n processes let n times as much through; redis://[:password@]host:port/db (also rediss, redis+unix; extra `redis`): by all together.",
    )
    rate_limit_submissions_per_tenant: str | None = Field(
        None,
        description='Most tasks that a tenant may submit, as "1000/second; 100000/minute"; a batch counts each task. None: no limit.',
    )
    rate_limit_submissions_per_key: str | None = Field(
        None, description="As rate_limit_submissions_per_tenant, for each API key."
    )
    rate_limit_reads_per_tenant: str | None = Field(
        None, description="Most reading requests that a tenant may make, in the same form. None: no limit."
    )
    rate_limit_reads_per_key: str | None = Field(
        None, description="As rate_limit_reads_per_tenant, for each API key."
    )
    rate_limit_timeout_ms: float = Field(
        50.0,
        gt=0,
        description="How long a request waits for the counters in Redis; after that it passes uncounted, and so do those of the next second.",
    )


class GatewaySettings(_Section):
    """Workers of the HTTP protocol (`taskline gateway`)."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(
        8081, ge=0, le=65_535, description="Port to listen on; 0: a free one, printed at start."
    )
    lease_seconds: float = Field(
        60.0,
        ge=1,
        le=3_600,
        description="How long a fetched task is lent to its worker, unless it extends the lease. Shorter: what a dead worker held is run again sooner; longer: fewer extensions.",
    )
    max_lease_seconds: float = Field(
        3_600.0,
        ge=1,
        le=86_400,
        description="The longest that one extension may ask for. Shorter: a worker that asks for too much and dies holds a task for less.",
    )
    max_batch: int = Field(100, ge=1, le=1_000, description="Most tasks that one fetch brings.")
    max_wait_seconds: float = Field(
        30.0,
        ge=0,
        le=60,
        description="The longest that a fetch waits for a task. Longer: fewer requests; stay below the idle time-outs of balancers.",
    )
    max_waiting: int = Field(
        2_000,
        ge=1,
        description="Fetches that may wait at once; more are refused with 503. Each holds a connection.",
    )
    max_leases: int = Field(
        10_000,
        ge=1,
        description="Tasks that a process has lent at once; more are not handed out until some end. Each takes about 1 KB of its memory.",
    )
    buffer: int = Field(
        200,
        ge=1,
        le=2_000,
        description="Records of one partition that wait in memory for a fetch. Full of types that nobody fetches, the partition's are handed on to its topic's end.",
    )
    idle_seconds: float = Field(
        30.0,
        gt=0,
        description="A process that nobody has fetched from for so long leaves the workers' groups, and a type that nobody has fetched for so long counts as not fetched. Longer: fewer moves of partitions; shorter: others get the tasks sooner.",
    )
    unfetched_delay_seconds: float = Field(
        10.0,
        ge=0.1,
        le=3_600,
        description="How long a task of a type that nobody fetches waits in the delay tiers, once it is in the way of others; doubled each time, up to 64 times as long.",
    )


class TelemetrySettings(_Section):
    """Logs and metrics of every role."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged."
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: console on a terminal, JSON lines elsewhere."
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="Port of the Prometheus metrics of worker and projector; 0: a free one; None: off. The API serves /metrics itself.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address of the metrics port.")


class Settings(_Section):
    """All sections."""

    kafka: KafkaSettings = KafkaSettings()
    topics: TopicSettings = TopicSettings()
    cassandra: CassandraSettings = CassandraSettings()
    schemas: SchemaSettings = SchemaSettings()
    producer: ProducerSettings = ProducerSettings()
    worker: WorkerSettings = WorkerSettings()
    delay: DelaySettings = DelaySettings()
    dlq: DeadLetterSettings = DeadLetterSettings()
    projector: ProjectorSettings = ProjectorSettings()
    api: ApiSettings = ApiSettings()
    gateway: GatewaySettings = GatewaySettings()
    telemetry: TelemetrySettings = TelemetrySettings()


def load_settings(
    environ: Mapping[str, str] | None = None,
    *,
    config_file: Path | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Merge overrides, environment and file into checked settings.

    Args:
        environ: the environment; the process's own when None.
        config_file: a TOML file that must exist; when None, `$TASKLINE_CONFIG` or an existing `taskline.toml`.
        overrides: section → setting → value, e.g. from the command line; None values are skipped.

    Raises:
        InvalidSettings: an unknown name (with the nearest right one) or an impossible value.
    """
    environ = os.environ if environ is None else environ
    merged: dict[str, dict[str, Any]] = {}
    for source in (_from_file(environ, config_file), _from_environment(environ), overrides or {}):
        for section, values in source.items():
            kept = {name: value for name, value in values.items() if value is not None}
            merged.setdefault(section, {}).update(kept)
    return _checked(merged)


def as_environment(settings: Settings) -> dict[str, str]:
    """The variables that make a child process load the same settings (only what differs from the defaults; secrets in clear)."""
    variables = {}
    for section, values in settings.model_dump(exclude_defaults=True).items():
        for name, value in values.items():
            if isinstance(value, SecretStr):
                text = value.get_secret_value()
            else:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            variables[f"{ENV_PREFIX}{section}__{name}".upper()] = text
    return variables


def _from_file(environ: Mapping[str, str], config_file: Path | None) -> Mapping[str, Mapping[str, Any]]:
    named = config_file or (Path(environ["TASKLINE_CONFIG"]) if environ.get("TASKLINE_CONFIG") else None)
    path = named or Path(CONFIG_FILE)
    if named is None and not path.is_file():
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSettings(f"can't read settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"settings file {path} is not TOML: {error}") from error
    for section, values in document.items():
        if not isinstance(values, dict):
            raise InvalidSettings(
                f"settings file {path}: {section!r} must stand in a [section]{_hint(section, Settings.model_fields)}"
            )
    return document


def _from_environment(environ: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for variable, value in environ.items():
        if (
            not variable.startswith(ENV_PREFIX)
            or variable in _NOT_SETTINGS
            or variable.startswith(_TEST_PREFIX)
        ):
            continue
        section, separator, name = variable.removeprefix(ENV_PREFIX).lower().partition("__")
        if not separator:
            raise InvalidSettings(f"{variable} names no setting{_hint(variable, _all_variables())}")
        found.setdefault(section, {})[name] = value.split(",") if name in _LISTS else value
    return found


def _checked(merged: Mapping[str, Mapping[str, Any]]) -> Settings:
    for section, values in merged.items():
        if section not in Settings.model_fields:
            raise InvalidSettings(
                f"unknown settings section {section!r}{_hint(section, Settings.model_fields)}"
            )
        known = Settings.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        for name in values:
            if name not in known:
                raise InvalidSettings(f"unknown setting {section}.{name}{_hint(name, known)}")
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_input=False)
        )
        raise InvalidSettings(problems) from error


def _all_variables() -> list[str]:
    return [
        f"{ENV_PREFIX}{section}__{name}".upper()
        for section, field in Settings.model_fields.items()
        for name in field.annotation.model_fields  # type: ignore[union-attr]
    ]


def _hint(name: str, known: Iterable[str]) -> str:
    return did_you_mean(nearest(name, known))
