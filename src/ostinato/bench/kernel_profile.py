"""The seconds of every call of a step on a CPU: replayed from a tape, or run eagerly under a stopwatch."""

from __future__ import annotations

import random
import time

import torch

from ostinato.bench.decode_steps import run_eagerly
from ostinato.bench.profile_figures import Calls, shortest_pass
from ostinato.bench.stopwatch import Stopwatch
from ostinato.engine.run.inputs import write_step
from ostinato.engine.run.runner import Runner
from ostinato.graphs.buffers import StepBuffers
from ostinato.graphs.graphs import persistent_storages
from ostinato.graphs.tape import TapeBackend
from ostinato.schedule.batch import Batch, Row


@torch.inference_mode()
def profile_tape(runner: Runner, step: Batch, size: int, passes: int) -> tuple[Calls, float]:
    """Of a decode step, padded to `size` rows: the calls of the shortest pass, `logits` last, and the shortest replay
    without a look at the calls. The tape is captured anew."""
    rows, blocks = len(step.rows), max(len(row.block_table) for row in step.rows)
    buffers = StepBuffers(size, size, blocks, 1, runner.device, runner.takes_images)
    backend = TapeBackend(
        runner.model.build.ops.tap, persistent_storages(buffers, runner.model, runner.memory), runner.device
    )
    tape = backend.capture(lambda each: runner.model(each, runner.memory), buffers.view(size, size, 1, size), ())
    now = write_step(buffers, step, runner.block_size)
    buffers.pad(rows, rows, size, size)
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
def profile_eagerly(runner: Runner, step: Batch, rows: int, passes: int) -> tuple[Calls, float]:
    """The kernels of the shortest pass, `logits` of `rows` positions last, and the shortest time of the whole model:
    Python, and torch between the kernels, in it."""
    work, tap = run_eagerly(runner, step), runner.model.build.ops.tap
    profiles: list[Calls] = []
    runs = []
    for _ in range(passes + 1):
        clock = Stopwatch()
        begin = time.perf_counter()
        hidden = work()
        runs.append(time.perf_counter() - begin)
        assert isinstance(hidden, torch.Tensor)
        logits = _timed_logits(runner, hidden[-rows:])
        tap.recorder = clock
        try:
            work()
        finally:
            tap.recorder = None
        profiles.append([*clock.calls, logits])
    return shortest_pass(profiles[1:]), min(runs[1:])


def prompt_step(runner: Runner, num_tokens: int, vocab_size: int) -> Batch:
    """A prompt of random tokens as a step of one row, in the first blocks and the first slot."""
    rng = random.Random(num_tokens)
    memory, block_size = runner.plan.memory, runner.block_size
    table = tuple(range(1, 1 + -(-num_tokens // block_size))) if memory.num_blocks else ()
    tokens = tuple(rng.randrange(vocab_size) for _ in range(num_tokens))
    row = Row("prompt", tokens, 0, table, 0, (1 if memory.num_slots else 0,))
    return Batch((row,), 0)


def _timed_logits(runner: Runner, hidden: torch.Tensor) -> tuple[str, float]:
    begin = time.perf_counter()
    runner.model.logits(hidden)
    return "logits", time.perf_counter() - begin
