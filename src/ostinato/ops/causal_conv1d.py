"""causal_conv1d: the short depthwise convolution of a state layer, with its last inputs kept in slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """y[t] = silu(bias + sum_j weight[j] * x[t - width + 1 + j]), with inputs before the row from its read slot.

    `x` [tokens, channels]; `weight` [width, channels]; `conv_states` [slots, width - 1, channels], the last inputs
    before a position. Row r owns tokens `row_starts[r]:row_starts[r + 1]`; read slot 0 is the zero state. The first
    `num_decode_rows` rows have `write_slots.shape[1]` tokens each and write the state after token i to
    `write_slots[r, i]`; the others write the state after their last token to `write_slots[r, 0]`. `checkpoints`
    are (row, offset, slot): the state after `offset` tokens of a prefill row also goes to `slot`.
    -> [tokens, channels] in the dtype of `x`; summed in float32.
    """
    tokens_per_row = write_slots.shape[1]
    decode_tokens = num_decode_rows * tokens_per_row
    out = torch.empty_like(x)
    if num_decode_rows:
        decode = x[:decode_tokens].unflatten(0, (num_decode_rows, tokens_per_row))
        window = torch.cat((_initial(conv_states, read_slots[:num_decode_rows]), decode), dim=1)
        out[:decode_tokens] = _convolve(window, weight, bias, tokens_per_row).flatten(0, 1)
        kept = conv_states.shape[1]
        for i in range(tokens_per_row):
            conv_states[write_slots[:num_decode_rows, i]] = window[:, i + 1 : i + 1 + kept]
    starts, writes = row_starts.tolist(), write_slots[:, 0].tolist()
    for row in range(num_decode_rows, len(starts) - 1):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        window = torch.cat((_initial(conv_states, read_slots[row : row + 1]), x[None, start:end]), dim=1)
        out[start:end] = _convolve(window, weight, bias, end - start)[0]
        for of_row, offset, slot in checkpoints:
            if of_row == row:
                conv_states[slot] = window[0, offset : offset + conv_states.shape[1]]
        conv_states[writes[row]] = window[0, end - start :]
    return out


def _initial(conv_states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """States of the read slots, zeros for slot 0, whose content is selected away and not multiplied."""
    return torch.where((slots == 0).view(-1, 1, 1), 0, conv_states[slots])


def _convolve(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """`window` [rows, width - 1 + tokens, channels] -> [rows, tokens, channels]."""
    y = window[:, :tokens].float() * weight[0].float()
    for j in range(1, weight.shape[0]):
        y.addcmul_(window[:, j : j + tokens].float(), weight[j].float())
    if bias is not None:
        y += bias.float()
    return F.silu(y, inplace=True).to(window.dtype)
