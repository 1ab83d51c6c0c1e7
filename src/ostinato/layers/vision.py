"""Vision encoders: a transformer over patches, whose neighbours become a token (Qwen3-VL, arXiv 2511.21631; SigLIP 2).

Every computation is row by row except attention, which stays within an image, so padding affects nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.layers.attention import AxialRotary
from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.module import ModelBuilder, Module, ModuleList
from ostinato.layers.norm import LayerNorm
from ostinato.plan.layer_specs import VisionSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, EncoderInputs

NORM_EPS = 1e-6


def linear(
    build: ModelBuilder, in_size: int, out_size: int, stored_shape: tuple[int, ...] = (), bias: bool = True
) -> Linear:
    """Return a linear layer.

    The encoder's weights stay in the model's dtype even if the text part's are quantised.
    """
    return Linear(build, in_size, out_size, bias=bias, can_be_quantised=False, stored_shape=stored_shape)


def scaled(layer: Linear, x: Array, residual: Array, scale: Array | None) -> Array:
    """Return layer(x) * scale + residual; `scale` [out] float32, or None for 1."""
    return layer.op(x, layer.weight, layer.bias, residual, None, scale)


class PatchEmbedding(Module):
    """Matmul with the patch as one vector; in checkpoints a convolution [hidden, channels, time, height, width]."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec) -> None:
        super().__init__()
        kernel = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        self.proj = linear(build, vision.patch_elements, vision.hidden_size, (vision.hidden_size, *kernel))

    def forward(self, patches: Array, positions: Array) -> Array:
        """Embed `patches` [patches, elements] and add the embeddings of their `positions` -> [patches, hidden]."""
        return self.proj(patches, positions)


class PositionEmbedding(Module):
    """Learned embeddings of a square grid; a patch takes a weighted sum of those that surround it."""

    def __init__(self, build: ModelBuilder, count: int, hidden_size: int) -> None:
        super().__init__()
        self.op = build.ops.weighted_embedding
        self.weight = self.declare(build, "weight", count, hidden_size, role="embedding")

    def forward(self, position_ids: Array, weights: Array) -> Array:
        """Sum embeddings in float32: ids [patches, taps] int64, `weights` alike, float32 -> [patches, hidden]."""
        return self.op(position_ids, weights, self.weight)


