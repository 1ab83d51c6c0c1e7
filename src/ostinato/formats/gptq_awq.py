"""Configs and tensors of GPTQ and AWQ: integers of 4 bits with a scale and a zero point per group. Imports no torch.

GPTQ, as AutoGPTQ and GPTQModel write it: for a linear there are `qweight` int32 [in / 8, out], whose int32 hold eight
elements of a column, the first in the lowest bits; `qzeros` int32 [groups, out / 8], packed alike along its rows;
`scales` [groups, out]; and `g_idx` int32 [in], the group of each element. Format `gptq` stores zero points less one,
`gptq_v2` as they are.

AWQ, as AutoAWQ writes it: `qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8], whose int32 hold eight
neighbours of a row in the order `AWQ_NIBBLES`; and `scales` [groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping

from ostinato.formats.config_checks import GROUP_SIZES, ConfigChecker
from ostinato.plan.quantization import StoredWeights

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
