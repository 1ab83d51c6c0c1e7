"""References of `causal_conv1d` and those like it, which keep the last inputs of each row in slots.

`causal_conv1d` is the short depthwise convolution of a state layer, `dilated_conv1d` one with gaps between its taps.
`token_shift` returns each token's predecessor in its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

SLAB = 32
"""Tokens of a prefill row that a CPU convolves at once: a pass per tap is cheap while they stay in a core's cache."""


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]] = (),
    activation: str | None = "silu",
) -> torch.Tensor:
    """Compute y[t] = silu(bias + sum_j weight[j] * x[t - width + 1 + j]), with earlier inputs from the read slot.

    Without an `activation` the sum is the result. `x` [tokens, channels]; `weight` [width, channels]; `conv_states`
    [slots, width - 1, channels], the last inputs before a position. Row r owns tokens `row_starts[r]:row_starts[r +
    1]`; read slot 0 is the zero state. The first `num_decode_rows` rows have `write_slots.shape[1]` tokens each and
    write the state after token i to `write_slots[r, i]`; the others write the state after their last token to
    `write_slots[r, 0]`. `checkpoints` are (row, offset, slot): the state after `offset` tokens of a prefill row also
    goes to `slot`. -> [tokens, channels] in the dtype of `x`; summed in float32.
    """
    weight, bias = weight.float(), None if bias is None else bias.float()
    kept = conv_states.shape[1]
    tokens_per_row = write_slots.shape[1]
    decode_tokens = num_decode_rows * tokens_per_row
    out = torch.empty_like(x)
    if num_decode_rows:
        decode = x[:decode_tokens].unflatten(0, (num_decode_rows, tokens_per_row))
        window = torch.cat((_initial(conv_states, read_slots[:num_decode_rows]), decode), dim=1)
        out[:decode_tokens] = _convolve(window.float(), weight, bias, activation).flatten(0, 1)
        # The state after token i is the window's inputs i + 1 to i + kept.
        states = window.unfold(1, kept, 1)[:, 1:].transpose(2, 3)
        conv_states[write_slots[:num_decode_rows]] = states
    starts, writes = row_starts.tolist(), write_slots[:, 0].tolist()
    for row in range(num_decode_rows, len(starts) - 1):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        before = _initial(conv_states, read_slots[row : row + 1])[0]
        _convolve_row(before, x[start:end], weight, bias, out[start:end], activation)
        for of_row, offset, slot in checkpoints:
            if of_row == row:
                conv_states[slot] = _last_inputs(before, x[start : start + offset])
        conv_states[writes[row]] = _last_inputs(before, x[start:end])
    return out


def dilated_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    dilation: int,
    conv_states: torch.Tensor,
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """Compute `causal_conv1d` with taps that are `dilation` tokens apart.

    `weight` [width, channels]; `conv_states` [slots, (width - 1) * dilation, channels].
    """
    # Between the taps are others of 0, so that inputs that no tap reads must be finite, as those of a row are.
    taps = weight.new_zeros(((weight.shape[0] - 1) * dilation + 1, weight.shape[1]))
    taps[::dilation] = weight
    rows = (row_starts, read_slots, write_slots, num_decode_rows, checkpoints)
    return causal_conv1d(x, taps, None, conv_states, *rows)


def _initial(conv_states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the states of the read slots, with zeros for slot 0, whose content is selected away and not multiplied."""
    return torch.where((slots == 0).view(-1, 1, 1), 0, conv_states[slots])


def _last_inputs(before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the last `width - 1` inputs up to the end of `x` [tokens, channels]; `before` are those before it."""
    kept = len(before)
    return x[len(x) - kept :] if len(x) >= kept else torch.cat((before[len(x) :], x))


def _convolve_row(
    before: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None,
) -> None:
    """Write the outputs of a row's tokens `x`, after the inputs `before` them, to `out` [tokens, channels]."""
    kept, slab = len(before), len(x) if x.is_cuda else min(SLAB, len(x))
    window = torch.empty(kept + slab, x.shape[1], dtype=torch.float32, device=x.device)
    window[:kept] = before
    for part, out_part in zip(x.split(slab), out.split(slab), strict=True):
        end = kept + len(part)
        window[kept:end] = part
        out_part.copy_(_convolve(window[:end], weight, bias, activation))
        window[:kept] = window[end - kept : end].clone()


def _convolve(
    window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Convolve `window` [..., width - 1 + tokens, channels] -> [..., tokens, channels], all in float32."""
    width = weight.shape[0]
    tokens = window.shape[-2] - width + 1
    taps = [window[..., j : j + tokens, :] for j in range(width)]
    y = taps[0] * weight[0] if bias is None else torch.addcmul(bias, taps[0], weight[0])
    for tap, tap_weight in zip(taps[1:], weight[1:], strict=True):
        y.addcmul_(tap, tap_weight)
    assert activation in ("silu", None), "a convolution ends with silu or with nothing"
    return F.silu(y, inplace=True) if activation else y


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
