"""How long threads of kernels wait awake for each other."""

from __future__ import annotations

from collections.abc import MutableMapping

TURNS = "10000"
"""Turns (a fraction of a millisecond) for which a thread waits awake before it leaves its core to others. libgomp's own
count is 300,000: where another process has taken one of the cores, the threads of the others then burn theirs until it
comes back, at every kernel, and a step takes up to 60 times as long."""


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Sets `TURNS` in the `environment` of a process that has not loaded libgomp yet, which comes with torch.

    What the user says of it stays: `GOMP_SPINCOUNT`, or `OMP_WAIT_POLICY`.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", TURNS)
