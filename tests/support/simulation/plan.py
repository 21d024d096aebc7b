"""What a seed stands for: the shape of the system, the tasks, and which faults come how often.

Each seed has some kinds of faults and not others (swarm testing): a run with all of them at once hides what a few would show. One seed in
eight has none at all, and is held to more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from taskline.settings import Settings

MOST_SKEW_MS = 300_000
CALM_SHARE = 0.125
WORK, LEASED = "work", "default"
CRASH_POINTS = (
    *(
        f"{when} append {topic}"
        for when in ("before", "after")
        for topic in ("lifecycle", "dlq", "dispatch", "delay")
    ),
    *(f"{when} {what}" for when in ("before", "after") for what in ("commit", "write")),
)
SESSION_SECONDS = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A task, and what its caller does about it. Times in virtual seconds."""

    number: int
    at: float
    task_type: str
    priority: str
    # What each attempt does; the last one goes for those that follow.
    acts: tuple[str, ...]
    max_retries: int
    timeout: float
    delay: float | None = None
    start_by: float | None = None
    tenant: str = "default"
    key: str | None = None
    # (when, whether running ones are to be stopped) of each request to cancel.
    cancels: tuple[tuple[float, bool], ...] = ()

    @property
    def leased(self) -> bool:
        return self.task_type == "sim.leased"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Something that goes wrong at an instant."""

    at: float
    kind: str
    # Chooses among the roles that there are then.
    choice: int
    seconds: float
    point: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    seed: int
    calm: bool
    settings: Settings
    seconds: float
    jobs: tuple[Job, ...]
    troubles: tuple[Trouble, ...]
    # How many of each there are at first.
    roles: dict[str, int]
    # Most seconds of network latency, and how rarely it is much more.
    latency: float
    hold_back: float
    # Per append, commit, call of the view.
    append_faults: float
    commit_faults: float
    view_faults: float
    skew_ms: int
    replays: bool
    readers: int
    features: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {'calm' if self.calm else ' '.join(self.features) or 'no faults'}; {len(self.jobs)} tasks in "
            f"{self.seconds:.0f} s, {len(self.troubles)} troubles, roles {self.roles}, skew ±{self.skew_ms} ms"
        )


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"{seed} plan")
    calm = rng.random() < CALM_SHARE
    seconds = rng.uniform(4, 30)

    def swarm(name: str, share: float = 0.5) -> bool:
        chosen = not calm and rng.random() < share
        if chosen:
            features.append(name)
        return chosen

    features: list[str] = []
    kinds = []
    for kind, share in (
        ("crash worker", 0.5), ("crash at", 0.6), ("crash delay", 0.4), ("crash projector", 0.4),
        ("crash api", 0.3), ("crash gateway", 0.4), ("stop worker", 0.3), ("join worker", 0.4),
        ("join projector", 0.3), ("join delay", 0.3), ("broker away", 0.35), ("view away", 0.35),
        ("freeze", 0.35), ("expel", 0.4), ("wipe view", 0.15), ("stop gateway", 0.2), ("stop projector", 0.2),
        ("stop delay", 0.2),
    ):  # fmt: skip
        if swarm(kind, share):
            kinds.append(kind)
    leased = rng.random() < 0.5
    roles = {"api": rng.choice([1, 2]), "worker": rng.choice([1, 1, 2, 3]), "projector": 1, "delay": 1}
    roles["gateway"] = rng.choice([1, 2]) if leased else 0
    append_faults = rng.choice([0.005, 0.02, 0.08]) if swarm("append faults") else 0.0
    commit_faults = rng.choice([0.05, 0.3]) if swarm("commit faults") else 0.0
    view_faults = rng.choice([0.02, 0.2]) if swarm("view faults") else 0.0
    skew = MOST_SKEW_MS if swarm("skew", 0.25) else 0
    jobs = tuple(_job(rng, number, seconds, leased=leased, calm=calm) for number in range(rng.randint(6, 40)))
    troubles = tuple(
        Trouble(
            at=rng.uniform(0.2, seconds),
            kind=rng.choice(kinds),
            choice=rng.randrange(1_000),
            seconds=rng.choice([0.1, 1.0, 3.0, 8.0, 12.0]) * rng.uniform(0.5, 1.5),
            point=rng.choice(CRASH_POINTS),
        )
        for _ in range(rng.randint(1, 3 + 2 * len(kinds)) if kinds else 0)
    )
    return Plan(
        seed=seed,
        calm=calm,
        settings=_settings(rng, calm=calm),
        seconds=seconds,
        jobs=jobs,
        troubles=tuple(sorted(troubles, key=lambda each: each.at)),
        roles=roles,
        latency=rng.choice([0.001, 0.01, 0.05, 0.3]),
        hold_back=rng.choice([0.0, 0.1, 0.4]),
        append_faults=append_faults,
        commit_faults=commit_faults,
        view_faults=view_faults,
        skew_ms=skew,
        replays=rng.random() < 0.4,
        readers=rng.choice([1, 2]),
        features=tuple(features),
    )


def _job(rng: random.Random, number: int, seconds: float, *, leased: bool, calm: bool) -> Job:
    at = rng.uniform(0, seconds * 0.8)
    timeout = rng.choice([2.0, 20.0])
    kind = rng.choice(["sim.async", "sim.async", "sim.plain", "sim.leased" if leased else "sim.async"])
    lasts = [f"ok {round(rng.choice([0, 0.01, 0.3, 1.5]) * rng.uniform(0.5, 1.1), 3)}", "ok 0"]
    bad = ["fail 0", "fail 0.2", "permanent", "retry 0.7", "hang", "die", "beside"]
    if kind == "sim.leased":
        lasts += ["extend 2", "silent", "late"]
        bad = ["fail 0", "fail 1", "permanent", "silent", "late"]
    elif kind == "sim.plain":
        # Runs on the loop itself, so it can't wait.
        lasts, bad = ["ok 0"], ["fail 0", "permanent", "retry 0.7"]
    acts = [rng.choice(bad) for _ in range(rng.choice([0, 0, 0, 1, 2, 4]))]
    acts.append(rng.choice(lasts))
    delay = rng.choice([0.1, 0.5, 2.3, 7.0, 12.0]) * rng.uniform(1, 1.3) if rng.random() < 0.3 else None
    start_by = (delay or 0) + rng.choice([0.2, 3.0, 10.0]) if rng.random() < 0.15 else None
    cancels = []
    while rng.random() < 0.3 and len(cancels) < 3:
        cancels.append((rng.choice([0.0, 0.05, 0.3, 1.0, 4.0]) * rng.uniform(0.5, 1.5), rng.random() < 0.4))
    return Job(
        number=number,
        at=at,
        task_type=kind,
        priority=rng.choice(["high", "normal", "low"]),
        acts=tuple(acts),
        max_retries=rng.choice([0, 1, 3]),
        timeout=timeout,
        delay=delay,
        start_by=start_by,
        tenant=rng.choice(["default", "default", "other"]),
        key=rng.choice([None, None, "a", "b"]),
        cancels=tuple(cancels),
    )


def _settings(rng: random.Random, *, calm: bool) -> Settings:
    sections: dict[str, dict[str, Any]] = {
        "kafka": {"session_timeout_ms": round(SESSION_SECONDS * 1_000)},
        "topics": {
            "queues": (LEASED, WORK),
            "dispatch_partitions": rng.choice([1, 3]),
            "lanes": rng.choice([1, 2, 4]),
            "dlq_partitions": rng.choice([1, 2]),
            "delay_partitions": rng.choice([1, 2]),
        },
        "producer": {"delivery_timeout_seconds": rng.choice([2.0, 8.0])},
        "delay": {"tiers": ("200ms", "1s", "5s", "1m"), "commit_interval_seconds": rng.choice([0.1, 0.5])},
        "worker": {
            "concurrency": rng.choice([1, 2, 6]),
            "prefetch": rng.choice([1, 4, 100]),
            "window": rng.choice([2, 12, 200]),
            # A calm run has no fault that may run an attempt twice, a hand-over past its grace included.
            "grace_seconds": 60.0 if calm else rng.choice([0.0, 1.0, 5.0]),
            "commit_interval_seconds": rng.choice([0.1, 0.5]),
            "retry_base_seconds": rng.choice([0.1, 0.8]),
            "retry_multiplier": 1.5,
            "poison_deaths": 3,
            "lifecycle_linger_ms": rng.choice([0.0, 5.0]),
        },
        "projector": {"flush_records": rng.choice([1, 20, 500])},
        "api": {"request_timeout_seconds": rng.choice([3.0, 15.0])},
        "gateway": {
            "lease_seconds": rng.choice([2.0, 6.0]),
            "buffer": rng.choice([1, 4, 50]),
            "idle_seconds": rng.choice([3.0, 30.0]),
            "unfetched_delay_seconds": 1.0,
        },
    }
    return Settings.model_validate(sections)
