"""How long an event loop is held: what each of its callbacks takes of the processor. Machines that are busy with
something else do not change it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass
class Longest:
    """The longest callback since the last look."""

    seconds: float = 0.0
    what: str = ""

    def reset(self) -> None:
        self.seconds, self.what = 0.0, ""


@contextmanager
def watched(thread: int) -> Iterator[Longest]:
    """Watches the loop that runs in a thread, by its id."""
    longest = Longest()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        begin = time.thread_time()
        run(handle)
        took = time.thread_time() - begin
        if took > longest.seconds:
            longest.seconds, longest.what = took, repr(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield longest
