"""token_shift: each token's predecessor in its row; the last token of a row is kept in slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def token_shift(
    x: torch.Tensor,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """Return y[t] = x[t - 1] within a row, and for the row's first token the content of the read slot.

    `x` [tokens, channels]; `states` [slots, 1, channels]; rows, slots and `checkpoints` as for `causal_conv1d`, with
    which it shares the interface: the state after a token is the token. Read slot 0 gives zeros. -> like `x`.
    """
    tokens_per_row = write_slots.shape[1]
    decode_tokens = num_decode_rows * tokens_per_row
    out = torch.empty_like(x)
    if num_decode_rows:
        decode = x[:decode_tokens].unflatten(0, (num_decode_rows, tokens_per_row))
        shifted = out[:decode_tokens].unflatten(0, (num_decode_rows, tokens_per_row))
        shifted[:, 0] = first_inputs(states, read_slots[:num_decode_rows])
        shifted[:, 1:] = decode[:, :-1]
        states[write_slots[:num_decode_rows], 0] = decode
    if num_decode_rows == read_slots.shape[0]:
        return out
    starts = row_starts[num_decode_rows:].tolist()
    for row, (start, end) in enumerate(pairwise(starts), num_decode_rows):
        if start == end:
            continue
        out[start] = first_inputs(states, read_slots[row : row + 1])[0]
        out[start + 1 : end] = x[start : end - 1]
        for of_row, offset, slot in checkpoints:
            if of_row == row:
                states[slot, 0] = x[start + offset - 1]
        states[write_slots[row, 0], 0] = x[end - 1]
    return out


def first_inputs(states: torch.Tensor, read_slots: torch.Tensor) -> torch.Tensor:
    """Return the content of the read slots, [rows, channels], with zeros for slot 0, whose content is selected away."""
    return torch.where((read_slots == 0)[:, None], 0, states[read_slots, 0])
