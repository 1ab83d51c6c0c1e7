"""Launches of Triton kernels in the steps of a plan, and the time of launching them.

They come from the operations' launch tables, called with the sizes of a model's layers. The seconds of launching
kernels, eagerly and during capture, are estimates: they have not been measured with Ostinato yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ostinato.json_io import JsonObject
from ostinato.ops.launch_tables.launch import Launch
from ostinato.ops.operations import OPERATIONS, PIECES, call_with_known, ops_called_by, prefill_op
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.ops.step_inputs import WINDOW
from ostinato.plan.graphs.arena import CallTrace
from ostinato.plan.graphs.capture_plan import CapturePlan, CaptureTime
from ostinato.plan.kernels import KernelChoice
from ostinato.plan.layer_specs import layer_sizes
from ostinato.plan.limits import Limits
from ostinato.plan.mixers import operations_of
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import BlockQuantization

StepSize = tuple[int, int]
"""Tokens and rows of a step."""


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
    operation = OPERATIONS[op]
    row = operation.triton
    if choice.implementation != "triton" or row is None or row.launches is None:
        return choice
    distinct: list[Launch] = []
    of_one_row = 0
    for sizes in {tuple(sizes.items()): sizes for sizes in _sizes_of(op, model)}.values():
        for tokens, rows in steps:
            launches = call_with_known(row.launches, {**of_all, "tokens": tokens, "rows": rows, **sizes})
            distinct += [launch for launch in launches if launch not in distinct]
            of_one_row = of_one_row or len(launches)
    return replace(choice, launches=tuple(distinct), launches_per_call=operation.decode_launches or max(of_one_row, 1))


def _sizes_of(op: str, model: ModelSpec) -> Iterator[JsonObject]:
    """Yield the sizes of each kind of layer that calls the operation, under the names that launch tables use."""
    vision, drafter = model.vision, model.drafter
    # No language model behind an encoder has layer norms.
    if vision is not None and (op in ops_called_by("encoder") or op == "layer_norm"):
        head_dim = vision.hidden_size // vision.num_heads
        sizes = {"num_heads": 2 * vision.num_heads, "head_dim": head_dim, "rotated": head_dim, "count": vision.taps}
        yield {**sizes, "size": vision.hidden_size}
        if op == "layer_norm":
            merged = WINDOW if vision.has_windows else vision.patches_per_token
            yield {"size": vision.hidden_size * merged}
            if vision.is_encoder_free:
                yield {"size": vision.patch_elements}
        return
    layers = [(model, layer) for layer in dict.fromkeys(model.layers)]
    if drafter is not None:
        layers += [(drafter.model or model, layer) for layer in dict.fromkeys(drafter.layers)]
    of_mixers = {name for _, layer in layers for name in operations_of(layer.mixer)}
    for owner, layer in layers:
        if op in ("attention", "rotary", "rotate") and layer.attention is not None:
            rope = owner.rope_of(layer.attention)
            rotated = {"rotated": 0 if rope is None else rope.rotary_dim}
            yield from ({**rotated, **sizes} for sizes in layer_sizes(op, layer))
        elif op == "rms_norm" and layer.attention is not None:
            # Norms of the residual stream, and of heads, all heads or latents.
            yield from ({"size": weight.shape[-1]} for weight in layer.weights if weight.role == "norm")
        elif op == "concat" and layer.attention is not None and layer.attention.values_in_keys:
            yield {"size": layer.attention.head_dim}
        elif op in operations_of(layer.mixer):
            yield from layer_sizes(op, layer)
        elif op in ("moe", "route"):
            in_blocks = isinstance(model.quantization, BlockQuantization)
            for sizes, groups in product(layer_sizes(op, layer), _weight_groups(model, of_experts=True)):
                yield {**sizes, "in_blocks": in_blocks, **groups, **_groups(model)}
    if op == "embedding" and getattr(model.hyperparameters, "query_growth", None) is not None:
        yield {"size": 1}
    if op not in (*of_mixers, "attention", "rotary", "rotate", "moe", "route"):
        finished = {"is_quantized": model.quantization is not None, "is_finished": True}
        sizes = {"size": model.hidden_size, "channels": model.hidden_size, "vocab_size": model.vocab_size}
        for groups in _weight_groups(model, of_experts=False):
            yield {**sizes, **finished, **groups}


def _weight_groups(model: ModelSpec, of_experts: bool) -> list[dict[str, int | bool | None]]:
    """Return how kernels read the weights of experts, or the others: `group_size`, and whether `in_pieces`.

    A group are the inputs that share one scale (None: all of a row), or a block of each format.
    """
    quantization = model.quantization
    if not isinstance(quantization, BlockQuantization):
        size = None if quantization is None else quantization.group_size
        return [{"group_size": size, "in_pieces": False}]
    sizes = [
        (BLOCK_FORMATS[name].elements, name in PIECES)
        for weight in model.table
        if (weight.role == "experts") == of_experts
        for name, _ in quantization.blocks_of(weight) or ()
    ]
    if not sizes:
        return [{"group_size": None, "in_pieces": False}]
    return [{"group_size": size, "in_pieces": pieces} for size, pieces in sorted(set(sizes))]


def _groups(model: ModelSpec) -> dict[str, int]:
    """Return the group sizes of experts, for routers that choose groups of experts first."""
    given = getattr(model.hyperparameters, "moe", None)
    return {name: getattr(given, name, 1) for name in ("num_groups", "top_groups")}


LAUNCH_SECONDS = 5e-6
"""Host time of one launch: torch's dispatcher or Triton's launcher, and the driver.

