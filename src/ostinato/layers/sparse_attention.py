"""Attention to the blocks of keys that an indexer selects for each token (Qwen4), and its latent form (GLM-5.3).

The blocks of the latter are selected in this layer or in the one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.layers.attention import Attention
from ostinato.layers.latent_attention import LatentAttention
from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.module import ModelBuilder, Module, split_columns
from ostinato.layers.norm import LayerNorm, RMSNorm
from ostinato.plan.layer_specs import AttentionSpec, IndexerSpec, LatentSizes
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


KEY_NORM_EPS = 1e-6


class BlockIndexer(Module):
    """Queries of several heads with a weight each, and for each token a key and its gates, which are cached.

    Queries are projected from the latent of the attention's queries.
    """

    def __init__(self, build: ModelBuilder, hidden_size: int, query_rank: int, spec: IndexerSpec) -> None:
        super().__init__()
        self.ops, self.spec = build.ops, spec
        self.wq_b = Linear(build, query_rank, spec.num_heads * spec.head_dim)
        self.sizes = (spec.head_dim, spec.head_dim, spec.num_heads)
        parts = tuple(zip(("wk", "index_kpool_compress_gate", "weights_proj"), self.sizes, strict=True))
        self.in_proj = PackedLinear(build, hidden_size, parts, can_be_quantised=False)
        self.k_norm = LayerNorm(build, spec.head_dim, KEY_NORM_EPS)
        self.index_kpool_compress_ape = self.declare(
            build, "index_kpool_compress_ape", spec.ratio, spec.head_dim, role="bias"
        )

    def forward(self, x: Array, latent: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Write the keys of `x` [tokens, hidden] and select blocks, [tokens, budget / ratio] int32.

        `latent` is that of the queries, [tokens, query_rank].
        """
        tokens = x.shape[0]
        key, gates, weights = split_columns(self.in_proj(x), self.sizes)
        entry = self.ops.concat(self.k_norm(key), gates).reshape(tokens, 1, -1)
        self.ops.rotary(entry[:, :0], entry, None, None, 1.0, memory.index_cache, None, inputs.kv_cells)
        queries = self.wq_b(latent).reshape(tokens, -1, self.spec.head_dim)
        return self.ops.hook.split("attention", self._select, (queries, weights), inputs, memory)

    def _select(self, queries: Array, weights: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        return self.ops.select_blocks(
            queries,
            weights,
            memory.index_cache,
            self.index_kpool_compress_ape,
            inputs.row_starts,
            inputs.start_positions,
            inputs.kv_lens,
            inputs.block_tables,
            self.spec.budget,
            self.spec.ratio,
        )


class SelectedLatentAttention(LatentAttention):
    """Latent attention to selected blocks. It has an indexer unless it shares the choice of the layer before."""

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        spec: AttentionSpec,
        sizes: LatentSizes,
        *,
        query_rank: int,
        **facts: Any,
    ) -> None:
        super().__init__(build, hidden_size, spec, sizes, query_rank=query_rank, **facts)
        assert spec.indexer is not None, "blocks are selected"
        self.selection = spec.indexer
        self.indexer: BlockIndexer | None = None
        if not spec.indexer.is_shared:
            self.indexer = BlockIndexer(build, hidden_size, query_rank, spec.indexer)

    def forward(  # type: ignore[override]
        self, x: Array, selected: Array | None, inputs: StepInputs, memory: LayerCache
    ) -> tuple[Array, Array | None]:
        """Return attention over `x`, [tokens, hidden] both, and the blocks, [tokens, budget / ratio] int32.

        `selected` are the blocks of the layer before, which a layer with an indexer does not read. A sketch of one
        layer has none.
        """
        assert self.q_a_layernorm is not None, "queries come out of a latent"
        assert self.q_b_proj is not None, "queries come out of a latent"
        whole = self.in_proj(x)
        latent = self.q_a_layernorm(whole[:, : self.first])
        if self.indexer is not None:
            selected = self.indexer(x, latent, inputs, memory)
        out = self.attend(self.q_b_proj(latent), whole[:, self.first :], None, inputs, memory, None, beside=(selected,))
        return out, selected

    def _attend(self, q: Array, selected: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:  # type: ignore[override]
        """Attend to the selected blocks of the cached latents -> like `q` [tokens, heads, rank]."""
        return self.ops.selected_attention(
            q,
            memory.k_cache,
            memory.k_cache,
            selected,
            inputs.row_starts,
            inputs.start_positions,
            inputs.kv_lens,
            inputs.block_tables,
            self.scale,
            self.selection.ratio,
            self.selection.has_tail,
        )
