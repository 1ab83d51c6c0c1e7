"""Assistants of tiny models of Gemma 4, made with transformers, which is also the oracle of their drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.support.checkpoints import VOCAB_SIZE, oracle, randomize, recipe
from tests.support.folders import shared_folder
from tests.support.recipes import without_small_embeddings

TAKEN = (
    "vocab_size", "sliding_window", "num_key_value_heads", "head_dim", "max_position_embeddings", "attention_k_eq_v",
    "rope_parameters", "rms_norm_eps",
)  # fmt: skip
"""What an assistant has from its target."""

KINDS = {
    "plain": {},
    "clusters": {"use_ordered_embeddings": True, "num_centroids": VOCAB_SIZE, "centroid_intermediate_top_k": 40},
    "wide": {"use_double_wide_mlp": True},
    "untied": {"tie_word_embeddings": False, "attention_bias": True, "layer_types": ["full_attention"] * 2},
}
"""Values of the config.json, and of its text part, by the name of a kind of assistants.

Those of Gemma 4 Unified alone may be wide.
"""

OF_TEXT = ("attention_bias", "layer_types", "use_double_wide_mlp")

AssistantConfig = transformers.Gemma4AssistantConfig | transformers.Gemma4UnifiedAssistantConfig
AssistantModel = Gemma4AssistantForCausalLM | Gemma4UnifiedAssistantForCausalLM


ARCHITECTURES = frozenset({"gemma4_assistant", "gemma4_unified_assistant"})
"""Those of the registry that only make drafts for others."""


def assistant_config(text: PretrainedConfig, kind: str, **given: Any) -> AssistantConfig:
    """The config.json of an assistant of a model with this text part; `given` are further values of its own."""
    [*full] = (
        layer for layer, each in zip(text.per_layer_config, text.layer_types, strict=True) if each == "full_attention"
    )
    written = text.to_dict()
    own = {name: written[name] for name in TAKEN if name in written} | {
        "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "global_head_dim": full[0].head_dim,
        "num_global_key_value_heads": full[0].num_key_value_heads, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip
    outer = {name: value for name, value in KINDS[kind].items() if name not in OF_TEXT}
    own |= {name: value for name, value in KINDS[kind].items() if name not in outer} | given
    layers = len(own["layer_types"])
    own |= {"num_hidden_layers": layers, "num_kv_shared_layers": layers}
    if text.model_type == "gemma4_unified_text":
        unified = transformers.Gemma4UnifiedTextConfig(**without_small_embeddings(own))
        return transformers.Gemma4UnifiedAssistantConfig(
            text_config=unified, backbone_hidden_size=text.hidden_size, **outer
        )
    return transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**own), backbone_hidden_size=text.hidden_size, **outer
    )


def assistant_of(config: AssistantConfig, seed: int) -> AssistantModel:
    """Random weights, and tokens in clusters at random."""
    is_unified = isinstance(config, transformers.Gemma4UnifiedAssistantConfig)
    shared = property(lambda self: ["reuse"] * self.num_hidden_layers)
    with pytest.MonkeyPatch.context() as patch:
        # transformers 5.23 looks for layers with keys, of which an assistant has none.
        patch.setattr(type(config.text_config), "kv_sharing_modes", shared)
        model = (Gemma4UnifiedAssistantForCausalLM if is_unified else Gemma4AssistantForCausalLM)(config)
    randomize(model, seed)
    if model.masked_embedding is not None:
        order = torch.randperm(model.vocab_size, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.data.copy_(order)
    return model.eval()


@cache
def assistant_oracle(target: str, kind: str) -> AssistantModel:
    """transformers' assistant of a recipe's model, float32. Treat it as read-only."""
    return assistant_of(assistant_config(recipe(target).get_text_config(), kind), seed=3000)


@cache
def assistant_checkpoint(target: str, kind: str) -> Path:
    """A directory with its weights. Treat it as read-only."""
    directory = shared_folder("assistant")
    assistant_oracle(target, kind).save_pretrained(directory)
    return directory


def changed_checkpoint(target: str, kind: str, text: dict[str, Any] | None = None, **outer: Any) -> Path:
    """The same weights beside another config.json, with other values of its text part and outside of it."""
    directory, own = shared_folder("assistant"), assistant_checkpoint(target, kind)
    config = json.loads((own / "config.json").read_text()) | outer
    config["text_config"] |= text or {}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").symlink_to(own / "model.safetensors")
    return directory


def storing_oracle(target: str) -> PreTrainedModel:
    """The oracle of a recipe, which gives its keys to an assistant: those of the last layer of each kind that has some.

    transformers 5.23 gives none of models whose layers share none.
    """
    model = oracle(target)
    layers = [layer.self_attn for layer in model.get_decoder().layers]
    last = {each.layer_type: each for each in layers if not each.is_kv_shared_layer}
    for attention in last.values():
        attention.store_full_length_kv = True
    return model


class AssistantReference:
    """The drafts of an assistant behind the beginnings of one text.

    A draft has the position of the text's last token, whose keys the target has not yet computed. Within a window it
    sees the keys that that token will see.
    """

    @torch.inference_mode()
    def __init__(self, target: str, kind: str, text: Sequence[int]) -> None:
        model = storing_oracle(target)
        self._assistant, self._embed, self._text = assistant_oracle(target, kind), model.get_input_embeddings(), text
        self._window = recipe(target).get_text_config().sliding_window
        result = model.get_decoder()(torch.tensor([text]), use_cache=False, return_shared_kv_states=True)
        self._hidden, self._keys = result.last_hidden_state, result.shared_kv_states

    @torch.inference_mode()
    def logits(self, length: int, ahead: Sequence[int] = ()) -> torch.Tensor:
        """[vocab]: of the draft behind the first `length` tokens of the text and the drafts `ahead`."""
        first = {"full_attention": 0, "sliding_attention": max(0, length - self._window)}
        keys = {
            kind: tuple(part[:, :, first[kind] : length - 1] for part in parts) for kind, parts in self._keys.items()
        }
        hidden, logits = self._hidden[:, length - 2 : length - 1], torch.empty(0)
        for token in (self._text[length - 1], *ahead):
            joined = torch.cat((self._embed(torch.tensor([[token]])), hidden), dim=-1)
            result = self._assistant(
                inputs_embeds=joined, position_ids=torch.tensor([[length - 1]]), shared_kv_states=keys
            )
            hidden, logits = result.last_hidden_state, result.logits
        return logits[0, -1]
