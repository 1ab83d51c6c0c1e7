"""AWQ's config and tensors, as AutoAWQ writes them. Imports no torch.

For a linear there are `qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8], whose int32 hold eight
neighbours of a row in the order `NIBBLES`; and `scales` [groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping

from ostinato.formats.config_checks import GROUP_SIZES, ConfigChecker
from ostinato.plan.quantization import StoredWeights

PARTS = ("qweight", "qzeros", "scales")
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the element in the lowest four bits of an int32, in the next four, and so on."""

SUPPORTED = (
    "supported: quant_method awq with bits 4, group_size 32, 64, 128 or -1, zero_point true, version gemm, and the "
    "same for all modules"
)


def read_awq(given: Mapping[str, object]) -> StoredWeights:
    # AutoAWQ's own quant_config.json has other names for three of them.
    spelled = {"w_bit": "bits", "q_group_size": "group_size"}
    given = {spelled.get(name, name): value for name, value in given.items()}
    config = ConfigChecker(given, SUPPORTED)
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


def awq_shape(part: str, rows: int, columns: int, stored: StoredWeights) -> list[int]:
    """Return the shape of a tensor that belongs to a weight [rows, columns]."""
    groups = 1 if stored.group_size is None else -(-columns // stored.group_size)
    return {
        "qweight": [columns, -(-rows // 8)],
        "qzeros": [groups, -(-rows // 8)],
        "scales": [groups, rows],
    }[part]
