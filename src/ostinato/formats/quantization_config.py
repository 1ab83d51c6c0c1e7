"""The `quantization_config` of a config.json, in each spelling, and the tensors of one quantised weight.

FP8, as DeepSeek and Qwen write it: for a linear there are `weight` float8_e4m3 [out, in] and the scales by which it is
multiplied: with `weight_block_size` [high, wide] `weight_scale_inv` [out / high, in / wide], rounded up; without it one
number, under that name or as `weight_scale`.

MXFP4, such as that of gpt-oss: for a stack of matrices [experts, out, in] named NAME there are `NAME_blocks` uint8
[experts, out, in / 32, 16], whose bytes have neighbours of a row, the first in the lower half, and `NAME_scales` uint8
[experts, out, in / 32], the exponents of powers of 2 plus 127 (OCP Microscaling Formats 1.0, 2023). All else is not
quantised.

GPTQ, as AutoGPTQ and GPTQModel write it: for a linear there are `qweight` int32 [in / 8, out], whose int32 hold eight
elements of a column, the first in the lowest bits; `qzeros` int32 [groups, out / 8], packed alike along its rows;
`scales` [groups, out]; and `g_idx` int32 [in], the group of each element. Format `gptq` stores zero points less one,
`gptq_v2` as they are.

AWQ, as AutoAWQ writes it: `qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8], whose int32 hold eight
neighbours of a row in the order `AWQ_NIBBLES`; and `scales` [groups, out].

compressed-tensors, as llm-compressor writes it: for integers, format `pack-quantized` has `weight_packed` int32 [out,
in / 8 or 4], whose int32 hold neighbours of a row, the first in the lowest bits, each with 8 or 128 added;
`weight_scale` [out, groups]; `weight_zero_point` int32 [out / 8, groups], packed alike along its columns;
`weight_shape`; and with act-order `weight_g_idx` int32 [in]. `int-quantized` has an int8 `weight` and its scale, and
`float-quantized` a float8_e4m3 one with scales [1], [out, 1] or of blocks [out / high, in / wide].

Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.plan.quantization import StoredWeights

GROUP_SIZES = (32, 64, 128)
"""Group sizes of 4-bit weights that kernels read."""


@dataclass(frozen=True)
class ConfigChecker:
    """A quantisation config, and the `supported` part of its method."""

    given: JsonMapping
    supported: str

    def expect(
        self, name: str, *values: object, inside: Mapping[str, object] | None = None, default: object = None
    ) -> Any:
        """Return the value of `name`, which must be one of `values`; `True` and 1 are different values."""
        value = (self.given if inside is None else inside).get(name, default)
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values):
            raise self.unsupported(name, value)
        return value

    def refuse(self, *names: str) -> None:
        """Raise ModelError if one of `names` has a value, which would change the meaning of the weights."""
        for name in names:
            if self.given.get(name):
                raise self.unsupported(name, self.given[name])

    def unsupported(self, name: str, value: object) -> ModelError:
        return ModelError(f"the checkpoint is quantized with {name} = {value!r}; {self.supported}")

    def names(self, *spellings: str) -> tuple[str, ...]:
        """Return the linears that a list names, as patterns for `Quantization.ignore`.

        An entry of the list is a part of a module's name between dots, or a pattern for one.
        """
        found: list[str] = []
        for name in spellings:
            entries = self.given.get(name) or []
            if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
                raise self.unsupported(name, entries)
            found += [rf"re:(?:.*\.)?(?:{checked_pattern(name, entry)})(?:\.|$)" for entry in entries]
        return tuple(found)


def checked_pattern(name: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelError(f"quantization_config has {name} = {pattern!r}, which is no pattern: {error}") from None
    return pattern


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


GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
AWQ_PARTS = GPTQ_PARTS[:-1]
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the element in the lowest four bits of an int32, in the next four, and so on."""

ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Offsets of GPTQ's stored zero points, by `checkpoint_format`."""

_GPTQ = (
    "supported: quant_method gptq with bits 4, group_size 32, 64, 128 or -1, desc_act or not, sym or not, "
    "checkpoint_format gptq or gptq_v2, and the same for all modules"
)
_AWQ = (
    "supported: quant_method awq with bits 4, group_size 32, 64, 128 or -1, zero_point true, version gemm, and the "
    "same for all modules"
)


