"""Tiny random checkpoints of every recipe, made with transformers, which is also the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from tests.support.folders import shared_folder
from tests.support.recipes import EOS as EOS
from tests.support.recipes import HEADED, PREFIX_LMS, RECIPES, VOCAB_SIZE

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


PLAIN_NORMS = ("linear_attn", "visual")
"""Parts of the names of norms that are not stored less 1 where others are."""

SUMMED = "shared_transformer"
"""Part of the names of matrices to whose products others are added. As large as elsewhere, they would leave attention
one key, and rounding would grow tenfold with every use."""


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Weights that make every part matter: no norm left at 1, no bias at 0, states that remember."""
    generator = torch.Generator().manual_seed(seed)
    stored_less_one = model.config.model_type.startswith(("qwen3_next", "qwen3_5", "qwen4"))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kind = name.rpartition(".")[2]
        if not tensor.is_floating_point() or "inv_freq" in name or kind in ("embed_scale", "mup_vector"):
            continue
        if kind == "A_log":
            tensor.data.uniform_(-1.5, 1.5, generator=generator)
        elif kind == "dt_bias":
            tensor.data.uniform_(-3, 1, generator=generator)
        elif kind.endswith(("_min", "_max")):
            tensor.data.uniform_(0.4, 1.2, generator=generator).mul_(-1 if kind.endswith("_min") else 1)
        elif tensor.dim() == 1:
            centre = (
                0.0 if "bias" in kind or (stored_less_one and not any(part in name for part in PLAIN_NORMS)) else 1.0
            )
            tensor.data.normal_(centre, 0.3, generator=generator)
        elif kind == "weight" and "conv1d" in name:
            tensor.data.normal_(0, 0.5, generator=generator)
        else:
            tensor.data.normal_(0, (0.6 if SUMMED in name else 1.4) * tensor.shape[-1] ** -0.5, generator=generator)


@cache
def oracle(name: str, seed: int = 0) -> PreTrainedModel:
    """transformers' model of a recipe, float32, with random weights. Treat it as read-only."""
    return _random_model(recipe(name), seed)


def recipe(name: str) -> PretrainedConfig:
    """The configuration of a model, with or without a head."""
    return (RECIPES | HEADED | PREFIX_LMS)[name]()


def _random_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    is_text = config.model_type not in ("glm5_next", "qwen4_exp")  # which are no models of text alone
    auto = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    return model.eval()


@cache
def checkpoint(name: str, seed: int = 0) -> Path:
    """A directory with the oracle's weights, saved by transformers, and those of the head, which transformers does not
    know. Treat it as read-only."""
    directory = shared_folder(name)
    oracle(name, seed).save_pretrained(directory)
    if name in HEADED:
        file = directory / "model.safetensors"
        save_file(load_file(file) | head_oracle(name, seed).tensors(), file, metadata={"format": "pt"})
    return directory


@dataclass(frozen=True)
class HeadOracle:
    """A prediction head: a model of transformers with the head's layers, which begins with what `eh_proj` makes of a
    normed embedding and a normed hidden state, and ends with the head's own norm."""

    model: PreTrainedModel
    enorm: torch.Tensor
    hnorm: torch.Tensor
    eh_proj: torch.Tensor

    def join(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] twice -> [tokens, hidden]"""
        size, eps = embedded.shape[-1:], self.model.config.layer_norm_epsilon
        normed = (
            torch.nn.functional.rms_norm(embedded, size, self.enorm, eps),
            torch.nn.functional.rms_norm(hidden, size, self.hnorm, eps),
        )
        return torch.cat(normed, dim=-1) @ self.eh_proj.T

    def tensors(self) -> dict[str, torch.Tensor]:
        """As a checkpoint holds them: those of transformers under the head's own prefix, and the three of `join`."""
        directory = shared_folder("head")
        self.model.save_pretrained(directory)
        saved = load_file(directory / "model.safetensors")
        last = self.model.config.num_hidden_layers - 1
        own = {"enorm.weight": self.enorm, "hnorm.weight": self.hnorm, "eh_proj.weight": self.eh_proj}
        return {
            **{f"mtp.layers.0.{name}": tensor for name, tensor in own.items()},
            **{
                f"mtp.{name.removeprefix('backbone.')}": tensor
                for name, tensor in saved.items()
                if name.startswith("backbone.layers.")
            },
            f"mtp.layers.{last}.final_layernorm.weight": saved["backbone.norm_f.weight"],
        }


