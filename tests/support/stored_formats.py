"""Checkpoints of 4-bit and float8 weights as compressed-tensors, GPTQ, AWQ and `fp8` write them, by their public rules,
and what each tensor stands for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ostinato.formats.mapped_files import SINGLE
from tests.support.checkpoints import checkpoint
from tests.support.quantized_checkpoints import LINEAR, STACK, quantization_config

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of eight elements, the one in each four bits of an int32, the lowest first."""


@dataclass
class Integers:
    """A weight is scale * (whole - zero); [rows, in], and [rows, groups] for the scale and the zero point."""

    whole: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_of: torch.Tensor

    @property
    def meaning(self) -> torch.Tensor:
        return self.scale.float()[:, self.group_of] * (self.whole - self.zero[:, self.group_of])


def rounded(
    weight: torch.Tensor, group_size: int | None, has_zeros: bool, in_order: bool = False, dtype: Any = torch.float16
) -> Integers:
    """`weight` [rows, in] as 4-bit integers of groups; `has_act_order`: of elements that are no neighbours."""
    columns = weight.shape[1]
    group_of = torch.arange(columns) // (group_size or columns)
    if in_order:
        group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    groups = [weight[:, group_of == i] for i in range(int(group_of.max()) + 1)]
    low = torch.stack([group.amin(dim=1) for group in groups], dim=1).clamp(max=0)
    high = torch.stack([group.amax(dim=1) for group in groups], dim=1).clamp(min=0)
    scale = ((high - low) / 15 if has_zeros else torch.maximum(high, -low) / 7).to(dtype)
    zero = (-low / scale.float()).round().clamp(0, 15) if has_zeros else torch.full_like(low, 8)
    whole = (weight / scale.float()[:, group_of]).round() + zero[:, group_of]
    return Integers(whole.clamp(0, 15).int(), scale, zero.int(), group_of)


