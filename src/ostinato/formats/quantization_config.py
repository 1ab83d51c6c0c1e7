"""The `quantization_config` of a config.json, in each spelling, and the tensors of one quantised weight.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from ostinato.errors import ModelError
from ostinato.formats import compressed_tensors, fp8_mxfp4, gptq_awq
from ostinato.json_io import JsonMapping
from ostinato.plan.quantization import StoredWeights

READERS = {
    "compressed-tensors": compressed_tensors.read_compressed_tensors,
    "gptq": gptq_awq.read_gptq,
    "awq": gptq_awq.read_awq,
    "fp8": fp8_mxfp4.read_fp8,
    "mxfp4": fp8_mxfp4.read_mxfp4,
}
"""Readers by `quant_method`."""


def stored_weights(config: JsonMapping) -> StoredWeights | None:
    """Return the quantization of a checkpoint's weights, None without. ModelError for what cannot be read."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method not in READERS:
        known = ", ".join(READERS)
        raise ModelError(f"the checkpoint is quantized with {method or 'an unnamed method'}; supported: {known}")
    return READERS[method](given)


PARTS = {
    "compressed-tensors": compressed_tensors.PARTS,
    "gptq": gptq_awq.GPTQ_PARTS,
    "awq": gptq_awq.AWQ_PARTS,
    "fp8": fp8_mxfp4.FP8_PARTS,
    "mxfp4": fp8_mxfp4.MXFP4_PARTS,
}
"""Suffixes of a linear's name, by `quant_method`."""

SHAPES = {
    "compressed-tensors": compressed_tensors.compressed_tensors_shape,
    "gptq": gptq_awq.shape_of_four_bits,
    "awq": gptq_awq.shape_of_four_bits,
    "mxfp4": fp8_mxfp4.mxfp4_shape,
}
"""Functions that give the shape of a part for one matrix, by `quant_method`."""

PACKED = ("weight_packed", "qweight", "blocks")
"""Parts with the integers."""

FLOATS = ("F32", "F16", "BF16")
"""Types of numbers that are not quantised, in safetensors' words."""
TYPES = {"weight_shape": ("I64", "I32"), "weight_scale_inv": FLOATS, "weight_scale": FLOATS, "scales": FLOATS}
"""Types of parts, in safetensors' words; all others are I32."""


def split(stored: StoredWeights, name: str, values: str) -> tuple[str, str]:
    """Return the weight that a tensor belongs to, and the name of its part; `values` for the weight itself."""
    if stored.method == "mxfp4":
        weight, _, last = name.rpartition("_")
        return (weight, last) if last in fp8_mxfp4.MXFP4_PARTS else (name, values)
    parent, _, last = name.rpartition(".")
    return (f"{parent}.weight", last) if last in PARTS[stored.method] else (name, values)


def name_of(stored: StoredWeights, weight: str, part: str) -> str:
    """Return the name of the tensor that is a part of a weight."""
    if stored.method == "mxfp4":
        return f"{weight}_{part}"
    return f"{weight.removesuffix('.weight')}.{part}"


def types(stored: StoredWeights, part: str) -> tuple[str, ...]:
    if stored.method == "mxfp4":
        return ("U8",)
    return TYPES.get(part, ("I32",))


def type_of_values(stored: StoredWeights) -> str | None:
    """Return the type of a quantised tensor that has the weight's own name; None if there is none."""
    return None if stored.is_packed else {"int8": "I8", "float8": "F8_E4M3"}.get(stored.storage)


def complete(stored: StoredWeights, parts: Collection[str], is_quantised: bool) -> tuple[list[str], list[str]]:
    """Return the parts that are missing for a weight that has `parts`, and those that should not be there.

    `is_quantised`: the tensor with the weight's own name is quantised.
    """
    beside = [part for part in parts if part in PARTS[stored.method]]
    has_values = len(beside) < len(parts)
    if has_values and not is_quantised:
        return [], beside
    if not has_values and not any(part in PACKED for part in beside):
        return [next(part for part in PACKED if part in PARTS[stored.method]) if stored.is_packed else "weight"], []
    if stored.method == "fp8":
        return ([] if any(part in parts for part in fp8_mxfp4.FP8_PARTS) else [fp8_mxfp4.FP8_PARTS[0]]), []
    if stored.method == "mxfp4":
        return [part for part in fp8_mxfp4.MXFP4_PARTS if part not in parts], []
    if stored.method == "compressed-tensors":
        needed = ["weight_scale", *(["weight_zero_point"] if stored.has_zeros else [])]
    else:
        needed = ["qzeros", "scales"]
    if stored.in_groups_by_index:
        needed.append("g_idx" if stored.method == "gptq" else "weight_g_idx")
    surplus = [] if stored.has_zeros else ["weight_zero_point"]
    return [part for part in needed if part not in parts], [part for part in surplus if part in parts]


def shape(stored: StoredWeights, part: str, of_weight: list[int], found: list[int]) -> list[int]:
    """Return the shape that a part should have for a weight, or a stack of them, of the shape `of_weight`.

    If several shapes mean the same, it is `found` if that is one of them.
    """
    *outer, columns = of_weight
    if part == "weight_shape":
        # A stack may have the shape of one matrix of all rows.
        return of_weight if len(found) > 2 else [math.prod(outer), columns]
    *stack, rows = outer
    if stored.storage == "float8":
        return _float8_scales(stored, [*stack, rows, columns], found)
    of_matrix = SHAPES[stored.method](part, rows, columns, stored)
    return of_matrix if part in ("g_idx", "weight_g_idx") else [*stack, *of_matrix]


def _float8_scales(stored: StoredWeights, weight: list[int], found: list[int]) -> list[int]:
    *stack, rows, columns = weight
    if stored.block is None:
        alike: list[list[int]] = [[rows, 1], [rows]]
    elif stored.block == (0, 0):
        alike = [[1], [], [1, 1], [rows, 1]]
    else:
        high, wide = stored.block
        alike = [[-(-rows // high), -(-columns // wide)]]
    expected = [[*stack, *each] for each in alike]
    return found if found in expected else expected[0]
