"""Gemma 4, its text model (model_type `gemma4_text`), also inside `gemma4`.

Blocks of four norms, as in Gemma 3. A block multiplies its result by a learned number. Before that it may add a small
embedding of its token, gated by the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ostinato.layers.attention import Attention
from ostinato.layers.linear import Embedding, Linear
from ostinato.layers.mlp import STACKED, Experts, GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import RMSNorm
from ostinato.models.base import Backbone, CausalLM, SandwichBlock
from ostinato.models.gemma4_text.spec import Gemma4Hyperparameters
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.model import ModelSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, LayerCache, StepInputs

_BESIDE_TEXT = tuple(
    f"model.{part}." for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
)
"""Prefixes of the tensors of a checkpoint with encoders that are not its text model's."""

HALF = 0.5**0.5


class Router(Module):
    """Router of a normed input. Each expert has a number that multiplies its weight."""

    def __init__(self, build: ModelBuilder, experts: ExpertsSpec, eps: float) -> None:
        super().__init__()
        self.ops, self.eps, self.top_k = build.ops, eps, experts.top_k
        self.root = build.constant([experts.size**-0.5] * experts.size, build.dtype).reshape(1, experts.size)
        self.scale = self.declare(build, "scale", experts.size, role="norm")
        self.weight = self.declare(
            build, "weight", experts.num_experts, experts.size, role="router", names=("proj.weight",)
        )
        name = "per_expert_scale"
        self.per_expert_scale = self.declare(build, name, experts.num_experts, role="bias", in_float32=True)

    def forward(self, x: Array) -> Array:
        """Return the ids of experts and their weights, [tokens, hidden] -> [tokens, 2, top_k]."""
        normed = self.ops.multiply(self.ops.rms_norm(x, self.scale, self.eps), self.root)
        return self.ops.route(normed, self.weight, None, self.top_k, expert_scales=self.per_expert_scale)


