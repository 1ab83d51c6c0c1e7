"""Steps for tests of capture and replay: of a small function of the step buffers, and of whole models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import torch

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.graphs.buffers import StepBuffers
from ostinato.graphs.step_graphs import persistent_storages
from ostinato.graphs.tape import Tape, TapeBackend
from ostinato.ops.arrays import Arrays, TorchArrays, is_array
from ostinato.ops.dispatch import CallHook
from ostinato.ops.step_inputs import LayerCache, StepInputs
from ostinato.runner.inputs import make_step_inputs, write_step_inputs
from tests.support.checkpoints import checkpoint, random_prompt
from tests.support.tensors import as_tensor

CPU = TorchArrays("cpu")
Forward = Callable[[StepInputs], torch.Tensor]


def step_of(
    tokens: Sequence[int], tables: Sequence[Sequence[int]] = ((0,),), write_slots: Sequence[Sequence[int]] = ((0,),)
) -> StepInputs:
    """A step of one token per row or of one row with all `tokens`, as many rows as `tables` has."""
    rows, count = len(tables), len(tokens)
    starts = range(rows + 1) if rows > 1 else (0, count)
    return StepInputs(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(count) + 5,
        row_starts=torch.tensor(list(starts), dtype=torch.int32),
        start_positions=torch.full((rows,), 5, dtype=torch.int32),
        kv_lens=torch.full((rows,), 5 + count // rows, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        kv_cells=torch.arange(count) + 32,
        read_slots=torch.arange(1, rows + 1, dtype=torch.int32),
        write_slots=torch.tensor(write_slots, dtype=torch.int32).expand(rows, -1),
        num_decode_rows=rows if rows == count else 0,
    )


def lay(buffers: StepBuffers, inputs: StepInputs, rows: int, tokens: int) -> StepInputs:
    """Writes a step whose tensors lie elsewhere, padded to `rows` rows and `tokens` tokens -> its view."""
    count, real_tokens = inputs.read_slots.shape[0], inputs.token_ids.shape[0]
    for name, array in buffers.arrays.items():
        if name not in ("block_tables", "window_block_tables"):
            value = getattr(inputs, name).cpu()
            array[tuple(slice(size) for size in value.shape)] = value
    buffers.write_tables([tuple(table) for table in inputs.block_tables.tolist()])
    if inputs.window_block_tables is not None:
        buffers.write_window_tables([tuple(table) for table in inputs.window_block_tables.tolist()])
    buffers.pad(count, real_tokens, rows, tokens)
    return buffers.view(count, real_tokens, inputs.write_slots.shape[1], inputs.num_decode_rows, inputs.checkpoints)


class Toy:
    """Step buffers for 8 tokens, a weight, a cache, and a backend of tapes: a place to capture small functions."""

    def __init__(self, arrays: Arrays = CPU) -> None:
        generator = torch.Generator().manual_seed(0)
        self.buffers = StepBuffers(8, 8, 4, 2, arrays)
        self.table = torch.randn(20, 6, generator=generator).to(arrays.device)
        self.weight = torch.randn(6, 6, generator=generator).to(arrays.device)
        self.cache = torch.zeros(64, 6, device=arrays.device)
        self.hook = CallHook()
        self.backend = TapeBackend(self.hook, self.persistent(), arrays)

    def persistent(self) -> dict[int, str]:
        named = {"weights.table": self.table, "weights.weight": self.weight, "cache memory.0": self.cache}
        own = {tensor.untyped_storage().data_ptr(): name for name, tensor in named.items()}
        return {self.buffers.storage: "step buffers", **own}

    def padding(self, tokens: int = 8) -> StepInputs:
        self.buffers.clear()
        return self.buffers.view(1, tokens, 1, 0)

    def capture(self, forward: Forward, splits: Sequence[str] = ()) -> Tape:
        return self.backend.capture(forward, self.padding(), splits)

    def write(self, tokens: Sequence[int]) -> StepInputs:
        """Fills the buffers with a step of one row, padded to 8 tokens -> its view."""
        return lay(self.buffers, replace(step_of(tokens), num_decode_rows=0), 1, 8)


class Steps:
    """A model of the parity tests with the batches that its engine schedules, to run as tapes and eagerly."""

    def __init__(self, recipe: str, dtype: Literal["float32", "bfloat16"] = "float32", **settings: Any) -> None:
        config = EngineConfig(
            model=str(checkpoint(recipe)), dtype=dtype, max_model_len=128, max_num_seqs=8, threads=1,
            max_num_batched_tokens=64, cache_memory="16MiB", graph_mode="none", **settings,
        )  # fmt: skip
        # Native kernels on torch's arrays, as where the other kernels are references.
        with patch("ostinato.runner.model_runner.choose_arrays", lambda plan, spec: CPU):
            self.engine = EngineCore(config)
        self.runner = self.engine.runner
        self.block_size = self.engine.plan.settings.block_size
        most = 128 // self.block_size
        self.buffers = StepBuffers(
            8, 64, most, 1, CPU, max_window_blocks=most if self.engine.plan.memory.num_window_blocks else 0
        )
        self.memory: Sequence[LayerCache] = self.runner.layer_memory
        persistent = persistent_storages(self.buffers, self.runner.model, self.memory)
        self.backend = TapeBackend(self.runner.model.build.ops.hook, persistent, CPU)
        for seed, length in enumerate((9, 3, 1, 17, 6)):
            sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            self.engine.add_request(random_prompt(length, seed), sampling)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        return self.runner.model(inputs, self.memory)

    def padding(self, rows: int, tokens: int, is_decode: bool) -> StepInputs:
        self.buffers.clear()
        return self.buffers.view(rows, tokens, 1, rows if is_decode else 0)

    def next_step(self, rows: int | None, tokens: int) -> tuple[StepInputs, StepInputs]:
        """Runs the batch before, schedules one, writes it into the buffers, padded -> as it is, and its view."""
        self.batch = self.engine.scheduler.schedule()
        assert self.batch is not None
        step = make_step_inputs(self.batch, self.block_size, CPU)
        count = step.read_slots.shape[0]
        view = write_step_inputs(self.buffers, self.batch, self.block_size)
        self.buffers.pad(count, view.num_tokens, rows or count, tokens)
        return step, view

    def finish(self) -> None:
        """Lets the engine compute the batch, from the states that it left."""
        self.engine.scheduler.update(self.runner.execute(self.batch))

    def states(self) -> list[torch.Tensor]:
        """Copies of all that layers remember but for the null slot and block, whose content nobody reads."""
        return [part[1:].clone() for part in self._parts()]

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        for part, saved in zip(self._parts(), states, strict=True):
            part[1:] = saved

    def _parts(self) -> list[torch.Tensor]:
        return [part for layer in self.memory for part in layer.tensors.values()]


def without_padding(inputs: StepInputs) -> StepInputs:
    """The same step in memory of its own."""
    tensors = {name: as_tensor(value).clone() for name, value in vars(inputs).items() if is_array(value)}
    return replace(inputs, **tensors)
