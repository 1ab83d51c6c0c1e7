"""Engines that do not start, or fail: made in the process of a server's engine."""

from __future__ import annotations

import time
from typing import Any


def never(*_: Any) -> Any:
    """Loads for ever."""
    while True:
        time.sleep(1)


def broken(*_: Any) -> Any:
    """Has a bug."""
    return 1 / 0


def out_of_memory(config: Any, progress: Any) -> Any:
    """Fails with the first request, in a way that no step may."""
    from ostinato.engine.engine import Engine

    engine = Engine(config, progress)
    step = engine.step

    def fail() -> Any:
        if engine.output("async-1") is not None:
            raise MemoryError("no more")
        return step()

    engine.step = fail
    return engine
