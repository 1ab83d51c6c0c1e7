"""Images of requests are prepared few at a time, and not by those who wait for too many."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ostinato.serve.chat.model_text import MOST_WAITING, Background
from ostinato.serve.http.errors import ApiError


def test_two_are_prepared_at_a_time_and_the_loop_goes_on() -> None:
    running, most, begun = 0, 0, threading.Semaphore(0)
    lock, release = threading.Lock(), threading.Event()

    def work() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        begun.release()
        release.wait(10)
        with lock:
            running -= 1
        return 1

    async def main() -> int:
        background = Background(None)
        tasks = [asyncio.create_task(background.prepared(work)) for _ in range(6)]
        for _ in range(2):
            await asyncio.to_thread(begun.acquire)
        await asyncio.sleep(0.05)
        release.set()
        return sum(await asyncio.gather(*tasks))

    assert asyncio.run(main()) == 6
    assert most == 2


def test_more_than_can_wait_are_told_to_come_later() -> None:
    release = threading.Event()

    async def main() -> None:
        background = Background(None)
        tasks = [asyncio.create_task(background.prepared(release.wait)) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await background.prepared(release.wait)
        assert refused.value.status == 429
        assert "Retry-After" in refused.value.headers
        release.set()
        await asyncio.gather(*tasks)
        assert await background.prepared(lambda: 3) == 3

    asyncio.run(main())
