"""Decode steps made by hand, and their time without a graph and with one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ostinato.bench.graph_figures import StepTimes
from ostinato.engine.run.decode_inputs import DecodeInputs
from ostinato.engine.run.inputs import step_inputs
from ostinato.engine.run.runner import Runner
from ostinato.errors import CapacityError
from ostinato.layers.step import StepInputs
from ostinato.schedule.batch import Batch, Row

Work = Callable[[StepInputs], object]


@torch.inference_mode()
def make_decode_steps(runner: Runner, sizes: Sequence[int], prompt_len: int, vocab_size: int) -> dict[int, StepInputs]:
    """A decode step for each number of rows in `sizes`, on a CPU. Every row has `prompt_len` tokens before it, which
    are computed here; row r has blocks and a slot of its own, in every step the same. CapacityError if there are fewer
    blocks."""
    settings, memory = runner.plan.settings, runner.plan.memory
    rng = random.Random(prompt_len)
    blocks = prompt_len // settings.block_size + 1 if memory.num_blocks else 0
    if blocks * max(sizes) > max(memory.num_blocks - 1, 0):
        raise CapacityError(
            f"{max(sizes)} rows of {prompt_len} tokens need {blocks * max(sizes)} blocks, and the cache has "
            f"{memory.num_blocks - 1}: ask for fewer rows, shorter prompts or more cache_memory"
        )
    rows = []
    for number in range(max(sizes)):
        table = tuple(range(1 + number * blocks, 1 + (number + 1) * blocks))
        slot = 1 + number if memory.num_slots else 0
        for start in range(0, prompt_len, settings.max_num_batched_tokens):
            count = min(settings.max_num_batched_tokens, prompt_len - start)
            tokens = tuple(rng.randrange(vocab_size) for _ in range(count))
            chunk = Row(str(number), tokens, start, table, slot if start else 0, (slot,))
            runner.graphs.run(_inputs(runner, [chunk], num_decode_rows=0))
        rows.append(Row(str(number), (rng.randrange(vocab_size),), prompt_len, table, slot, (slot,)))
    return {size: _inputs(runner, rows[:size], size) for size in sizes}


@torch.inference_mode()
def take_turns(
    runner: Runner, steps: Mapping[int, StepInputs], rounds: int, report: Callable[[str], None]
) -> list[StepTimes]:
    """The seconds of every step, both ways. In a round each size has its turn, once from eager to graph and once back,
    so that what else the machine does falls on all alike. The first round is not counted."""
    pairs: dict[int, list[tuple[float, float]]] = {size: [] for size in steps}
    for number in range(rounds + 1):
        report(f"round {number} of {rounds}" if number else "warming up")
        for size, step in steps.items():
            first, second = seconds_of(runner, run_eagerly(runner), step), seconds_of(runner, runner.graphs.run, step)
            third, fourth = seconds_of(runner, runner.graphs.run, step), seconds_of(runner, run_eagerly(runner), step)
            if number:
                pairs[size] += [(first, second), (fourth, third)]
    return [StepTimes(size, [one for one, _ in each], [other for _, other in each]) for size, each in pairs.items()]


def run_eagerly(runner: Runner) -> Work:
    """The model's forward pass on a step that lies on a CPU."""
    return lambda step: runner.model(step if runner.device.type == "cpu" else step.to(runner.device), runner.memory)


def seconds_of(runner: Runner, work: Work, step: StepInputs) -> float:
    """From the call until the device is done."""
    begin = time.perf_counter()
    work(step)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return time.perf_counter() - begin


def _inputs(runner: Runner, rows: Sequence[Row], num_decode_rows: int) -> StepInputs:
    return step_inputs(
        Batch(tuple(rows), num_decode_rows),
        runner.block_size,
        torch.device("cpu"),
        (),
        DecodeInputs(runner.takes_images),
    )
