"""The rows of a step in a layer that keeps states: decode rows and prefill rows differ in how they advance theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ostinato.ops.step import StepInputs


@dataclass(frozen=True)
class DecodeRows:
    """What the update of a recurrence needs to know of decode rows."""

    read_slots: torch.Tensor
    """[rows]"""
    write_slots: torch.Tensor
    """[rows, tokens of a row]: the state after each token."""
    start_positions: torch.Tensor
    """[rows]"""


@dataclass(frozen=True)
class PrefillRows:
    """What the scan of a recurrence needs to know of prefill rows, whose tokens alone it gets."""

    row_starts: torch.Tensor
    """[rows + 1], among these tokens."""
    start_positions: torch.Tensor
    """[rows]"""
    read_slots: torch.Tensor
    """[rows]"""
    write_slots: torch.Tensor
    """[rows]: the state after the last token."""
    checkpoints: list[tuple[int, int, int]]
    """(row, offset, slot): further states to keep."""


def advance_rows(
    step: StepInputs,
    parts: Sequence[torch.Tensor],
    update: Callable[..., torch.Tensor],
    scan: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """`update(DecodeRows, *parts)` for the decode rows, which come first, `scan(PrefillRows, *parts)` for the others,
    each with their own tokens of `parts` [tokens, ...]. -> [tokens, ...]"""
    rows, tokens = step.num_decode_rows, step.num_decode_tokens
    if rows == step.read_slots.shape[0]:
        return update(DecodeRows(step.read_slots, step.write_slots, step.start_positions), *parts)
    prefill = PrefillRows(
        step.row_starts[rows:] - tokens,
        step.start_positions[rows:],
        step.read_slots[rows:],
        step.write_slots[rows:, 0],
        [(row - rows, offset, slot) for row, offset, slot in step.checkpoints],
    )
    if rows == 0:
        return scan(prefill, *parts)
    decode = DecodeRows(step.read_slots[:rows], step.write_slots[:rows], step.start_positions[:rows])
    decoded = update(decode, *(part[:tokens] for part in parts))
    out = decoded.new_empty((parts[0].shape[0], *decoded.shape[1:]))
    out[:tokens] = decoded
    out[tokens:] = scan(prefill, *(part[tokens:] for part in parts))
    return out
