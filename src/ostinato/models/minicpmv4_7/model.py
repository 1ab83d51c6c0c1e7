"""MiniCPM-V 4.7 (model_type `minicpmv4_7`): Qwen3.5's text model behind SigLIP 2 with merged windows of patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import LayerNorm
from ostinato.layers.vision import Encoder, EncoderAttention, MeanOfPatches, PatchMerger, Siglip, linear
from ostinato.models.minicpmv4_7.spec import MiniCPMVHyperparameters
from ostinato.models.qwen3_5.model import Qwen35VL
from ostinato.ops.step_inputs import WINDOW
from ostinato.plan.layer_specs import VisionSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, EncoderInputs


class WindowMerger(Module):
    """Attention within each window, then an MLP that makes one patch of a window's, added to their mean."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, norm_eps: float) -> None:
        super().__init__()
        size = vision.hidden_size
        self.merged_size, inner_size = WINDOW * size, WINDOW * vision.intermediate_size
        self.layer_norm1 = LayerNorm(build, size, norm_eps)
        self.self_attn = EncoderAttention(build, size, vision.num_heads, ("q_proj", "k_proj", "v_proj"))
        self.self_attn.names = {"proj": "out_proj"}
        self.mean = MeanOfPatches(build, vision, count=WINDOW)
        self.pre_norm = LayerNorm(build, self.merged_size, norm_eps)
        self.linear_1 = linear(build, self.merged_size, inner_size)
        self.linear_2 = linear(build, inner_size, size)

    def forward(self, x: Array, window_starts: Array) -> Array:
        """Merge windows, [patches, hidden] -> [windows, hidden]."""
        x = self.self_attn(self.layer_norm1(x), None, window_starts, x)
        inner = self.linear_1(self.pre_norm(x.reshape(-1, self.merged_size)), activation="gelu_pytorch_tanh")
        return self.linear_2(inner, self.mean(x))


class MergingTower(Siglip):
    """SigLIP 2, in which windows of patches are merged behind a layer."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: MiniCPMVHyperparameters) -> None:
        super().__init__(build, vision, hyper.activation, hyper.norm_eps)
        self.merges_behind = hyper.merges_behind
        self.vit_merger = WindowMerger(build, vision, hyper.norm_eps) if vision.has_windows else None

    def forward(self, inputs: EncoderInputs) -> Array:
        """Encode images, [patches or windows, hidden]."""
        x, starts = self.embeddings(inputs.patches, inputs), inputs.starts
        for i, block in enumerate(self.encoder.layers):
            x = block(x, None, starts)
            if self.vit_merger is not None and i == self.merges_behind:
                assert inputs.window_starts is not None, "the encoder has windows"
                assert inputs.merged_starts is not None, "the encoder has windows"
                x, starts = self.vit_merger(x, inputs.window_starts), inputs.merged_starts
        return self.post_layernorm(x)


class MiniCPMV(Qwen35VL):
    """Language model with its encoder."""

    encoder_name = "model"

    def make_encoder(self, vision: VisionSpec) -> Encoder:
        hyper: MiniCPMVHyperparameters = self.spec.encoder_hyperparameters
        projector = PatchMerger(self.build, vision, norms_merged=True, count=WINDOW)
        projector.names = {"norm": "pre_norm", "linear_fc1": "linear_1", "linear_fc2": "linear_2"}
        names = {"multi_modal_projector": "merger.mlp.0"}
        return Encoder(MergingTower(self.build, vision, hyper), projector, names)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate a name; None for those of the windows' merger if it is not used."""
        assert self.spec.vision is not None
        is_unused = name.startswith("model.vision_tower.vit_merger.") and not self.spec.vision.has_windows
        return None if is_unused else super().checkpoint_name(name)
