"""Rows of a step in a layer with states: decode rows and prefill rows differ in how they advance their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ostinato.ops.step_inputs import StepInputs


@dataclass(frozen=True)
class DecodeRows:
    """Slots and positions of decode rows, for the update of a recurrence."""

    read_slots: torch.Tensor
    """Slots to read, [rows]."""
    write_slots: torch.Tensor
    """Slots for the state after each token, [rows, tokens of a row]."""
    start_positions: torch.Tensor
    """Position of each row's first token, [rows]."""


@dataclass(frozen=True)
class PrefillRows:
    """Slots and positions of prefill rows, for the scan of a recurrence, which gets only their tokens."""

    row_starts: torch.Tensor
    """First token of each row among these tokens, and the end of the last one, [rows + 1]."""
    start_positions: torch.Tensor
    """Position of each row's first token, [rows]."""
    read_slots: torch.Tensor
    """Slots to read, [rows]."""
    write_slots: torch.Tensor
    """Slots for the state after the last token, [rows]."""
    checkpoints: list[tuple[int, int, int]]
    """Further states to keep: (row, offset, slot)."""


def run_state_rows(
    step: StepInputs,
    parts: Sequence[torch.Tensor],
    update: Callable[..., torch.Tensor],
    scan: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Call `update(DecodeRows, *parts)` for the decode rows and `scan(PrefillRows, *parts)` for the others.

    Decode rows come first. Each call gets its rows' tokens of `parts` [tokens, ...]. -> [tokens, ...].
    """
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
