"""References of `delta_scan` and `delta_update`: the gated delta rule for prefill rows and decode rows.

`delta_scan` works in chunks. Inside a chunk the changes d of all tokens follow from one triangular system (Yang et al.
2024, arXiv 2412.06464, section 3.3; with a decay per key channel Kimi Linear, arXiv 2510.26692, section 3). With L_t
the sum of log decays up to token t, and S the state before the chunk:

    d_t + beta_t sum_{s < t} (k_t . e^(L_t - L_s) k_s) d_s = beta_t (v_t - S^T e^(L_t) k_t)
    o_t = S^T e^(L_t) q_t + sum_{s <= t} (q_t . e^(L_t - L_s) k_s) d_s
    S after token t = e^(L_t) S + sum_{s <= t} e^(L_t - L_s) k_s d_s^T

Only differences of sums that are at most 0 are exponents, so nothing overflows however strong a decay is. Chunks begin
at absolute multiples of their length: if a prompt is split at such a multiple, the same sums are made in the same
order. A row is computed alone and chunk by chunk, with the same calls on the same shapes in any batch.

`delta_update` works token by token, from read slot to write slots:

    S <- a S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q / sqrt(key_dim)

(Yang et al. 2024, arXiv 2412.06464, equation 10: a is one number per head. Kimi Linear, arXiv 2510.26692, equation 1: a
has one per key channel and multiplies the rows of S.) a = exp(-exp(A_log) softplus(a_raw + dt_bias)), or with a
decay_bound below 0, which no log decay goes below, exp(decay_bound sigmoid(exp(A_log) (a_raw + dt_bias))) (Ling 3.0);
beta = beta_scale sigmoid(b_raw), and q and k have length 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ostinato.ops.reference.stochastic_rounding import rounded
from ostinato.ops.sizes import DELTA_CHANNEL_CHUNK, DELTA_CHUNK, INT8_STATE_TOKENS

UNIT_EPS = 1e-6
"""Number added to the sum of squares by which q and k are normalised."""


def delta_update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    decay_bound: float,
    beta_scale: float,
    keys_take_turns: bool,
    states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    start_positions: torch.Tensor | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute the gated delta rule of decode rows.

    Row r's tokens are `r * n` to `r * n + n - 1`, n being `write_slots.shape[1]`. `q`, `k` [rows * n, key_heads,
    key_dim] as projected; `v` [rows * n, heads, value_dim], adjacent heads sharing a key head, or with
    `keys_take_turns` head i having key head i % key_heads; `a` [rows * n, heads], or [rows * n, heads, key_dim]
    for a decay per key channel, before bias and softplus; `b` [rows * n, heads] before the sigmoid; `A_log` [heads]
    float32; `dt_bias` float32, in the shape of a token of `a`; `decay_bound` is 0 if decays have no bound;
    `beta_scale` is 2 if a checkpoint lets beta reach 2, else 1. `states` [slots, heads, key_dim, value_dim] float32;
    `read_slots` [rows], 0 being the zero state; `write_slots` [rows, n], for the state after token i.

    -> [rows * n, heads, value_dim] in the dtype of `v`. All arithmetic is in float32, or in float64 if the states are.
    Padding rows read and write slot 0, which no request reads. With `packable`, states are rounded to 8 bits after the
    last of `INT8_STATE_TOKENS` tokens, a row's first token being at `start_positions` [rows].
    """
    heads, exact = v.shape[1], precision(states)
    by_row = write_slots.shape
    query, key = (per_head(x, heads, keys_take_turns, exact).unflatten(0, by_row) for x in (q, k))
    log_decay = log_decays(a, A_log, dt_bias, decay_bound, exact).unflatten(0, by_row)
    beta = betas(b, beta_scale, exact).unflatten(0, by_row)
    value = v.to(exact).unflatten(0, by_row)
    # It is selected, not multiplied, so the null slot's content reaches no output.
    state = torch.where((read_slots == 0).view(-1, 1, 1, 1), 0, states[read_slots])
    outputs = []
    for i in range(by_row[1]):
        decay = log_decay[:, i].exp()
        state = state * decay.view(*decay.shape[:2], -1, 1)  # [rows, heads, 1 or key_dim, 1]
        held = (key[:, i].unsqueeze(2) @ state).squeeze(2)  # S^T k: [rows, heads, value_dim]
        change = beta[:, i].unsqueeze(-1) * (value[:, i] - held)
        state = state + key[:, i].unsqueeze(3) * change.unsqueeze(2)
        outputs.append((query[:, i].unsqueeze(2) @ state).squeeze(2))
        if packable:
            assert start_positions is not None, "positions say where states are packable"
            state = rounded(state, exact, start_positions + i, None, packable)
        states[write_slots[:, i]] = state
    out: torch.Tensor = torch.stack(outputs, dim=1).flatten(0, 1) * float(q.shape[2]) ** -0.5
    return out.to(v.dtype)


