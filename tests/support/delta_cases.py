"""Inputs of the gated delta rule, and the rule itself in float64, token by token and head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass
class DeltaCase:
    """The first ten arguments of delta_update and delta_scan."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    beta_scale: float
    keys_take_turns: bool = False
    decay_bound: float = 0.0

    def args(self, begin: int = 0, end: int | None = None) -> tuple[Any, ...]:
        """As the kernels take them, for a part of the tokens."""
        part = slice(begin, end)
        tokens = (self.q[part], self.k[part], self.v[part], self.a[part], self.b[part])
        return (*tokens, self.A_log, self.dt_bias, self.decay_bound, self.beta_scale, self.keys_take_turns)

    def exactly(self) -> DeltaCase:
        """The same numbers in float64."""
        found = {name: value.double() for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **found)

    def slots(self, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        """`count` slots with values in all but the null slot, which is NaN."""
        shape = (count, self.v.shape[1], self.k.shape[2], self.v.shape[2])
        states = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        states[0] = math.nan
        return states

    def log_decay(self, token: int) -> torch.Tensor:
        """[heads, 1 or key_dim]"""
        raw = (self.a[token].double() + self.dt_bias.double()).view(self.v.shape[1], -1)
        rate = self.A_log.double().exp().view(-1, 1)
        if self.decay_bound < 0:
            return self.decay_bound / (1 + (-rate * raw).exp())
        return -rate * torch.where(raw > 20, raw, raw.clamp(max=20).exp().log1p())

    def beta(self, token: int) -> torch.Tensor:
        """[heads]"""
        return self.beta_scale / (1 + (-self.b[token].double()).exp())

    def follow(self, begin: int, end: int, state: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Outputs of tokens `begin` to `end - 1` after `state`, and the state after each."""
        heads, value_dim = self.v.shape[1:]
        key_heads, key_dim = self.k.shape[1:]
        held = torch.zeros(heads, key_dim, value_dim) if state is None else state
        held = held.double()
        out, states = [], []
        for t in range(begin, end):
            decay, beta = self.log_decay(t).exp(), self.beta(t)
            held, o = held.clone(), torch.empty(heads, value_dim, dtype=torch.float64)
            for head in range(heads):
                key_head = head % key_heads if self.keys_take_turns else head // (heads // key_heads)
                q, k = (x[t, key_head].double() for x in (self.q, self.k))
                q, k = (x / ((x * x).sum() + 1e-6).sqrt() for x in (q, k))
                S = decay[head].view(-1, 1) * held[head]
                S = S + torch.outer(k, beta[head] * (self.v[t, head].double() - S.t() @ k))
                held[head], o[head] = S, S.t() @ q / math.sqrt(key_dim)
            out.append(o)
            states.append(held)
        return torch.stack(out) if out else self.v[:0].double(), states


def delta_case(
    tokens: int,
    *,
    key_heads: int = 1,
    heads_per_key: int = 2,
    key_dim: int = 4,
    value_dim: int = 3,
    per_channel: bool = False,
    beta_scale: float = 1.0,
    strength: float = 0.0,
    decay_bound: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DeltaCase:
    """q, k, v, and a, b are parts of two tensors, so strided by token. Decays last long with a small `strength`. With
    odd seeds keys take turns."""
    generator = torch.Generator().manual_seed(seed)
    heads, keys = key_heads * heads_per_key, key_heads * key_dim
    of_token = (heads, key_dim) if per_channel else (heads,)
    wide = torch.randn(tokens, 2 * keys + heads * value_dim, generator=generator).to(dtype)
    gates = torch.randn(tokens, math.prod(of_token) + heads, generator=generator).to(dtype)
    q, k, v = wide.split((keys, keys, heads * value_dim), dim=-1)
    a, b = gates.split((math.prod(of_token), heads), dim=-1)
    return DeltaCase(
        q.unflatten(-1, (key_heads, key_dim)),
        k.unflatten(-1, (key_heads, key_dim)),
        v.unflatten(-1, (heads, value_dim)),
        a.unflatten(-1, of_token),
        b,
        torch.randn(heads, generator=generator) + strength,
        torch.randn(of_token, generator=generator),
        beta_scale,
        bool(seed % 2),
        decay_bound,
    )


def with_betas(case: DeltaCase, bounds: str) -> DeltaCase:
    """Half of all tokens, or all of them, with a beta of 0 or of the largest."""
    b = case.b.clone()
    if bounds == "least":
        b.fill_(-200.0)
    elif bounds == "largest":
        b.fill_(200.0)
    elif bounds == "either":
        b[::2] = -200.0
        b[1::2] = 200.0
    return replace(case, b=b)
