"""One line a while of each kind is enough."""

from __future__ import annotations

import logging

from taskline.processors.quiet import Quiet


def record(name: str, message: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, __file__, 1, message, values, None)


def test_repeats_of_a_noisy_library_pass_once_in_a_while() -> None:
    now = [0.0]
    quiet = Quiet(interval_seconds=10, clock=lambda: now[0])
    noisy = [record("aiokafka.conn", "no node %s", number) for number in range(3)]
    assert [quiet.filter(each) for each in noisy] == [True, False, False]
    assert quiet.filter(record("aiokafka.conn", "another"))
    now[0] = 10.0
    assert quiet.filter(noisy[0])


def test_everything_else_passes() -> None:
    quiet = Quiet()
    assert all(quiet.filter(record("taskline.processors", "waiting")) for _ in range(3))
    assert all(quiet.filter(record("aiokafkaesque", "waiting")) for _ in range(3))
