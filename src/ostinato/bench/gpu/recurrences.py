"""Recurrences alone on a GPU: updates of decode rows and scans of prompts, beside kernels of other projects.

Each operation runs at the sizes of a real layer, first once against its reference, then as a graph over the states of
enough layers that no cache holds them. Other projects' kernels get the same tensors if their package can be imported;
else, or if they fail, the report names the reason. They run after ours, so that what they do to the process, which may
compile them for minutes, takes nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch

from ostinato.bench.gpu import kernel_times
from ostinato.bench.roofline import best_seconds, measure_bandwidth
from ostinato.graphs.cuda import Driver
from ostinato.json_io import JsonObject
from ostinato.ops.dispatch import reference_kernel, triton_kernel

NUM_BYTES = 2**28
"""Bytes of the states of all layers of a graph at least: more than the cache of any GPU."""
MAX_LAYERS = 128
PASSES = 5
OUT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""Largest difference from the reference, as a part of the largest magnitude."""
STATE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""The same for float32 states, by the dtype of the inputs."""
NO_LIMIT = (0.0, float("inf"))

Tensors = Mapping[str, Any]
"""The inputs of a layer by name, for our kernel and others alike."""
Rival = Callable[[Any, Tensors, torch.Tensor], torch.Tensor]
"""Adapter: it calls another project's function on a layer's inputs and states; it returns the outputs."""


@dataclass(frozen=True)
class Case:
    """An operation at one size: its inputs, and its arguments given the states of a layer."""

    operation: str
    inputs: Tensors
    make_states: Callable[[], torch.Tensor]
    arguments: Callable[[torch.Tensor], tuple[Any, ...]]
    num_bytes: int
    """Bytes that a call must move."""
    sizes: JsonObject = field(default_factory=dict)


def measure_recurrences(device_name: str, options: Mapping[str, Any], keep: Callable[[JsonObject], None]) -> JsonObject:
    """Measure each of the `operations`: updates of each number of `rows`, or scans of a prompt of `tokens` tokens.

    `state` and `delta` are the sizes of a layer. `keep` gets the data so far.
    """
    device, dtype = torch.device(device_name), getattr(torch, options["dtype"])
    driver = kernel_times.CudaDriver(device)
    results: list[JsonObject] = []
    faults: list[str] = []
    data: JsonObject = {"dtype": options["dtype"], "results": results, "faults": faults}
    data["machine"] = measure_bandwidth(device.type).to_json()
    counts = [(rows, rows) for rows in options["rows"]] if "rows" in options else [(1, options["tokens"])]
    cases = [
        (CASES[operation.partition("_")[0]], operation, rows, tokens)
        for rows, tokens in counts
        for operation in options["operations"]
    ]
    for compares in (False, True):
        for number, (make, operation, rows, tokens) in enumerate(cases):
            sizes = options["delta" if make is delta_case else "state"]
            case = make(operation, _drawing(device), dtype, rows, tokens, **sizes)
            if not compares:
                results.append(_result(case, dtype, device, driver, faults))
            else:
                results[number]["others"] = _others(case, device, driver)
            keep(data)
        data["is_whole"] = True  # whatever other projects' kernels do to this process
        keep(data)
    return data


@torch.inference_mode()
def _result(case: Case, dtype: torch.dtype, device: torch.device, driver: Driver, faults: list[str]) -> JsonObject:
    """Compare a case with its reference, and time it."""
    states = case.make_states()
    expected_states = states.clone()
    own = triton_kernel(case.operation)(*case.arguments(states))
    expected = reference_kernel(case.operation)(*case.arguments(expected_states))
    errors = difference(own, expected), difference(states[1:], expected_states[1:])
    del states, expected_states
    described = f"{case.operation} of {case.sizes['rows']} rows and {case.sizes['tokens']} tokens"
    for what, error, most in zip(("outputs", "states"), errors, (OUT_TOLERANCE, STATE_TOLERANCE), strict=True):
        if not error <= most[dtype]:
            faults.append(f"{what} of {described} differ by {error:.1e} of the largest from the reference")
    kernel = triton_kernel(case.operation)
    seconds, has_graph = graph_seconds(case, lambda states: kernel(*case.arguments(states)), device, driver)
    if not has_graph:
        faults.append(f"no graph can hold {described}")
    return {
        "operation": case.operation,
        **case.sizes,
        "bytes": case.num_bytes,
        "seconds": seconds,
        "tokens_per_second": case.sizes["tokens"] / seconds,
        "errors": errors,
        "others": {},
    }


def difference(own: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference as a part of the largest magnitude; NaN if `own` has one."""
    largest = right.float().abs().max().clamp(min=1e-6)
    return float((own.float() - right.float()).abs().max() / largest)


