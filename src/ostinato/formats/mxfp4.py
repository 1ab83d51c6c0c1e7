"""MXFP4 weights of experts (`quant_method: mxfp4`), such as those of gpt-oss. Imports no torch.

For a stack of matrices [experts, out, in] named NAME there are `NAME_blocks` uint8 [experts, out, in / 32, 16], whose
bytes have neighbours of a row, the first in the lower half, and `NAME_scales` uint8 [experts, out, in / 32], the
exponents of powers of 2 plus 127 (OCP Microscaling Formats 1.0, 2023). All else is not quantised.
"""

from __future__ import annotations

from ostinato.formats.config_checks import ConfigChecker
from ostinato.json_io import JsonMapping
from ostinato.plan.quantization import StoredWeights

PARTS = ("blocks", "scales")
GROUP = 32
SUPPORTED = "supported: quant_method mxfp4 of experts, with modules_to_not_convert"
ALL_BUT_EXPERTS = r"re:(?!.*\.experts\.)"


def read_mxfp4(given: JsonMapping) -> StoredWeights:
    config = ConfigChecker(given, SUPPORTED)
    ignore = (ALL_BUT_EXPERTS, *config.names("modules_to_not_convert"))
    return StoredWeights("mxfp4", "mxfp4", GROUP, ignore)


def mxfp4_shape(part: str, rows: int, columns: int, _: StoredWeights) -> list[int]:
    groups = [rows, columns // GROUP]
    return [*groups, GROUP // 2] if part == "blocks" else groups
