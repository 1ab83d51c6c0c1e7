"""Speed of each native kernel on this machine: calls of usual sizes, as a tape makes them, on memory in no cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.ops.arrays import TorchArrays, dtype_name
from ostinato.ops.dispatch import native_kernel
from ostinato.ops.kernel_cost import KernelCost, StepShape
from ostinato.ops.native_extension import NativeExtension
from ostinato.ops.operations import OPERATIONS
from ostinato.plan.device.measured_rates import KernelRate, StepKind
from ostinato.plan.layer_specs import AttentionSpec
from ostinato.plan.memory.cache_modes import bytes_per_token

FEW_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48)
"""Numbers of tokens (small m) of matmuls whose time is mostly the memory's, so that each call has its own weights."""
MANY_TOKENS = (64, 128, 512)
ROWS = (1, 8, 32)
PROMPT = 512
ROUNDS = 5
"""Counted rounds, after one to warm up.

Other work makes a round longer, so the second shortest counts: the shortest may have been lucky.
"""

WIDTH, OUTPUTS = 1024, 4096
"""Elements of a token, and rows of a matrix."""
HEADS, KV_HEADS, HEAD_DIM, BLOCK, CONTEXT = 16, 8, 128, 16, 256
"""Shape of the attention that is timed. Few query heads share a key head.

If more do, each byte of keys and values has more operations, and these predict the time. The other way round, a model
with fewer would be as slow per byte as one with more.
"""
STATE_HEADS, STATE_DIM, STATE_SIZE, GROUPS, CHUNK = 32, 64, 128, 8, 128
CHANNELS, TAPS = 4096, 4
SELECTIVE_SIZE = 16
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_CALLS = 64
MAX_MATRICES = 24

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class KernelProbe:
    """Timer of the kernels of `extension`, in `dtype`, with torch's threads. `num_bytes` are well above all caches.

    Each kernel's calls cycle through this much memory, so that the data of a call has left the caches since its last
    use.
    """

    extension: NativeExtension
    dtype: torch.dtype
    num_bytes: int
    rounds: int = ROUNDS
    call_seconds: float = 0.0
    """Seconds subtracted from each call: the plan adds them for every call of a step."""

    def rates(self) -> Iterator[KernelRate]:
        """Yield the rates of all kernels that the plan's prediction needs."""
        for storage in (self.dtype, torch.int8):
            yield from self._products(storage)
        for storage in STATE_DTYPES:
            yield from self._recurrences(storage)
            yield from self._selective(storage)
        yield from self._delta_rule()
        yield from self._convolutions()
        for storage in (self.dtype, torch.int8):
            yield from self._attention(storage)
        yield from self._passes()

    def seconds_of(self, operation: str, tokens: int, calls: list[Call]) -> float:
        """Return the seconds of one of `calls`, on average over all."""
        program, kernel, kept = self.extension.Program(), native_kernel(self.extension, operation), []
        for args, kwargs in calls:
            _, arguments = kernel.prepare_call(None, args, kwargs)
            kept.append(arguments)  # the program holds only addresses, so this keeps the tensors alive
            getattr(program, operation)(tokens, arguments)
        times = []
        for _ in range(self.rounds + 1):
            begin = time.perf_counter()
            program.run(tokens)
            times.append((time.perf_counter() - begin) / len(calls))
        del kept
        seconds = sorted(times[1:])[min(1, self.rounds - 1)]
        return max(seconds - self.call_seconds, seconds / 10)

    def empty_call(self) -> float:
        """Return the seconds of a call that has next to nothing to do."""
        x, weight = self._some(1, 16), self._some(16)
        return self.seconds_of("rms_norm", 1, [((x, weight, 1e-5), {})] * 256)

    def _rate(
        self, operation: str, storage: torch.dtype, step: StepShape, calls: list[Call], work: KernelCost
    ) -> KernelRate:
        seconds = self.seconds_of(operation, step.tokens, calls)
        way: StepKind = "decode" if step.decodes else "prompt"
        name = str(storage).removeprefix("torch.")
        return KernelRate(operation, name, way, step.tokens, work.num_bytes / seconds, work.flops / seconds)

    def _work(self, operation: str, step: StepShape, **numbers: float) -> KernelCost:
        rule = OPERATIONS[operation].work
        assert rule is not None, f"{operation} has a rule"
        return rule(step, **numbers)

    def _products(self, storage: torch.dtype) -> Iterator[KernelRate]:
        """Yield the rates of matmuls with matrices that are alternately wide and tall, as those of a model are."""
        elements = WIDTH * OUTPUTS
        shapes = ((OUTPUTS, WIDTH), (WIDTH, OUTPUTS))
        count = min(self._turns(elements * storage.itemsize), MAX_MATRICES)
        weights = [self._some(*shapes[i % 2], dtype=storage) for i in range(count)]
        scales = {outputs: self._some(outputs, dtype=torch.float32) for outputs, _ in shapes}
        for tokens in (*FEW_TOKENS, *MANY_TOKENS):
            inputs = {width: self._some(tokens, width) for _, width in shapes}
            calls: list[Call] = []
            for weight in weights if tokens in FEW_TOKENS else weights[:2]:
                outputs, width = weight.shape
                scale = {"weight_scale": scales[outputs]} if storage == torch.int8 else {}
                calls.append(((inputs[width], weight), scale))
            step = StepShape(tokens, 1, 0, decodes=True)
            work = self._work("linear", step, parameters=elements, num_bytes=elements * storage.itemsize)
            yield self._rate("linear", storage, step, calls, work)

    def _recurrences(self, storage: torch.dtype) -> Iterator[KernelRate]:
        shape = (STATE_HEADS, STATE_DIM, STATE_SIZE)
        elements = STATE_HEADS * STATE_DIM * STATE_SIZE
        slots = self._turns(elements * storage.itemsize, least=max(ROWS))
        states = self._some(slots + 1, *shape, dtype=storage)
        per_head = [self._some(STATE_HEADS, dtype=torch.float32) for _ in range(3)]
        numbers = {"state_elements": elements, "element_bytes": storage.itemsize, "num_heads": STATE_HEADS}

        def inputs(tokens: int) -> tuple[Any, ...]:
            A_log, D, dt_bias = per_head
            x, dt = self._some(tokens, *shape[:2]), self._some(tokens, STATE_HEADS)
            B, C = (self._some(tokens, GROUPS, STATE_SIZE) for _ in range(2))
            return x, dt, A_log, B, C, D, dt_bias, (0.0, float("inf"))

        for rows in ROWS:
            given = inputs(rows)
            calls: list[Call] = []
            for at in _groups(slots, rows):
                calls.append(((*given, states, at, at.unsqueeze(1)), {}))
            step = StepShape(rows, 1, 1, decodes=True)
            yield self._rate("state_update", storage, step, calls, self._work("state_update", step, **numbers))
        begin, one = _int32(0), _int32(1)
        prompt: Call = ((*inputs(PROMPT), CHUNK, states, _int32(0, PROMPT), begin, begin, one), {})
        step = StepShape(1, PROMPT, 0, decodes=False)
        yield self._rate("ssd_scan", storage, step, [prompt] * 2, self._work("ssd_scan", step, **numbers))

    def _delta_rule(self) -> Iterator[KernelRate]:
        """Yield the rates of the recurrence of delta nets, with float32 states and one decay for each head."""
        elements, storage = STATE_HEADS * STATE_SIZE**2, torch.float32
        slots = self._turns(elements * storage.itemsize, least=max(ROWS))
        states = self._some(slots + 1, STATE_HEADS, STATE_SIZE, STATE_SIZE, dtype=storage)
        decay = [self._some(STATE_HEADS, dtype=storage) for _ in range(2)]
        numbers = {"state_elements": elements, "element_bytes": storage.itemsize, "num_heads": STATE_HEADS}

        def inputs(tokens: int) -> tuple[Any, ...]:
            q, k = (self._some(tokens, STATE_HEADS // 2, STATE_SIZE) for _ in range(2))
            a, b = (self._some(tokens, STATE_HEADS) for _ in range(2))
            return q, k, self._some(tokens, STATE_HEADS, STATE_SIZE), a, b, *decay, 0.0, 1.0, False

        for rows in ROWS:
            given = inputs(rows)
            calls: list[Call] = [((*given, states, at, at.unsqueeze(1)), {}) for at in _groups(slots, rows)]
            step = StepShape(rows, 1, 1, decodes=True)
            yield self._rate("delta_update", storage, step, calls, self._work("delta_update", step, **numbers))
        begin, one = _int32(0), _int32(1)
        prompt: Call = ((*inputs(PROMPT), states, _int32(0, PROMPT), begin, begin, one), {})
        step = StepShape(1, PROMPT, 0, decodes=False)
        yield self._rate("delta_scan", storage, step, [prompt] * 2, self._work("delta_scan", step, **numbers))

    def _selective(self, storage: torch.dtype) -> Iterator[KernelRate]:
        """Yield the rates of the recurrence of Mamba-1."""
        slots = self._turns(CHANNELS * SELECTIVE_SIZE * storage.itemsize, least=max(ROWS))
        states = self._some(slots + 1, CHANNELS, SELECTIVE_SIZE, dtype=storage)
        A_log = self._some(CHANNELS, SELECTIVE_SIZE, dtype=torch.float32)
        D, dt_bias = (self._some(CHANNELS, dtype=torch.float32) for _ in range(2))
        numbers = {"channels": CHANNELS, "state_size": SELECTIVE_SIZE, "element_bytes": storage.itemsize}

        def inputs(tokens: int) -> tuple[Any, ...]:
            x, dt = (self._some(tokens, CHANNELS) for _ in range(2))
            B, C = (self._some(tokens, SELECTIVE_SIZE) for _ in range(2))
            return x, dt, A_log, B, C, D, dt_bias

        for rows in ROWS:
            given = inputs(rows)
            calls: list[Call] = [((*given, states, at, at.unsqueeze(1)), {}) for at in _groups(slots, rows)]
            step = StepShape(rows, 1, 1, decodes=True)
            yield self._rate("selective_update", storage, step, calls, self._work("selective_update", step, **numbers))
        begin, one = _int32(0), _int32(1)
        prompt: Call = ((*inputs(PROMPT), states, _int32(0, PROMPT), begin, begin, one), {})
        step = StepShape(1, PROMPT, 0, decodes=False)
        yield self._rate("selective_scan", storage, step, [prompt] * 2, self._work("selective_scan", step, **numbers))

    def _convolutions(self) -> Iterator[KernelRate]:
        slots = min(self._turns((TAPS - 1) * CHANNELS * self.dtype.itemsize, least=max(ROWS)), max(ROWS) * MAX_CALLS)
        states = self._some(slots + 1, TAPS - 1, CHANNELS)
        weight, bias = self._some(TAPS, CHANNELS), self._some(CHANNELS)
        numbers = {"channels": CHANNELS, "width": TAPS, "element_bytes": self.dtype.itemsize}
        for rows in ROWS:
            x, starts = self._some(rows, CHANNELS), torch.arange(rows + 1, dtype=torch.int32)
            calls: list[Call] = [
                ((x, weight, bias, states, starts, at, at.unsqueeze(1), rows), {}) for at in _groups(slots, rows)
            ]
            step = StepShape(rows, 1, 1, decodes=True)
            yield self._rate("causal_conv1d", self.dtype, step, calls, self._work("causal_conv1d", step, **numbers))
        x, step = self._some(PROMPT, CHANNELS), StepShape(1, PROMPT, 0, decodes=False)
        prompt: Call = ((x, weight, bias, states, _int32(0, PROMPT), _int32(0), _int32(1).unsqueeze(1), 0), {})
        work = self._work("causal_conv1d", step, **numbers)
        yield self._rate("causal_conv1d", self.dtype, step, [prompt] * 4, work)

    def _attention(self, storage: torch.dtype) -> Iterator[KernelRate]:
        """Yield the rates of attention with keys and values in `storage`."""
        per_row = CONTEXT // BLOCK + 1
        token_bytes = bytes_per_token(AttentionSpec(HEADS, KV_HEADS, HEAD_DIM), str(storage).removeprefix("torch."))
        held = self._turns(per_row * BLOCK * token_bytes, least=max(ROWS))
        blocks = max(held * per_row, PROMPT // BLOCK) + 1
        k_cache, v_cache = (self._some(blocks, BLOCK, KV_HEADS, HEAD_DIM, dtype=storage) for _ in range(2))
        scales: dict[str, object] = {}
        if storage == torch.int8:
            scales = {
                name: self._some(blocks, BLOCK, KV_HEADS, dtype=torch.float32) for name in ("k_scales", "v_scales")
            }
        numbers = {"num_heads": HEADS, "head_dim": HEAD_DIM, "kv_bytes_per_token": token_bytes}
        scale = HEAD_DIM**-0.5
        for rows in ROWS:
            q, starts = self._some(rows, HEADS, HEAD_DIM), torch.arange(rows + 1, dtype=torch.int32)
            before = torch.full((rows,), CONTEXT, dtype=torch.int32)
            calls: list[Call] = []
            for at in _groups(held, rows):
                tables = ((at - 1).unsqueeze(1) * per_row + torch.arange(1, per_row + 1)).to(torch.int32)
                calls.append(((q, k_cache, v_cache, starts, before, before + 1, tables, scale), scales))
            step = StepShape(rows, 1, CONTEXT, decodes=True)
            yield self._rate("attention", storage, step, calls, self._work("attention", step, **numbers))
        q, step = self._some(PROMPT, HEADS, HEAD_DIM), StepShape(1, PROMPT, 0, decodes=False)
        table = torch.arange(1, PROMPT // BLOCK + 1, dtype=torch.int32).unsqueeze(0)
        prompt: Call = ((q, k_cache, v_cache, _int32(0, PROMPT), _int32(0), _int32(PROMPT), table, scale), scales)
        yield self._rate("attention", storage, step, [prompt] * 2, self._work("attention", step, **numbers))

    def _passes(self) -> Iterator[KernelRate]:
        """Yield the rates of operations that only pass over activations, which stay in the caches between calls."""
        weight = self._some(WIDTH)
        k_cache, v_cache = (self._some(PROMPT // BLOCK + 1, BLOCK, KV_HEADS, HEAD_DIM) for _ in range(2))
        for rows, count in ((1, 1), (max(ROWS), 1), (1, PROMPT)):
            step = StepShape(rows, count, 0, decodes=count == 1)
            tokens = step.tokens
            x, gate = self._some(tokens, WIDTH), self._some(tokens, WIDTH)
            q, k = self._some(tokens, HEADS, HEAD_DIM), self._some(tokens, KV_HEADS, HEAD_DIM)
            angles = self._some(2, tokens, HEAD_DIM // 2, dtype=torch.float32)
            cells = torch.arange(BLOCK, BLOCK + tokens)
            given: dict[str, tuple[Any, ...]] = {
                "rms_norm": (x, weight, 1e-5),
                "gated_rms_norm": (x, gate, weight, 1e-5, WIDTH // GROUPS),
                "rotary": (q, k, k, angles, 1.0, k_cache, v_cache, cells),
            }
            for operation, args in given.items():
                work = KernelCost(args[0].nbytes)
                yield self._rate(operation, self.dtype, step, [(args, {})] * 16, work)

    def _turns(self, size: int, least: int = 2) -> int:
        """Return the number of pieces of `size` bytes that calls cycle through."""
        return max(self.num_bytes // size, least)

    def _some(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor with all its pages in memory. Its values make no difference."""
        made = TorchArrays("cpu").empty(shape, dtype_name(dtype or self.dtype))
        return made.fill_(1 if dtype == torch.int8 else 0.01)


def _groups(slots: int, rows: int) -> list[torch.Tensor]:
    """Return the slots 1 to `slots` in groups of `rows`, at most `MAX_CALLS` groups."""
    return [
        torch.arange(1 + i * rows, 1 + (i + 1) * rows, dtype=torch.int32) for i in range(min(slots // rows, MAX_CALLS))
    ]


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
