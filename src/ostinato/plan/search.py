"""Bisection over whole numbers, for the largest or smallest value that works."""

from __future__ import annotations

from collections.abc import Callable


def largest(low: int, high: int, works: Callable[[int], bool]) -> int | None:
    """Return the largest of `low` to `high` that works, if all smaller ones work too; None if not even `low` does."""
    if low > high or not works(low):
        return None
    if works(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if works(middle):
            low = middle
        else:
            high = middle
    return low


def smallest(low: int, high: int, works: Callable[[int], bool]) -> int | None:
    """Return the smallest of `low` to `high` that works, if all larger ones work too; None if not even `high` does."""
    found = largest(-high, -low, lambda value: works(-value))
    return None if found is None else -found
