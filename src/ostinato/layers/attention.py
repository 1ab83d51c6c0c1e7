"""Multi-head attention with grouped keys and values, over paged cache memory."""

from __future__ import annotations

import torch
from torch import nn

from ostinato.layers.build import Build
from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.norm import RMSNorm
from ostinato.layers.step import LayerMemory, StepInputs
from ostinato.plan.model import AttentionSpec


class Attention(nn.Module):
    """q, k, v projections, optional norm of queries and keys, rotation, attention, output projection.

    `scale` multiplies the scores (default head_dim ** -0.5); `key_multiplier` multiplies the keys (Falcon-H1); keys
    before position `first_key` are not attended to (a prediction head has none for a text's first token).
    """

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        scale: float | None = None,
        key_multiplier: float = 1.0,
        first_key: int = 0,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.spec = spec
        self.q_size, self.kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = (("q_proj", self.q_size), ("k_proj", self.kv_size), ("v_proj", self.kv_size))
        self.qkv = PackedLinear(build, hidden_size, parts, bias)
        self.o_proj = Linear(build, self.q_size, hidden_size, out_bias)
        self.q_norm = RMSNorm(build, spec.head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(build, spec.head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.scale = spec.head_dim**-0.5 if scale is None else scale
        self.key_multiplier = key_multiplier
        self.first_key = first_key

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        step: StepInputs,
        memory: LayerMemory,
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]; `rotation` is cos and sin, or None for attention without positions."""
        head_dim = self.spec.head_dim
        q, k, v = self.qkv(x).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.key_multiplier != 1.0:
            k = k * self.key_multiplier
        if rotation is not None:
            q, k = self.ops.rotary(q, *rotation), self.ops.rotary(k, *rotation)
        out = self.ops.tap.split("attention", self._attend, (q, k, v), step, memory)
        return self.o_proj(out.flatten(1))

    def store(self, x: torch.Tensor, step: StepInputs, memory: LayerMemory) -> None:
        """Writes the keys and values of `x` [tokens, hidden], and does not attend. For attention without positions."""
        assert self.k_norm is None, "keys are stored as they are projected"
        assert self.key_multiplier == 1.0, "keys are stored as they are projected"
        keys, values = self.qkv.part(x, self.q_size, self.q_size + 2 * self.kv_size).split(self.kv_size, dim=-1)
        for cache, new in ((memory.k_cache, keys), (memory.v_cache, values)):
            assert cache is not None, "an attention layer has keys and values in the cache"
            cache.flatten(0, 1).index_copy_(0, step.kv_cells, new.unflatten(-1, (-1, self.spec.head_dim)))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepInputs, memory: LayerMemory
    ) -> torch.Tensor:
        """-> [tokens, heads, head_dim]"""
        return self.ops.attention(
            q,
            k,
            v,
            memory.k_cache,
            memory.v_cache,
            step.kv_cells,
            step.row_starts,
            step.start_positions,
            step.kv_lens,
            step.block_tables,
            self.scale,
            self.first_key,
        )
