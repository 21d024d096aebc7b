from __future__ import annotations

import logging

from taskline.infra.kafka.quiet import REPEAT_SECONDS, Repetitions, kafka_logger


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("k", logging.ERROR, __file__, 1, text, (), None)


def test_a_line_passes_once_in_a_while() -> None:
    now = 0.0
    lines = Repetitions(lambda: now)
    assert lines.filter(line("Connect to ipv4#127.0.0.1:9092 failed (after 0ms in state CONNECT)"))
    assert not lines.filter(line("Connect to ipv4#127.0.0.1:9092 failed (after 12ms in state CONNECT)"))
    now = REPEAT_SECONDS
    assert lines.filter(line("Connect to ipv4#127.0.0.1:9092 failed (after 12ms in state CONNECT)"))


def test_numbers_do_not_make_a_line_new_but_hosts_do() -> None:
    lines = Repetitions(lambda: 0.0)
    assert lines.filter(line("127.0.0.1:9092: 3 request(s) timed out, in flight 12: timeout"))
    assert not lines.filter(line("127.0.0.1:9092: 4 request(s) timed out, in flight 99: timeout"))
    assert lines.filter(line("127.0.0.1:9093: 4 request(s) timed out, in flight 99: timeout"))
    assert lines.filter(line("10.0.0.1:9093: 4 request(s) timed out, in flight 99: timeout"))


def test_memory_is_bounded() -> None:
    lines = Repetitions(lambda: 0.0)
    for number in range(5_000):
        lines.filter(line(f"host{number}: down"))
    assert len(lines._last) <= 1_000


def test_the_filter_is_added_once() -> None:
    kafka_logger()
    assert sum(isinstance(each, Repetitions) for each in kafka_logger().filters) == 1
