"""LFM3-VL (model_type `lfm3_vl`): LFM3, some of whose tokens are the outputs of an encoder of images."""

from __future__ import annotations

from typing import Any

from ostinato.layers.attention import AxialRotary
from ostinato.layers.linear import PackedLinear
from ostinato.layers.module import ModelBuilder, Module, ModuleList, split_columns
from ostinato.layers.norm import RMSNorm
from ostinato.layers.vision import Encoder, GatedEncoderMLP, PatchMerger, linear
from ostinato.models.lfm2_vl.model import PROJECTOR_NAMES
from ostinato.models.lfm3.model import Lfm3
from ostinato.models.lfm3_vl.spec import Lfm3VLHyperparameters
from ostinato.ops.step_inputs import Array, EncoderInputs
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec

ATTENTION_NAMES = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}


class PatchAttention(Module):
    """Attention within an image, whose heads share keys and values, with normed and rotated queries and keys."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: Lfm3VLHyperparameters) -> None:
        super().__init__()
        self.ops, self.names = build.ops, ATTENTION_NAMES
        size, self.head_dim = vision.hidden_size, vision.hidden_size // vision.num_heads
        self.group = vision.num_heads // hyper.num_kv_heads
        self.kv_size = hyper.num_kv_heads * self.head_dim
        parts = (("q_proj", size), ("k_proj", self.kv_size), ("v_proj", self.kv_size))
        self.qkv = PackedLinear(build, size, parts, can_be_quantised=False)
        self.q_norm, self.k_norm = (RMSNorm(build, self.head_dim, hyper.norm_eps) for _ in range(2))
        self.out_proj = linear(build, size, size, bias=False)

    def forward(self, x: Array, residual: Array, starts: Array, angles: Array) -> Array:
        """Attend within each image and add `residual`, both [patches, hidden] -> [patches, hidden]."""
        patches = x.shape[0]
        parts = split_columns(self.qkv(x), (x.shape[1], self.kv_size, self.kv_size))
        q, k, v = (part.reshape(patches, -1, self.head_dim) for part in parts)
        q, k = self.ops.rotate(self.q_norm(q), angles), self.ops.rotate(self.k_norm(k), angles)
        out = self.ops.encoder_attention(q, self._each_head(k), self._each_head(v), starts)
        return self.out_proj(out.reshape(patches, -1), residual)

    def _each_head(self, x: Array) -> Array:
        """Return the keys or values of each head, [patches, kv heads, size] -> [patches, heads, size]."""
        each = x
        for _ in range(self.group - 1):
            each = self.ops.concat(each, x)
        return each.reshape(x.shape[0], -1, self.head_dim)


class SpatialConv(Module):
    """Depthwise convolution over the grid of an image's patches.

    The products of all patches with a row of weights are an embedding table. Each patch sums the entries that its taps
    name (`runner.image_encoder.neighbour_taps`).
    """

    def __init__(self, build: ModelBuilder, size: int, side: int) -> None:
        super().__init__()
        self.ops, self.size, self.side = build.ops, size, side
        stored = {"stored_shape": (size, 1, side, side), "stored_transposed": True}
        self.weight = self.declare(build, "weight", side * side, size, role="convolution", **stored)

    def forward(self, x: Array, inputs: EncoderInputs) -> Array:
        """Convolve each image, [patches, channels] -> [patches, channels]."""
        wide = x
        for _ in range(self.side - 1):
            wide = self.ops.concat(wide, x)
        rows = [self._row(wide, inputs, row * self.side) for row in range(self.side)]
        total = rows[0]
        for row in rows[1:]:
            total = self.ops.add(total, row)
        return total

    def _row(self, wide: Array, inputs: EncoderInputs, first: int) -> Array:
        """Sum the neighbours that a row of weights is for, [patches, channels]."""
        end = first + self.side
        products = self.ops.multiply(wide, self.weight[first:end].reshape(1, -1)).reshape(-1, self.size)
        return self.ops.weighted_embedding(inputs.taps[:, first:end], inputs.tap_weights[:, first:end], products)


class PatchConv(Module):
    """out_proj(C * conv(B * x)) + residual, where in_proj gives B, C and x."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec) -> None:
        super().__init__()
        self.multiply, self.size = build.ops.multiply, vision.hidden_size
        self.in_proj = linear(build, self.size, 3 * self.size, bias=False)
        self.spatial_conv = SpatialConv(build, self.size, vision.conv_size)
        self.out_proj = linear(build, self.size, self.size, bias=False)

    def forward(self, x: Array, residual: Array, inputs: EncoderInputs) -> Array:
        """Apply the convolution and add `residual`, both [patches, hidden] -> [patches, hidden]."""
        before, after, inner = split_columns(self.in_proj(x), (self.size,) * 3)
        return self.out_proj(self.multiply(after, self.spatial_conv(self.multiply(before, inner), inputs)), residual)


class VisionBlock(Module):
    """Attention or a convolution, then the MLP, each on a norm of the residual stream and added to it."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: Lfm3VLHyperparameters, attends: bool) -> None:
        super().__init__()
        size = vision.hidden_size
        self.operator_norm = RMSNorm(build, size, hyper.norm_eps)
        self.self_attn = PatchAttention(build, vision, hyper) if attends else None
        self.conv = None if attends else PatchConv(build, vision)
        self.ffn_norm = RMSNorm(build, size, hyper.norm_eps)
        self.feed_forward = GatedEncoderMLP(build, size, vision.intermediate_size, ("w1", "w3", "w2"), bias=False)

    def forward(self, x: Array, inputs: EncoderInputs, angles: Array) -> Array:
        """Apply the block, [patches, hidden] -> [patches, hidden]."""
        y = self.operator_norm(x)
        if self.self_attn is not None:
            x = self.self_attn(y, x, inputs.starts, angles)
        if self.conv is not None:
            x = self.conv(y, x, inputs)
        return self.feed_forward(self.ffn_norm(x), x)


class VisionTower(Module):
    """Patch embedding and blocks. Patches have no positions but those by which attention rotates."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: Lfm3VLHyperparameters) -> None:
        super().__init__()
        self.patchifier = linear(build, vision.patch_elements, vision.hidden_size, bias=False)
        self.embedding_norm = RMSNorm(build, vision.hidden_size, hyper.norm_eps)
        self.layers = ModuleList(VisionBlock(build, vision, hyper, attends) for attends in hyper.attends)
        # One pair of a head's quarters is rotated by the rows, the other pair by the columns.
        quarter = vision.hidden_size // vision.num_heads // 4
        frequencies = [hyper.theta ** (-i / quarter) for i in range(quarter)]
        self.rotary = AxialRotary(build, [0] * quarter + [1] * quarter, 2 * frequencies, 1.0)

    def forward(self, inputs: EncoderInputs) -> Array:
        """Encode images, [patches, hidden]."""
        x = self.embedding_norm(self.patchifier(inputs.patches))
        angles = self.rotary(inputs.positions)
        for block in self.layers:
            x = block(x, inputs, angles)
        return x


class Lfm3VL(Lfm3):
    """Language model with its encoder."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.names = {"model": "model.language_model", "images": "model"}

    def make_encoder(self, vision: VisionSpec) -> Encoder:
        hyper: Lfm3VLHyperparameters = self.spec.encoder_hyperparameters
        tower = VisionTower(self.build, vision, hyper)
        how: dict[str, Any] = {"inner_size": hyper.projector_size, "bias": hyper.projector_bias}
        projector = PatchMerger(self.build, vision, norms_merged=False, **how)
        projector.names = PROJECTOR_NAMES
        return Encoder(tower, projector)
