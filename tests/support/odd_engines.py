"""Engines that do not start, or fail: made in the process of a server's engine."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
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
    from ostinato.engine.core import EngineCore

    engine = EngineCore(config, progress)
    step = engine.step

    def fail() -> Any:
        if engine.output("async-1") is not None:
            raise MemoryError("no more")
        return step()

    engine.step = fail
    return engine


def shortened(config: Any, progress: Any) -> Any:
    """Somebody writes a file of its model anew while it is read."""
    from ostinato.engine.core import EngineCore

    [file] = Path(config.model).glob("*.safetensors")

    def shorten(what: str, done: int, total: int) -> None:
        if file.stat().st_size > 4096:
            os.truncate(file, 4096)
        progress(what, done, total)

    return EngineCore(config, shorten)


def limit_by(mib: int) -> None:
    """From now on the process may have so much more address space."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20,) * 2)


def limited_before_torch(config: Any, progress: Any) -> Any:
    """Has too little address space for the library."""
    import numpy  # noqa: F401 (which itself ends the process where it has no room)

    assert "torch" not in sys.modules
    limit_by(100)
    from ostinato.engine.core import EngineCore

    return EngineCore(config, progress)


def limited_before_the_cache(config: Any, progress: Any) -> Any:
    """Has enough of it for all but the cache."""
    from ostinato.engine.core import EngineCore

    limit_by(700)
    return EngineCore(config, progress)
