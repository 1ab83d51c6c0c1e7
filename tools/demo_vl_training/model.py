"""transformers' model, made quicker to train on a CPU: the same results, in fewer and larger products."""

from __future__ import annotations

import itertools
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    BaseModelOutputWithDeepstackFeatures,
    apply_rotary_pos_emb_vision,
)

from .data import NOTHING, Batch

NOISE_VARIANCE = 0.01
"""Of components, in which there is nothing but noise below about that."""

NOTHING_WEIGHT = 0.1


def build(config: Qwen3VLConfig) -> Qwen3VLForConditionalGeneration:
    """A model with fresh float32 weights, ready for training."""
    model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")):
            parameter.data *= 0.3
    # The place of a patch has to be seen beside its pixels.
    nn.init.normal_(model.model.visual.pos_embed.weight, std=0.5)
    nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.15)
    for block in model.model.visual.blocks:
        block.attn.forward = MethodType(_attend, block.attn)
    patches = model.model.visual.patch_embed
    patches.forward = MethodType(_embed, patches)
    return model.train()


@torch.no_grad()
def whiten(model: Qwen3VLForConditionalGeneration, patches: Tensor) -> None:
    """Lets the patch embedding begin with the principal components of `patches` [patches, values], all of one scale.

    From random weights it would see little but a patch's mean colour, and what tells shapes apart is in the rest.
    """
    projection = model.model.visual.patch_embed.proj
    patches = patches.double()
    mean = patches.mean(0)
    variances, components = torch.linalg.eigh(torch.cov(patches.T))
    count = projection.out_channels
    weight = (components / (variances + NOISE_VARIANCE).sqrt())[:, -count:].T
    projection.weight.copy_(weight.view_as(projection.weight))
    projection.bias.copy_(-weight @ mean)


def _embed(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """The patch embedding's forward, [patches, values] to [patches, hidden], as the product that it is."""
    return F.linear(hidden_states, self.proj.weight.flatten(1), self.proj.bias)


def _attend(
    self: nn.Module, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object
) -> Tensor:
    """The vision attention's forward, [patches, hidden] to the same, one call for each run of equal lengths."""
    count = hidden_states.shape[0]
    q, k, v = self.qkv(hidden_states).reshape(count, 3, self.num_heads, -1).unbind(1)
    q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
    sizes = [length * rows for length, rows in runs]
    outputs = []
    for (length, rows), *parts in zip(runs, *(x.split(sizes) for x in (q, k, v)), strict=True):
        heads = [part.view(rows, length, self.num_heads, -1).transpose(1, 2) for part in parts]
        outputs.append(F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(rows * length, -1))
    return self.proj(torch.cat(outputs))


class Helper(nn.Module):
    """What reads kind and colour of shapes off the encoder's outputs while it is trained, and is then thrown away.

    Answers alone teach the encoder slowly: what a shape looks like is learned from a word in a sentence.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(hidden, nothing + 1) for nothing in NOTHING)

    def forward(self, seen: BaseModelOutputWithDeepstackFeatures, labels: Tensor) -> Tensor:
        """Cross entropy of the labels [tokens, 2] given each of the encoder's outputs, shapes counting most."""
        features = [seen.pooler_output, *seen.deepstack_features]
        total = torch.zeros(())
        for index, nothing in enumerate(NOTHING):
            weight = torch.ones(nothing + 1)
            weight[nothing] = NOTHING_WEIGHT
            for each in features:
                total = total + F.cross_entropy(self.heads[index](each).float(), labels[:, index], weight)
        return total / len(features)


def picture_loss(
    model: Qwen3VLForConditionalGeneration, helper: Helper, patches: Tensor, grids: Tensor, labels: Tensor
) -> Tensor:
    """The encoder alone, by what the helper reads off it."""
    with sdpa_kernel(SDPBackend.MATH):
        return helper(model.model.visual(patches, grid_thw=grids), labels)


def loss_of(model: Qwen3VLForConditionalGeneration, helper: Helper, batch: Batch) -> tuple[Tensor, Tensor, float]:
    """Mean cross entropy of the tokens that are learned, the helper's, and the share of tokens that are right."""
    inputs = dict(batch.inputs)
    types = inputs.pop("mm_token_type_ids")
    positions, _ = model.model.get_rope_index(
        batch.ids, types, inputs.get("image_grid_thw"), inputs.get("video_grid_thw"), batch.mask
    )
    helped = torch.zeros(())
    # Over sequences this short, attention as plain products takes two thirds of the fused kernels' time.
    with sdpa_kernel(SDPBackend.MATH):
        outputs = {}
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            if pixels in inputs:
                seen = model.model.visual(inputs.pop(pixels), grid_thw=inputs[grids])
                if kind == "image":
                    helped = helper(seen, batch.labels)
                outputs[kind] = BaseModelOutputWithDeepstackFeatures(
                    pooler_output=(seen.pooler_output,),
                    deepstack_features=[(each,) for each in seen.deepstack_features],
                )
        hidden = model.model(
            input_ids=batch.ids, position_ids=positions, use_cache=False, mm_encoder_outputs=outputs, **inputs
        ).last_hidden_state
    wanted = batch.learned[:, 1:]
    logits = model.lm_head(hidden[:, :-1][wanted]).float()
    targets = batch.ids[:, 1:][wanted]
    return F.cross_entropy(logits, targets), helped, (logits.argmax(-1) == targets).float().mean().item()
