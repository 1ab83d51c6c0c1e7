"""How long threads of kernels wait awake for each other."""

from __future__ import annotations

from collections.abc import MutableMapping

TURNS = 10_000
"""A fraction of a millisecond, for a process that may not have the machine to itself. libgomp's own count is 300,000:
where another process has taken one of the cores, the threads of the others burn theirs until it comes back, at every
kernel, and a step takes up to 60 times as long."""
TURNS_BESIDE_SERVER = 1000
"""Some microseconds, for the engine's process of a server, which needs a core between any two steps."""


def wait_briefly(environment: MutableMapping[str, str], turns: int = TURNS) -> None:
    """Says in the `environment` of a process that has not loaded libgomp yet, which comes with torch, for how many
    turns a thread waits awake before it leaves its core to others.

    What the user says of it stays: `GOMP_SPINCOUNT`, or `OMP_WAIT_POLICY`.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(turns))
