"""Times of launching kernels on a GPU, eagerly and during capture.

The seconds here are estimates: they have not been measured with Ostinato yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ostinato.ops.facts import OPERATIONS, prefill_op
from ostinato.plan.calls import CallTrace
from ostinato.plan.graphs.capture_plan import CapturePlan, CaptureTime
from ostinato.plan.kernels import KernelChoice
from ostinato.plan.model import ModelSpec

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

WITHOUT_LAUNCH = frozenset({"new_empty"})
"""Operations that torch does on the host alone."""

RUNS_BEFORE_CAPTURE = 2
"""Eager runs of a step before its capture: one to record it, one to warm up."""


def launches_of(calls: CallTrace, kernels: Mapping[str, KernelChoice], leaves_out: Collection[str] = ()) -> int:
    """Return the launches of one pass over `calls`, without the parts that a graph `leaves_out`."""
    return sum(
        launches_of_call(call.operation, kernels)
        for call in calls.calls
        if call.operation not in WITHOUT_LAUNCH and call.part not in leaves_out
    )


def step_launches(model: ModelSpec, kernels: Mapping[str, KernelChoice], *, decodes: bool) -> int:
    """Return the launches of a decode step or of a prompt's step, including the logits and sampling."""
    own = launches_of(model.calls, kernels)
    if not decodes:
        # The calls are those of a decode step; in a prompt a scan replaces the recurrence.
        named = [call.operation for call in model.calls.calls if call.operation in OPERATIONS]
        own += sum(launches_of_call(prefill_op(name), kernels) - launches_of_call(name, kernels) for name in named)
    return own + launches_of_call("linear", kernels) + launches_of_call("sample", kernels)


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
    own = model.calls if drafter is None or drafter.method != "mtp" else drafter.step_calls
    graphs = _graphs(capture, own, kernels)
    if of_drafts is not None and drafter is not None:
        calls = drafter.calls if drafter.model is None else drafter.model.calls
        graphs += _graphs(of_drafts, calls, kernels)
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
