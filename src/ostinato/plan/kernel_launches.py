"""Launches of Triton kernels in the steps of a plan.

They come from the operations' launch tables, called with the sizes of a model's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from ostinato.ops.blocks.formats import BLOCK_FORMATS
from ostinato.ops.facts import OPERATIONS, call_with_known
from ostinato.ops.launches.table import Launch
from ostinato.plan.encoder.needs import ENCODER_OPS, TAPS
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.kernels import KernelChoice
from ostinato.plan.limits import Limits
from ostinato.plan.model import DTYPE_BYTES, ModelSpec
from ostinato.plan.quantization import BlockQuantization
from ostinato.plan.states import operations_of

StepSize = tuple[int, int]
"""Tokens and rows of a step."""

IN_DECODE = {"causal_conv1d": 1, "token_shift": 1, "sample": 2, "linear": 1}
"""Operation -> launches of one call in a decode step, where that is not the number of launches that its table lists.

Other launches of the table are for prompts, for sampled tokens, or follow some matmuls. A matmul of unquantised weights
is cuBLAS's, which no table lists.
"""


def planned_step_sizes(capture: CapturePlan, limits: Limits, tokens_per_row: int) -> list[StepSize]:
    """Return the sizes of all graphs and of the largest step: decode steps first, from one row on."""
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
    """Return `kernels`, with the distinct launches of steps of these sizes added to Triton's.

    The first size determines the number of launches per call.
    """
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
    found: list[Launch] = []
    of_one_row = 0
    for sizes in _distinct(_sizes_of(op, model)):
        for tokens, rows in steps:
            launches = call_with_known(row.launches, {**of_all, "tokens": tokens, "rows": rows, **sizes})
            found += [launch for launch in launches if launch not in found]
            of_one_row = of_one_row or len(launches)
    return replace(choice, launches=tuple(found), launches_per_call=IN_DECODE.get(op, max(of_one_row, 1)))


def _distinct(found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from {tuple(sizes.items()): sizes for sizes in found}.values()


def _sizes_of(op: str, model: ModelSpec) -> Iterator[dict[str, Any]]:
    """Yield the sizes of each kind of layer that calls the operation, under the names that launch tables use."""
    vision, drafter = model.vision, model.drafter
    if op in ENCODER_OPS - {"axial_angles", "linear"} and vision is not None:
        head_dim = vision.hidden_size // vision.num_heads
        sizes = {"num_heads": 2 * vision.num_heads, "head_dim": head_dim, "rotated": head_dim, "count": TAPS}
        yield {**sizes, "size": vision.hidden_size}
        if op == "layer_norm":
            yield {"size": vision.hidden_size * vision.patches_per_token}
        return
    layers = [*model.layers, *(drafter.layers if drafter is not None else ())]
    if drafter is not None and drafter.model is not None:
        layers += drafter.model.layers
    of_mixers = {name for layer in layers for name in operations_of(layer.mixer)}
    for layer in dict.fromkeys(layers):
        if op in ("attention", "rotary") and layer.attention is not None:
            rope = model.rope if layer.attention.rotates else None
            yield {**asdict(layer.attention), "rotated": 0 if rope is None else rope.rotary_dim}
        elif op == "rms_norm" and layer.attention is not None:
            if layer.attention.values_in_keys:
                # Norms are over the latents, not over heads.
                yield from ({"size": weight.shape[-1]} for weight in layer.weights if weight.role == "norm")
            else:
                yield {"size": layer.attention.head_dim}
        elif op == "concat" and layer.attention is not None and layer.attention.values_in_keys:
            yield {"size": layer.attention.head_dim}
        elif layer.mixer is not None and op in operations_of(layer.mixer):
            yield dict(layer.mixer.sizes)
        elif op in ("moe", "route") and layer.experts is not None:
            experts = {"experts": layer.experts.num_experts, "top_k": layer.experts.top_k}
            experts["in_blocks"] = isinstance(model.quantization, BlockQuantization)
            for group_size in _group_sizes(model, of_experts=True):
                yield {**experts, "group_size": group_size, **_groups(model)}
    if op not in (*of_mixers, "attention", "rotary", "moe", "route"):
        finished = {"is_quantized": model.quantization is not None, "is_finished": True}
        sizes = {"size": model.hidden_size, "channels": model.hidden_size, "vocab_size": model.vocab_size}
        for group_size in _group_sizes(model, of_experts=False):
            yield {**sizes, **finished, "group_size": group_size}


def _group_sizes(model: ModelSpec, of_experts: bool) -> list[int | None]:
    """Return the numbers of inputs that share one scale, of experts' weights or of the others; None: all of a row.

    For weights in blocks it is the block size of each format.
    """
    quantization = model.quantization
    if not isinstance(quantization, BlockQuantization):
        return [None if quantization is None else quantization.group_size]
    found = [
        BLOCK_FORMATS[name].elements
        for weight in model.table
        if (weight.role == "experts") == of_experts
        for name, _ in quantization.blocks_of(weight) or ()
    ]
    return [*sorted(set(found))] or [None]


def _groups(model: ModelSpec) -> dict[str, int]:
    """Return the group sizes of experts, for routers that choose groups of experts first."""
    given = getattr(model.hyperparameters, "moe", None)
    return {name: getattr(given, name, 1) for name in ("num_groups", "top_groups")}
