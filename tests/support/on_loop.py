"""Tests without `await` of what needs an event loop that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def on_loop(test: Callable[..., Any]) -> Callable[[], None]:
    """The test, called within an event loop of its own."""

    async def run() -> None:
        test()

    def runs() -> None:
        asyncio.run(run())

    runs.__name__ = test.__name__
    return runs
