"""Pages have one owner, waiters are served in order, and no cancellation loses a page."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdxfer.demo.paging import NoPages, Pages


def test_a_page_goes_its_way_and_no_other() -> None:
    async def run() -> None:
        pages = Pages(4)
        mine = await pages.take(3, 1)
        assert (pages.free, pages.held, pages.lent) == (1, 3, 0)
        pages.lend(mine[:2])
        with pytest.raises(AssertionError, match="given back"):
            pages.give(mine)  # two of them are lent
        with pytest.raises(AssertionError, match="lent"):
            pages.lend(mine[:1])
        pages.home(mine)  # those that are home already stay so
        pages.give(mine)
        with pytest.raises(AssertionError, match="given back"):
            pages.give(mine)
        with pytest.raises(AssertionError):
            pages.give([0, 0])
        pages.audit()
        assert pages.free == 4

    asyncio.run(run())


def test_waiters_are_served_in_order_and_small_ones_do_not_overtake() -> None:
    async def run() -> None:
        pages = Pages(4)
        first = await pages.take(3, 1)
        large = asyncio.create_task(pages.take(4, 5))
        small = asyncio.create_task(pages.take(1, 5))
        await asyncio.sleep(0.01)
        assert pages.waiting == 2 and not small.done(), "one page is free, but the large one was first"
        pages.give(first)
        got = await large
        assert not small.done()
        pages.give(got)
        pages.give(await small)
        pages.audit()

    asyncio.run(run())


def test_who_waits_too_long_or_wants_too_much_is_told_by_name() -> None:
    async def run() -> None:
        pages = Pages(2)
        with pytest.raises(NoPages, match="3 pages asked for, this worker has 2"):
            await pages.take(3, 1)
        mine = await pages.take(1, 1)
        large = asyncio.create_task(pages.take(2, 0.05))
        small = asyncio.create_task(pages.take(1, 5))
        with pytest.raises(NoPages, match=r"2 pages asked for, 1 of 2 free after 0\.05 s"):
            await large
        pages.give(await small)  # it stood behind the large one, and need not wait any longer
        pages.give(mine)
        pages.audit()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_cancellation_at_any_moment_loses_nothing(seed: int) -> None:
    chance = random.Random(seed)

    async def user(pages: Pages) -> None:
        mine = await pages.take(chance.randint(1, 6), chance.choice([0.001, 1]))
        try:
            pages.lend(mine[:1])
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
        finally:
            pages.home(mine)
            pages.give(mine)

    async def run() -> None:
        pages = Pages(8)
        tasks = [asyncio.create_task(user(pages)) for _ in range(60)]
        while not all(task.done() for task in tasks):
            chance.choice(tasks).cancel()
            pages.audit()
            await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, NoPages | asyncio.CancelledError) for r in results)
        pages.audit()
        assert pages.free == 8 and not pages.waiting

    asyncio.run(run())


def test_late_writes_are_counted() -> None:
    async def run() -> None:
        poisoned: list[int] = []
        pages = Pages(2, poison=poisoned.extend, late=lambda taken: 7 if 1 in taken else 0)
        pages.give(await pages.take(2, 1))
        assert poisoned == [0, 1] and pages.late_bytes == 7

    asyncio.run(run())