class Gemma4Block(SandwichBlock):
    """Block of four norms, with experts beside the MLP if its layer has some.

    It adds the token's small embedding, if it gets one, and multiplies the sum by a number.
    """

    def __init__(
        self,
        build: ModelBuilder,
        size: int,
        hyper: Gemma4Hyperparameters,
        attention: Attention,
        mlp: GatedMLP,
        experts: ExpertsSpec | None,
    ) -> None:
        super().__init__(build, size, hyper.norm_eps, attention=attention, mlp=mlp)
        self.multiply = build.ops.multiply
        self.layer_scalar = self.declare(build, "layer_scalar", 1, role="bias")
        self.router: Router | None = None
        if experts is not None:
            self.router = Router(build, experts, hyper.norm_eps)
            self.experts = Experts(build, experts, "geglu", stacked_as=STACKED)
            self.post_feedforward_layernorm_1 = RMSNorm(build, size, hyper.norm_eps)
            self.post_feedforward_layernorm_2 = RMSNorm(build, size, hyper.norm_eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(build, size, hyper.norm_eps)
        if hyper.small_size:
            self.per_layer_input_gate = Linear(build, size, hyper.small_size)
            self.per_layer_projection = Linear(build, hyper.small_size, size)
            self.post_per_layer_input_norm = RMSNorm(build, size, hyper.norm_eps)

    def forward(
        self,
        x: Array,
        angles: Array | None,
        inputs: StepInputs,
        memory: LayerCache,
        embedded: Array | None = None,
    ) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden].

        `embedded` are the tokens' small embeddings, [tokens, small].
        """
        x = super().forward(x, angles, inputs, memory)
        if embedded is not None:
            gates = self.per_layer_input_gate(x, activation="gelu_pytorch_tanh")
            y = self.per_layer_projection(self.multiply(gates, embedded))
            x = self.post_per_layer_input_norm(y, x)
        return self.multiply(x, self.layer_scalar.reshape(1, 1))

    def feed_forward(self, x: Array) -> Array:
        y = super().feed_forward(x)
        if self.router is None or self.experts is None:
            return y
        of_experts = self.experts(self.pre_feedforward_layernorm_2(x), self.router(x))
        return self.post_feedforward_layernorm_2(of_experts, self.post_feedforward_layernorm_1(y))


class Gemma4Backbone(Backbone):
    """Backbone whose blocks get small embeddings of the tokens: learned ones plus a projection of the large ones."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec, *how: Any) -> None:
        """Make the parts of a `Backbone`, which documents the arguments, and those of the small embeddings."""
        super().__init__(build, spec, *how)
        hyper: Gemma4Hyperparameters = spec.hyperparameters
        self.small_size, hidden, all_sizes = hyper.small_size, spec.hidden_size, hyper.num_layers * hyper.small_size
        if self.small_size:
            multiplier = build.rounded(self.small_size**0.5)
            self.embed_tokens_per_layer = Embedding(build, spec.vocab_size, all_sizes, multiplier)
            self.per_layer_model_projection = Linear(build, hidden, all_sizes, multiplier=hidden**-0.5)
            self.multiply = build.ops.multiply
            self.half = build.constant([HALF] * all_sizes, build.dtype).reshape(1, all_sizes)
            self.per_layer_projection_norm = RMSNorm(build, self.small_size, hyper.norm_eps)

    def forward(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute the final normed hidden states of a step, [tokens, hidden]."""
        x = self.embed(inputs, memory)
        small = self._small_embeddings(x, inputs.token_ids)
        angles = [rotary(inputs.positions) for rotary in self.rotaries]
        for i, (block, layer_memory) in enumerate(zip(self.layers, memory[: len(self.layers)], strict=True)):
            x = block(x, angles[self.ropes[block]], inputs, layer_memory, small[i] if small else None)
        return self.norm(x)

    def _small_embeddings(self, x: Array, token_ids: Array) -> tuple[Array, ...]:
        """Return the small embeddings for each layer, [tokens, small] each; () if there are none."""
        if not self.small_size:
            return ()
        tokens, num_layers = x.shape[0], len(self.layers)
        projected = self.per_layer_model_projection(x).reshape(tokens, num_layers, self.small_size)
        learned = self.embed_tokens_per_layer(token_ids).reshape(tokens, num_layers, self.small_size)
        both = self.per_layer_projection_norm(projected, residual=learned).reshape(tokens, -1)
        both = self.multiply(both, self.half).reshape(tokens, num_layers, self.small_size)
        return tuple(both[:, layer] for layer in range(num_layers))


class Gemma4(CausalLM):
    """The language model."""

    backbone_type = Gemma4Backbone

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: Gemma4Hyperparameters = spec.hyperparameters
        super().__init__(
            build,
            spec,
            embedding_multiplier=build.rounded(spec.hidden_size**0.5),
            logits_cap=hyper.logits_cap,
        )

    def make_block(self, layer: LayerSpec) -> Gemma4Block:
        return gemma4_block(self.build, self.spec, layer)

    def checkpoint_name(self, name: str) -> str | None:
        if not self.spec.architecture.endswith("_text"):
            if name.startswith(_BESIDE_TEXT):
                return None
            name = name.replace("model.language_model.", "model.", 1)
        return super().checkpoint_name(name)


def gemma4_block(build: ModelBuilder, spec: ModelSpec, layer: LayerSpec) -> Gemma4Block:
    """Build a block of the model or of its assistant."""
    size, attention = spec.hidden_size, layer.attention
    hyper: Gemma4Hyperparameters = spec.hyperparameters
    assert attention is not None, "every layer has attention"
    mixer = Attention(
        build,
        size,
        attention,
        bias=hyper.attention_bias,
        qk_norm_eps=hyper.norm_eps,
        scale=1.0,
        value_norm_eps=hyper.norm_eps,
        values_are_keys=hyper.values_are_keys and not attention.rope,
    )
    widens = hyper.widens_shared and attention.keys_of is not None
    mlp = GatedMLP(build, size, hyper.intermediate_size * (2 if widens else 1), activation="geglu")
    return Gemma4Block(build, size, hyper, mixer, mlp, layer.experts)
