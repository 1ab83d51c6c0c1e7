"""HRM-Text (model_type `hrm_text`): L(low + high) becomes `low` several times, then H(high + low) becomes `high`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import PlainRMSNorm
from ostinato.models.base import Backbone, CausalLM
from ostinato.models.hrm_text.spec import HrmTextHyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, LayerCache, StepInputs

STACKED = re.compile(r"^model\.([HL])_module\.layers\.(\d+)\.")


class HrmTextBlock(Module):
    """Attention with a gate of each channel, then a gated MLP, each after a norm without weights."""

    def __init__(self, build: ModelBuilder, size: int, layer: LayerSpec, hyper: HrmTextHyperparameters) -> None:
        super().__init__()
        assert layer.attention is not None, "every layer has attention"
        self.norm = PlainRMSNorm(build, size, hyper.norm_eps)
        self.self_attn = Attention(
            build, size, layer.attention, bias=hyper.attention_bias, has_channel_gates=True, whole_name="gqkv_proj"
        )
        self.mlp = GatedMLP(build, size, hyper.intermediate_size, hyper.mlp_bias, whole_name="gate_up_proj")

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        x = self.self_attn(self.norm(x), angles, inputs, memory, x)
        return self.mlp(self.norm(x), x)


class Reuse(Module):
    """Another use of a block, which has no weights of its own."""

    def __init__(self, block: HrmTextBlock) -> None:
        super().__init__()
        self.borrowed = {"": block}
        self.forward = block.forward


class HrmTextBackbone(Backbone):
    """Embedding, and the uses of the two stacks' layers. The first use of a layer owns it."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        size, hyper = spec.hidden_size, spec.hyperparameters
        self.stack_size, self.cycle = hyper.stack_size, hyper.low_cycles + 1
        blocks: dict[int, HrmTextBlock] = {}

        def make_layer(layer: LayerSpec) -> Module:
            assert layer.use is not None, "every layer is a use"
            owner = self.owner(layer.use)
            if owner in blocks:
                return Reuse(blocks[owner])
            blocks[owner] = HrmTextBlock(build, size, layer, hyper)
            return blocks[owner]

        norm = PlainRMSNorm(build, size, hyper.norm_eps)
        super().__init__(
            build, spec, make_layer, hyper.norm_eps, embedding_multiplier=hyper.embedding_scale, final_norm=norm
        )
        self.add = build.ops.add
        self.low = self.declare(build, "low", size, role="bias", names=("z_L_init",))

    def owner(self, use: int) -> int:
        """Return the first use of the layer that is used there."""
        run, place = divmod(use, self.stack_size)
        return (self.cycle - 1) * self.stack_size + place if self.is_high(run) else place

    def is_high(self, run: int) -> bool:
        """Return whether a run of a stack is one of H."""
        return run % self.cycle == self.cycle - 1

    def transform(self, x: Array, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        (rotary,) = self.rotaries
        angles, high, low = rotary(inputs.positions), x, self.low.reshape(1, x.shape[-1])
        uses = list(zip(self.layers, memory, strict=True))
        for run, first in enumerate(range(0, len(uses), self.stack_size)):
            x = self.add(high, low)
            for block, layer_memory in uses[first : first + self.stack_size]:
                x = block(x, angles, inputs, layer_memory)
            x = self.norm(x)
            if self.is_high(run):
                high = x
            else:
                low = x
        return high


class HrmText(CausalLM):
    """The language model."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.model = HrmTextBackbone(build, spec)

    @property
    def backbone(self) -> Backbone:
        return self.model

    def forward(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        return self.model(inputs, memory)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate the names of the stacks' layers, and of attention, which has two; None for a stack without use."""
        match = STACKED.match(name)
        if match is None:
            return super().checkpoint_name(name)
        hyper: HrmTextHyperparameters = self.spec.hyperparameters
        stack, place = match[1], int(match[2])
        if place >= hyper.stack_size:
            return name
        if stack == "L" and not hyper.low_cycles:
            return None
        use = place + (hyper.low_cycles * hyper.stack_size if stack == "H" else 0)
        inner = name[match.end() :]
        # transformers writes some tensors of attention under another name than the rest.
        return f"model.layers.{use}.{'self_' if inner.startswith('attn.') else ''}{inner}"