class EncoderAttention(Module):
    """Attention within an image, with queries and keys that `angles` rotate, and the residual.

    `parts` are the checkpoint's names of the projections of queries, keys and values, if they are apart in it.
    """

    def __init__(
        self, build: ModelBuilder, size: int, num_heads: int, parts: tuple[str, ...] = (), has_bias: bool = True
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.num_heads = num_heads
        self.qkv = linear(build, size, 3 * size, bias=has_bias)
        if parts:
            self.qkv = PackedLinear(build, size, [(name, size) for name in parts], bias=True, can_be_quantised=False)
        self.proj = linear(build, size, size)

    def forward(
        self, x: Array, angles: Array | None, starts: Array, residual: Array, scale: Array | None = None
    ) -> Array:
        """Attend within each image and add `residual`, both [patches, hidden] -> [patches, hidden].

        `scale` [hidden] float32 multiplies what is added to it.
        """
        heads, patches = self.num_heads, x.shape[0]
        parts = self.qkv(x).reshape(patches, 3 * heads, -1)
        rotated = parts[:, : 2 * heads]
        if angles is not None:
            rotated = self.ops.rotate(rotated, angles)
        out = self.ops.encoder_attention(rotated[:, :heads], rotated[:, heads:], parts[:, 2 * heads :], starts)
        return scaled(self.proj, out.reshape(patches, -1), residual, scale)


class EncoderMLP(Module):
    """linear_fc2(activation(linear_fc1(x))) + residual."""

    def __init__(self, build: ModelBuilder, size: int, inner_size: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.linear_fc1 = linear(build, size, inner_size)
        self.linear_fc2 = linear(build, inner_size, size)

    def forward(self, x: Array, residual: Array, scale: Array | None = None) -> Array:
        """Apply the MLP to `x` and add `residual`, both [patches, hidden] -> [patches, hidden].

        `scale` [hidden] float32 multiplies what is added to it.
        """
        return scaled(self.linear_fc2, self.linear_fc1(x, activation=self.activation), residual, scale)


class GatedEncoderMLP(Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)) + residual. `names` are the checkpoint's of the three."""

    def __init__(
        self,
        build: ModelBuilder,
        size: int,
        inner_size: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = True,
    ) -> None:
        super().__init__()
        parts = [(name, inner_size) for name in names[:2]]
        self.gate_up = PackedLinear(build, size, parts, bias=bias, is_gated=True, can_be_quantised=False)
        self.down_proj = linear(build, inner_size, size, bias=bias)
        self.names = {"down_proj": names[2]}

    def forward(self, x: Array, residual: Array, scale: Array | None = None) -> Array:
        """Apply the MLP to `x` and add `residual`, both [patches, hidden] -> [patches, hidden].

        `scale` [hidden] float32 multiplies what is added to it.
        """
        return scaled(self.down_proj, self.gate_up(x, activation="swiglu"), residual, scale)


class EncoderBlock(Module):
    """Attention, then the MLP, each on a norm of the residual stream and added to it.

    Checkpoints of SigLIP have other names, and queries, keys and values apart.
    """

    def __init__(
        self, build: ModelBuilder, vision: VisionSpec, activation: str, norm_eps: float = NORM_EPS, siglip: bool = False
    ) -> None:
        super().__init__()
        size = vision.hidden_size
        self.norm1 = LayerNorm(build, size, norm_eps)
        self.attn = EncoderAttention(build, size, vision.num_heads, ("q_proj", "k_proj", "v_proj") if siglip else ())
        self.norm2 = LayerNorm(build, size, norm_eps)
        self.mlp = EncoderMLP(build, size, vision.intermediate_size, activation)
        if siglip:
            self.names = {"norm1": "layer_norm1", "attn": "self_attn", "norm2": "layer_norm2"}
            self.attn.names, self.mlp.names = {"proj": "out_proj"}, {"linear_fc1": "fc1", "linear_fc2": "fc2"}

    def forward(self, x: Array, angles: Array | None, starts: Array) -> Array:
        """Apply the block, [patches, hidden] -> [patches, hidden]."""
        x = self.attn(self.norm1(x), angles, starts, x)
        return self.mlp(self.norm2(x), x)


class PatchMerger(Module):
    """Merger of neighbouring patches, those of a token or `count`, side by side into one token of the text part.

    `norms_merged`: the norm is over all of them together, as in DeepStack's. With a `norm_eps` of None there is none.
    `inner_size` is that between the two matrices, by default that of the merged patches.
    """

    def __init__(
        self,
        build: ModelBuilder,
        vision: VisionSpec,
        norms_merged: bool,
        count: int | None = None,
        *,
        inner_size: int | None = None,
        bias: bool = True,
        norm_eps: float | None = NORM_EPS,
    ) -> None:
        super().__init__()
        self.size, self.norms_merged = (count or vision.patches_per_token) * vision.hidden_size, norms_merged
        inner_size = self.size if inner_size is None else inner_size
        normed = self.size if norms_merged else vision.hidden_size
        self.norm = None if norm_eps is None else LayerNorm(build, normed, norm_eps)
        self.linear_fc1 = linear(build, self.size, inner_size, bias=bias)
        self.linear_fc2 = linear(build, inner_size, vision.out_hidden_size, bias=bias)

    def forward(self, x: Array) -> Array:
        """Merge patches, [patches, hidden] -> [tokens, out]."""
        x = x.reshape(-1, self.size) if self.norms_merged else x
        x = x if self.norm is None else self.norm(x)
        return self.linear_fc2(self.linear_fc1(x.reshape(-1, self.size), activation="gelu"))


class VisionEncoder(Module):
    """Patch and position embeddings, blocks, and mergers.

    The mergers take the output of the last block and of the blocks for DeepStack.
    """

    def __init__(self, build: ModelBuilder, vision: VisionSpec, theta: float, activation: str) -> None:
        super().__init__()
        self.concat = build.ops.concat
        self.deepstack_layers = vision.deepstack_layers
        self.patch_embed = PatchEmbedding(build, vision)
        self.pos_embed = PositionEmbedding(build, vision.num_positions, vision.hidden_size)
        self.blocks = ModuleList(EncoderBlock(build, vision, activation) for _ in range(vision.num_layers))
        self.merger = PatchMerger(build, vision, norms_merged=False)
        self.deepstack_merger_list = ModuleList(PatchMerger(build, vision, True) for _ in vision.deepstack_layers)
        # One pair of a head's quarters is rotated by the rows, the other pair by the columns.
        quarter = vision.hidden_size // vision.num_heads // 4
        frequencies = [theta ** (-i / quarter) for i in range(quarter)]
        self.rotary = AxialRotary(build, [0] * quarter + [1] * quarter, 2 * frequencies, 1.0)

    def forward(self, inputs: EncoderInputs) -> Array:
        """Encode images -> [patches / merge ** 2, rows, hidden of the text part].

        The first row is the merged last block's output, the others are DeepStack's.
        """
        positions = self.pos_embed(inputs.taps, inputs.tap_weights)
        x = self.patch_embed(inputs.patches, positions)
        angles = self.rotary(inputs.positions)
        deepstack: list[Array] = []
        for i, block in enumerate(self.blocks):
            x = block(x, angles, inputs.starts)
            if i in self.deepstack_layers:
                deepstack.append(self.deepstack_merger_list[len(deepstack)](x))
        out = merged = self.merger(x)
        for each in deepstack:
            out = self.concat(out, each)
        return out.reshape(merged.shape[0], 1 + len(deepstack), -1)


class SiglipEmbeddings(Module):
    """Matmul with a patch, plus the learned positions, resized to the image's grid."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec) -> None:
        super().__init__()
        # SigLIP 1 has a convolution.
        kernel = (vision.hidden_size, vision.in_channels, vision.patch_size, vision.patch_size)
        stored = () if vision.is_naflex else kernel
        self.patch_embedding = linear(build, vision.patch_elements, vision.hidden_size, stored)
        self.position_embedding = PositionEmbedding(build, vision.num_positions, vision.hidden_size)

    def forward(self, patches: Array, inputs: EncoderInputs) -> Array:
        """Embed `patches` [patches, elements] -> [patches, hidden]."""
        return self.patch_embedding(patches, self.position_embedding(inputs.taps, inputs.tap_weights))


class SiglipBlocks(Module):
    """Layers of the encoder, under the checkpoint's name."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, activation: str, norm_eps: float) -> None:
        super().__init__()
        how = (activation, norm_eps, True)
        self.layers = ModuleList(EncoderBlock(build, vision, *how) for _ in range(vision.num_layers))


class Siglip(Module):
    """SigLIP, 1 or 2, without its pooling head."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, activation: str, norm_eps: float) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(build, vision)
        self.encoder = SiglipBlocks(build, vision, activation, norm_eps)
        self.post_layernorm = LayerNorm(build, vision.hidden_size, norm_eps)

    def forward(self, inputs: EncoderInputs) -> Array:
        """Encode images, [patches, hidden]."""
        x = self.embeddings(inputs.patches, inputs)
        for block in self.encoder.layers:
            x = block(x, None, inputs.starts)
        return self.post_layernorm(x)


class MeanOfPatches(Module):
    """Mean of the patches of a token, or of `count` patches, times `multiplier`."""

    def __init__(
        self, build: ModelBuilder, vision: VisionSpec, multiplier: float = 1.0, count: int | None = None
    ) -> None:
        super().__init__()
        self.ops, self.count, size = build.ops, count or vision.patches_per_token, vision.hidden_size
        self.share = build.constant([multiplier / self.count] * size, build.dtype).reshape(1, size)

    def forward(self, x: Array) -> Array:
        """Merge patches, [patches, hidden] -> [tokens, hidden]."""
        squares = x.reshape(-1, self.count, x.shape[-1])
        parts = [squares[:, i] for i in range(self.count)]
        while len(parts) > 1:  # in pairs, which rounds less than one after the other
            pairs = [self.ops.add(first, second) for first, second in zip(parts[::2], parts[1::2], strict=False)]
            parts = [*pairs, *parts[2 * len(pairs) :]]
        return self.ops.multiply(parts[0], self.share)


class Encoder(Module):
    """Encoder of images in two parts, which stand beside the language model in checkpoints."""

    def __init__(self, tower: Module, projector: Module, names: dict[str, str] | None = None) -> None:
        """Join the parts; `names` are a checkpoint's for them, if they differ."""
        super().__init__()
        self.names = names or {}
        self.vision_tower = tower
        self.multi_modal_projector = projector

    def forward(self, inputs: EncoderInputs) -> Array:
        """Encode images -> [tokens, 1, hidden of the text part]."""
        tokens = self.multi_modal_projector(self.vision_tower(inputs))
        return tokens.reshape(tokens.shape[0], 1, -1)
