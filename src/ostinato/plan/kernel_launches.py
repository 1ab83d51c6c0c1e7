"""What Triton's kernels launch in the steps of a plan: the launch tables of the operations' rows, asked with the sizes
of a model's layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from ostinato.ops.facts import OPERATIONS
from ostinato.ops.launches.table import Launch
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.kernels import KernelChoice
from ostinato.plan.limits import Limits
from ostinato.plan.model import DTYPE_BYTES, LayerSpec, ModelSpec

StepSize = tuple[int, int]
"""Tokens and rows of a step."""

MOST_STEPS = 64
"""Sizes of steps that the tables are asked with, at the most; tables change at few of them."""


def step_sizes(capture: CapturePlan, limits: Limits, tokens_per_row: int) -> list[StepSize]:
    """Those of all graphs, and the largest step: decode steps first, from one row on."""
    rows = sorted({1, *capture.rows, limits.max_num_seqs})
    decode = [(count * width, count) for width in sorted({1, tokens_per_row}) for count in rows]
    prompts = [(tokens, 1) for tokens in sorted({*capture.tokens, limits.max_num_batched_tokens})]
    return decode + prompts


def with_launches(
    kernels: Mapping[str, KernelChoice],
    model: ModelSpec,
    sizes: Iterable[StepSize],
    *,
    dtype: str,
    capability: int | None,
    max_model_len: int,
    block_size: int,
) -> dict[str, KernelChoice]:
    """`kernels`, those of Triton with the distinct launches that steps of these sizes start. The first size says how
    many one call starts."""
    if capability is None or not any(choice.implementation == "triton" for choice in kernels.values()):
        return dict(kernels)
    steps = list(sizes)
    blocks = -(-max_model_len // block_size)
    of_all = {"capability": capability, "element_bytes": DTYPE_BYTES[dtype], "block_size": block_size}
    of_all |= {"max_context": blocks * block_size}
    return {op: _with_launches(op, choice, model, steps, of_all) for op, choice in kernels.items()}


def _with_launches(
    op: str, choice: KernelChoice, model: ModelSpec, steps: list[StepSize], of_all: Mapping[str, int]
) -> KernelChoice:
    row = OPERATIONS[op].triton
    if choice.implementation != "triton" or row is None or row.launches is None:
        return choice
    wanted = inspect.signature(row.launches).parameters
    found: list[Launch] = []
    per_call = None
    for numbers in _sizes_of(op, model):
        for tokens, rows in steps:
            given = {**of_all, "tokens": tokens, "rows": rows, **numbers}
            if op == "rms_norm":
                given["rows"] = tokens
            launches = row.launches(**{name: given[name] for name in wanted if name in given})
            per_call = len(launches) if per_call is None else per_call
            found += [launch for launch in launches if launch not in found]
    return replace(choice, launches=tuple(found), launches_per_call=max(per_call or 1, 1))


def _sizes_of(op: str, model: ModelSpec) -> Iterator[dict[str, Any]]:
    """The sizes of each kind of layer that calls the operation, by the names that launch tables have for them."""
    drafter = model.drafter
    layers = [*model.layers, *(drafter.layers if drafter is not None else ())]
    if drafter is not None and drafter.model is not None:
        layers += drafter.model.layers
    found = [_layer_sizes(op, layer, model) for layer in dict.fromkeys(layers)]
    yield from {tuple(sizes.items()): sizes for sizes in found if sizes is not None}.values()


def _layer_sizes(op: str, layer: LayerSpec, model: ModelSpec) -> dict[str, Any] | None:
    group_size = None if model.quantization is None else model.quantization.group_size
    of_model = {"size": model.hidden_size, "vocab_size": model.vocab_size}
    if op in ("attention", "rotary"):
        if layer.attention is None:
            return None
        rotated = 0 if model.rope is None else model.rope.rotary_dim
        return {**asdict(layer.attention), "rotated": rotated}
    if op in ("causal_conv1d", "ssd_scan", "state_update", "gated_rms_norm"):
        if layer.mamba2 is None:
            return None
        mamba2 = layer.mamba2
        return {
            **asdict(mamba2),
            "channels": mamba2.conv_dim,
            "width": mamba2.conv_kernel,
            "size": mamba2.intermediate_size,
        }
    if op in ("moe", "route"):
        if layer.experts is None:
            return None
        experts = layer.experts
        return {"experts": experts.num_experts, "top_k": experts.top_k, "group_size": group_size}
    return {**of_model, "is_quantized": model.quantization is not None, "group_size": group_size, "is_finished": True}
