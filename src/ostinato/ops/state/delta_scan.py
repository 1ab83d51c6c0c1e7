"""delta_scan: the gated delta rule for prefill rows, in chunks.

Inside a chunk the changes d of all tokens follow from one triangular system (Yang et al. 2024, arXiv 2412.06464,
section 3.3; with a decay per key channel Kimi Linear, arXiv 2510.26692, section 3). With L_t the sum of log decays up
to token t, and S the state before the chunk:

    d_t + beta_t sum_{s < t} (k_t . e^(L_t - L_s) k_s) d_s = beta_t (v_t - S^T e^(L_t) k_t)
    o_t = S^T e^(L_t) q_t + sum_{s <= t} (q_t . e^(L_t - L_s) k_s) d_s
    S after token t = e^(L_t) S + sum_{s <= t} e^(L_t - L_s) k_s d_s^T

Only differences of sums that are at most 0 are exponents, so nothing overflows however strong a decay is. Chunks begin
at absolute multiples of their length: if a prompt is split at such a multiple, the same sums are made in the same
order. A row is computed alone and chunk by chunk, with the same calls on the same shapes in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostinato.ops.sizes import DELTA_CHANNEL_CHUNK, DELTA_CHUNK
from ostinato.ops.state.delta_update import betas, log_decays, per_head, precision

MIN_LOG_DECAY = -60.0
"""Smallest log decay: one below e^-60 is taken as e^-60, which no sum in float32 notices.

Smaller ones would make denormal products.
"""


@dataclass(frozen=True)
class DeltaChunk:
    """Some adjacent tokens of one row. `d` is 1, or key_dim if each key channel has a decay."""

    q: torch.Tensor
    """Scaled queries, [heads, n, key_dim]."""
    k: torch.Tensor
    """Keys, [heads, n, key_dim]."""
    v: torch.Tensor
    """Values, [heads, n, value_dim]."""
    beta: torch.Tensor
    """Write strengths, [heads, n, 1]."""
    log_decay: torch.Tensor
    """Log decay from the chunk's begin to after each token, [heads, n, d] in float64.

    The differences that are made of it are small where the sums are large.
    """


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    beta_scale: float,
    keys_take_turns: bool,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    checkpoints: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """Compute the gated delta rule of prefill rows.

    Row r owns tokens `row_starts[r]:row_starts[r + 1]`, the first at `start_positions[r]` of its request. Shapes as in
    delta_update, with `tokens` in place of `rows * n`; `read_slots` [rows] (0: the zero state); `write_slots` [rows],
    for the state after the row's last token. `checkpoints` are (row, offset, slot): the state after `offset` tokens of
    the row also goes to `slot`. No row may write a slot that another one reads. -> [tokens, heads, value_dim] in the
    dtype of `v`.
    """
    out, heads, exact = torch.empty_like(v), v.shape[1], precision(states)
    length = DELTA_CHUNK if a.dim() == 2 else DELTA_CHANNEL_CHUNK
    starts, positions = row_starts.tolist(), start_positions.tolist()
    reads, writes = read_slots.tolist(), write_slots.tolist()
    for row in range(len(starts) - 1):
        token, end = starts[row], starts[row + 1]
        wanted = [(starts[row] + offset, slot) for of_row, offset, slot in checkpoints if of_row == row]
        state = states[reads[row]].clone() if reads[row] else torch.zeros_like(states[0])
        while token < end:
            position = positions[row] + token - starts[row]
            stop = min(end, token + length - position % length)
            part = slice(token, stop)
            log_decay = log_decays(a[part], A_log, dt_bias, exact).view(stop - token, heads, -1)
            chunk = DeltaChunk(
                per_head(q[part], heads, keys_take_turns, exact).transpose(0, 1) * q.shape[2] ** -0.5,
                per_head(k[part], heads, keys_take_turns, exact).transpose(0, 1),
                v[part].to(exact).transpose(0, 1),
                betas(b[part], beta_scale, exact).t().unsqueeze(2),
                log_decay.double().cumsum(0).transpose(0, 1),
            )
            changes = _changes(chunk, state)
            out[part] = _outputs(chunk, state, changes).transpose(0, 1)
            for at, slot in wanted:
                if token < at <= stop:
                    states[slot] = _after(chunk, state, changes, at - token)
            state = _after(chunk, state, changes, stop - token)
            token = stop
        if starts[row] < end:
            states[writes[row]] = state
    return out


def _changes(chunk: DeltaChunk, state: torch.Tensor) -> torch.Tensor:
    """Return the change that each token adds at its key, [heads, n, value_dim].

    `state` [heads, key_dim, value_dim] is the one before the chunk.
    """
    system = (chunk.beta * _scores(chunk.k, chunk)).tril(-1)
    expected = (chunk.k * _decay(chunk.log_decay, state.dtype)) @ state
    return torch.linalg.solve_triangular(system, chunk.beta * (chunk.v - expected), upper=False, unitriangular=True)


def _outputs(chunk: DeltaChunk, state: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
    """Return the outputs of the chunk's tokens, [heads, n, value_dim]."""
    carried = (chunk.q * _decay(chunk.log_decay, state.dtype)) @ state
    return carried + _scores(chunk.q, chunk).tril() @ changes


def _after(chunk: DeltaChunk, state: torch.Tensor, changes: torch.Tensor, count: int) -> torch.Tensor:
    """Return the state after the first `count` tokens."""
    until = chunk.log_decay[:, count - 1 : count]
    keys = chunk.k[:, :count] * _decay(until - chunk.log_decay[:, :count], state.dtype)
    return state * _decay(until, state.dtype).transpose(1, 2) + keys.transpose(1, 2) @ changes[:, :count]


def _scores(left: torch.Tensor, chunk: DeltaChunk) -> torch.Tensor:
    """Return the scores [heads, t, s] of `left` [heads, n, key_dim] at t and the key at s, for t >= s.

    The key has decayed since s.
    """
    apart = chunk.log_decay.unsqueeze(2) - chunk.log_decay.unsqueeze(1)  # [heads, t, s, d]
    if apart.shape[3] == 1:
        return (left @ chunk.k.transpose(1, 2)) * _decay(apart.squeeze(3), left.dtype)
    return torch.einsum("htc,hsc,htsc->hts", left, chunk.k, _decay(apart, left.dtype))


def _decay(log: torch.Tensor, exact: torch.dtype) -> torch.Tensor:
    """Return exp of `log` (<= 0 where it counts).

    The logarithm is clamped so that values above 0, which do not count, cannot overflow.
    """
    return log.to(exact).clamp(MIN_LOG_DECAY, 0.0).exp()
