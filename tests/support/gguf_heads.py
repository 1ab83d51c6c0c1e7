"""Prediction heads in GGUF files, as llama.cpp's converter writes them: one more block behind those of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import QwenHeadOracle, qwen_head_oracle

NAMES = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""What stands outside the head's layer."""


def head_layers(config: Any) -> int:
    """How many layers of a prediction head a model has."""
    return getattr(config, "mtp_num_hidden_layers", 0)


def head_of(config: Any) -> QwenHeadOracle | None:
    """The head of a model, with random weights; None for one without."""
    return qwen_head_oracle(config, seed=7) if head_layers(config) else None


def tensors_of(config: Any, head: QwenHeadOracle | None) -> dict[str, torch.Tensor]:
    """The head's tensors, where they are, by the names that the converter gives them before it translates any."""
    if head is None:
        return {}
    block = f"model.layers.{config.num_hidden_layers}"
    tensors = {f"{block}.{name}.weight": getattr(head, name) for name in ("eh_proj", "enorm", "hnorm")}
    for name, tensor in head.model.state_dict().items():
        if name.startswith("model.layers.0."):
            tensors[name.replace("model.layers.0", block)] = tensor
        elif name == "model.norm.weight":
            tensors[f"{block}.shared_head.norm.weight"] = tensor
    return tensors


def add_to_checkpoint(directory: Path, head: QwenHeadOracle | None) -> None:
    """Puts the head's tensors beside those of a model that transformers has saved."""
    if head is not None:
        file = directory / "model.safetensors"
        save_file(load_file(file) | head.tensors(), file, metadata={"format": "pt"})
