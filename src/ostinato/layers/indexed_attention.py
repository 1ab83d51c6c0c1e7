"""Attention to the blocks of keys that an indexer selects for each token (Qwen4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.layers.attention import Attention
from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import RMSNorm
from ostinato.plan.layer_specs import AttentionSpec, IndexerSpec
from ostinato.plan.rope import RopeSpec, inverse_frequencies

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, LayerCache, StepInputs


class Indexer(Module):
    """Queries of several heads and one key per token. Keys are cached as projected: their norm is that of blocks."""

    def __init__(self, build: ModelBuilder, hidden_size: int, spec: IndexerSpec, rope: RopeSpec, eps: float) -> None:
        super().__init__()
        self.ops, self.spec, self.eps = build.ops, spec, eps
        self.index_qk_proj = Linear(build, hidden_size, (spec.num_heads + 1) * spec.head_dim)
        self.q_layernorm = RMSNorm(build, spec.head_dim, eps, plus_one=True)
        self.k_layernorm = RMSNorm(build, spec.head_dim, eps, plus_one=True)
        frequencies, self.scaling = inverse_frequencies(rope)
        self.frequencies = build.constant(frequencies, "float32")

    def forward(self, x: Array, angles: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Write the keys of `x` [tokens, hidden] and return its queries, [tokens, heads, index_dim]."""
        qk = self.index_qk_proj(x).reshape(x.shape[0], -1, self.spec.head_dim)
        queries, key = qk[:, :-1], qk[:, -1:]
        queries = self.ops.rotate(self.q_layernorm(queries), angles)
        cache = (memory.index_cache, None, inputs.kv_cells, memory.index_scales)
        return self.ops.rotary(queries, key, None, None, 1.0, *cache)


class IndexedAttention(Attention):
    """Gated attention to the selected blocks."""

    def __init__(
        self, build: ModelBuilder, hidden_size: int, spec: AttentionSpec, rope: RopeSpec, eps: float, **facts: Any
    ) -> None:
        super().__init__(build, hidden_size, spec, **facts)
        assert spec.indexer is not None, "it selects"
        self.indexer = Indexer(build, hidden_size, spec.indexer, rope, eps)

    def forward(
        self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache, residual: Array | None
    ) -> Array:
        """Return attention over `x`, added to `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        queries = self.indexer(x, angles, inputs, memory)
        return self.attend(*self.project(x), angles, inputs, memory, residual, beside=(queries,))

    def _attend(self, q: Array, index_q: Array, inputs: StepInputs, memory: LayerCache) -> Array:  # type: ignore[override]
        """Attend to the selected blocks of the cached keys -> [tokens, heads, head_dim]."""
        indexer = self.indexer
        return self.ops.indexed_attention(
            q,
            memory.k_cache,
            memory.v_cache,
            index_q,
            memory.index_cache,
            indexer.k_layernorm.weight,
            indexer.eps,
            indexer.frequencies,
            indexer.scaling,
            inputs.row_starts,
            inputs.start_positions,
            inputs.kv_lens,
            inputs.block_tables,
            self.scale,
            indexer.spec.budget,
            indexer.spec.ratio,
            memory.k_scales,
            memory.v_scales,
            memory.index_scales,
        )
