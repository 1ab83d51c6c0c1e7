"""Gemma 4 with images (model_type `gemma4`): the text model, some of whose tokens are the outputs of an encoder.

Its blocks are those of the text: four norms, and norms of queries, keys and values.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from ostinato.layers.attention import AxialRotary
from ostinato.layers.linear import PackedLinear
from ostinato.layers.module import ModelBuilder, Module, ModuleList, split_columns
from ostinato.layers.norm import RMSNorm
from ostinato.layers.vision import Encoder, MeanOfPatches, linear
from ostinato.models.gemma4.spec import Gemma4VLHyperparameters
from ostinato.models.gemma4_text.model import Gemma4
from ostinato.plan.layer_specs import VisionSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, EncoderInputs


class ClippedLinear(Module):
    """Linear layer without a bias whose inputs and outputs are clipped."""

    def __init__(self, build: ModelBuilder, in_size: int, out_size: int) -> None:
        super().__init__()
        self.clip = build.ops.clip
        self.linear = linear(build, in_size, out_size, bias=False)
        self.input_bounds, self.output_bounds = (
            self.declare(
                build, f"{at}_bounds", 2, role="bias", names=(f"{at}_min", f"{at}_max"), sizes=(1, 1), in_float32=True
            )
            for at in ("input", "output")
        )

    def forward(self, x: Array) -> Array:
        """Return [patches, in] -> [patches, out]."""
        return self.clip(self.linear(self.clip(x, self.input_bounds)), self.output_bounds)


class PatchAttention(Module):
    """Attention within an image. One half of a head is rotated by the columns, the other by the rows.

    Scores are not divided by the root of a head's size; the angles undo that of the operation.
    """

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: Gemma4VLHyperparameters) -> None:
        super().__init__()
        self.ops, size, eps = build.ops, vision.hidden_size, hyper.norm_eps
        self.head_dim, self.eps, self.clips = size // vision.num_heads, eps, hyper.clips
        if self.clips:
            self.q_proj, self.k_proj, self.v_proj = (ClippedLinear(build, size, size) for _ in range(3))
            self.o_proj: Module = ClippedLinear(build, size, size)
        else:
            parts = [(f"{name}_proj.linear", size) for name in "qkv"]
            self.qkv = PackedLinear(build, size, parts, can_be_quantised=False)
            self.o_proj = linear(build, size, size, bias=False)
            self.names = {"o_proj": "o_proj.linear"}
        self.q_norm, self.k_norm = (RMSNorm(build, self.head_dim, eps) for _ in range(2))
        self.ones = build.constant([1.0] * self.head_dim, build.dtype)

    def forward(self, x: Array, starts: Array, angles: tuple[Array, Array]) -> Array:
        """Attend within each image, [patches, hidden] -> [patches, hidden]."""
        size = x.shape[1]
        q, k, v = (part.reshape(-1, size // self.head_dim, self.head_dim) for part in self._project(x))
        q, k = self._rotate(self.q_norm(q), angles), self._rotate(self.k_norm(k), angles)
        v = self.ops.rms_norm(v, self.ones, self.eps)
        return self.o_proj(self.ops.encoder_attention(q, k, v, starts).reshape(-1, size))

    def _project(self, x: Array) -> tuple[Array, ...]:
        if self.clips:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return tuple(split_columns(self.qkv(x), (x.shape[1],) * 3))

    def _rotate(self, x: Array, angles: tuple[Array, Array]) -> Array:
        """Rotate the halves of each head, which change places: in queries and keys alike, so no score changes."""
        columns, rows = angles
        x, half = self.ops.rotate(x, columns), self.head_dim // 2
        return self.ops.rotate(self.ops.concat(x[:, :, half:], x[:, :, :half]), rows)


class PatchMLP(Module):
    """down_proj(gelu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, clips: bool) -> None:
        super().__init__()
        size, inner_size, self.ops, self.clips = vision.hidden_size, vision.intermediate_size, build.ops, clips
        if clips:
            self.gate_proj, self.up_proj = (ClippedLinear(build, size, inner_size) for _ in range(2))
            self.down_proj: Module = ClippedLinear(build, inner_size, size)
        else:
            parts = [(f"{name}_proj.linear", inner_size) for name in ("gate", "up")]
            self.gate_up = PackedLinear(build, size, parts, is_gated=True, can_be_quantised=False)
            self.down_proj = linear(build, inner_size, size, bias=False)
            self.names = {"down_proj": "down_proj.linear"}

    def forward(self, x: Array) -> Array:
        """Apply the MLP, [patches, hidden] -> [patches, hidden]."""
        if self.clips:
            both = self.ops.concat(self.gate_proj(x), self.up_proj(x))
            return self.down_proj(self.ops.gated_activation(both, "gelu_pytorch_tanh"))
        return self.down_proj(self.gate_up(x, activation="geglu"))


