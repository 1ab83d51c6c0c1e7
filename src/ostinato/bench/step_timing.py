"""Time of steps built by hand, without a graph and with one, and of their kernels on a CPU.

An eager step is timed call by call by a recorder. A tape times its own calls.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ostinato.bench.report import ProgressCallback
from ostinato.bench.statistics import Calls, GraphStepTimes, KernelShares
from ostinato.errors import CapacityError
from ostinato.graphs.buffers import BufferedInputs
from ostinato.graphs.tape import Tape, TapeBackend
from ostinato.graphs.tensor_refs import StepForward
from ostinato.kv_cache.sliding_window import SlidingWindowSpec
from ostinato.ops.dispatch import CallHook, Kernel, Recorder
from ostinato.ops.step_inputs import Array
from ostinato.plan.memory.split import sliding_window_spec
from ostinato.runner.graph_setup import make_graphs
from ostinato.runner.inputs import make_step_inputs, write_step_inputs
from ostinato.runner.model_runner import ModelRunner
from ostinato.scheduler.batch import Batch, BatchRow

P = ParamSpec("P")
R = TypeVar("R")


def _without_gradients(function: Callable[Concatenate[ModelRunner, P], R]) -> Callable[Concatenate[ModelRunner, P], R]:
    """Return `function`, which computes with a runner's model, in the context in which models compute."""

    @wraps(function)
    def call(runner: ModelRunner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with runner.arrays.inference_mode():
            return function(runner, *args, **kwargs)

    return call


PASSES = 5
Work = Callable[[], Any]


@_without_gradients
def make_decode_steps(runner: ModelRunner, sizes: Sequence[int], prompt_len: int, vocab_size: int) -> dict[int, Batch]:
    """Return a decode step for each number of rows in `sizes`.

    Every row has `prompt_len` tokens before it; row r has its own blocks, window blocks and slot, in every step the
    same. One chunk of one prompt is computed, and the memory of all rows is filled with copies of what it wrote, so a
    prompt of any length takes a moment. Raises CapacityError if there are fewer blocks or window blocks.
    """
    settings, memory = runner.plan.settings, runner.plan.memory
    rng = random.Random(prompt_len)
    blocks = prompt_len // settings.block_size + 1 if memory.num_blocks else 0
    if blocks * max(sizes) > max(memory.num_blocks - 1, 0):
        raise CapacityError(
            f"{max(sizes)} rows of {prompt_len} tokens need {blocks * max(sizes)} blocks, and the cache has "
            f"{memory.num_blocks - 1}: ask for fewer rows, shorter prompts or more cache_memory"
        )
    rows, most = [], settings.max_num_batched_tokens
    rules, window_blocks = sliding_window_spec(memory, settings.block_size, most), 0
    if rules is not None:
        window_blocks, needed = (memory.num_window_blocks - 1) // max(sizes), prompt_len // settings.block_size + 1
        least = min(needed, rules.blocks_per_request)
        if window_blocks < least:
            raise CapacityError(
                f"{max(sizes)} rows with a window of {rules.window} need {least} window blocks each, and the cache "
                f"has {memory.num_window_blocks - 1}: ask for fewer rows or more cache_memory"
            )
        if window_blocks < needed:
            most = min(most, (window_blocks - rules.blocks_per_window - 1) * settings.block_size)
    count = min(most, prompt_len)
    for number in range(max(sizes)):
        table = tuple(range(1 + number * blocks, 1 + (number + 1) * blocks))
        slot = 1 + number if memory.num_slots else 0
        if number == 0:
            tokens = tuple(rng.randrange(vocab_size) for _ in range(count))
            chunk = BatchRow("prompt", tokens, 0, table, 0, (slot,))
            chunk = chunk._replace(window_block_table=_window_blocks(rules, 0, window_blocks, 0, count))
            runner.execute_model(Batch((chunk,), num_decode_rows=0))
        last = BatchRow(str(number), (rng.randrange(vocab_size),), prompt_len, table, slot, (slot,))
        rows.append(
            last._replace(window_block_table=_window_blocks(rules, number, window_blocks, prompt_len, prompt_len + 1))
        )
    computed = max(1, count // settings.block_size)
    for layer in runner.layer_memory:
        end = 1 + max(sizes) * (window_blocks if layer.in_window_blocks else blocks)
        for cells in layer.block_tensors.values():
            for begin in range(1 + computed, end, computed):
                copied = min(computed, end - begin)
                cells[begin : begin + copied] = cells[1 : 1 + copied]
        for state in layer.states.values():
            state[2 : 1 + max(sizes)] = state[1]
    return {size: Batch(tuple(rows[:size]), size) for size in sizes}


def _window_blocks(
    rules: SlidingWindowSpec | None, number: int, window_blocks: int, start: int, end: int
) -> tuple[int, ...]:
    """Return the window block table of row `number`, for tokens from `start` to before `end`.

    The row has `window_blocks` window blocks and uses them cyclically.
    """
    if rules is None:
        return ()
    first = rules.first_block(start)
    held = range(first, -(-end // rules.block_size))
    return (0,) * first + tuple(1 + number * window_blocks + block % window_blocks for block in held)


def prompt_step(runner: ModelRunner, num_tokens: int, vocab_size: int) -> Batch:
    """Return a prompt of random tokens as a step of one row, in the first blocks, window blocks and slot."""
    rng = random.Random(num_tokens)
    memory, block_size = runner.plan.memory, runner.block_size
    table = tuple(range(1, 1 + -(-num_tokens // block_size))) if memory.num_blocks else ()
    tokens = tuple(rng.randrange(vocab_size) for _ in range(num_tokens))
    row = BatchRow("prompt", tokens, 0, table, 0, (1 if memory.num_slots else 0,))
    if runner.plan.model.is_prefix_lm:
        row = row._replace(prompt_end=num_tokens)
    if memory.num_window_blocks:
        row = row._replace(window_block_table=tuple(range(1, 1 + -(-num_tokens // block_size))))
    return Batch((row,), 0)


@_without_gradients
def take_turns(
    runner: ModelRunner, steps: Mapping[int, Batch], rounds: int, say: ProgressCallback
) -> list[GraphStepTimes]:
    """Return the seconds of every step, with and without graph.

    In a round each size is measured once from eager to graph and once back, so that other work on the machine affects
    all alike. The first round is not counted.
    """
    pairs: dict[int, list[tuple[float, float]]] = {size: [] for size in steps}
    ways = {size: (run_eagerly(runner, step), partial(runner.execute_model, step)) for size, step in steps.items()}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up")
        for size, (eager, graph) in ways.items():
            first, second = seconds_of(runner, eager), seconds_of(runner, graph)
            third, fourth = seconds_of(runner, graph), seconds_of(runner, eager)
            if number:
                pairs[size] += [(first, second), (fourth, third)]
    return [
        GraphStepTimes(size, [one for one, _ in each], [other for _, other in each]) for size, each in pairs.items()
    ]


def run_eagerly(runner: ModelRunner, batch: Batch) -> Work:
    """Return the work that writes a step into the runner's buffers, as for a graph, and runs the model on it."""
    buffers, rows = runner.graphs.buffers, len(batch.rows)

    def work() -> Array:
        inputs = write_step_inputs(buffers, batch, runner.block_size)
        buffers.pad(rows, inputs.num_tokens, rows, inputs.num_tokens)
        return runner.model(inputs, runner.layer_memory)

    return work


def seconds_of(runner: ModelRunner, work: Work) -> float:
    """Return the seconds from the call until the device is done."""
    begin = time.perf_counter()
    work()
    runner.arrays.synchronize()
    return time.perf_counter() - begin


class Stopwatch:
    """Recorder that times every kernel that runs through it and records nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self._is_running = False

    @property
    def seconds(self) -> float:
        """Seconds of all calls together."""
        return sum(seconds for _, seconds in self.calls)

    def timed(self, name: str, kernel: Callable[..., object]) -> Callable[..., Any]:
        """Return `kernel` with timing. Calls that a kernel makes belong to it, and are not counted twice."""

        def call(*args: object, **kwargs: object) -> Any:
            if self._is_running:
                return kernel(*args, **kwargs)
            self._is_running = True
            begin = time.perf_counter()
            try:
                return kernel(*args, **kwargs)
            finally:
                self.calls.append((name, time.perf_counter() - begin))
                self._is_running = False

        return call

    def kernel(self, name: str, kernel: Kernel, args: tuple[object, ...], kwargs: dict[str, object]) -> Array:
        return self.timed(name, kernel)(*args, **kwargs)

    def split(
        self,
        name: str,  # noqa: ARG002
        function: Kernel,
        tensors: tuple[Array, ...],
        others: tuple[object, ...],
    ) -> Array:
        return function(*tensors, *others)


class TapeClock:
    """Second capture of a model's tapes, when first used. A replay is timed as a whole, then again call by call."""

    def __init__(self, runner: ModelRunner) -> None:
        plan = runner.plan
        self.calls: Calls = ()
        """Calls of the last replay."""
        self.seconds = 0.0
        """Seconds of the last replay, without timing of its calls."""
        self.left_out = Stopwatch()
        """Kernels of the parts that a piecewise graph leaves out, if this is the hook's recorder."""
        self._block_size = runner.block_size
        self._graphs = make_graphs(
            plan,
            plan.capture,
            runner.model,
            lambda inputs: runner.model(inputs, runner.layer_memory),
            runner.layer_memory,
            max_tokens=plan.settings.max_num_batched_tokens,
            make_backend=lambda *parts: _ClockedTapes(TapeBackend(*parts), self),
        )

    def run(self, batch: Batch) -> Array:
        """Return the hidden states of a step that has a graph."""
        return self._graphs.run(write_step_inputs(self._graphs.buffers, batch, self._block_size))


@dataclass(frozen=True)
class _ClockedTapes:
    """Backend for graphs that makes timed tapes."""

    tapes: TapeBackend
    clock: TapeClock
    name = "tape"

    @property
    def num_bytes(self) -> int:
        return self.tapes.num_bytes

    def capture(self, forward: StepForward, inputs: BufferedInputs, splits: Collection[str]) -> _ClockedTape:
        return _ClockedTape(self.tapes.capture(forward, inputs, splits), self.clock)


@dataclass(frozen=True)
class _ClockedTape:
    tape: Tape
    clock: TapeClock

    def replay(self, inputs: BufferedInputs) -> Array:
        begin = time.perf_counter()
        hidden = self.tape.replay(inputs)
        self.clock.seconds = time.perf_counter() - begin
        self.clock.left_out.calls.clear()
        self.clock.calls = self.tape.profile(inputs)
        return hidden


@_without_gradients
def kernel_shares(runner: ModelRunner, steps: Mapping[int, Batch], passes: int = PASSES) -> dict[int, KernelShares]:
    """Return the share of a step's time in its kernels, by number of rows, in the shortest of `passes` passes.

    The time of reading the clock counts as the rest, which it makes larger by up to a microsecond per call.
    """
    clock, hook = TapeClock(runner), runner.model.build.ops.hook
    for step in steps.values():
        clock.run(step)  # captured here, as the hook cannot hold two recorders
    shares: dict[int, KernelShares] = {}
    for size, step in steps.items():
        eagerly = run_eagerly(runner, step)
        eager, graph = [], []
        for _ in range(passes):
            watch = Stopwatch()
            with recording(hook, watch):
                seconds = seconds_of(runner, eagerly)
            eager.append((seconds, watch.seconds / seconds))
            with recording(hook, clock.left_out):
                seconds = seconds_of(runner, partial(clock.run, step)) - clock.seconds
            graph.append((seconds, _kernel_seconds(runner, clock) / seconds))
        # Other work disturbed the shortest pass least.
        shares[size] = KernelShares(min(eager)[1], min(graph)[1])
    return shares


@_without_gradients
def profile_tape(runner: ModelRunner, clock: TapeClock, step: Batch, passes: int) -> tuple[Calls, float]:
    """Return the calls of the shortest pass of a decode step with a full graph, and the shortest replay.

    `logits` is the last call. The replay is without timing of the calls.
    """
    rows = len(step.rows)
    profiles, replays = [], []
    for _ in range(passes + 1):
        hidden = clock.run(step)
        replays.append(clock.seconds)
        profiles.append([*clock.calls, _timed_logits(runner, hidden[:rows])])
    return shortest_pass(profiles[1:]), min(replays[1:])


@_without_gradients
def profile_eagerly(runner: ModelRunner, step: Batch, rows: int, passes: int) -> tuple[Calls, float]:
    """Return the kernels of the shortest pass, `logits` of `rows` positions last, and the shortest time of the model.

    That time includes Python, and what is computed between the kernels.
    """
    inputs = make_step_inputs(step, runner.block_size, runner.arrays, vision=runner.vision)
    profiles, runs = [], []
    for _ in range(passes + 1):
        begin = time.perf_counter()
        hidden = runner.model(inputs, runner.layer_memory)
        runs.append(time.perf_counter() - begin)
        logits = _timed_logits(runner, hidden[-rows:])
        watch = Stopwatch()
        with recording(runner.model.build.ops.hook, watch):
            runner.model(inputs, runner.layer_memory)
        profiles.append([*watch.calls, logits])
    return shortest_pass(profiles[1:]), min(runs[1:])


class ExpertsLog(Stopwatch):
    """Recorder that counts the experts that each call of `moe` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_read: list[int] = []

    def kernel(self, name: str, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, object]) -> Array:
        if name == "moe":
            expert_ids = args[1][:, 0]
            self.num_read.append(len(set(expert_ids.flatten().tolist())))
        return super().kernel(name, kernel, args, kwargs)


@_without_gradients
def experts_read(runner: ModelRunner, step: Batch) -> list[int]:
    """Return the number of experts that a step's tokens choose, for each layer that has experts."""
    log, inputs = ExpertsLog(), make_step_inputs(step, runner.block_size, runner.arrays, vision=runner.vision)
    with recording(runner.model.build.ops.hook, log):
        runner.model(inputs, runner.layer_memory)
    return log.num_read


@contextmanager
def recording(hook: CallHook, recorder: Recorder) -> Iterator[None]:
    """Set `recorder` as the hook's recorder inside the context."""
    hook.recorder = recorder
    try:
        yield
    finally:
        hook.recorder = None


def _kernel_seconds(runner: ModelRunner, clock: TapeClock) -> float:
    """Return the kernel seconds of the last replay, with those of the parts that it left out."""
    kernels = set(runner.plan.kernels)
    if clock.left_out.calls:
        kernels -= set(runner.plan.capture.splits)
    return sum(seconds for name, seconds in clock.calls if name in kernels) + clock.left_out.seconds


def _timed_logits(runner: ModelRunner, hidden: Array) -> tuple[str, float]:
    begin = time.perf_counter()
    runner.model.compute_logits(hidden)
    return "logits", time.perf_counter() - begin


def shortest_pass(passes: Sequence[Calls]) -> Calls:
    """Return the pass over a step that took the least time in all: other work makes it longer, never shorter.

    It is not the shortest time of each call: on a busy machine the thread with the clock may be late for a call, which
    then seems short, and the one before it long.
    """
    return min(passes, key=lambda calls: sum(seconds for _, seconds in calls))
