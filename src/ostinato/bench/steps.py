"""Steps made by hand, without a scheduler, and their time without a graph and with one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ostinato.bench.reports import Say
from ostinato.bench.step_figures import StepTimes
from ostinato.engine.run.inputs import step_inputs
from ostinato.engine.run.runner import Runner
from ostinato.errors import CapacityError
from ostinato.schedule.batch import Batch, Row

Work = Callable[[], torch.Tensor]


@torch.inference_mode()
def make_decode_steps(runner: Runner, sizes: Sequence[int], prompt_len: int, vocab_size: int) -> dict[int, Batch]:
    """A decode step for each number of rows in `sizes`. Every row has `prompt_len` tokens before it, which
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
            runner.forward(Batch((chunk,), num_decode_rows=0))
        rows.append(Row(str(number), (rng.randrange(vocab_size),), prompt_len, table, slot, (slot,)))
    return {size: Batch(tuple(rows[:size]), size) for size in sizes}


def prompt_step(runner: Runner, num_tokens: int, vocab_size: int) -> Batch:
    """A prompt of random tokens as a step of one row, in the first blocks and the first slot."""
    rng = random.Random(num_tokens)
    memory, block_size = runner.plan.memory, runner.block_size
    table = tuple(range(1, 1 + -(-num_tokens // block_size))) if memory.num_blocks else ()
    tokens = tuple(rng.randrange(vocab_size) for _ in range(num_tokens))
    row = Row("prompt", tokens, 0, table, 0, (1 if memory.num_slots else 0,))
    return Batch((row,), 0)


@torch.inference_mode()
def take_turns(runner: Runner, steps: Mapping[int, Batch], rounds: int, say: Say) -> list[StepTimes]:
    """The seconds of every step, both ways. In a round each size has its turn, once from eager to graph and once back,
    so that what else the machine does falls on all alike. The first round is not counted."""
    pairs: dict[int, list[tuple[float, float]]] = {size: [] for size in steps}
    ways = {size: (run_eagerly(runner, step), partial(runner.forward, step)) for size, step in steps.items()}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up")
        for size, (eager, graph) in ways.items():
            first, second = seconds_of(runner, eager), seconds_of(runner, graph)
            third, fourth = seconds_of(runner, graph), seconds_of(runner, eager)
            if number:
                pairs[size] += [(first, second), (fourth, third)]
    return [StepTimes(size, [one for one, _ in each], [other for _, other in each]) for size, each in pairs.items()]


def run_eagerly(runner: Runner, batch: Batch) -> Work:
    """The model's forward pass on a step whose inputs are written here."""
    step = step_inputs(batch, runner.block_size, runner.device, takes_images=runner.takes_images)
    return lambda: runner.model(step, runner.memory)


def seconds_of(runner: Runner, work: Work) -> float:
    """From the call until the device is done."""
    begin = time.perf_counter()
    work()
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return time.perf_counter() - begin
