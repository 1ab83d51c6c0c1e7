"""What the allocators of torch and numpy are asked for, whatever the process keeps of it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that `work` has asked torch's allocator on the CPU for and not given back, at the most; what was there
    before does not count."""
    peak = _peak_of_torch(work)
    assert peak is not None, "the profiler has seen no allocation"
    return peak


def peak_with_numpy(work: Callable[[], object]) -> int:
    """As `peak_bytes`, and those of numpy and Python too: no less than they hold together at any time."""
    return sum(peaks(work))


def peaks(work: Callable[[], object]) -> tuple[int, int]:
    """As `peak_bytes`, and the same of numpy and Python."""
    tracemalloc.start()
    try:
        peak = _peak_of_torch(work) or 0
        return peak, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _peak_of_torch(work: Callable[[], object]) -> int | None:
    gc.collect()  # what others left is not given back meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        tracemalloc.reset_peak()
        work()
    recorded = profiler.profiler
    assert recorded is not None, "the profiler has run"
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0)) if events else None
