"""The `quantization_config` of a config.json, in each spelling, and the quantised weights that can be read.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.errors import ModelError
from ostinato.formats import awq, compressed_tensors, fp8, gptq
from ostinato.plan.stored_weights import StoredWeights

READERS = {
    "compressed-tensors": compressed_tensors.read_compressed_tensors,
    "gptq": gptq.read_gptq,
    "awq": awq.read_awq,
    "fp8": fp8.read_fp8,
}
"""Readers by `quant_method`."""


def stored_weights(config: Mapping[str, Any]) -> StoredWeights | None:
    """Return the quantization of a checkpoint's weights; None if there is none.

    Raises ModelError for what cannot be read.
    """
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method not in READERS:
        known = ", ".join(READERS)
        raise ModelError(f"the checkpoint is quantized with {method or 'an unnamed method'}; supported: {known}")
    return READERS[method](given)
