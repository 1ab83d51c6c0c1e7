"""Prediction head of layers behind a join: that of Qwen3.5, Qwen3-Next, Ling 3.0 and Nemotron-H."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostinato.layers.attention import AxialRotary, Rotary
from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, Module, ModuleList
from ostinato.layers.norm import RMSNorm
from ostinato.models.base import PredictionHead
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import axes, inverse_frequencies


class AttentionHead(PredictionHead):
    """Join of a token with the hidden state before it, layers, and a norm.

    `names` are the checkpoint's, and `first` its number of the first layer. With `norm_plus_one` it stores the norms
    less 1.
    """

    def __init__(
        self,
        build: ModelBuilder,
        spec: ModelSpec,
        layers: Sequence[LayerSpec],
        make_block: Callable[[LayerSpec, int], Module],
        *,
        names: dict[str, str],
        first: int = 0,
        norm_plus_one: bool = False,
    ) -> None:
        """Build the head; `make_block` takes a layer and the first position whose key its attention sees.

        Blocks with attention have `store_keys`.
        """
        super().__init__(build)
        size, eps = spec.hidden_size, spec.hyperparameters.norm_eps
        self.names = names
        self.concat = build.ops.concat
        self.pre_fc_norm_embedding = RMSNorm(build, size, eps, norm_plus_one)
        self.pre_fc_norm_hidden = RMSNorm(build, size, eps, norm_plus_one)
        self.fc = Linear(build, 2 * size, size)
        self.blocks = ModuleList((make_block(layer, 1) for layer in layers), first)
        self.norm = RMSNorm(build, size, eps, norm_plus_one)
        self.last_attention = max((i for i, layer in enumerate(layers) if layer.attention is not None), default=-1)
        self.is_axial = spec.rope is not None and spec.rope.sections is not None
        self.rotary: Rotary | AxialRotary | None = None
        if spec.rope is not None and self.is_axial:
            self.rotary = AxialRotary(build, axes(spec.rope), *inverse_frequencies(spec.rope))
        elif spec.rope is not None:
            self.rotary = Rotary(build, spec.rope)

    def forward(self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        x, angles = self.join(hidden, embedded), self._angles(inputs)
        for block, layer_memory in zip(self.blocks, memory, strict=False):
            x = block(x, angles, inputs, layer_memory)
        return self.norm(x)

    def update_head_cache(
        self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]
    ) -> None:
        previous, last = self.previous_hidden(hidden, inputs, memory[-1]), self.last_attention
        if last < 0:
            return
        x, angles = self.join(previous, embedded), self._angles(inputs)
        for block, layer_memory in zip(self.blocks[:last], memory, strict=False):
            x = block(x, angles, inputs, layer_memory)
        self.blocks[last].store_keys(x, angles, inputs, memory[last])

    def _angles(self, inputs: StepInputs) -> Array | None:
        """Return the angles of the step's tokens, None if attention has no positions.

        An entry has the position of its token, and not of the hidden state before it: all differences are the same,
        except across an image's edges.
        """
        if self.rotary is None:
            return None
        return self.rotary(inputs.rope_positions if self.is_axial else inputs.positions)

    def join(self, hidden: Array, embedded: Array) -> Array:
        """Join `hidden` and `embedded`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.fc(self.concat(self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)))
