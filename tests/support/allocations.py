"""What torch's allocator is asked for, whatever the process keeps of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object], mapped: Path | None = None) -> int:
    """Bytes that `work` has asked the CPU's allocator for and not given back, at the most; what was there before does
    not count. Nor does the file that is `mapped`, as torch reports it, whole, whenever it is opened."""
    gc.collect()  # what others left is not given back meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    recorded = profiler.profiler
    assert recorded is not None, "the profiler has run"
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    assert events, "the profiler has seen no allocation"
    if mapped is not None:
        events = [event for event in events if abs(event.nbytes()) != mapped.stat().st_size]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))
