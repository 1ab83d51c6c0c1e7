"""Zamba2 (model_type `zamba2`): Mamba-2 layers, some after a transformer block that they share in rotation."""

from __future__ import annotations

import re

from ostinato.layers.linear import Linear
from ostinato.layers.mamba import Mamba2Mixer
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import RMSNorm
from ostinato.models.base import CausalLM
from ostinato.models.zamba2.shared import Adapters, SharedBlock
from ostinato.models.zamba2.spec import Zamba2Hyperparameters
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec

MIXER_NORM_EPS = 1e-5
"""Epsilon of the norm within mixers, whatever config.json gives for the others."""

SHARED = re.compile(r"(?<=\.layers\.)(\d+)(?=\.shared_transformer\.)")
ADAPTER = re.compile(r"_adapter_list\.(\d+)\.")


class MambaLayer(Module):
    """x + mamba(norm(y)); y is x, or x plus the output of a block."""

    def __init__(self, build: ModelBuilder, size: int, spec: Mamba2Spec, hyper: Zamba2Hyperparameters) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, size, hyper.norm_eps)
        self.mamba = Mamba2Mixer(build, size, spec, eps=MIXER_NORM_EPS, proj_bias=hyper.bias, dt_limit=hyper.dt_limit)

    def forward(self, x: Array, _: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the layer, [tokens, hidden] -> [tokens, hidden]."""
        return self.mix(x, x, inputs, memory)

    def mix(self, y: Array, x: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the mixer to the norm of `y` and add `x`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.mamba(self.input_layernorm(y), inputs, memory, x)


class HybridLayer(Module):
    """A use of a block, whose result a linear layer of this one adds to the Mamba layer's input.

    The first layer that uses a block owns it (`owns_block`), as in the checkpoint; the others borrow it.
    """

    def __init__(
        self, build: ModelBuilder, size: int, spec: LayerSpec, hyper: Zamba2Hyperparameters, block: SharedBlock
    ) -> None:
        super().__init__()
        assert isinstance(spec.mixer, Mamba2Spec), "a Mamba layer follows every use"
        assert spec.use is not None, "it is a use"
        assert spec.attention is not None, "a use has attention"
        self.names = {"adapters": "shared_transformer"}
        owns_block = spec.use < hyper.num_blocks
        self.shared_transformer = block if owns_block else None
        self.borrowed = {} if owns_block else {"shared_transformer": block}
        self.pass_block = block.forward
        self.adapters = Adapters(build, size, spec.attention, hyper, spec.use)
        self.linear = Linear(build, size, size)
        self.mamba_decoder = MambaLayer(build, size, spec.mixer, hyper)

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the layer, [tokens, hidden] -> [tokens, hidden]."""
        y = self.linear(self.pass_block(x, self.adapters, angles, inputs, memory), x)
        return self.mamba_decoder.mix(y, x, inputs, memory)


class Zamba2(CausalLM):
    """The language model."""

    backbone_names = (("norm", "final_layernorm"),)

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        self.blocks: list[SharedBlock] = []
        super().__init__(build, spec)

    def make_block(self, layer: LayerSpec) -> Module:
        size, hyper = self.spec.hidden_size, self.spec.hyperparameters
        if layer.use is None:
            assert isinstance(layer.mixer, Mamba2Spec), "every layer has a mixer"
            return MambaLayer(self.build, size, layer.mixer, hyper)
        assert layer.attention is not None, "a use has attention"
        if layer.use < hyper.num_blocks:
            self.blocks.append(SharedBlock(self.build, size, layer.attention, hyper, self.embed))
        return HybridLayer(self.build, size, layer, hyper, self.blocks[layer.use % hyper.num_blocks])

    def embed(self, token_ids: Array) -> Array:
        """Return the embeddings of tokens for the shared blocks, [tokens] -> [tokens, hidden]."""
        return self.embedding(token_ids)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate the names of a block's tensors, which a checkpoint may have under any of the layers that use it.

        A checkpoint may have them under the first such layer, under each, or under any. In this model the block belongs
        to the first of them, and each adapter to its own layer.
        """
        return super().checkpoint_name(SHARED.sub(lambda found: str(self._owner(int(found[1]), name)), name))

    def _owner(self, layer: int, name: str) -> int:
        """Return the layer that owns, in this model, the tensor `name` of the block of `layer`.

        It is `layer` itself if none does, so that the tensor is left over.
        """
        hyper: Zamba2Hyperparameters = self.spec.hyperparameters
        if layer not in hyper.uses:
            return layer
        block = hyper.uses.index(layer) % hyper.num_blocks
        adapter = ADAPTER.search(name)
        if adapter is None:
            return hyper.uses[block]
        use = int(adapter[1])
        return hyper.uses[use] if use < len(hyper.uses) and use % hyper.num_blocks == block else layer
