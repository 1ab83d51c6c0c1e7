"""delta_update: the gated delta rule for decode rows, token by token, from read slot to write slots.

S <- a S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q / sqrt(key_dim)
(Yang et al. 2024, arXiv 2412.06464, equation 10: a is one number per head. Kimi Linear, arXiv 2510.26692, equation 1: a
has one per key channel and multiplies the rows of S.) a = exp(-exp(A_log) softplus(a_raw + dt_bias)), beta =
beta_scale sigmoid(b_raw), and q and k have length 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
    beta_scale: float,
    keys_take_turns: bool,
    states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """Compute the gated delta rule of decode rows.

    Row r's tokens are `r * n` to `r * n + n - 1`, n being `write_slots.shape[1]`. `q`, `k` [rows * n, key_heads,
    key_dim] as projected; `v` [rows * n, heads, value_dim], adjacent heads sharing a key head, or with
    `interleaved_key_heads` head i having key head i % key_heads; `a` [rows * n, heads], or [rows * n, heads, key_dim] for a
    decay per key channel, before bias and softplus; `b` [rows * n, heads] before the sigmoid; `A_log` [heads] float32;
    `dt_bias` float32, in the shape of a token of `a`; `beta_scale` is 2 if a checkpoint lets beta reach 2, else 1.
    `states` [slots, heads, key_dim, value_dim] float32; `read_slots` [rows], 0 being the zero state; `write_slots`
    [rows, n], for the state after token i.

    -> [rows * n, heads, value_dim] in the dtype of `v`. All arithmetic is in float32, or in float64 if the states are.
    Padding rows read and write slot 0, which no request reads.
    """
    heads, exact = v.shape[1], precision(states)
    by_row = write_slots.shape
    query, key = (per_head(x, heads, keys_take_turns, exact).unflatten(0, by_row) for x in (q, k))
    log_decay = log_decays(a, A_log, dt_bias, exact).unflatten(0, by_row)
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
        states[write_slots[:, i]] = state
    out = torch.stack(outputs, dim=1).flatten(0, 1) * q.shape[2] ** -0.5
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


def log_decays(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, exact: torch.dtype) -> torch.Tensor:
    """Return the logarithms of the decays, at most 0, in the shape of `a`."""
    rate = A_log.to(exact).exp().view(-1, *[1] * (a.dim() - 2))
    return -rate * F.softplus(a.to(exact) + dt_bias.to(exact))


def betas(b: torch.Tensor, beta_scale: float, exact: torch.dtype) -> torch.Tensor:
    """Return the fraction of a key's stored value that its new value replaces, in the shape of `b`.

    It is 0 to `beta_scale`.
    """
    return beta_scale * b.to(exact).sigmoid()
