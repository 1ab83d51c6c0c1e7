"""Short convolution along the rows of a step, as part of a state layer or as a layer (LFM2).

The layer is projection, gate, convolution, gate, projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, Module, split_columns
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.mixers import ShortConvSpec


class CausalConv(Module):
    """A state layer's depthwise convolution. Weights are time first in memory; in checkpoints [channels, 1, width].

    `parts` are names and numbers of channels of the separate convolutions, siblings of this module, that a checkpoint
    may have in its place, concatenated along the channels; `conv1d` is then the whole one.
    """

    def __init__(
        self,
        build: ModelBuilder,
        channels: int,
        width: int,
        bias: bool,
        parts: Sequence[tuple[str, int]] = (),
        activation: str | None = "silu",
        segments: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.op = build.ops.causal_conv1d
        self.activation = activation
        stored: dict[str, Any] = {"stored_shape": (channels, 1, width), "stored_transposed": True, "segments": segments}
        if parts:
            self.is_in_checkpoint = False
            stored |= {"names": tuple(f"{part}.weight" for part, _ in parts), "sizes": tuple(size for _, size in parts)}
            stored["whole_name"] = "conv1d.weight"
        self.weight = self.declare(build, "weight", width, channels, role="convolution", **stored)
        self.bias = self.declare(build, "bias", channels, role="bias", segments=segments) if bias else None

    def forward(self, x: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Convolve along each row, [tokens, channels] -> [tokens, channels]."""
        return self.op(
            x,
            self.weight,
            self.bias,
            memory.states["conv"],
            inputs.row_starts,
            inputs.read_slots,
            inputs.write_slots,
            inputs.num_decode_rows,
            inputs.checkpoints,
            self.activation,
        )


class ShortConv(Module):
    """out_proj(C * conv(B * x)) + residual, where in_proj gives B, C and x."""

    def __init__(self, build: ModelBuilder, hidden_size: int, spec: ShortConvSpec, *, bias: bool) -> None:
        super().__init__()
        self.ops = build.ops
        self.spec = spec
        self.in_proj = Linear(build, hidden_size, 3 * spec.channels, bias, segments=(spec.channels,) * 3)
        self.conv = CausalConv(build, spec.channels, spec.width, bias, activation=None)
        self.out_proj = Linear(build, spec.channels, hidden_size, bias, cuts_inputs=True)

    def forward(self, x: Array, inputs: StepInputs, memory: LayerCache, residual: Array | None) -> Array:
        """Apply the convolution to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        before, after, inner = split_columns(self.in_proj(x), (self.spec.channels,) * 3)
        gated = self.ops.multiply(before, inner)
        convolved = self.ops.hook.split("state", self.conv, (gated,), inputs, memory)
        return self.out_proj(self.ops.multiply(after, convolved), residual)
