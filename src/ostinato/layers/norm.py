"""Normalisation layers."""

from __future__ import annotations

from ostinato.layers.module import ModelBuilder, Module
from ostinato.ops.step_inputs import Array


class RMSNorm(Module):
    """RMS norm over the last dimension.

    `plus_one`: the checkpoint has its weight less 1 (Gemma, Qwen3-Next); the kernel adds the 1 in float32, since the
    sum would be rounded in the model's dtype. `spans_ranks`: the mean is over the channels of all ranks, which have
    equally many.
    """

    def __init__(
        self, build: ModelBuilder, size: int, eps: float, plus_one: bool = False, spans_ranks: bool = False
    ) -> None:
        super().__init__()
        self.ranks = build.rank.of if spans_ranks else 1
        assert self.ranks == 1 or not plus_one, "no such norm has its weight less 1"
        self.of_ranks = build.ops.sharded_rms_norm
        self.op = build.ops.rms_norm
        self.weight = self.declare(build, "weight", size, role="norm", stored_minus_one=plus_one)
        self.eps = eps
        self.offset = (1.0,) if plus_one else ()

    def forward(self, x: Array, residual: Array | None = None) -> Array:
        """Normalise `x` [..., size], rounded to the weight's dtype -> [..., size] in that dtype.

        `residual`, of the result's shape, is added.
        """
        if self.ranks > 1:
            assert residual is None, "no residual is added to what ranks share"
            return self.of_ranks(x, self.weight, self.eps, self.ranks)
        added = {} if residual is None else {"residual": residual}
        return self.op(x, self.weight, self.eps, *self.offset, **added)


class PlainRMSNorm(Module):
    """RMS norm over the last dimension, without a weight."""

    def __init__(self, build: ModelBuilder, size: int, eps: float) -> None:
        super().__init__()
        self.op, self.eps = build.ops.rms_norm, eps
        self.ones = build.constant([1.0] * size, build.dtype)

    def forward(self, x: Array) -> Array:
        """Normalise `x` [..., size], rounded to the model's dtype -> [..., size] in that dtype."""
        return self.op(x, self.ones, self.eps)


class LayerNorm(Module):
    """Norm to mean 0 and variance 1 over the last dimension, then weight and bias, if it `has_bias`."""

    def __init__(self, build: ModelBuilder, size: int, eps: float, has_bias: bool = True) -> None:
        super().__init__()
        self.op = build.ops.layer_norm
        self.weight = self.declare(build, "weight", size, role="norm")
        if has_bias:
            self.bias = self.declare(build, "bias", size, role="bias")
        else:
            self.bias = build.constant([0.0] * size, build.dtype)
        self.eps = eps

    def forward(self, x: Array) -> Array:
        """Normalise [tokens, size] -> [tokens, size]."""
        return self.op(x, self.weight, self.bias, self.eps)


class GatedRMSNorm(Module):
    """RMS norm over groups of channels with a gate, the end of state mixers.

    The gate is SiLU, or the sigmoid if `gate_is_sigmoid`. With `group_size` None there is only the gate, which has no
    weight.
    """

    def __init__(
        self,
        build: ModelBuilder,
        size: int,
        eps: float,
        group_size: int | None,
        norm_before_gate: bool = False,
        shares_weight: bool = False,
        gate_is_sigmoid: bool = False,
        spans_ranks: bool = False,
    ) -> None:
        """Declare the weight of the norm.

        `shares_weight`: one weight of `group_size` serves all groups. `spans_ranks`: the single group spans all ranks,
        which have equally many channels.
        """
        super().__init__()
        self.ranks = build.rank.of if spans_ranks and group_size is not None else 1
        self.of_ranks = build.ops.sharded_rms_norm
        self.op = build.ops.gated_rms_norm
        self.weight = None
        if group_size is not None:
            self.weight = self.declare(build, "weight", group_size if shares_weight else size, role="norm")
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.gate_is_sigmoid = gate_is_sigmoid

    def forward(self, x: Array, gate: Array) -> Array:
        """Normalise and gate `x`, both [tokens, size] -> [tokens, size] in the gate's dtype."""
        if self.ranks > 1:
            return self.of_ranks(x, self.weight, self.eps, self.ranks, gate, self.norm_before_gate)
        how = (self.eps, self.group_size, self.norm_before_gate, self.gate_is_sigmoid)
        return self.op(x, gate, self.weight, *how)


def sigmoid_gate(build: ModelBuilder, size: int) -> GatedRMSNorm:
    """Return the module that multiplies `x` [tokens, size] by the sigmoid of a gate of its channels or heads."""
    return GatedRMSNorm(build, size, 0.0, None, gate_is_sigmoid=True)
