"""selective_scan: the Mamba-1 recurrence for prefill rows.

Each element of a state has its own rate of decay (Gu and Dao 2023, arXiv 2312.00752), so tokens do not become a matmul
as in `ssd_scan`: the scan takes token after token, as `selective_update` does. So a request has the same states however
its tokens are split into chunks and divided between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from ostinato.ops.state.selective_update import advance, initial, keep


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
) -> torch.Tensor:
    """Compute the Mamba-1 recurrence of prefill rows.

    Row r owns tokens `row_starts[r]:row_starts[r + 1]` of `x`, the first at `start_positions[r]` of its request. Shapes
    as in selective_update, with `tokens` in place of `rows * n`; `read_slots` [rows] (0: the zero state); `write_slots`
    [rows], for the state after the row's last token. `checkpoints` are (row, offset, slot): the state after `offset`
    tokens of the row also goes to `slot`. No row may write a slot that another one reads. -> [tokens, channels] in the
    dtype of `x`; the arithmetic is in float32. States are rounded as there, after each token.
    """
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
        kept = keep(state[:count], states.dtype, positions[:count] + t, noise)
        for index, slot in wanted.get(t + 1, ()):
            states[slot] = kept[index]
    return y.addcmul_(x.float(), D).to(x.dtype)
