"""Gated delta net (Yang et al. 2024, arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692).

A delta net has projections, convolution, delta rule and gated norm. Kimi's has one decay per key channel and a sigmoid
gate; decays and gate come out of projections of low rank.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ostinato.layers.conv import CausalConv
from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.module import ModelBuilder, Module, split_columns
from ostinato.layers.norm import GatedRMSNorm
from ostinato.ops.step_inputs import Array, DecodeRows, LayerCache, PrefillRows, StepInputs, apply_recurrence
from ostinato.plan.mixers import GatedDeltaSpec, StoredDeltaNet

if TYPE_CHECKING:
    from ostinato.ops.dispatch import Ops


class DeltaMixer(Module):
    """Base of mixers with the delta rule: the convolution and the recurrence, along each row."""

    ops: Ops
    spec: GatedDeltaSpec
    beta_scale: float
    decay_bound: float = 0.0
    """Number below 0 that no log decay goes below; 0 without one."""
    conv1d: CausalConv
    A_log: Array
    dt_bias: Array

    @property
    def decay(self) -> tuple[Array, Array]:
        """Tensors `A_log` and `dt_bias`, in the shapes that the operations take."""
        return self.A_log, self.dt_bias

    def _mix(self, conv_in: Array, a: Array, b: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Convolve, and apply the delta rule along each row -> [tokens, heads, value_dim].

        `conv_in` [tokens, channels] are queries, keys and values; `a` and `b` are the decays and betas before their
        functions.
        """
        spec = self.spec
        convolved = self.conv1d(conv_in, inputs, memory)
        tokens, sizes = conv_in.shape[0], (spec.key_size, spec.key_size, spec.value_size)
        widths = (spec.key_dim, spec.key_dim, spec.value_dim)
        parts = zip(split_columns(convolved, sizes), widths, strict=True)
        q, k, v = (part.reshape(tokens, -1, width) for part, width in parts)
        update, scan = partial(self._update, memory), partial(self._scan, memory)
        return apply_recurrence(inputs, (q, k, v, a, b), update, scan, self.ops.concat)

    def _update(self, memory: LayerCache, rows: DecodeRows, *parts: Array) -> Array:
        return self.ops.delta_update(
            *parts,
            *self.decay,
            self.decay_bound,
            self.beta_scale,
            self.spec.interleaved_key_heads,
            memory.states["delta"],
            rows.read_slots,
            rows.write_slots,
            rows.start_positions,
            memory.packable,
        )

    def _scan(self, memory: LayerCache, rows: PrefillRows, *parts: Array) -> Array:
        return self.ops.delta_scan(
            *parts,
            *self.decay,
            self.decay_bound,
            self.beta_scale,
            self.spec.interleaved_key_heads,
            memory.states["delta"],
            rows.row_starts,
            rows.start_positions,
            rows.read_slots,
            rows.write_slots,
            rows.checkpoints,
            memory.packable,
        )


