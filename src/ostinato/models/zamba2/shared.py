"""Transformer blocks of Zamba2, which several layers use, and the adapters of each use."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.layers.attention import Attention
from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.module import ModelBuilder, Module, split_columns
from ostinato.layers.norm import RMSNorm
from ostinato.models.zamba2.spec import Zamba2Hyperparameters
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import AttentionSpec


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
