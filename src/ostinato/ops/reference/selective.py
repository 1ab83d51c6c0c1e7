"""References of `selective_scan` and `selective_update`: the Mamba-1 recurrence for prefill and decode rows.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t,  y_t = h_t C_t + D x_t,  dt_t = softplus(dt_raw + dt_bias)

Each channel has its own state, and each element of it its own rate of decay (Gu and Dao 2023, arXiv 2312.00752, section
3 and algorithm 2). So tokens do not become a matmul as in `ssd_scan`: the scan takes token after token, as
`selective_update` does, which goes from read slot to write slots. A request has the same states however its tokens are
split into chunks and divided between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from ostinato.ops.reference.stochastic_rounding import rounded


def selective_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    start_positions: torch.Tensor | None = None,
    noise: int | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute the Mamba-1 recurrence of decode rows.

    Row r's tokens are `r * n` to `r * n + n - 1`, n being `write_slots.shape[1]`. `x` [rows * n, channels]; `dt` [rows
    * n, channels] before bias and softplus; `A_log` [channels, size] float32, A being -exp(A_log); `B`, `C` [rows * n,
    size]; `D`, `dt_bias` [channels] float32; `states` [slots, channels, size]; `read_slots` [rows], 0 being the zero
    state; `write_slots` [rows, n], for the state after token i. -> [rows * n, channels] in the dtype of `x`. All
    arithmetic is in float32. Padding rows read and write slot 0, which no request reads.

    After each token a state is rounded to the dtype of `states`, and the next token begins with the rounded state. With
    `noise`, the number of the layer, 16-bit states are rounded stochastically (`ops/reference/stochastic_rounding.py`):
    a row's first token is at `start_positions` [rows]. With `packable`, float32 states are rounded to 8 bits after the
    last of `INT8_STATE_TOKENS` tokens.
    """
    by_row = write_slots.shape
    step, rates = F.softplus(dt.float() + dt_bias), -A_log.exp()
    steps, added = step.unflatten(0, by_row), (step * x.float()).unflatten(0, by_row)
    B, C = B.float().unflatten(0, by_row), C.float().unflatten(0, by_row)
    state = initial(states, read_slots)
    y = torch.empty_like(steps)
    for i in range(by_row[1]):
        y[:, i] = advance(state, rates, steps[:, i], added[:, i], B[:, i], C[:, i])
        position = None if start_positions is None else start_positions + i
        states[write_slots[:, i]] = keep(state, states.dtype, position, noise, packable)
    return y.flatten(0, 1).addcmul_(x.float(), D).to(x.dtype)


def initial(states: torch.Tensor, read_slots: torch.Tensor) -> torch.Tensor:
    """Return the states of `read_slots` [rows] in float32, zeros selected (not multiplied) for slot 0."""
    return torch.where((read_slots == 0).view(-1, 1, 1), 0, states[read_slots].float())


def advance(
    state: torch.Tensor, rates: torch.Tensor, steps: torch.Tensor, added: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> torch.Tensor:
    """Advance `state` [rows, channels, size] by one token of each row, in place, and return state times C.

    `rates` [channels, size]; `steps` and `added`, which is steps times x, [rows, channels]; `B`, `C` [rows, size]. ->
    [rows, channels].
    """
    state.mul_(torch.exp(steps.unsqueeze(-1) * rates)).addcmul_(added.unsqueeze(-1), B.unsqueeze(1))
    return (state * C.unsqueeze(1)).sum(-1)


def keep(
    state: torch.Tensor, dtype: torch.dtype, positions: torch.Tensor | None, noise: int | None, packable: bool
) -> torch.Tensor:
    """Round `state` [rows, channels, size] to the slots' `dtype`, in place, and return it in that dtype.

    It is the state after tokens at `positions` [rows].
    """
    if dtype == torch.float32 and not packable:
        return state
    kept = rounded(state.unsqueeze(1), dtype, positions, noise, packable).squeeze(1)
    state.copy_(kept)
    return kept


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    checkpoints: Sequence[tuple[int, int, int]] = (),
    noise: int | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute the Mamba-1 recurrence of prefill rows.

    Row r owns tokens `row_starts[r]:row_starts[r + 1]` of `x`, the first at `start_positions[r]` of its request. Shapes
    as in selective_update, with `tokens` in place of `rows * n`; `read_slots` [rows] (0: the zero state); `write_slots`
    [rows], for the state after the row's last token. `checkpoints` are (row, offset, slot): the state after `offset`
    tokens of the row also goes to `slot`. No row may write a slot that another one reads. -> [tokens, channels] in the
    dtype of `x`; the arithmetic is in float32. States are rounded as there, after each token.
    """
    row_starts = row_starts - row_starts[:1]  # Other rows may come first.
    starts = row_starts.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    # Rows are in order of length, so those with a token left are always the first.
    rows = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])
    targets = [(write, lengths[row], row) for row, write in enumerate(write_slots.tolist())]
    targets += [(slot, offset, row) for row, offset, slot in checkpoints]
    wanted: dict[int, list[tuple[int, int]]] = {}
    for slot, offset, row in targets:
        if lengths[row]:
            wanted.setdefault(offset, []).append((rows.index(row), slot))

    order = torch.tensor(rows, dtype=torch.int64, device=x.device)
    state, begins, positions = initial(states, read_slots[order]), row_starts[order].long(), start_positions[order]
    step, rates = F.softplus(dt.float() + dt_bias), -A_log.exp()
    added, B, C = step * x.float(), B.float(), C.float()
    y = torch.empty_like(step)
    for t in range(max(lengths, default=0)):
        count = sum(lengths[row] > t for row in rows)
        now = begins[:count] + t
        y[now] = advance(state[:count], rates, step[now], added[now], B[now], C[now])
        kept = keep(state[:count], states.dtype, positions[:count] + t, noise, packable)
        for index, slot in wanted.get(t + 1, ()):
            states[slot] = kept[index]
    return y.addcmul_(x.float(), D).to(x.dtype)
