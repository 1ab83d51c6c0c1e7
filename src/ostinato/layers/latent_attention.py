"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with or without positions.

The cache keeps one latent vector per token; the keys and values of all heads are projections of it. If a head's key is
K c for the latent c, the score q (K c) is (K^T q) c. So queries are multiplied by K^T instead of all keys by K, and
heads attend to latents; a head's output is then multiplied by V.
"""

from __future__ import annotations

from typing import Any

from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import RMSNorm, sigmoid_gate
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import AttentionSpec, LatentSizes

LATENT_NORM_EPS = 1e-6
"""Epsilon of the latents' norm in DeepSeek-V3 and its kin, whatever config.json gives for others."""


class HeadProjections(Module):
    """Each head's matrices from latents to keys and to values, `kv_b_proj` of a checkpoint.

    The checkpoint stores, head by head, the rows of its key, then those of its value. They are kept in the model's
    dtype: the key matrices are used transposed, so that scales of their rows would not apply.
    """

    def __init__(self, build: ModelBuilder, num_heads: int, sizes: LatentSizes) -> None:
        super().__init__()
        self.op = build.ops.linear
        self.sizes, self.key_rows = sizes, num_heads * sizes.key
        rows = num_heads * (sizes.key + sizes.value)
        turns = {"row_interleave": (sizes.key, sizes.value), "first_part_transposed": True}
        self.weight = self.declare(build, "weight", rows, sizes.rank, role="linear", **turns)

    def to_latents(self, q: Array) -> Array:
        """Map queries [tokens, heads, key] to latent space, [tokens, heads, rank]."""
        return self.op(q, self.weight[: self.key_rows].reshape(-1, self.sizes.key))

    def to_values(self, latents: Array) -> Array:
        """Map latents [tokens, heads, rank] to values, [tokens, heads, value]."""
        return self.op(latents, self.weight[self.key_rows :])


