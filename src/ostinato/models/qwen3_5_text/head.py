"""Prediction head of one layer with attention: that of Qwen3.5, Qwen3-Next and Ling 3.0."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostinato.layers.attention import AxialRotary, Rotary
from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, ModuleList
from ostinato.layers.norm import RMSNorm
from ostinato.models.base import PredictionHead
from ostinato.models.decoder import Block
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import axes, inverse_frequencies


class AttentionHead(PredictionHead):
    """Join of a token with the hidden state before it, a layer, and a norm.

    `names` are the checkpoint's, and `first` its number of the layer; with `norm_plus_one` it stores the norms less 1.
    """

    def __init__(
        self,
        build: ModelBuilder,
        spec: ModelSpec,
        layers: Sequence[LayerSpec],
        make_block: Callable[[LayerSpec, int], Block],
        *,
        names: dict[str, str],
        first: int = 0,
        norm_plus_one: bool = False,
    ) -> None:
        """Build the head; `make_block` takes a layer and the first position whose key its attention sees."""
        super().__init__(build)
        size, eps = spec.hidden_size, spec.hyperparameters.norm_eps
        assert spec.rope is not None, "queries and keys are rotated"
        self.names = names
        self.concat = build.ops.concat
        self.pre_fc_norm_embedding = RMSNorm(build, size, eps, norm_plus_one)
        self.pre_fc_norm_hidden = RMSNorm(build, size, eps, norm_plus_one)
        self.fc = Linear(build, 2 * size, size)
        self.blocks = ModuleList((make_block(layer, 1) for layer in layers), first)
        self.norm = RMSNorm(build, size, eps, norm_plus_one)
        self.is_axial = spec.rope.sections is not None
        if self.is_axial:
            self.rotary: Rotary | AxialRotary = AxialRotary(build, axes(spec.rope), *inverse_frequencies(spec.rope))
        else:
            self.rotary = Rotary(build, spec.rope)

    def forward(self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        x, angles = self._join(hidden, embedded), self._angles(inputs)
        for block, layer_memory in zip(self.blocks, memory, strict=False):
            x = block(x, angles, inputs, layer_memory)
        return self.norm(x)

    def update_head_cache(
        self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]
    ) -> None:
        x = self._join(self.previous_hidden(hidden, inputs, memory[-1]), embedded)
        [block], angles = self.blocks, self._angles(inputs)
        assert isinstance(block, Block), "its blocks are made here"
        assert block.self_attn is not None, "a head's layer has attention"
        block.self_attn.store(block.input_layernorm(x), inputs, memory[0], angles)

    def _angles(self, inputs: StepInputs) -> Array:
        """Return the angles of the step's tokens.

        An entry has the position of its token, and not of the hidden state before it: all differences are the same,
        except across an image's edges.
        """
        return self.rotary(inputs.rope_positions if self.is_axial else inputs.positions)

    def _join(self, hidden: Array, embedded: Array) -> Array:
        """Join `hidden` and `embedded`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.fc(self.concat(self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)))
