"""Checkpoints as compressed-tensors writes them, made of plain ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ostinato.models.loader import SINGLE
from ostinato.ops import int8
from tests.checkpoints import checkpoint

LINEAR = re.compile(r".*(_proj|_linear|lm_head|layer)\.weight$")
"""Tensors that torch's class `Linear` holds in the models of the tests."""


def quantization_config(**changes: Any) -> dict[str, Any]:
    """8-bit weights with one scale per row."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}
    weights |= changes.pop("weights", {})
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | changes.pop("group", {})},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | changes


def packed(weight: torch.Tensor) -> torch.Tensor:
    """int8 [rows, in] -> int32 [rows, in / 4]: of four values plus 128, the first is in the lowest bits."""
    missing = -weight.shape[1] % 4
    values = torch.cat((weight.int() + 128, torch.zeros(len(weight), missing, dtype=torch.int32)), dim=1)
    first, second, third, fourth = values.long().unflatten(1, (-1, 4)).unbind(-1)
    return (first + (second << 8) + (third << 16) + (fourth << 24)).to(torch.int32)


def compressed(
    name: str, directory: Path, group_size: int | None, form: str, ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of the recipe `name` with quantised weights. -> what each tensor stands for, float32"""
    shutil.copytree(checkpoint(name), directory, dirs_exist_ok=True)
    tensors, meaning = load_file(directory / SINGLE), {}
    written: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        meaning[key] = written[key] = tensor
        if not LINEAR.match(key) or tensor.dim() != 2 or any(re.match(each, key) for each in ignore):
            continue
        weight, scale = int8.quantize(tensor, group_size)
        scale = scale.view(len(scale), -1).to(torch.bfloat16)
        meaning[key] = int8.dequantize(weight, scale.float() if group_size else scale.float().view(-1), group_size)
        del written[key]
        if form == "pack-quantized":
            written[f"{key}_packed"], written[f"{key}_shape"] = packed(weight), torch.tensor(weight.shape)
        else:
            written[key] = weight
        written[f"{key}_scale"] = scale
    save_file(written, directory / SINGLE, metadata={"format": "pt"})
    strategy = {"strategy": "channel" if group_size is None else "group", "group_size": group_size}
    patterns = [f"re:{each}" for each in ignore]
    described = quantization_config(format=form, weights=strategy, ignore=patterns)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return meaning
