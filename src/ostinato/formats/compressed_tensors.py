"""compressed-tensors' config and tensors, as llm-compressor writes them. Imports no torch.

For integers, format `pack-quantized` has `weight_packed` int32 [out, in / 8 or 4], whose int32 hold neighbours of a
row, the first in the lowest bits, each with 8 or 128 added; `weight_scale` [out, groups]; `weight_zero_point` int32
[out / 8, groups], packed alike along its columns; `weight_shape`; and with act-order `weight_g_idx` int32 [in].
`int-quantized` has an int8 `weight` and its scale, and `float-quantized` a float8_e4m3 one with scales [1], [out, 1] or
of blocks [out / high, in / wide].
"""

from __future__ import annotations

from collections.abc import Mapping

from ostinato.errors import ModelError
from ostinato.formats.config_checks import GROUP_SIZES, ConfigChecker, checked_pattern
from ostinato.json_io import JsonObject
from ostinato.plan.quantization import StoredWeights

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
INTEGERS = ("pack-quantized", "int-quantized")
FLOATS = ("float-quantized", "naive-quantized")
SUPPORTED = (
    "supported: quant_method compressed-tensors with one group of targets Linear, and of weights: type int with 4 bits "
    "(format pack-quantized, symmetric or not, strategy group with group_size 32, 64 or 128, or channel); type int "
    "with 8 bits (format pack-quantized or int-quantized, symmetric, strategy group or channel); type float with 8 "
    "bits (format float-quantized, strategy tensor, channel or block); activations as they are, or dynamic: with "
    "float weights (and left as they are), or of type int with 8 bits, symmetric, strategy token (activation_dtype "
    "int8)"
)
STACK = "GraniteMoeHybridParallelExpertsLinear"
"""Class of experts that are quantised while they are stacked in one tensor."""

GROUP_MULTIPLE = 32
"""Divisor of group sizes, in elements: kernels multiply this many at once."""


def read_compressed_tensors(given: Mapping[str, object]) -> StoredWeights:
    config = ConfigChecker(given, SUPPORTED)
    form = config.expect("format", *INTEGERS, *FLOATS)
    config.expect("quantization_status", "compressed", None)
    config.refuse("kv_cache_scheme", "sparsity_config", "transform_config")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise config.unsupported("config_groups", groups)
    [group] = groups.values()
    if not isinstance(group, Mapping):
        raise config.unsupported("config_groups", groups)
    config.expect("targets", ["Linear"], ["Linear", STACK], inside=group)
    config.expect("format", form, None, inside=group)
    config.expect("output_activations", None, inside=group)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise config.unsupported("weights", weights)
    facts = _integers(config, form, weights) if form in INTEGERS else _floats(config, weights)
    activations = group.get("input_activations")
    if activations is not None:
        if not isinstance(activations, Mapping) or activations.get("dynamic") is not True:
            raise config.unsupported("input_activations", activations)
        if form in INTEGERS:
            is_token_wise = activations.get("strategy") == "token" and activations.get("symmetric", True) is True
            if not is_token_wise or (activations.get("type", "int"), activations.get("num_bits")) != ("int", 8):
                raise config.unsupported("input_activations", activations)
        facts["wants_small_activations"] = True
    return StoredWeights(
        "compressed-tensors", ignore=_ignored(config), ignores_stacks=STACK not in group["targets"], **facts
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
    elif isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % GROUP_MULTIPLE:
        raise ModelError(
            f"the checkpoint is quantized with group_size = {size!r}; supported: multiples of {GROUP_MULTIPLE}"
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
