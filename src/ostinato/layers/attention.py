"""Multi-head attention with grouped keys and values over paged memory, and its rotary angles.

The angles of a step are computed once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.module import ModelBuilder, Module, split_columns
from ostinato.layers.norm import RMSNorm, sigmoid_gate
from ostinato.plan.layer_specs import AttentionSpec
from ostinato.plan.rope import RopeSpec, inverse_frequencies

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, LayerCache, StepInputs


class Attention(Module):
    """q, k, v projections, optional norm of queries and keys, rotation, attention, output projection, residual.

    `bias` is that of the projections, `out_bias` that of the output projection, if it differs. `scale` multiplies the
    scores (default head_dim ** -0.5). `in_multiplier`, `key_multiplier` and `out_multiplier` multiply the input, the
    keys and the output before the residual (Falcon-H1, Granite). Keys before position `first_key` are not attended to
    (a prediction head has none for a request's first token). If it `is_gated`, q_proj gives each head a query and a
    gate, whose sigmoid multiplies the head's output (Qwen3.5). If it `has_head_gates`, gate_proj gives each head a gate
    of one number (LFM3). If it `has_channel_gates`, gate_proj gives each channel of the heads one (HRM-Text). A
    checkpoint may have all these projections as one tensor, of this `whole_name`. `out_size` is the size of the result,
    if it differs from the input's (Zamba2). If it `has_neighbours`, a checkpoint has the rows of queries and keys that
    positions rotate together side by side (Ernie 4.5, Cohere). If queries, keys and values are projected by what
    `is_one_tensor` in a checkpoint, that is `qkv_proj` (Phi-3). `query_scales` [positions, 1] multiplies the queries of
    each position (Ministral 3). With `value_norm_eps` the values have a norm without weights; if `values_are_keys`,
    they are the keys before norm and rotation (Gemma 4). A layer that reads another's keys has queries alone.
    """

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm_eps: float | None = None,
        qk_norm_plus_one: bool = False,
        scale: float | None = None,
        in_multiplier: float = 1.0,
        key_multiplier: float = 1.0,
        out_multiplier: float = 1.0,
        first_key: int = 0,
        is_gated: bool = False,
        has_head_gates: bool = False,
        has_channel_gates: bool = False,
        whole_name: str = "",
        qk_norm_whole: bool = False,
        out_size: int | None = None,
        has_neighbours: bool = False,
        is_one_tensor: bool = False,
        query_scales: Array | None = None,
        value_norm_eps: float | None = None,
        values_are_keys: bool = False,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.spec = spec
        self.q_size, self.kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.is_gated = is_gated
        self.output_gate = sigmoid_gate(build, self.q_size)
        self.query_scales = query_scales
        self.q_width = 2 * spec.head_dim if is_gated else spec.head_dim
        self.q_out_size = spec.num_heads * self.q_width
        parts: tuple[tuple[str, int], ...] = (
            ("q_proj", self.q_out_size),
            ("k_proj", self.kv_size),
            ("v_proj", self.kv_size),
        )
        parts = parts[: 1 if spec.keys_of is not None else 2 if values_are_keys else 3]
        facts: dict[str, Any] = {}
        self.has_channel_gates = has_channel_gates
        if has_channel_gates:
            parts = (("gate_proj", self.q_size), *parts)
        if whole_name:
            facts |= {"whole_name": f"{whole_name}.weight", "segments": tuple(size for _, size in parts)}
        if has_neighbours:
            facts["neighbours"] = (0, self.q_size + self.kv_size, spec.head_dim, spec.head_dim)
        if is_one_tensor:
            sizes = tuple(size for _, size in parts)
            parts, facts["segments"] = (("qkv_proj", sum(sizes)),), sizes
        self.qkv = PackedLinear(build, hidden_size, parts, bias, in_multiplier=in_multiplier, **facts)
        out_size = hidden_size if out_size is None else out_size
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = Linear(build, self.q_size, out_size, out_bias, out_multiplier, cuts_inputs=True)
        self.gate_proj = Linear(build, hidden_size, spec.num_heads) if has_head_gates else None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            sizes = (self.q_size, self.kv_size) if qk_norm_whole else (spec.head_dim, spec.head_dim)
            how = (qk_norm_eps, qk_norm_plus_one, qk_norm_whole)
            self.q_norm = RMSNorm(build, sizes[0], *how)
            self.k_norm = RMSNorm(build, sizes[1], *how) if spec.keys_of is None else None
        self.value_norm_eps, self.value_norm = value_norm_eps, None
        if value_norm_eps is not None and spec.keys_of is None:
            self.value_norm = build.constant([1.0] * spec.head_dim, build.dtype)
        assert not (is_gated and qk_norm_whole), "norms of all heads together stand before the heads are taken apart"
        self.qk_norm_whole = qk_norm_whole
        self.scale = spec.head_dim**-0.5 if scale is None else scale
        self.key_multiplier = key_multiplier
        self.values_are_keys = values_are_keys
        self.first_key = first_key
        self.sinks: Array | None = None
        if spec.has_sinks:
            self.sinks = self.declare(build, "sinks", spec.num_heads, role="per_head", in_float32=True)

    def forward(
        self,
        x: Array,
        angles: Array | None,
        inputs: StepInputs,
        memory: LayerCache,
        residual: Array | None,
    ) -> Array:
        """Return attention over `x`, added to `residual`, both [tokens, hidden] -> [tokens, hidden].

        Without `angles` attention has no positions.
        """
        if self.has_channel_gates:
            gates, q, k, v = split_columns(self.qkv(x), (self.q_size, self.q_size, self.kv_size, self.kv_size))
            return self.attend(q, k, v, angles, inputs, memory, residual, gates)
        head_gates = None if self.gate_proj is None else self.gate_proj(x)
        return self.attend(*self.project(x), angles, inputs, memory, residual, head_gates)

    def project(self, x: Array) -> tuple[Array, Array | None, Array | None]:
        """Project [tokens, hidden] to queries (with their gates), keys and values, each [tokens, its size].

        A layer that reads another's keys and values has none of its own.
        """
        if self.spec.keys_of is not None:
            return self.qkv(x), None, None
        qkv, begin, end = self.qkv(x), self.q_out_size, self.q_out_size + self.kv_size
        return qkv[:, :begin], qkv[:, begin:end], qkv[:, begin:] if self.values_are_keys else qkv[:, end:]

    def attend(
        self,
        q: Array,
        k: Array | None,
        v: Array | None,
        angles: Array | None,
        inputs: StepInputs,
        memory: LayerCache,
        residual: Array | None,
        head_gates: Array | None = None,
        beside: tuple[Array, ...] = (),
    ) -> Array:
        """Compute the part of `forward` after the projections -> [tokens, hidden].

        The sigmoid of `head_gates` [tokens, heads], or of as many as channels, multiplies the outputs of the heads.
        `beside` are further arguments of `_attend`, with one entry per token.
        """
        if self.qk_norm_whole and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.query_scales is not None:
            q = self.ops.multiply(q, self.ops.embedding(inputs.positions, self.query_scales, 1.0))
        tokens, size = q.shape[0], self.spec.head_dim
        # Each head has first the query, then the gate.
        q = q.reshape(tokens, -1, self.q_width)
        q, gate = q[:, :, :size], q[:, :, size:]
        if not self.qk_norm_whole and self.q_norm is not None:
            q = self.q_norm(q)
        angles = angles if self.spec.rotates else None
        if k is None or v is None:
            q = q if angles is None else self.ops.rotate(q, angles)
        else:
            k, v = (part.reshape(tokens, -1, size) for part in (k, v))
            if not self.qk_norm_whole and self.k_norm is not None:
                k = self.k_norm(k)
            if self.value_norm is not None:
                v = self.ops.rms_norm(v, self.value_norm, self.value_norm_eps)
            q = self._store(q, k, v, angles, inputs, memory)
        out = self.ops.hook.split("attention", self._attend, (q, *beside), inputs, memory)
        out = out.reshape(tokens, -1)
        if self.is_gated:
            out = self.output_gate(out, gate)
        if head_gates is not None:
            out = self.output_gate(out, head_gates)
        return self.o_proj(out, residual)

    def store(self, x: Array, inputs: StepInputs, memory: LayerCache, angles: Array | None = None) -> None:
        """Write the keys and values of `x` [tokens, hidden] without attending.

        `angles` are those of `forward`.
        """
        assert not self.qk_norm_whole, "no prediction head has norms of all heads together"
        parts = self.qkv.part(x, self.q_out_size, self.q_out_size + 2 * self.kv_size)
        kv = parts.reshape(x.shape[0], 2, -1, self.spec.head_dim)
        k, v = kv[:, 0], kv[:, 1]
        if self.k_norm is not None:
            k = self.k_norm(k)
        self._store(k[:, :0], k, v, angles if self.spec.rotates else None, inputs, memory)

    def _store(
        self,
        q: Array,
        k: Array,
        v: Array,
        angles: Array | None,
        inputs: StepInputs,
        memory: LayerCache,
    ) -> Array:
        """Rotate queries and keys, write keys and values, and return the queries to attend with.

        In a graph padding has its cells in the null block, which no request reads.
        """
        cells, _ = inputs.kv_targets(self.spec.window)
        caches = (memory.k_cache, memory.v_cache, cells, memory.k_scales, memory.v_scales)
        return self.ops.rotary(q, k, v, angles, self.key_multiplier, *caches)

    def _attend(self, q: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Attend to the cached keys -> [tokens, heads, head_dim]."""
        _, tables = inputs.kv_targets(self.spec.window)
        return self.ops.attention(
            q,
            memory.k_cache,
            memory.v_cache,
            inputs.row_starts,
            inputs.start_positions,
            inputs.kv_lens,
            tables,
            self.scale,
            self.first_key,
            self.spec.window,
            memory.k_scales,
            memory.v_scales,
            self.sinks,
            self.spec.softcap,
            inputs.last_seen if self.spec.sees_ahead else None,
        )


class Rotary(Module):
    """Cosine and sine of every token's angles, already multiplied by the embedding's attention scaling."""

    def __init__(self, build: ModelBuilder, rope: RopeSpec) -> None:
        super().__init__()
        self.op = build.ops.rotary_angles
        frequencies, self.scaling = inverse_frequencies(rope)
        self.frequencies = build.constant(frequencies, "float32")

    def forward(self, positions: Array) -> Array:
        """Return the angles of positions, [tokens] -> [2, tokens, rotary_dim / 2] float32."""
        return self.op(positions, self.frequencies, self.scaling)


class AxialRotary(Module):
    """Cosine and sine of tokens whose positions have several axes.

    Angle i is that of the position on axis `axes[i]`.
    """

    def __init__(self, build: ModelBuilder, axes: Sequence[int], frequencies: Sequence[float], scaling: float) -> None:
        super().__init__()
        self.op, self.scaling = build.ops.axial_angles, scaling
        self.axes = build.constant(axes, "int64")
        self.frequencies = build.constant(frequencies, "float32")

    def forward(self, positions: Array) -> Array:
        """Return the angles of positions, [tokens, axes] -> [2, tokens, angles] float32."""
        return self.op(positions, self.axes, self.frequencies, self.scaling)
