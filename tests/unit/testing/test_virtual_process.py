from __future__ import annotations

import asyncio

from taskline.testing.process import VirtualProcess


def test_everything_that_a_process_started_dies_with_it_and_nothing_else(loop, run):
    alive = []

    async def ticking(name):
        alive.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            alive.remove(name)

    async def spreading():
        async with asyncio.TaskGroup() as group:
            group.create_task(ticking("child"))
            loop.call_later(1, lambda: loop.create_task(ticking("grandchild, by a timer")))
            await ticking("parent")

    async def main():
        process = VirtualProcess("p")
        process.spawn(spreading(), name="spreading")
        other = asyncio.create_task(ticking("other"))
        await asyncio.sleep(2)
        assert set(alive) == {"parent", "child", "grandchild, by a timer", "other"}
        await process.kill()
        assert alive == ["other"]
        other.cancel()

    run(main())


def test_ties_are_cut_before_anything_is_cancelled(loop, run):
    said = []

    async def polite():
        try:
            await asyncio.Event().wait()
        finally:
            said.append("cancelled")

    async def main():
        process = VirtualProcess("p")
        process.tie(lambda: said.append("cut"))
        process.spawn(polite(), name="polite")
        await asyncio.sleep(0)
        await process.kill()

    run(main())
    assert said == ["cut", "cancelled"]


def test_a_task_that_swallows_its_cancellation_is_told_again(loop, run):
    told = []

    async def stubborn():
        for _ in range(3):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told.append(1)

    async def main():
        process = VirtualProcess("p")
        task = process.spawn(stubborn(), name="stubborn")
        await asyncio.sleep(0)
        await process.kill()
        assert task.done()

    run(main())
    assert len(told) == 3


def test_a_timer_of_a_dead_process_starts_nothing(loop, run):
    lived = []

    async def born_late():
        await asyncio.sleep(0)
        lived.append(1)

    async def main():
        process = VirtualProcess("p")

        async def start():
            loop.call_later(5, lambda: loop.create_task(born_late()))

        await process.spawn(start(), name="start")
        await process.kill()
        await asyncio.sleep(10)

    run(main())
    assert lived == []
