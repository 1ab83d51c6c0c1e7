"""Zamba2 (model_type `zamba2`): Mamba-2 layers, some after a transformer block that they share in rotation.

Each use of a block has adapters of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ostinato.layers.attention import Attention
from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.mamba import Mamba2Mixer
from ostinato.layers.module import ModelBuilder, Module, split_columns
from ostinato.layers.norm import RMSNorm
from ostinato.models.base import CausalLM
from ostinato.models.zamba2.spec import Zamba2Hyperparameters
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec


class AttentionAdapter(Module):
    """Low-rank projections that are added to queries, keys and values."""

    def __init__(self, build: ModelBuilder, size: int, spec: AttentionSpec, rank: int, use: int) -> None:
        super().__init__()
        of_q, of_k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        lists = {part: f"linear_{part}_adapter_list.{use}" for part in "qkv"}
        self.names = {part: f"{name}.1" for part, name in lists.items()}
        self.rank = rank
        self.down = PackedLinear(build, size, tuple((f"{name}.0", rank) for name in lists.values()))
        self.q, self.k, self.v = (Linear(build, rank, out_size) for out_size in (of_q, of_k, of_k))

    def forward(self, x: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Add the projections of `x` to q, k and v, all [tokens, size]."""
        of_q, of_k, of_v = split_columns(self.down(x), (self.rank,) * 3)
        return self.q(of_q, q), self.k(of_k, k), self.v(of_v, v)


class MLPAdapter(Module):
    """Low-rank projection that is added to the gates and values of an MLP."""

    def __init__(self, build: ModelBuilder, size: int, rank: int, out_size: int, use: int) -> None:
        super().__init__()
        self.names = {"down": f"gate_up_proj_adapter_list.{use}.0", "up": f"gate_up_proj_adapter_list.{use}.1"}
        self.down = Linear(build, size, rank)
        self.up = Linear(build, rank, out_size, segments=(out_size // 2,) * 2)

    def forward(self, x: Array, gate_up: Array) -> Array:
        """Add the projection of `x` [tokens, size] to `gate_up` [tokens, out_size]."""
        return self.up(self.down(x), gate_up)


class Adapters(Module):
    """Adapters of one use; in the checkpoint they are inside the block."""

    def __init__(
        self, build: ModelBuilder, size: int, spec: AttentionSpec, hyper: Zamba2Hyperparameters, use: int
    ) -> None:
        super().__init__()
        self.names = {"attention": "self_attn", "mlp": "feed_forward"}
        rank = hyper.adapter_rank
        self.attention = AttentionAdapter(build, 2 * size, spec, rank, use) if hyper.adapts_attention else None
        self.mlp = MLPAdapter(build, size, rank, 2 * hyper.intermediate_size, use)


class SharedMLP(Module):
    """A gated MLP whose gates and values are changed by an adapter before the activation."""

    def __init__(self, build: ModelBuilder, size: int, hyper: Zamba2Hyperparameters) -> None:
        super().__init__()
        self.op, self.activation = build.ops.gated_activation, hyper.activation
        inner = hyper.intermediate_size
        self.gate_up_proj = Linear(build, size, 2 * inner, hyper.bias, segments=(inner, inner))
        self.down_proj = Linear(build, inner, size, hyper.bias, cuts_inputs=True)

    def forward(self, x: Array, adapter: MLPAdapter) -> Array:
        """Apply the MLP with the `adapter`, [tokens, size] -> [tokens, size]."""
        return self.down_proj(self.op(adapter(x, self.gate_up_proj(x)), self.activation))


class SharedBlock(Module):
    """Attention over the concatenated hidden state and token embedding, then an MLP; no residual.

    The embedding is looked up anew in every use: that reads as much as a copy kept through all layers would, and the
    copy would take memory.
    """

    def __init__(
        self,
        build: ModelBuilder,
        size: int,
        spec: AttentionSpec,
        hyper: Zamba2Hyperparameters,
        embed: Callable[[Array], Array],
    ) -> None:
        super().__init__()
        self.concat, self.embed = build.ops.concat, embed
        self.input_layernorm = RMSNorm(build, 2 * size, hyper.norm_eps)
        scale = (spec.head_dim / 2) ** -0.5
        self.self_attn = Attention(build, 2 * size, spec, scale=scale, out_size=size)
        self.pre_ff_layernorm = RMSNorm(build, size, hyper.norm_eps)
        self.feed_forward = SharedMLP(build, size, hyper)

    def forward(
        self, x: Array, adapters: Adapters, angles: Array | None, inputs: StepInputs, memory: LayerCache
    ) -> Array:
        """Apply the layer, [tokens, hidden] -> [tokens, hidden]."""
        both = self.input_layernorm(self.concat(x, self.embed(inputs.token_ids)))
        q, k, v = self.self_attn.project(both)
        if adapters.attention is not None:
            q, k, v = adapters.attention(both, q, k, v)
        attended = self.self_attn.attend(q, k, v, angles, inputs, memory, None)
        return self.feed_forward(self.pre_ff_layernorm(attended), adapters.mlp)


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
