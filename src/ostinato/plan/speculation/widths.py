"""The numbers of drafts that steps have: each has graphs of its own."""

from __future__ import annotations


def draft_numbers(num_speculative_tokens: int, adaptive: bool) -> tuple[int, ...]:
    """Drafts per row that a step may have, ascending: none and all; and if they are chosen, half of them, half of
    that, and so on. Where many rows make a step dear, few drafts pay and many do not."""
    numbers = {0, num_speculative_tokens}
    while adaptive and num_speculative_tokens > 1:
        num_speculative_tokens //= 2
        numbers.add(num_speculative_tokens)
    return tuple(sorted(numbers))


def widths(num_speculative_tokens: int, adaptive: bool) -> tuple[int, ...]:
    """Tokens per row of the steps that decode, ascending."""
    return tuple(1 + number for number in draft_numbers(num_speculative_tokens, adaptive))