def read_gptq(given: Mapping[str, object]) -> StoredWeights:
    config = ConfigChecker(given, _GPTQ)
    config.expect("bits", 4)
    group_size = config.expect("group_size", -1, *GROUP_SIZES)
    desc_act = config.expect("desc_act", True, False, default=False)
    config.expect("sym", True, False, default=True)
    config.expect("pack_dtype", "int32", default="int32")
    config.expect("lm_head", False, default=False)
    config.expect("is_marlin_format", False, default=False)
    config.refuse("modules_in_block_to_quantize", "adapter", "rotation")
    spelled = "checkpoint_format" if "checkpoint_format" in given else "format"
    form = config.expect(spelled, *ZERO_OFFSETS, default="gptq")
    ignore = (*config.names("modules_to_not_convert"), *_skipped(config), "lm_head")
    return StoredWeights(
        "gptq",
        "int4",
        None if group_size == -1 else group_size,
        ignore,
        ignores_stacks=True,
        has_zeros=True,
        zero_offset=ZERO_OFFSETS[form],
        in_groups_by_index=desc_act,
    )


def _skipped(config: ConfigChecker) -> tuple[str, ...]:
    """Return the linears that `dynamic` leaves out: its keys are patterns of names with `-:` before them.

    Raises ModelError for other keys, which would give modules bits or groups of their own.
    """
    dynamic = config.given.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(str(key).startswith("-:") for key in dynamic):
        raise config.unsupported("dynamic", dynamic)
    return tuple(f"re:{key.removeprefix('-:')}" for key in dynamic)


def read_awq(given: Mapping[str, object]) -> StoredWeights:
    # AutoAWQ's own quant_config.json has other names for three of them.
    spelled = {"w_bit": "bits", "q_group_size": "group_size"}
    given = {spelled.get(name, name): value for name, value in given.items()}
    config = ConfigChecker(given, _AWQ)
    config.expect("bits", 4)
    group_size = config.expect("group_size", -1, *GROUP_SIZES)
    config.expect("zero_point", True, default=True)
    version = given.get("version") or given.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise config.unsupported("version", version)
    config.expect("lm_head", False, default=False)
    config.refuse("desc_act", "dynamic")
    ignore = (*config.names("modules_to_not_convert"), "lm_head")
    return StoredWeights(
        "awq", "int4", None if group_size == -1 else group_size, ignore, ignores_stacks=True, has_zeros=True
    )