def packed(whole: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[a, b] of 0 to 15 -> int32 [a, b / 8], rounded up: element `order[i]` of eight in the `i`th four bits."""
    missing = -whole.shape[1] % 8
    eight = torch.nn.functional.pad(whole, (0, missing)).long().unflatten(1, (-1, 8))
    together = torch.zeros(eight.shape[:2], dtype=torch.int64)
    for i, element in enumerate(order):
        together |= eight[:, :, element] << (4 * i)
    return together.to(torch.int32)


Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a linear by the ends of their names, and what they stand for."""


def compressed_tensors(weight: torch.Tensor, group_size: int | None, has_zeros: bool, in_order: bool) -> Written:
    of = rounded(weight, group_size, has_zeros, in_order, torch.bfloat16)
    tensors = {
        "weight_packed": packed(of.whole),
        "weight_scale": of.scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        tensors["weight_zero_point"] = packed(of.zero.t()).t().contiguous()
    if in_order:
        tensors["weight_g_idx"] = of.group_of.int()
    return tensors, of.meaning


def gptq(weight: torch.Tensor, group_size: int | None, has_zeros: bool, in_order: bool, less: int) -> Written:
    """`less`: what is taken from zero points before they are packed."""
    of = rounded(weight, group_size, has_zeros, in_order)
    tensors = {
        "qweight": packed(of.whole).t().contiguous(),
        "qzeros": packed((of.zero - less).t() & 15),
        "scales": of.scale.t().contiguous(),
        "g_idx": of.group_of.int(),
    }
    return tensors, of.meaning


def awq(weight: torch.Tensor, group_size: int | None) -> Written:
    of = rounded(weight, group_size, has_zeros=True)
    tensors = {
        "qweight": packed(of.whole.t(), AWQ_ORDER),
        "qzeros": packed(of.zero.t(), AWQ_ORDER),
        "scales": of.scale.t().contiguous(),
    }
    return tensors, of.meaning


def float8(weight: torch.Tensor, block: tuple[int, int] | None, scale_name: str) -> Written:
    """With a scale for each block; None: for each row; (0, 0): for all."""
    rows, columns = weight.shape
    high, wide = (1, columns) if block is None else (rows, columns) if block == (0, 0) else block
    scale = torch.zeros(-(-rows // high), -(-columns // wide))
    for i, j in [(i, j) for i in range(scale.shape[0]) for j in range(scale.shape[1])]:
        scale[i, j] = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide].abs().max() / 448
    spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    small = (weight / spread).to(torch.float8_e4m3fn)
    scale = scale.view(-1)[:1] if block == (0, 0) else scale
    return {"weight": small, scale_name: scale}, small.float() * spread


def _w4(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    return quantization_config(weights=weights | changes)


def _f8(strategy: str, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "group_size": None}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    return quantization_config(
        format="float-quantized", weights=weights | changes, group={"input_activations": activations}
    )


def _gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True} | changes


def _awq(**changes: Any) -> dict[str, Any]:
    given = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return given | {"modules_to_not_convert": None} | changes


def _fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"} | changes


FORMS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Written]]] = {
    "ct": (_w4(), lambda w: compressed_tensors(w, GROUP, False, False)),
    "ct-zeros": (_w4(symmetric=False), lambda w: compressed_tensors(w, GROUP, True, False)),
    "ct-channel": (
        _w4(strategy="channel", group_size=None),
        lambda w: compressed_tensors(w, None, False, False),
    ),
    "ct-channel-zeros": (
        _w4(strategy="channel", group_size=None, symmetric=False),
        lambda w: compressed_tensors(w, None, True, False),
    ),
    "ct-act-order": (
        _w4(symmetric=False, actorder="group"),
        lambda w: compressed_tensors(w, GROUP, True, True),
    ),
    "gptq": (_gptq(), lambda w: gptq(w, GROUP, False, False, 1)),
    "gptq-zeros": (_gptq(sym=False, checkpoint_format="gptq"), lambda w: gptq(w, GROUP, True, False, 1)),
    "gptq-v2": (_gptq(sym=False, checkpoint_format="gptq_v2"), lambda w: gptq(w, GROUP, True, False, 0)),
    "gptq-channel": (_gptq(group_size=-1), lambda w: gptq(w, None, False, False, 1)),
    "gptq-act-order": (_gptq(desc_act=True), lambda w: gptq(w, GROUP, False, True, 1)),
    "awq": (_awq(), lambda w: awq(w, GROUP)),
    "awq-channel": (_awq(group_size=-1), lambda w: awq(w, None)),
    "fp8-narrow": (_fp8(weight_block_size=[16, 24]), lambda w: float8(w, (16, 24), "weight_scale_inv")),
    "fp8-blocks": (_fp8(weight_block_size=[16, 32]), lambda w: float8(w, (16, 32), "weight_scale_inv")),
    "fp8-tensor": (_fp8(), lambda w: float8(w, (0, 0), "weight_scale")),
    "ct-float-tensor": (_f8("tensor"), lambda w: float8(w, (0, 0), "weight_scale")),
    "ct-float-channel": (_f8("channel"), lambda w: float8(w, None, "weight_scale")),
    "ct-float-blocks": (
        _f8("block", block_structure=[16, 32]),
        lambda w: float8(w, (16, 32), "weight_scale"),
    ),
}
"""Each kind of checkpoint: its quantization_config, and what writes a linear."""

FLOAT8 = tuple(name for name in FORMS if "fp8" in name or "float" in name)
IN_ORDER = ("ct-act-order", "gptq-act-order")
"""Those whose groups are in an order of their own."""
EXPANDED = ("fp8-narrow",)
"""Those that no kernel reads as they lie: scales are for too few elements of a row."""


def stored(name: str | Path, directory: Path, form: str, ignore: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of the recipe `name`, or of that in a directory, with its linears in a form, but for the head
    and those that patterns in `ignore` name. -> what each tensor stands for, float32"""
    shutil.copytree(name if isinstance(name, Path) else checkpoint(name), directory, dirs_exist_ok=True)
    config, write = FORMS[form]
    written: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    left_out = []
    for key, tensor in load_file(directory / SINGLE).items():
        linear, is_linear = (
            key.removesuffix(".weight"),
            LINEAR.match(key) and tensor.dim() == 2 and not STACK.match(key),
        )
        has_parts = tensor.dim() == 2 and not any(size % 8 for size in tensor.shape)
        if is_linear and key != "lm_head.weight" and (not has_parts or any(re.search(each, linear) for each in ignore)):
            left_out.append(linear)
        elif is_linear and key != "lm_head.weight":
            tensors, meaning[key] = write(tensor)
            written |= {f"{linear}.{end}": part for end, part in tensors.items()}
            continue
        meaning[key] = written[key] = tensor
    save_file(written, directory / SINGLE, metadata={"format": "pt"})
    listed = {"ignore": ["lm_head", *left_out]} if "ignore" in config else {"modules_to_not_convert": left_out}
    described = json.loads((directory / "config.json").read_text()) | {"quantization_config": config | listed}
    (directory / "config.json").write_text(json.dumps(described))
    return meaning