def graph_seconds(
    case: Case, call: Callable[[torch.Tensor], object], device: torch.device, driver: Driver
) -> tuple[float, bool]:
    """Return the seconds of a call among those of several layers, and whether a graph held them."""
    first = case.make_states()
    layers = min(MAX_LAYERS, -(-NUM_BYTES // (first.numel() * first.element_size()))) if device.type == "cuda" else 1
    calls: list[Callable[[], object]] = [
        partial(call, each) for each in (first, *(case.make_states() for _ in range(layers - 1)))
    ]
    play = kernel_times.captured(calls, driver)
    seconds = best_seconds(play or partial(kernel_times.run_all, calls), device.type, PASSES)
    return seconds / layers, play is not None


@torch.inference_mode()
def _others(case: Case, device: torch.device, driver: Driver) -> JsonObject:
    """Time other projects' kernels for the operation; a reason takes the place of figures that there are none of."""
    found: JsonObject = {}
    states = case.make_states()
    right = triton_kernel(case.operation)(*case.arguments(states.clone()))
    for (package, path), adapt in RIVALS[case.operation].items():
        module, name = path.split(":")
        try:
            function = getattr(import_module(module), name)
            differs = difference(adapt(function, case.inputs, states.clone()).view(right.shape), right)
            seconds, has_graph = graph_seconds(case, partial(adapt, function, case.inputs), device, driver)
            found[package] = {"seconds": seconds, "has_graph": has_graph, "difference": differs}
        except ModuleNotFoundError as error:
            found[package] = {"reason": f"left out: {error.name} is not installed"}
        except Exception as error:  # another project's failure is a line of the report
            found[package] = {"reason": f"left out: {type(error).__name__}: {str(error)[:200]}"}
    return found


Draw = Callable[..., torch.Tensor]


def state_case(
    operation: str,
    draw: Draw,
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    chunk_size: int,
) -> Case:
    """Return a case of `state_update`, or of `ssd_scan` with one row."""
    inputs = {
        "x": draw(tokens, heads, head_dim).to(dtype),
        "dt": draw(tokens, heads).to(dtype),
        "A_log": draw(heads),
        "B": draw(tokens, groups, state_size).to(dtype),
        "C": draw(tokens, groups, state_size).to(dtype),
        "D": draw(heads),
        "dt_bias": draw(heads) - 2,
    }
    further = (NO_LIMIT,) if operation == "state_update" else (NO_LIMIT, chunk_size)
    return _case(operation, draw, rows, inputs, further, (heads, head_dim, state_size))


def delta_case(
    operation: str,
    draw: Draw,
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    *,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> Case:
    """Return a case of `delta_update`, or of `delta_scan` with one row."""
    inputs = {
        "q": draw(tokens, key_heads, key_dim).to(dtype),
        "k": draw(tokens, key_heads, key_dim).to(dtype),
        "x": draw(tokens, heads, value_dim).to(dtype),
        "a": draw(tokens, heads).to(dtype),
        "b": draw(tokens, heads).to(dtype),
        "A_log": draw(heads),
        "dt_bias": draw(heads),
    }
    return _case(operation, draw, rows, inputs, (0.0, 1.0, False), (heads, key_dim, value_dim))


def _case(
    operation: str,
    draw: Draw,
    rows: int,
    inputs: dict[str, torch.Tensor],
    further: tuple[object, ...],
    shape: tuple[int, ...],
) -> Case:
    """Return a case with states of `shape` behind a null slot, which is NaN."""
    tokens, device = inputs["x"].shape[0], inputs["x"].device
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    null, ends = torch.zeros_like(slots), torch.tensor([0, tokens], dtype=torch.int32, device=device)
    is_update = operation.endswith("update")
    places = (slots, slots.unsqueeze(1)) if is_update else (ends, null, null, slots)

    def make_states() -> torch.Tensor:
        states = draw(rows + 1, *shape)
        states[0] = torch.nan
        return states

    # The outputs have the size of `x`. An update reads and writes states, a scan only writes them.
    moved = sum(each.numel() * each.element_size() for each in (*inputs.values(), inputs["x"]))
    moved += (2 if is_update else 1) * rows * math.prod(shape) * 4
    return Case(
        operation,
        {**inputs, "slots": slots, "ends": ends},
        make_states,
        lambda states: (*inputs.values(), *further, states, *places),
        moved,
        {"rows": rows, "tokens": tokens},
    )


CASES: Mapping[str, Callable[..., Case]] = {"state": state_case, "ssd": state_case, "delta": delta_case}
"""Cases by the first word of an operation."""


def _drawing(device: torch.device) -> Draw:
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device=device)


def _flashinfer_update(function: Any, of: Tensors, states: torch.Tensor) -> torch.Tensor:
    heads, head_dim, size = states.shape[1:]
    per_head = {name: of[name].view(-1, 1).expand(heads, head_dim) for name in ("D", "dt_bias")}
    A = (-of["A_log"].exp()).view(-1, 1, 1).expand(heads, head_dim, size)
    dt = of["dt"].unsqueeze(-1).expand(of["x"].shape)
    result: torch.Tensor = function(
        states, of["x"], dt, A, of["B"], of["C"], per_head["D"], dt_bias=per_head["dt_bias"], dt_softplus=True,
        state_batch_indices=of["slots"],
    )  # fmt: skip
    return result


def _flashinfer_scan(function: Any, of: Tensors, states: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    x, dt, B, C = (of[name].unsqueeze(0) for name in ("x", "dt", "B", "C"))
    D = of["D"].to(x.dtype)
    return function(x, dt, -of["A_log"].exp(), B, C, D, dt_bias=of["dt_bias"], dt_softplus=True)[0]  # type: ignore[no-any-return]


def _fla_scan(function: Any, of: Tensors, states: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    heads = of["x"].shape[1]
    q, k = (of[name].repeat_interleave(heads // of[name].shape[1], dim=1).unsqueeze(0) for name in ("C", "B"))
    step = torch.nn.functional.softplus(of["dt"].float() + of["dt_bias"])
    value, decay = (of["x"] * step.unsqueeze(-1)).to(q.dtype), -of["A_log"].exp() * step
    out, _ = function(q, k, value.unsqueeze(0), g=decay.unsqueeze(0), scale=1.0, output_final_state=True)
    return out.squeeze(0) + of["D"].view(-1, 1) * of["x"]  # type: ignore[no-any-return]


def _fla_delta(function: Any, of: Tensors, states: torch.Tensor, *, is_scan: bool) -> torch.Tensor:
    """Call fla's update with a sequence of one token for each row, or its scan with one sequence."""
    axis = 0 if is_scan else 1
    q, k, v, a, b = (of[name].unsqueeze(axis) for name in ("q", "k", "x", "a", "b"))
    out, _ = function(
        q, k, v, g=a, beta=b, initial_state=None if is_scan else states[1:], output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=of["A_log"], dt_bias=of["dt_bias"],
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    return out  # type: ignore[no-any-return]


def _flashinfer_delta(function: Any, of: Tensors, states: torch.Tensor) -> torch.Tensor:
    q, k, v, a, b = (of[name].unsqueeze(1) for name in ("q", "k", "x", "a", "b"))
    return function(q, k, v, states[1:], of["A_log"], a, of["dt_bias"], b)[0]  # type: ignore[no-any-return]


def _flashinfer_delta_scan(function: Any, of: Tensors, states: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    out, _ = function(
        of["q"], of["k"], of["x"], g=of["a"], beta=of["b"], output_final_state=True, cu_seqlens=of["ends"],
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=of["A_log"], dt_bias=of["dt_bias"],
        beta_is_logit=True,
    )  # fmt: skip
    return out  # type: ignore[no-any-return]


FLA, FLASHINFER = "fla-core", "flashinfer-python"
RIVALS: Mapping[str, Mapping[tuple[str, str], Rival]] = {
    "state_update": {(FLASHINFER, "flashinfer.mamba:selective_state_update"): _flashinfer_update},
    "delta_update": {
        (FLA, "fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule"): partial(_fla_delta, is_scan=False),
        (FLASHINFER, "flashinfer.gdn_decode:gated_delta_rule_decode"): _flashinfer_delta,
    },
    "ssd_scan": {
        (FLA, "fla.ops.simple_gla:chunk_simple_gla"): _fla_scan,
        (FLASHINFER, "flashinfer.mamba.ssd_combined:ssd_combined_fwd"): _flashinfer_scan,
    },
    "delta_scan": {
        (FLA, "fla.ops.gated_delta_rule:chunk_gated_delta_rule"): partial(_fla_delta, is_scan=True),
        (FLASHINFER, "flashinfer.gdn_prefill:chunk_gated_delta_rule"): _flashinfer_delta_scan,
    },
}
"""Other projects' kernels by operation: their package, and the function's place. An adapter makes their arguments."""