class GatedDeltaNet(DeltaMixer):
    """One state layer's mixer. The norm after the recurrence has one weight for all heads.

    `beta_scale` multiplies the sigmoid of beta: beta stays below 1, or below 2 if that is allowed. `stored` is the
    layout in checkpoints, which loading converts:

    - `apart` (Qwen3.5): queries, keys and values come out of one projection; the output's gate, beta and decay come out
      of one each.
    - `by_key_head` (Qwen3-Next): two projections. In the first, the parts of a key head are adjacent: its query, its
      key, the values of its heads, their gates. The second has betas and decays by key head.
    - `beta_by_key_head` (Qwen3-Next's GGUF files): only betas and decays are stored by key head.
    - `one_by_one` (OLMo Hybrid): each has a separate projection, and queries, keys and values a convolution each.
    """

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        spec: GatedDeltaSpec,
        *,
        eps: float,
        stored: StoredDeltaNet = "apart",
        beta_scale: float = 1.0,
        gate_is_sigmoid: bool = False,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.spec = spec
        self.beta_scale = beta_scale
        keys, values, heads = spec.key_size, spec.value_size, spec.num_heads
        parts: tuple[tuple[str, int], ...] = (("in_proj_qkv", spec.conv_dim), ("in_proj_z", values))
        small: tuple[tuple[str, int], ...] = (("in_proj_b", heads), ("in_proj_a", heads))
        convolutions: tuple[tuple[str, int], ...] = ()
        of_key_head: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        own, own_values = heads // spec.num_key_heads, values // spec.num_key_heads
        if stored in ("by_key_head", "beta_by_key_head"):
            small, of_key_head = (("in_proj_ba", 2 * heads),), ((), (own, own))
        if stored == "by_key_head":
            parts = (("in_proj_qkvz", spec.conv_dim + values),)
            of_key_head = ((spec.key_dim, spec.key_dim, own_values, own_values), (own, own))
        elif stored == "one_by_one":
            parts = (("q_proj", keys), ("k_proj", keys), ("v_proj", values), ("g_proj", values))
            small = (("b_proj", heads), ("a_proj", heads))
            convolutions = (("q_conv1d", keys), ("k_conv1d", keys), ("v_conv1d", values))
            self.names = {"norm": "o_norm", "out_proj": "o_proj"}
        # If key heads are interleaved, a rank has its heads of each period.
        turns = heads // spec.num_key_heads if spec.interleaved_key_heads else 1
        of_values, of_heads = (values // turns,) * turns, (heads // turns,) * turns
        of_conv = (keys, keys, *of_values)
        segments = () if stored == "by_key_head" else (*of_conv, *of_values)
        self.in_proj = PackedLinear(build, hidden_size, parts, row_interleave=of_key_head[0], segments=segments)
        of_small = of_heads * 2 if spec.interleaved_key_heads else ()
        self.in_proj_ba = PackedLinear(build, hidden_size, small, row_interleave=of_key_head[1], segments=of_small)
        self.conv1d = CausalConv(
            build, spec.conv_dim, spec.conv_kernel, bias=False, parts=convolutions, segments=of_conv
        )
        per_head: dict[str, Any] = {"role": "per_head", "in_float32": True, "segments": of_heads}
        self.A_log = self.declare(build, "A_log", spec.num_heads, **per_head)
        self.dt_bias = self.declare(build, "dt_bias", spec.num_heads, **per_head)
        how = {"norm_before_gate": True, "shares_weight": True, "gate_is_sigmoid": gate_is_sigmoid}
        self.norm = GatedRMSNorm(build, spec.value_size, eps, spec.value_dim, **how)
        self.out_proj = Linear(build, spec.value_size, hidden_size, cuts_inputs=True, segments=of_values)

    def forward(self, x: Array, inputs: StepInputs, memory: LayerCache, residual: Array | None) -> Array:
        """Apply the mixer to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        conv_in, gate = split_columns(self.in_proj(x), (self.spec.conv_dim, self.spec.value_size))
        b, a = split_columns(self.in_proj_ba(x), (self.spec.num_heads, self.spec.num_heads))
        y = self.ops.hook.split("state", self._mix, (conv_in, a, b), inputs, memory)
        return self.out_proj(self.norm(y.reshape(x.shape[0], -1), gate), residual)


class KimiDeltaAttention(DeltaMixer):
    """One state layer's mixer.

    Queries, keys and values have the same number of heads, a projection and a convolution each.

    The decays of a head's key channels come out of `f_a_proj` and `f_b_proj`, and the output's gate out of `g_a_proj`
    and `g_b_proj`, with a head's number of channels in between. Unless they are of `low_rank`, `f_proj` and `g_proj`
    give them at once (Ling 3.0). `decay_bound` is that of `ops.delta_update`. A checkpoint has `A_log` with the shape
    of heads alone if it `has_flat_decay`.
    """

    beta_scale = 1.0

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        spec: GatedDeltaSpec,
        *,
        eps: float,
        low_rank: bool = True,
        decay_bound: float = 0.0,
        has_flat_decay: bool = False,
    ) -> None:
        super().__init__()
        self.decay_bound = decay_bound
        assert spec.per_channel, "its decays are of key channels"
        self.ops = build.ops
        self.spec = spec
        self.names = {"norm": "o_norm", "out_proj": "o_proj"}
        keys, values, heads, rank = spec.key_size, spec.value_size, spec.num_heads, spec.key_dim
        self.in_proj = PackedLinear(build, hidden_size, (("q_proj", keys), ("k_proj", keys), ("v_proj", values)))
        self.sizes = (heads, rank, rank) if low_rank else (heads, keys, values)
        names = ("b_proj", "f_a_proj", "g_a_proj") if low_rank else ("b_proj", "f_proj", "g_proj")
        self.in_proj_small = PackedLinear(build, hidden_size, tuple(zip(names, self.sizes, strict=True)))
        self.f_b_proj = Linear(build, rank, keys) if low_rank else None
        self.g_b_proj = Linear(build, rank, values) if low_rank else None
        convolutions = (("q_conv1d", keys), ("k_conv1d", keys), ("v_conv1d", values))
        self.conv1d = CausalConv(
            build, spec.conv_dim, spec.conv_kernel, bias=False, parts=convolutions, segments=(keys, keys, values)
        )
        of_decay = (heads,) if has_flat_decay or not low_rank else (1, 1, heads, 1)
        self.A_log = self.declare(build, "A_log", *of_decay, role="per_head", in_float32=True)
        self.dt_bias = self.declare(build, "dt_bias", keys, role="per_head", in_float32=True)
        how = {"norm_before_gate": True, "shares_weight": True, "gate_is_sigmoid": True}
        self.norm = GatedRMSNorm(build, values, eps, spec.value_dim, **how)
        self.out_proj = Linear(build, values, hidden_size, cuts_inputs=True)

    @property
    def decay(self) -> tuple[Array, Array]:
        return self.A_log.reshape(-1), self.dt_bias.reshape(-1, self.spec.key_dim)

    def forward(self, x: Array, inputs: StepInputs, memory: LayerCache, residual: Array | None) -> Array:
        """Apply the mixer to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        tokens = x.shape[0]
        b, of_decay, of_gate = split_columns(self.in_proj_small(x), self.sizes)
        if self.f_b_proj is not None and self.g_b_proj is not None:
            of_decay, of_gate = self.f_b_proj(of_decay), self.g_b_proj(of_gate)
        a = of_decay.reshape(tokens, -1, self.spec.key_dim)
        y = self.ops.hook.split("state", self._mix, (self.in_proj(x), a, b), inputs, memory)
        return self.out_proj(self.norm(y.reshape(tokens, -1), of_gate), residual)
