"""Checkpoints as compressed-tensors writes them, made of plain ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ostinato.formats.mapped_files import SINGLE
from ostinato.ops.quant import quantize
from tests.support.checkpoints import checkpoint

LINEAR = re.compile(r".*(_proj|_linear|lm_head|layer)\.weight$")
"""Tensors that torch's class `Linear` holds in the models of the tests, and stacked experts."""

STACK = re.compile(r".*block_sparse_moe.*_linear\.weight$")


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
    """int8 [..., in] -> int32 [..., in / 4]: of four values plus 128, the first is in the lowest bits."""
    values = F.pad(weight.int() + 128, (0, -weight.shape[-1] % 4))
    first, second, third, fourth = values.long().unflatten(-1, (-1, 4)).unbind(-1)
    return (first + (second << 8) + (third << 16) + (fourth << 24)).to(torch.int32)


def compressed(
    name: str,
    directory: Path,
    group_size: int | None,
    form: str,
    ignore: tuple[str, ...] = ("lm_head",),
    with_stacks: bool = False,
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of the recipe `name` with quantised weights, also those of stacked experts if `with_stacks`.
    -> what each tensor stands for, float32"""
    shutil.copytree(checkpoint(name), directory, dirs_exist_ok=True)
    tensors, meaning = load_file(directory / SINGLE), {}
    written: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        meaning[key] = written[key] = tensor
        is_linear = tensor.dim() == (3 if STACK.match(key) else 2)
        if not LINEAR.match(key) or not is_linear or any(re.match(each, key) for each in ignore):
            continue
        if tensor.dim() == 3 and not with_stacks:
            continue
        weight, scale = quantize.quantize_int8(tensor.flatten(0, -2), group_size)
        scale = scale.view(len(scale), -1).to(torch.bfloat16)
        wide = scale.float() if group_size else scale.float().view(-1)
        meaning[key] = quantize.dequantize(weight, wide, group_size).view(tensor.shape)
        del written[key]
        stack = weight.view(tensor.shape)
        if form == "pack-quantized":
            written[f"{key}_packed"], written[f"{key}_shape"] = packed(stack), torch.tensor(weight.shape)
        else:
            written[key] = stack
        written[f"{key}_scale"] = scale.view(*tensor.shape[:-1], -1)
    save_file(written, directory / SINGLE, metadata={"format": "pt"})
    strategy = {"strategy": "channel" if group_size is None else "group", "group_size": group_size}
    patterns = [f"re:{each}" for each in ignore]
    targets = ["Linear", "GraniteMoeHybridParallelExpertsLinear"] if with_stacks else ["Linear"]
    described = quantization_config(format=form, weights=strategy, ignore=patterns, group={"targets": targets})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return meaning
