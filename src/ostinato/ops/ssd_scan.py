"""ssd_scan: the Mamba-2 recurrence for prefill rows, in chunks (state-space duality).

Dao and Gu 2024, arXiv 2405.21060, section 6 and listing 1: inside a chunk the recurrence is a masked matrix
product; between chunks one state is carried. Chunks lie on absolute multiples of `chunk_size`, so that the same
sums are made in the same order wherever a prompt is cut at such a multiple.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.ops.state_update import step_sizes


def reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    chunk_size: int,
    ssm_states: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    checkpoints: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """Row r owns tokens `row_starts[r]:row_starts[r + 1]` of `x`, the first at `start_positions[r]` of its request.

    Shapes as in state_update, with `tokens` in place of `rows * n`; `read_slots` [rows] (0: the zero state),
    `write_slots` [rows], where the state after the row's last token goes. `checkpoints` are (row, offset, slot):
    the state after `offset` tokens of the row also goes to `slot`. -> [tokens, heads, head_dim] in the dtype of
    `x`; the arithmetic is in float32.
    """
    out = torch.empty_like(x)
    starts, positions = row_starts.tolist(), start_positions.tolist()
    reads, writes = read_slots.tolist(), write_slots.tolist()
    for row in range(len(starts) - 1):
        token, end = starts[row], starts[row + 1]
        if token == end:
            continue
        wanted = {starts[row] + offset: slot for of_row, offset, slot in checkpoints if of_row == row}
        state = ssm_states[reads[row]].float() if reads[row] else torch.zeros_like(ssm_states[0], dtype=torch.float32)
        while token < end:
            position = positions[row] + token - starts[row]
            stop = min(end, token + chunk_size - position % chunk_size)
            span = slice(token, stop)
            # Per chunk and not for all tokens at once: a vectorised softplus rounds the last elements of a tensor
            # differently, and the same chunk must give the same bits wherever its row began.
            step = step_sizes(dt[span], dt_bias, dt_limit)
            chunk = (step * A, step.unsqueeze(-1) * x[span].float(), B[span].float())
            for at in [at for at in wanted if token < at < stop]:
                ssm_states[wanted[at]] = _advance(state, *(part[: at - token] for part in chunk))
            out[span] = _chunk_output(state, *chunk, C[span].float(), x[span], D)
            state = _advance(state, *chunk)
            if stop in wanted:
                ssm_states[wanted[stop]] = state
            token = stop
        ssm_states[writes[row]] = state
    return out


def _chunk_output(
    state: torch.Tensor,
    log_decay: torch.Tensor,
    scaled: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    x: torch.Tensor,
    D: torch.Tensor,
) -> torch.Tensor:
    """Outputs of one chunk of `n` tokens that begins with `state` [heads, head_dim, state] -> [n, heads, head_dim]."""
    head_dim = scaled.shape[2]
    groups, state_size = B.shape[1:]
    total = _total(log_decay).transpose(0, 1)  # [heads, n]
    decay = (total.unsqueeze(2) - total.unsqueeze(1)).float().tril_().exp_().tril_()  # [heads, t, s <= t]: from s to t
    by_group_B, by_group_C = B.transpose(0, 1), C.transpose(0, 1)  # [groups, n, state]
    scores = torch.bmm(by_group_C, by_group_B.transpose(1, 2))  # [groups, t, s]
    weights = decay.unflatten(0, (groups, -1)).mul_(scores.unsqueeze(1)).flatten(0, 1)
    y = torch.bmm(weights, scaled.transpose(0, 1))  # [heads, n, head_dim]
    carried = torch.bmm(by_group_C, state.reshape(groups, -1, state_size).transpose(1, 2))
    carried = carried.unflatten(2, (-1, head_dim)).transpose(1, 2).flatten(0, 1)  # [heads, n, head_dim]
    y.addcmul_(carried, total.float().exp().unsqueeze(-1))
    return y.transpose(0, 1).addcmul(x.float(), D.unsqueeze(-1))


def _advance(state: torch.Tensor, log_decay: torch.Tensor, scaled: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """The state after the tokens of a chunk, given the one before it. -> a new [heads, head_dim, state]."""
    groups = B.shape[1]
    total = _total(log_decay)
    remaining = (total[-1] - total).float().exp_()  # decay from after token t to the end
    weighted = (scaled * remaining.unsqueeze(-1)).unflatten(1, (groups, -1)).flatten(2)  # [n, groups, heads * dim]
    added = torch.bmm(weighted.permute(1, 2, 0), B.transpose(0, 1))  # [groups, heads of the group * dim, state]
    return added.view_as(state).addcmul(state, total[-1].float().exp().view(-1, 1, 1))


def _total(log_decay: torch.Tensor) -> torch.Tensor:
    """[n, heads] -> the log of the decay from the chunk's begin to after each token, in float64: the differences that
    are made of it are small where the sums are large."""
    return log_decay.double().cumsum(0)