class LatentAttention(Module):
    """Projections to queries and to the latent, its norm, attention, the values' and the output's projection, residual.

    A token's entry in the cache is `shared` elements of a key that all heads share, followed by its normed latent. If
    the spec `rotates`, positions rotate the shared elements, and as many of each query. Queries may come out of a
    latent of their own, of `query_rank` elements. If it `has_neighbours`, a checkpoint has the rows that positions
    rotate together side by side. If it `has_head_gates`, the sigmoid of a number for each head multiplies its values.
    Keys before position `first_key` are not attended to. `score_scale` multiplies the scores. `norm_eps` is the
    latents' epsilon, and `bias` is that of the projections of `x` and of the output's.
    """

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        spec: AttentionSpec,
        sizes: LatentSizes,
        *,
        query_rank: int | None = None,
        has_neighbours: bool = False,
        has_head_gates: bool = False,
        first_key: int = 0,
        score_scale: float = 1.0,
        norm_eps: float = LATENT_NORM_EPS,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.spec, self.sizes = spec, sizes
        self.q_size = spec.num_heads * (sizes.key + sizes.shared)
        of_queries = ("q_proj", self.q_size) if query_rank is None else ("q_a_proj", query_rank)
        parts: tuple[tuple[str, int], ...] = (of_queries, ("kv_a_proj_with_mqa", sizes.rank + sizes.shared))
        # With neighbours, the rows of queries and of the shared key are not in one matrix.
        self.q_proj: Linear | None = None
        head = sizes.key + sizes.shared
        of_heads: dict[str, Any] = {"neighbours": (0, self.q_size, head, sizes.shared)} if has_neighbours else {}
        if query_rank is None and has_neighbours:
            parts, self.q_proj = parts[1:], Linear(build, hidden_size, self.q_size, **of_heads)
        self.first = sum(size for _, size in parts[:-1])
        end = self.first + sizes.rank + sizes.shared
        of_key: dict[str, Any] = {}
        if has_neighbours:
            of_key["neighbours"] = (end - sizes.shared, end, sizes.shared, sizes.shared)
        self.in_proj = PackedLinear(build, hidden_size, parts, bias, **of_key)
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if query_rank is not None:
            self.q_a_layernorm = RMSNorm(build, query_rank, norm_eps)
            self.q_b_proj = Linear(build, query_rank, self.q_size, **of_heads)
        self.kv_a_layernorm = RMSNorm(build, sizes.rank, norm_eps)
        self.kv_b_proj = HeadProjections(build, spec.num_heads, sizes)
        self.o_proj = Linear(build, spec.num_heads * sizes.value, hidden_size, bias, cuts_inputs=True)
        self.gate_proj = Linear(build, hidden_size, spec.num_heads) if has_head_gates else None
        self.output_gate = sigmoid_gate(build, spec.num_heads * sizes.value)
        self.scale = (sizes.key + sizes.shared) ** -0.5 * score_scale
        self.first_key = first_key

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache, residual: Array) -> Array:
        """Apply attention to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        whole = self.in_proj(x)
        q, latents = whole[:, : self.first], whole[:, self.first :]
        if self.q_proj is not None:
            q = self.q_proj(x)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        head_gates = None if self.gate_proj is None else self.gate_proj(x)
        return self.attend(q, latents, angles, inputs, memory, residual, head_gates)

    def attend(
        self,
        q: Array,
        latents: Array,
        angles: Array | None,
        inputs: StepInputs,
        memory: LayerCache,
        residual: Array | None,
        head_gates: Array | None = None,
        beside: tuple[Any, ...] = (),
    ) -> Array:
        """Compute the part of `forward` after the projections of `x` -> [tokens, hidden].

        `q` [tokens, heads * (key + shared)] and `latents` [tokens, rank + shared] are as projected. `beside` are
        further arguments of `_attend`, with one entry per token.
        """
        sizes, tokens = self.sizes, q.shape[0]
        q = q.reshape(tokens, self.spec.num_heads, -1)
        key = self._entry(latents)
        queries = self.kv_b_proj.to_latents(q[:, :, : sizes.key])
        if sizes.shared:
            queries = self.ops.concat(q[:, :, sizes.key :], queries)
        queries = self._store(queries, key, angles, inputs, memory)
        seen = self.ops.hook.split("attention", self._attend, (queries, *beside), inputs, memory)
        values = self.kv_b_proj.to_values(seen[:, :, sizes.shared :]).reshape(tokens, -1)
        if head_gates is not None:
            values = self.output_gate(values, head_gates)
        return self.o_proj(values, residual)

    def store(self, x: Array, inputs: StepInputs, memory: LayerCache, angles: Array | None = None) -> None:
        """Write the entries of `x` [tokens, hidden] without attending; `angles` are those of `forward`."""
        key = self._entry(self.in_proj.part(x, self.first, self.first + self.sizes.rank + self.sizes.shared))
        self._store(key[:, :0], key, angles, inputs, memory)

    def _entry(self, latents: Array) -> Array:
        """Return the entries of the cache, [tokens, rank + shared] as projected -> [tokens, 1, shared + rank]."""
        latent, shared = latents[:, : self.sizes.rank], latents[:, self.sizes.rank :]
        entry = self.kv_a_layernorm(latent)
        if self.sizes.shared:
            entry = self.ops.concat(shared, entry)
        return entry.reshape(latents.shape[0], 1, -1)

    def _store(self, q: Array, key: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Rotate queries and keys, write the keys, and return the queries to attend with."""
        angles = angles if self.spec.rotates else None
        return self.ops.rotary(q, key, None, angles, 1.0, memory.k_cache, None, inputs.kv_cells, memory.k_scales)

    def _attend(self, q: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Attend with `q` [tokens, heads, shared + rank] -> like `q`, each head's attended latents last."""
        return self.ops.attention(
            q,
            memory.k_cache,
            memory.k_cache,
            inputs.row_starts,
            inputs.start_positions,
            inputs.kv_lens,
            inputs.block_tables,
            self.scale,
            self.first_key,
            k_scales=memory.k_scales,
            v_scales=memory.k_scales,
        )