def shape_of_four_bits(part: str, rows: int, columns: int, stored: StoredWeights) -> list[int]:
    """Return the shape of a tensor that belongs to a weight [rows, columns]."""
    groups = 1 if stored.group_size is None else -(-columns // stored.group_size)
    return {
        "qweight": [columns, -(-rows // 8)] if stored.method == "awq" else [-(-columns // 8), rows],
        "qzeros": [groups, -(-rows // 8)],
        "scales": [groups, rows],
        "g_idx": [columns],
    }[part]


_COMPRESSED_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_INTEGER_FORMS = ("pack-quantized", "int-quantized")
_FLOAT_FORMS = ("float-quantized", "naive-quantized")
_COMPRESSED = (
    "supported: quant_method compressed-tensors with one group of targets Linear, and of weights: type int with 4 bits "
    "(format pack-quantized, symmetric or not, strategy group with group_size 32, 64 or 128, or channel); type int "
    "with 8 bits (format pack-quantized or int-quantized, symmetric, strategy group or channel); type float with 8 "
    "bits (format float-quantized, strategy tensor, channel or block); activations as they are, or dynamic: with "
    "float weights (and left as they are), or of type int with 8 bits, symmetric, strategy token (activation_dtype "
    "int8)"
)
_STACK = "GraniteMoeHybridParallelExpertsLinear"
"""Class of experts that are quantised while they are stacked in one tensor."""

_GROUP_MULTIPLE = 32
"""Divisor of group sizes, in elements: kernels multiply this many at once."""


def read_compressed_tensors(given: Mapping[str, object]) -> StoredWeights:
    config = ConfigChecker(given, _COMPRESSED)
    form = config.expect("format", *_INTEGER_FORMS, *_FLOAT_FORMS)
    config.expect("quantization_status", "compressed", None)
    config.refuse("kv_cache_scheme", "sparsity_config", "transform_config")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise config.unsupported("config_groups", groups)
    [group] = groups.values()
    if not isinstance(group, Mapping):
        raise config.unsupported("config_groups", groups)
    config.expect("targets", ["Linear"], ["Linear", _STACK], inside=group)
    config.expect("format", form, None, inside=group)
    config.expect("output_activations", None, inside=group)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise config.unsupported("weights", weights)
    facts = _integers(config, form, weights) if form in _INTEGER_FORMS else _floats(config, weights)
    activations = group.get("input_activations")
    if activations is not None:
        if not isinstance(activations, Mapping) or activations.get("dynamic") is not True:
            raise config.unsupported("input_activations", activations)
        if form in _INTEGER_FORMS:
            is_token_wise = activations.get("strategy") == "token" and activations.get("symmetric", True) is True
            if not is_token_wise or (activations.get("type", "int"), activations.get("num_bits")) != ("int", 8):
                raise config.unsupported("input_activations", activations)
        facts["wants_small_activations"] = True
    return StoredWeights(
        "compressed-tensors", ignore=_ignored(config), ignores_stacks=_STACK not in group["targets"], **facts
    )


def _integers(config: ConfigChecker, form: str, weights: Mapping[str, object]) -> JsonObject:
    bits = config.expect("num_bits", *((4, 8) if form == "pack-quantized" else (8,)), inside=weights)
    config.expect("type", "int", inside=weights)
    is_symmetric = config.expect("symmetric", *((True, False) if bits == 4 else (True,)), inside=weights)
    strategy = config.expect("strategy", "channel", "group", inside=weights)
    # `group` puts elements in another order than their groups; `dynamic` is its later name.
    orders = (None, False, "weight", "static", *(("group", "dynamic") if bits == 4 and strategy == "group" else ()))
    order = config.expect("actorder", *orders, inside=weights)
    size = weights.get("group_size")
    if strategy == "channel":
        size = None
    elif bits == 4:
        config.expect("group_size", *GROUP_SIZES, inside=weights)
    elif isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % _GROUP_MULTIPLE:
        raise ModelError(
            f"the checkpoint is quantized with group_size = {size!r}; supported: multiples of {_GROUP_MULTIPLE}"
        )
    return {
        "storage": "int4" if bits == 4 else "int8",
        "group_size": size,
        "is_packed": form == "pack-quantized",
        "has_zeros": not is_symmetric,
        "in_groups_by_index": order in ("group", "dynamic"),
    }


def _floats(config: ConfigChecker, weights: Mapping[str, object]) -> JsonObject:
    config.expect("num_bits", 8, inside=weights)
    config.expect("type", "float", inside=weights)
    config.expect("symmetric", True, inside=weights, default=True)
    strategy = config.expect("strategy", "tensor", "channel", "block", inside=weights)
    block = None
    if strategy == "tensor":
        block = (0, 0)
    elif strategy == "block":
        given = weights.get("block_structure")
        if not isinstance(given, list) or len(given) != 2 or not all(type(each) is int and each > 0 for each in given):
            raise config.unsupported("block_structure", given)
        block = (given[0], given[1])
    return {"storage": "float8", "is_packed": False, "block": block}


def _ignored(config: ConfigChecker) -> tuple[str, ...]:
    entries = config.given.get("ignore") or []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise config.unsupported("ignore", entries)
    for entry in entries:
        if entry.startswith("re:"):
            checked_pattern("ignore", entry.removeprefix("re:"))
    return tuple(entries)


def compressed_tensors_shape(part: str, rows: int, columns: int, stored: StoredWeights) -> list[int]:
    """Return the shape of a tensor that belongs to a weight [rows, columns], or to each of a stack."""
    groups = 1 if stored.group_size is None else -(-columns // stored.group_size)
    of_int32 = 8 if stored.storage == "int4" else 4
    return {
        "weight_packed": [rows, -(-columns // of_int32)],
        "weight_scale": [rows, groups],
        "weight_zero_point": [-(-rows // of_int32), groups],
        "weight_g_idx": [columns],
        "weight_shape": [2],
    }[part]


READERS = {
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "fp8": read_fp8,
    "mxfp4": read_mxfp4,
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
    "compressed-tensors": _COMPRESSED_PARTS,
    "gptq": GPTQ_PARTS,
    "awq": AWQ_PARTS,
    "fp8": FP8_PARTS,
    "mxfp4": MXFP4_PARTS,
}
"""Suffixes of a linear's name, by `quant_method`."""

SHAPES = {
    "compressed-tensors": compressed_tensors_shape,
    "gptq": shape_of_four_bits,
    "awq": shape_of_four_bits,
    "mxfp4": mxfp4_shape,
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
        return (weight, last) if last in MXFP4_PARTS else (name, values)
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
        return ([] if any(part in parts for part in FP8_PARTS) else [FP8_PARTS[0]]), []
    if stored.method == "mxfp4":
        return [part for part in MXFP4_PARTS if part not in parts], []
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