class QwenHeadOracle(HeadOracle):
    """As Qwen3.5 and Qwen3-Next have it: norms less 1, and other names."""

    def join(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        size, eps = embedded.shape[-1:], self.model.config.rms_norm_eps
        normed = (
            torch.nn.functional.rms_norm(embedded, size, 1 + self.enorm, eps),
            torch.nn.functional.rms_norm(hidden, size, 1 + self.hnorm, eps),
        )
        return torch.cat(normed, dim=-1) @ self.eh_proj.T

    def tensors(self) -> dict[str, torch.Tensor]:
        directory = shared_folder("head")
        self.model.save_pretrained(directory)
        own = {"pre_fc_norm_embedding": self.enorm, "pre_fc_norm_hidden": self.hnorm, "fc": self.eh_proj}
        return {f"mtp.{name}.weight": tensor for name, tensor in own.items()} | {
            f"mtp.{name.removeprefix('model.')}": tensor
            for name, tensor in load_file(directory / "model.safetensors").items()
            if name.startswith(("model.layers.", "model.norm."))
        }


@dataclass(frozen=True)
class LingHeadOracle(HeadOracle):
    """As Ling 3.0 has it: the tensors of one more layer, which is called `place`."""

    place: str

    def join(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        size, eps = embedded.shape[-1:], self.model.config.rms_norm_eps
        normed = (
            torch.nn.functional.rms_norm(embedded, size, self.enorm, eps),
            torch.nn.functional.rms_norm(hidden, size, self.hnorm, eps),
        )
        return torch.cat(normed, dim=-1) @ self.eh_proj.T

    def tensors(self) -> dict[str, torch.Tensor]:
        directory = shared_folder("head")
        self.model.save_pretrained(directory)
        saved, place = load_file(directory / "model.safetensors"), self.place
        return {
            f"{place}.enorm.weight": self.enorm,
            f"{place}.hnorm.weight": self.hnorm,
            f"{place}.eh_proj.weight": self.eh_proj,
            f"{place}.final_layernorm.weight": saved["model.norm.weight"],
            **{
                name.replace("model.layers.0", place): tensor
                for name, tensor in saved.items()
                if name.startswith("model.layers.")
            },
        }


@cache
def head_oracle(name: str, seed: int = 0) -> HeadOracle:
    """The head of a recipe that has one, with random weights. Treat it as read-only."""
    config = recipe(name)
    if config.model_type.startswith("qwen"):
        return qwen_head_oracle(config, seed)
    if config.model_type == "bailing_hybrid":
        changes = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "num_hidden_layers": 1}
        model = _random_model(type(config)(**(config.to_dict() | changes)), seed + 1000)
        return LingHeadOracle(
            model, *_random_join(config.hidden_size, seed), f"model.layers.{config.num_hidden_layers}"
        )
    kinds = config.mtp_layers_block_type
    changes = {"layers_block_type": kinds, "num_hidden_layers": len(kinds), "num_nextn_predict_layers": 0}
    model = _random_model(type(config)(**(config.to_dict() | changes)), seed + 1000)
    return HeadOracle(model, *_random_join(config.hidden_size, seed))


def qwen_head_oracle(config: PretrainedConfig, seed: int) -> QwenHeadOracle:
    """The head of Qwen3.5's or Qwen3-Next's text model, with random weights: one layer with attention."""
    changes: dict[str, Any] = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    changes |= {"mlp_only_layers": []} if config.model_type == "qwen3_next" else {}
    model = _random_model(type(config)(**(config.to_dict() | changes)), seed + 1000)
    enorm, hnorm, joined = _random_join(config.hidden_size, seed)
    return QwenHeadOracle(model, enorm - 1, hnorm - 1, joined)


def _random_join(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two norms around 1, and what makes one vector of two."""
    generator = torch.Generator().manual_seed(seed + 2000)
    enorm, hnorm = (torch.empty(size).normal_(1, 0.3, generator=generator) for _ in range(2))
    return enorm, hnorm, torch.empty(size, 2 * size).normal_(0, size**-0.5, generator=generator)


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def oracle_logits(name: str, token_ids: list[int], seed: int = 0, prompt: int = 0) -> torch.Tensor:
    """[tokens, vocab] of the whole text at once; a prefix LM's first `prompt` tokens see each other."""
    types = {}
    if name in PREFIX_LMS:
        types["token_type_ids"] = (torch.arange(len(token_ids)) < prompt).long()[None]
    return oracle(name, seed)(torch.tensor([token_ids]), use_cache=False, **types).logits[0]
