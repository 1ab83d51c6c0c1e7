"""Time that kernel threads spin while they wait for each other."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_TURNS = 10_000
"""Spins of a fraction of a millisecond, for a process that may have to share the machine.

libgomp's own count is 300,000. If another process has taken one of the cores, the threads on the other cores spin until
it comes back, at every kernel, and a step takes up to 60 times as long.
"""
TURNS_BESIDE_SERVER = 1000
"""Spins of some microseconds, for a server's engine process, which needs a core between any two steps."""


def limit_spin_wait(environment: MutableMapping[str, str], turns: int = SPIN_TURNS) -> None:
    """Set the OpenMP spin count in `environment`, for a process that has not loaded libgomp yet.

    libgomp comes with torch. A thread spins `turns` times before it gives its core to others. The user's own
    `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` takes precedence.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(turns))
