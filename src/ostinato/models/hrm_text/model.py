"""HRM-Text (model_type `hrm_text`): L(low + high) becomes `low` several times, then H(high + low) becomes `high`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import PlainRMSNorm
from ostinato.models.base import Backbone, CausalLM
from ostinato.models.hrm_text.spec import HrmTextHyperparameters
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec

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
    """Embedding, the uses of the two stacks' layers, and the norm after each run of a stack."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec, *how: Any) -> None:
        """Make the parts of a `Backbone`, which documents the arguments, and the first state of L."""
        super().__init__(build, spec, *how)
        self.hyper: HrmTextHyperparameters = spec.hyperparameters
        self.add = build.ops.add
        self.low = self.declare(build, "low", spec.hidden_size, role="bias", names=("z_L_init",))

    def transform(self, x: Array, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        (rotary,) = self.rotaries
        angles, high, low = rotary(inputs.positions), x, self.low.reshape(1, x.shape[-1])
        stack_size, uses = self.hyper.stack_size, list(zip(self.layers, memory, strict=True))
        for run, first in enumerate(range(0, len(uses), stack_size)):
            x = self.add(high, low)
            for block, layer_memory in uses[first : first + stack_size]:
                x = block(x, angles, inputs, layer_memory)
            x = self.norm(x)
            if self.hyper.is_high(run):
                high = x
            else:
                low = x
        return high


class HrmText(CausalLM):
    """The language model. The first use of a layer owns it."""

    backbone_type = HrmTextBackbone

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: HrmTextHyperparameters = spec.hyperparameters
        self.blocks: dict[int, HrmTextBlock] = {}
        """Blocks by their first use."""
        norm = PlainRMSNorm(build, spec.hidden_size, hyper.norm_eps)
        super().__init__(build, spec, embedding_multiplier=hyper.embedding_scale, final_norm=norm)

    def make_block(self, layer: LayerSpec) -> Module:
        hyper: HrmTextHyperparameters = self.spec.hyperparameters
        assert layer.use is not None, "every layer is a use"
        first_use = hyper.first_use(layer.use)
        if first_use in self.blocks:
            return Reuse(self.blocks[first_use])
        self.blocks[first_use] = HrmTextBlock(self.build, self.spec.hidden_size, layer, hyper)
        return self.blocks[first_use]

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
