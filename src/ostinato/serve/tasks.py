"""Coroutines that run concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def side_by_side(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines until they have ended.

    The first error is raised unchanged, once the others were cancelled and have ended.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
