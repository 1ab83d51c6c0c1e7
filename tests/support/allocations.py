"""What torch's allocator is asked for, whatever the process keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that `work` has asked the CPU's allocator for and not given back, at the most; what was there before does
    not count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    recorded = profiler.profiler
    assert recorded is not None, "the profiler has run"
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    assert events, "the profiler has seen no allocation"
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))