Public reports on hosts with an H100 give 4 to 10 microseconds.
"""

NOTE_SECONDS = 50e-6
"""Host time of one call that the recorder records before a capture."""

NODE_SECONDS = 10e-6
"""Host time of one launch that a graph keeps: its node is created, checked and instantiated."""

SEGMENT_SECONDS = 200e-6
"""Host time to begin, end and instantiate one graph of the driver, however few its launches.

A piecewise graph consists of one between every two parts that it leaves out.
"""

RUNS_BEFORE_CAPTURE = 2
"""Eager runs of a step before its capture: one to record it, one to warm up."""


def launches_of(calls: CallTrace, kernels: Mapping[str, KernelChoice], leaves_out: Collection[str] = ()) -> int:
    """Return the launches of one pass over `calls`, without the parts that a graph `leaves_out`."""
    return sum(launches_of_call(call.operation, kernels) for call in calls.calls if call.part not in leaves_out)


def step_launches(model: ModelSpec, kernels: Mapping[str, KernelChoice], *, decodes: bool) -> int:
    """Return the launches of a decode step or of a prompt's step, including the logits and sampling."""
    launches = launches_of(model.calls, kernels)
    if not decodes:
        # The calls are those of a decode step; in a prompt a scan replaces the recurrence.
        named = [call.operation for call in model.calls.calls if call.operation in OPERATIONS]
        launches += sum(launches_of_call(prefill_op(name), kernels) - launches_of_call(name, kernels) for name in named)
    return launches + launches_of_call("linear", kernels) + launches_of_call("sample", kernels)


def launches_of_call(operation: str, kernels: Mapping[str, KernelChoice]) -> int:
    """Return the launches of one call of an operation of ours or of torch."""
    return kernels[operation].launches_per_call if operation in kernels else 1


def capture_time(
    model: ModelSpec,
    capture: CapturePlan,
    of_drafts: CapturePlan | None,
    encoder_budgets: int,
    kernels: Mapping[str, KernelChoice],
) -> CaptureTime:
    """Return the capture time of all CUDA graphs: the model's, the drafter's (`of_drafts`), and the encoder's."""
    drafter = model.drafter
    model_calls = model.calls if drafter is None or not drafter.starts_from_hidden else drafter.step_calls
    graphs = _graphs(capture, model_calls, kernels)
    if of_drafts is not None and drafter is not None:
        graphs += _graphs(of_drafts, drafter.draft_calls, kernels)
    if model.vision is not None:
        encoding = launches_of(model.vision.calls, kernels)
        graphs += [_Graph(encoding, encoding)] * encoder_budgets
    launches, run = sum(graph.kept for graph in graphs), sum(graph.run for graph in graphs)
    segments = sum(graph.segments for graph in graphs)
    seconds = run * (NOTE_SECONDS + RUNS_BEFORE_CAPTURE * LAUNCH_SECONDS)
    seconds += launches * (LAUNCH_SECONDS + NODE_SECONDS) + segments * SEGMENT_SECONDS
    source = (
        f"an estimate: each step runs {RUNS_BEFORE_CAPTURE} times before its capture, with {_us(LAUNCH_SECONDS)} for "
        f"each launch and {_us(NOTE_SECONDS)} for noting it; keeping one takes {_us(NODE_SECONDS)} more, and each of "
        f"{segments:,} segments {_us(SEGMENT_SECONDS)}"
    )
    return CaptureTime(len(graphs), launches, seconds, source)


class _Graph(NamedTuple):
    """Launches that a graph keeps, launches of the whole step, and the graph's segments."""

    kept: int
    run: int
    segments: int = 1


def _graphs(capture: CapturePlan, calls: CallTrace, kernels: Mapping[str, KernelChoice]) -> list[_Graph]:
    whole, kept = launches_of(calls, kernels), launches_of(calls, kernels, capture.splits)
    left_out = {call.part_number for call in calls.calls if call.part in capture.splits}
    full = len(capture.rows) * len(capture.tokens_per_row)
    return [_Graph(whole, whole)] * full + [_Graph(kept, whole, len(left_out) + 1)] * len(capture.tokens)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
