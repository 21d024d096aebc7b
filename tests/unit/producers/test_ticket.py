from __future__ import annotations

import threading

from taskline.infra.log import Position
from taskline.producers.ticket import Ticket
from taskline.schemas.ids import new_task_id

HERE = Position(topic="t", partition=0, offset=1)


def ticket() -> Ticket:
    return Ticket(new_task_id(1), 0)


def test_no_outcome_in_time() -> None:
    waiting = ticket()
    assert not waiting.wait(0.001)
    waiting.resolve(HERE)
    assert waiting.wait(0)
    assert waiting.outcome == HERE


def test_an_outcome_that_is_there_is_not_waited_for() -> None:
    settled = ticket()
    settled.resolve(HERE)
    assert settled.wait(0)


def test_every_waiter_is_woken() -> None:
    # Many rounds, so that the outcome also falls between the waiter's two looks.
    for _ in range(300):
        waiting = ticket()
        resolver = threading.Thread(target=waiting.resolve, args=(HERE,))
        resolver.start()
        assert waiting.wait(10)
        resolver.join()
