"""The buffer between reader and folder, on a loop whose time the test turns."""

from __future__ import annotations

import asyncio

from taskline.processors.runs import Runs


def runs(**changes: float) -> Runs[int]:
    values = {"max_items": 3, "max_bytes": 100, "linger_seconds": 0.01} | changes
    return Runs(
        max_items=int(values["max_items"]),
        max_bytes=int(values["max_bytes"]),
        linger_seconds=values["linger_seconds"],
    )


def test_a_full_run_does_not_linger() -> None:
    async def check() -> None:
        buffer = runs(linger_seconds=1e6)
        for number in range(3):
            assert not buffer.full
            buffer.add(number, 1)
        assert buffer.full
        assert await buffer.take() == [0, 1, 2]
        assert not buffer.full
        assert len(buffer) == 0

    asyncio.run(check())


def test_bytes_fill_a_run_too() -> None:
    async def check() -> None:
        buffer = runs(linger_seconds=1e6)
        buffer.add(1, 100)
        assert buffer.full
        assert await buffer.take() == [1]

    asyncio.run(check())


def test_a_small_run_is_handed_out_after_its_linger() -> None:
    async def check() -> None:
        buffer = runs()
        taking = asyncio.create_task(buffer.take())
        await asyncio.sleep(0)
        buffer.add(1, 1)
        buffer.add(2, 1)
        assert await taking == [1, 2]

    asyncio.run(check())


def test_what_came_during_a_long_flush_waits_no_more() -> None:
    async def check() -> None:
        buffer = runs(linger_seconds=0)
        buffer.add(1, 1)
        assert await buffer.take() == [1]

    asyncio.run(check())


def test_a_reader_waits_for_room() -> None:
    async def check() -> None:
        buffer = runs()
        for number in range(3):
            buffer.add(number, 1)
        waiting = asyncio.create_task(buffer.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        await buffer.take()
        await waiting

    asyncio.run(check())


def test_close_hands_out_what_is_there_and_then_nothing() -> None:
    async def check() -> None:
        buffer = runs(linger_seconds=1e6)
        buffer.add(1, 1)
        taking = asyncio.create_task(buffer.take())
        await asyncio.sleep(0)
        buffer.close()
        assert await taking == [1]
        assert await buffer.take() == []

    asyncio.run(check())
