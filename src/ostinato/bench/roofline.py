"""Roofline of a decode step: the bytes that it must move, over the memory's bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from ostinato.bench.engine_driver import plan_of, with_room
from ostinato.bench.report import machine_facts
from ostinato.json_io import JsonObject
from ostinato.models.checkpoint import load_spec
from ostinato.ops.arrays import NUMPY, TorchArrays
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.os_support import usable_cores
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan

PROBE_BYTES = 2**29
"""Size of the tensor that is read, in bytes: well above the caches of a CPU or a GPU."""
PROBE_PASSES = 7
PROBE_SIDES = {"cpu": 2048, "cuda": 8192}
"""Rows of the matrices whose matmul is timed, by kind of device."""
PROBE_CALLS = {"cpu": 1, "cuda": 16}
"""Calls between two looks at the clock: waiting for a GPU takes a part of the time of one."""


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes that a decode step must read and write at least."""

    weights: int
    """Bytes of weights, read once for any number of rows; of an embedding that is not the LM head, none."""
    states: int
    """Bytes of state, read and written for each row."""
    keys_and_values: int
    """Bytes of keys and values, read for each row."""

    @property
    def total(self) -> int:
        return self.weights + self.states + self.keys_and_values

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Bandwidth:
    """Bandwidth of memory, in bytes/s, as simple loops over a large tensor reach it."""

    read: float
    copy: float
    """Bytes read and bytes written, added."""

    @property
    def best(self) -> float:
        return max(self.read, self.copy)

    def to_json(self) -> dict[str, float]:
        """Return the rates as facts about a machine."""
        return {"read_bytes_per_second": self.read, "copy_bytes_per_second": self.copy}


def decode_bytes(
    spec: ModelSpec, plan: Plan, rows: int, context: float, *, with_logits: bool = True
) -> DecodeBytes | None:
    """Return the bytes of a step with `rows` rows of `context` tokens on average.

    They include the LM head's matmul `with_logits`, else only what leads to hidden states. None for a model with
    experts: a step reads those that its tokens select, which is not known beforehand.
    """
    if "moe" in spec.ops:
        return None
    dtype, memory = plan.settings.dtype, plan.memory
    unread = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    unread += 0 if spec.vision is None else spec.vision.parameters
    if not with_logits:
        unread += spec.lm_head.num_elements
    return DecodeBytes(
        weights=spec.weight_bytes(dtype) - unread * DTYPE_BYTES[dtype],
        states=2 * rows * memory.state_slot,
        keys_and_values=round(
            rows
            * (context * memory.kv_block + min(context, memory.sliding_window) * memory.window_block)
            / plan.settings.block_size
        ),
    )


def floor_figures(needed: DecodeBytes, bandwidth: Bandwidth, step_seconds: float) -> JsonObject:
    """Return the roofline seconds of a decode step, and their share of `step_seconds`, the measured ones."""
    seconds = needed.total / bandwidth.best
    return {"step_bytes": needed.to_json(), "step_seconds": seconds, "fraction_reached": seconds / step_seconds}


def measure_bandwidth(device: str, size: int = PROBE_BYTES, isa: str | None = None) -> Bandwidth:
    """Return the best of several sums over, and copies of, a float32 array of `size` bytes.

    With `isa`, the native extension's reading counts too: it has more memory accesses under way at once.
    """
    if device != "cpu":
        import torch

        source = torch.ones(size // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        read = best_seconds(source.sum, device)
        return Bandwidth(read=size / read, copy=2 * size / best_seconds(lambda: target.copy_(source), device))
    values, copied, parts = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32), usable_cores()
    pieces = list(zip(np.array_split(copied, parts), np.array_split(values, parts), strict=True))
    with ThreadPoolExecutor(parts) as pool:  # numpy gives the interpreter free while it computes
        readings: list[Callable[[], object]] = [lambda: list(pool.map(lambda pair: pair[1].sum(), pieces))]
        if isa is not None:
            from ostinato.ops.dispatch import load_extension

            extension, blocks = load_extension(isa), 64
            sums = np.empty(blocks * 16, np.int32)
            readings.append(lambda: extension.read_memory(blocks, {"from": values, "sums": sums}))
        read = min(best_seconds(reading, device) for reading in readings)
        copy = best_seconds(lambda: list(pool.map(lambda pair: np.copyto(*pair), pieces)), device)
    return Bandwidth(read=size / read, copy=2 * size / copy)


def measure_flops(dtype: str, device: str = "cpu", size: int | None = None) -> float:
    """Return a device's FLOP/s in a matmul of two square matrices of `size` rows in `dtype`, the best of several.

    A CPU may multiply faster in float32: one without instructions for `dtype` converts its inputs first. torch
    multiplies.
    """
    import torch

    kind = torch.device(device).type
    size = size or PROBE_SIDES[kind]
    one = torch.randn(size, size, device=device)
    seconds = []
    for each in {dtype, "float32"} if kind == "cpu" else {dtype}:
        operand = one.to(getattr(torch, each))
        seconds.append(best_seconds(partial(torch.matmul, operand, operand.t()), device))
    return 2 * size**3 / min(seconds)


def best_seconds(work: Callable[[], object], device: str, passes: int = PROBE_PASSES) -> float:
    """Return the shortest of several times that `work` takes."""
    wait = (NUMPY if device == "cpu" else TorchArrays(device)).synchronize
    calls, seconds = PROBE_CALLS["cpu" if device == "cpu" else "cuda"], []
    for _ in range(passes):
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        seconds.append((time.perf_counter() - begin) / calls)
    return min(seconds)


def run_job(job: JsonObject) -> JsonObject:
    """Return the memory's bandwidth with the threads of the settings, and the bytes that decode steps must move.

    `decode_bytes` is by number of `rows`, of `context` tokens on average; None for a model without known bytes.
    """
    config = with_room(job["settings"], max_num_seqs=max(job["rows"]))
    spec, plan = load_spec(config), plan_of(config)
    bandwidth = measure_bandwidth(plan.device.kind, isa=plan.device.native.isa)
    needed = {}
    for rows in job["rows"]:
        one = decode_bytes(spec, plan, rows, job["context"])
        needed[str(rows)] = None if one is None else one.to_json()
    return {**asdict(bandwidth), "decode_bytes": needed, "machine": machine_facts(plan)}