class VisionBlock(Module):
    """Attention, then an MLP, each between two norms and added to the residual stream."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: Gemma4VLHyperparameters) -> None:
        super().__init__()
        size, eps = vision.hidden_size, hyper.norm_eps
        self.input_layernorm = RMSNorm(build, size, eps)
        self.self_attn = PatchAttention(build, vision, hyper)
        self.post_attention_layernorm = RMSNorm(build, size, eps)
        self.pre_feedforward_layernorm = RMSNorm(build, size, eps)
        self.mlp = PatchMLP(build, vision, hyper.clips)
        self.post_feedforward_layernorm = RMSNorm(build, size, eps)

    def forward(self, x: Array, starts: Array, angles: tuple[Array, Array]) -> Array:
        """Apply the block, [patches, hidden] -> [patches, hidden]."""
        x = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), starts, angles), x)
        return self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)), x)


class PatchEmbedder(Module):
    """Matmul with a patch, plus the embeddings of its column and its row."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec) -> None:
        super().__init__()
        self.op, size = build.ops.weighted_embedding, vision.hidden_size
        self.input_proj = linear(build, vision.patch_elements, size, bias=False)
        stored = {"stored_shape": (2, vision.num_positions // 2, size)}
        name, count = "position_embedding_table", vision.num_positions
        self.position_embedding_table = self.declare(build, name, count, size, role="embedding", **stored)

    def forward(self, inputs: EncoderInputs) -> Array:
        """Embed patches, [patches, hidden]."""
        positions = self.op(inputs.taps, inputs.tap_weights, self.position_embedding_table)
        return self.input_proj(inputs.patches, positions)


def shrinking(vision: VisionSpec) -> float:
    """Return a power of 2 near one over the root of the hidden size, by which the means of patches are multiplied.

    Times the root alone they may be beyond float16. The projector's norm makes up for it.
    """
    return 2.0 ** -round(log2(vision.hidden_size) / 2)


class VisionTower(Module):
    """Patch embedding, blocks, and the mean of the patches of a token, which may be standardised."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: Gemma4VLHyperparameters) -> None:
        super().__init__()
        self.ops, size = build.ops, vision.hidden_size
        self.names = {"blocks": "encoder.layers"}
        self.patch_embedder = PatchEmbedder(build, vision)
        self.blocks = ModuleList(VisionBlock(build, vision, hyper) for _ in range(vision.num_layers))
        self.standardises = hyper.standardises
        shrinks = shrinking(vision)
        self.mean = MeanOfPatches(build, vision, (-shrinks if self.standardises else shrinks) * size**0.5)
        if self.standardises:
            self.shrinks = build.constant([shrinks] * size, build.dtype).reshape(1, size)
            self.std_bias = self.declare(build, "std_bias", size, role="bias")
            self.std_scale = self.declare(build, "std_scale", size, role="bias")
        head_dim = size // vision.num_heads
        quarter = head_dim // 4
        frequencies = [hyper.theta ** (-i / quarter) for i in range(quarter)]
        # Queries and keys together are multiplied by the root that attention divides by.
        self.rotaries = ModuleList(AxialRotary(build, [axis] * quarter, frequencies, head_dim**0.25) for axis in (1, 0))

    def forward(self, inputs: EncoderInputs) -> Array:
        """Encode images -> [tokens, hidden], times `shrinking`; with its sign changed if it is standardised."""
        columns, rows = (rotary(inputs.positions) for rotary in self.rotaries)
        x = self.patch_embedder(inputs)
        for block in self.blocks:
            x = block(x, inputs.starts, (columns, rows))
        x = self.mean(x)
        if self.standardises:
            # There is no subtraction, so this is the bias less the mean. The projector's norm changes the sign back.
            bias = self.ops.multiply(self.std_bias.reshape(1, -1), self.shrinks)
            x = self.ops.multiply(self.ops.add(x, bias), self.std_scale.reshape(1, -1))
        return x


class Projector(Module):
    """Norm without weights, which may change the sign, and a matrix."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, eps: float, sign: float) -> None:
        super().__init__()
        self.op, self.eps = build.ops.rms_norm, eps
        self.signs = build.constant([sign] * vision.hidden_size, build.dtype)
        self.embedding_projection = linear(build, vision.hidden_size, vision.out_hidden_size, bias=False)

    def forward(self, x: Array) -> Array:
        """Project tokens, [tokens, hidden] -> [tokens, out]."""
        return self.embedding_projection(self.op(x, self.signs, self.eps))


class Gemma4VL(Gemma4):
    """Language model with its encoder, if it has one."""

    def make_encoder(self, vision: VisionSpec) -> Encoder:
        hyper: Gemma4VLHyperparameters = self.spec.encoder_hyperparameters
        sign = -1.0 if hyper.standardises else 1.0
        projector = Projector(self.build, vision, hyper.norm_eps * shrinking(vision) ** 2, sign)
        names = {"multi_modal_projector": "embed_vision"}
        return Encoder(VisionTower(self.build, vision, hyper), projector, names)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate names; those of encoders that are not run give None."""
        for part in ("vision_tower.", "embed_vision."):
            if name.startswith(f"model.{part}"):
                return None if self.images is None else name.removeprefix("model.")
        return super().checkpoint_name(name)
