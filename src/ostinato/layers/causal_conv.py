"""Short convolution of a state layer, along the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ostinato.layers.module import ModelBuilder, Module

if TYPE_CHECKING:
    import torch

    from ostinato.ops.step import LayerCache, StepInputs


class CausalConv(Module):
    """A state layer's depthwise convolution. Weights are time first in memory; in checkpoints [channels, 1, width].

    `parts` are names and numbers of channels of the separate convolutions, siblings of this module, that a checkpoint
    may have in its place, concatenated along the channels. `name` is then the name of the whole one.
    """

    def __init__(
        self,
        build: ModelBuilder,
        channels: int,
        width: int,
        bias: bool,
        parts: Sequence[tuple[str, int]] = (),
        name: str = "conv1d",
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
            stored["whole_name"] = f"{name}.weight"
        self.weight = self.declare(build, "weight", width, channels, role="convolution", **stored)
        self.bias = self.declare(build, "bias", channels, role="bias", segments=segments) if bias else None

    def forward(self, x: torch.Tensor, step: StepInputs, memory: LayerCache) -> torch.Tensor:
        """Convolve along each row, [tokens, channels] -> [tokens, channels]."""
        return self.op(
            x,
            self.weight,
            self.bias,
            memory.states["conv"],
            step.row_starts,
            step.read_slots,
            step.write_slots,
            step.num_decode_rows,
            step.checkpoints,
            self.activation,
        )
