"""The `quantization_config` of a config.json, as compressed-tensors writes it: which quantised weights can be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ostinato.errors import ModelError
from ostinato.plan.quantization import Quantization

FORMATS = ("pack-quantized", "int-quantized")
SUPPORTED = (
    "supported: quant_method compressed-tensors, format pack-quantized or int-quantized, with weights of 8 bits, type "
    "int, symmetric, strategy channel or group, and activations as they are"
)
STACK = "GraniteMoeHybridParallelExpertsLinear"
"""The class of experts that are quantised while they are stacked in one tensor."""

GROUP_MULTIPLE = 32
"""Elements; what kernels multiply at once."""


def stored_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """How the weights of a checkpoint are quantised; None where they are not. ModelError for what cannot be read."""
    given = config.get("quantization_config")
    if not given:
        return None
    if not isinstance(given, Mapping) or given.get("quant_method") != "compressed-tensors":
        method = given.get("quant_method") if isinstance(given, Mapping) else None
        raise ModelError(f"the checkpoint is quantized with {method or 'an unnamed method'}; {SUPPORTED}")
    _expect(given, "format", FORMATS)
    _expect(given, "quantization_status", ("compressed", None))
    for other in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if given.get(other):
            raise _unsupported(other, given[other])
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _unsupported("config_groups", groups)
    [group] = groups.values()
    if not isinstance(group, Mapping):
        raise _unsupported("config_groups", groups)
    _expect(group, "targets", (["Linear"], ["Linear", STACK]))
    _expect(group, "format", (*FORMATS, None))
    _expect(group, "input_activations", (None,))
    _expect(group, "output_activations", (None,))
    ignored = _ignored(given.get("ignore") or [])
    return Quantization(_group_size(group.get("weights")), ignored, ignores_stacks=STACK not in group["targets"])


def _group_size(weights: Any) -> int | None:
    if not isinstance(weights, Mapping):
        raise _unsupported("weights", weights)
    _expect(weights, "num_bits", (8,))
    _expect(weights, "type", ("int",))
    _expect(weights, "symmetric", (True,))
    _expect(weights, "strategy", ("channel", "group"))
    # With `group` elements are in another order than their groups.
    _expect(weights, "actorder", (None, False, "weight", "static"))
    if weights["strategy"] == "channel":
        return None
    size = weights.get("group_size")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % GROUP_MULTIPLE:
        raise ModelError(
            f"the checkpoint is quantized with group_size = {size!r}; supported: multiples of {GROUP_MULTIPLE}"
        )
    return size


def _ignored(entries: Any) -> tuple[str, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise _unsupported("ignore", entries)
    for entry in entries:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise ModelError(f"quantization_config has ignore = {entry!r}, which is no pattern: {error}") from None
    return tuple(entries)


def _expect(given: Mapping[str, Any], name: str, supported: tuple[Any, ...]) -> None:
    if given.get(name) not in supported:
        raise _unsupported(name, given.get(name))


def _unsupported(name: str, value: Any) -> ModelError:
    return ModelError(f"the checkpoint is quantized with {name} = {value!r}; {SUPPORTED}")
