"""Configs and tensors of weights in small floats: `quant_method` fp8, and mxfp4 of experts. Imports no torch.

FP8, as DeepSeek and Qwen write it: for a linear there are `weight` float8_e4m3 [out, in] and the scales by which it is
multiplied: with `weight_block_size` [high, wide] `weight_scale_inv` [out / high, in / wide], rounded up; without it one
number, under that name or as `weight_scale`.

MXFP4, such as that of gpt-oss: for a stack of matrices [experts, out, in] named NAME there are `NAME_blocks` uint8
[experts, out, in / 32, 16], whose bytes have neighbours of a row, the first in the lower half, and `NAME_scales` uint8
[experts, out, in / 32], the exponents of powers of 2 plus 127 (OCP Microscaling Formats 1.0, 2023). All else is not
quantised.
"""

from __future__ import annotations

from ostinato.formats.config_checks import ConfigChecker
from ostinato.json_io import JsonMapping
from ostinato.plan.quantization import StoredWeights

FP8_PARTS = ("weight_scale_inv", "weight_scale")
MXFP4_PARTS = ("blocks", "scales")
MXFP4_GROUP = 32
_FP8 = (
    "supported: quant_method fp8 with fmt e4m3, activation_scheme dynamic (activations are left as they are), and "
    "weight_block_size of two numbers or none"
)
_MXFP4 = "supported: quant_method mxfp4 of experts, with modules_to_not_convert"
_ALL_BUT_EXPERTS = r"re:(?!.*\.experts\.)"


def read_fp8(given: JsonMapping) -> StoredWeights:
    config = ConfigChecker(given, _FP8)
    config.expect("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    config.expect("activation_scheme", "dynamic", default="dynamic")
    # Powers of two are float32 numbers here too.
    config.expect("scale_fmt", None, "float", "ue8m0")
    config.expect("expert_dtype", None, "fp8")
    config.refuse("modules_to_convert")
    block = given.get("weight_block_size")
    if block is not None and not _is_block(block):
        raise config.unsupported("weight_block_size", block)
    ignore = (*config.names("modules_to_not_convert", "ignored_layers"), "lm_head")
    return StoredWeights(
        "fp8",
        "float8",
        ignore=ignore,
        ignores_stacks=True,
        is_packed=False,
        block=(0, 0) if block is None else (block[0], block[1]),
        wants_small_activations=True,
    )


def _is_block(block: object) -> bool:
    return (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in block)
    )


def read_mxfp4(given: JsonMapping) -> StoredWeights:
    config = ConfigChecker(given, _MXFP4)
    ignore = (_ALL_BUT_EXPERTS, *config.names("modules_to_not_convert"))
    return StoredWeights("mxfp4", "mxfp4", MXFP4_GROUP, ignore)


def mxfp4_shape(part: str, rows: int, columns: int, _: StoredWeights) -> list[int]:
    groups = [rows, columns // MXFP4_GROUP]
    return [*groups, MXFP4_GROUP // 2] if part == "blocks" else groups
