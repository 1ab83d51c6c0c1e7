"""The seconds of every call of a step on a CPU: replayed from a tape, or run eagerly under a stopwatch."""

from __future__ import annotations

import random
import time

import torch

from ostinato.bench.decode_steps import run_eagerly
from ostinato.bench.profile_figures import Calls, shortest_pass
from ostinato.bench.stopwatch import Stopwatch
from ostinato.engine.run.decode_inputs import DecodeInputs
from ostinato.engine.run.inputs import step_inputs
from ostinato.engine.run.runner import Runner
from ostinato.graphs.buffers import StepBuffers
from ostinato.graphs.graphs import persistent_storages
from ostinato.graphs.tape import TapeBackend
from ostinato.layers.step import StepInputs
from ostinato.schedule.batch import Batch, Row


@torch.inference_mode()
def profile_tape(runner: Runner, step: StepInputs, size: int, passes: int) -> tuple[Calls, float]:
    """Of a decode step, padded to `size` rows: the calls of the shortest pass, `logits` last, and the shortest replay
    without a look at the calls. The tape is captured anew."""
    rows, tokens_per_row = step.write_slots.shape
    table = step.block_tables.shape[1]
    buffers = StepBuffers(size, size * tokens_per_row, table, tokens_per_row, runner.device, runner.takes_images)
    backend = TapeBackend(
        runner.model.build.ops.tap, persistent_storages(buffers, runner.model, runner.memory), runner.device
    )
    padded = buffers.view(size, size * tokens_per_row, tokens_per_row, size)
    tape = backend.capture(lambda each: runner.model(each, runner.memory), padded, ())
    buffers.fill(step, size, size * tokens_per_row)
    now = buffers.view(rows, rows * tokens_per_row, tokens_per_row, rows)
    profiles: list[Calls] = []
    replays = []
    for _ in range(passes + 1):
        begin = time.perf_counter()
        hidden = tape.replay(now)
        replays.append(time.perf_counter() - begin)
        # Between two replays, so that the LM head finds the caches as it does in a step.
        logits = _timed_logits(runner, hidden[:rows])
        profiles.append([*tape.profile(now), logits])
    return shortest_pass(profiles[1:]), min(replays[1:])


@torch.inference_mode()
def profile_eagerly(runner: Runner, step: StepInputs, rows: int, passes: int) -> tuple[Calls, float]:
    """The kernels of the shortest pass, `logits` of `rows` positions last, and the shortest time of the whole model:
    Python, and torch between the kernels, in it."""
    work, tap = run_eagerly(runner), runner.model.build.ops.tap
    profiles: list[Calls] = []
    runs = []
    for _ in range(passes + 1):
        clock = Stopwatch()
        begin = time.perf_counter()
        hidden = work(step)
        runs.append(time.perf_counter() - begin)
        assert isinstance(hidden, torch.Tensor)
        logits = _timed_logits(runner, hidden[-rows:])
        tap.recorder = clock
        try:
            work(step)
        finally:
            tap.recorder = None
        profiles.append([*clock.calls, logits])
    return shortest_pass(profiles[1:]), min(runs[1:])


def prompt_step(runner: Runner, num_tokens: int, vocab_size: int) -> StepInputs:
    """A prompt of random tokens as a step of one row, in the first blocks and the first slot."""
    rng = random.Random(num_tokens)
    memory, block_size = runner.plan.memory, runner.block_size
    table = tuple(range(1, 1 + -(-num_tokens // block_size))) if memory.num_blocks else ()
    tokens = tuple(rng.randrange(vocab_size) for _ in range(num_tokens))
    row = Row("prompt", tokens, 0, table, 0, (1 if memory.num_slots else 0,))
    return step_inputs(Batch((row,), 0), block_size, torch.device("cpu"), (), DecodeInputs(runner.takes_images))


def _timed_logits(runner: Runner, hidden: torch.Tensor) -> tuple[str, float]:
    begin = time.perf_counter()
    runner.model.logits(hidden)
    return "logits", time.perf_counter() - begin