def precision(states: torch.Tensor) -> torch.dtype:
    """Return the dtype of all arithmetic. States are float32: 16 bits lose the small steps that a delta net adds."""
    assert states.dtype in (torch.float32, torch.float64), f"states of a delta net in {states.dtype}; use float32"
    return states.dtype


def per_head(x: torch.Tensor, heads: int, take_turns: bool, exact: torch.dtype) -> torch.Tensor:
    """Return `x` [tokens, key_heads, key_dim] for each of `heads` heads, each vector divided by its length.

    An element of it is x / sqrt(sum of squares + `UNIT_EPS`).
    """
    wide = x.to(exact)
    unit = wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + UNIT_EPS)
    times = heads // x.shape[1]
    return unit.repeat(1, times, 1) if take_turns else unit.repeat_interleave(times, dim=1)


def log_decays(
    a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, decay_bound: float, exact: torch.dtype
) -> torch.Tensor:
    """Return the logarithms of the decays, at most 0, in the shape of `a`."""
    rate, biased = A_log.to(exact).exp().view(-1, *[1] * (a.dim() - 2)), a.to(exact) + dt_bias.to(exact)
    return decay_bound * (rate * biased).sigmoid() if decay_bound < 0 else -rate * F.softplus(biased)


def betas(b: torch.Tensor, beta_scale: float, exact: torch.dtype) -> torch.Tensor:
    """Return the fraction of a key's value that the new one replaces, 0 to `beta_scale`, in the shape of `b`."""
    return beta_scale * b.to(exact).sigmoid()


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
    decay_bound: float,
    beta_scale: float,
    keys_take_turns: bool,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    checkpoints: Sequence[tuple[int, int, int]] = (),
    packable: bool = False,
) -> torch.Tensor:
    """Compute the gated delta rule of prefill rows.

    Row r owns tokens `row_starts[r]:row_starts[r + 1]`, the first at `start_positions[r]` of its request. Shapes as in
    delta_update, with `tokens` in place of `rows * n`; `read_slots` [rows] (0: the zero state); `write_slots` [rows],
    for the state after the row's last token. `checkpoints` are (row, offset, slot): the state after `offset` tokens of
    the row also goes to `slot`. No row may write a slot that another one reads. With `packable`, states are rounded as
    there. -> [tokens, heads, value_dim] in the dtype of `v`.
    """
    row_starts = row_starts - row_starts[:1]  # Other rows may come first.
    out, heads, exact = torch.empty_like(v), v.shape[1], precision(states)
    length = DELTA_CHUNK if a.dim() == 2 else DELTA_CHANNEL_CHUNK
    if packable:
        length = INT8_STATE_TOKENS
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
            log_decay = log_decays(a[part], A_log, dt_bias, decay_bound, exact).view(stop - token, heads, -1)
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
                if token < at < stop:
                    states[slot] = _after(chunk, state, changes, at - token)
            state = _after(chunk, state, changes, stop - token)
            if packable:
                last = start_positions[row : row + 1] + stop - 1 - starts[row]
                state = rounded(state[None], exact, last, None, packable)[0]
            for at, slot in wanted:
                if at == stop:
                    states[slot] = state
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
    right_side = chunk.beta * (chunk.v - expected)
    changes: torch.Tensor = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    return changes


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
    """Return scores [heads, t, s] of `left` [heads, n, key_dim] at t and the key at s <= t, decayed since."""
    apart = chunk.log_decay.unsqueeze(2) - chunk.log_decay.unsqueeze(1)  # [heads, t, s, d]
    if apart.shape[3] == 1:
        return (left @ chunk.k.transpose(1, 2)) * _decay(apart.squeeze(3), left.dtype)
    return torch.einsum("htc,hsc,htsc->hts", left, chunk.k, _decay(apart, left.dtype))


def _decay(log: torch.Tensor, exact: torch.dtype) -> torch.Tensor:
    """Return exp of `log`, clamped as values above 0, which do not count, could overflow."""
    return log.to(exact).clamp(MIN_LOG_DECAY, 0.0).exp()
