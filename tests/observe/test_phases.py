"""Where the time of a start goes."""

from __future__ import annotations

import time

from ostinato.observe.counts import StartupTimer


def test_parts_add_up_to_the_whole_also_where_one_comes_twice() -> None:
    phases = StartupTimer(begin=10.0)
    for name, at in (("import", 11.0), ("torch", 13.5), ("import", 13.75), ("plan", 20.0)):
        phases.end(name, at)
    assert phases.seconds == {"import": 1.25, "torch": 2.5, "plan": 6.25}
    assert list(phases.seconds) == ["import", "torch", "plan"]


def test_without_moments_it_takes_those_of_its_calls() -> None:
    before = time.monotonic()
    phases = StartupTimer()
    phases.end("all")
    assert 0 <= phases.seconds["all"] <= time.monotonic() - before
