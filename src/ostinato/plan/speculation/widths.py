"""Numbers of drafts that steps may have: each has separate graphs."""

from __future__ import annotations


def draft_numbers(num_speculative_tokens: int, adaptive: bool) -> tuple[int, ...]:
    """Return the numbers of drafts per row that a step may have, ascending.

    They are none and all; with `adaptive` also half of them, half of that, and so on. If many rows make a step
    expensive, few drafts pay and many do not.
    """
    numbers = {0, num_speculative_tokens}
    while adaptive and num_speculative_tokens > 1:
        num_speculative_tokens //= 2
        numbers.add(num_speculative_tokens)
    return tuple(sorted(numbers))


def widths(num_speculative_tokens: int, adaptive: bool) -> tuple[int, ...]:
    """Return the numbers of tokens per row of decode steps, ascending."""
    return tuple(1 + number for number in draft_numbers(num_speculative_tokens, adaptive))
