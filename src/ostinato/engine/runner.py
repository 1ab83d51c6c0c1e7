"""The runner owns tensors: weights and cache memory. It computes batches and knows no policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ostinato.engine.inputs import logit_positions, step_inputs
from ostinato.engine.memory import allocate_memory
from ostinato.errors import CapacityError, Remedy
from ostinato.graphs.buffers import StepBuffers
from ostinato.graphs.cuda import CudaBackend
from ostinato.graphs.graphs import Backend, Graphs, persistent_storages
from ostinato.graphs.tape import TapeBackend
from ostinato.layers.build import Build
from ostinato.models.loader import load_weights
from ostinato.models.random import randomize_weights
from ostinato.models.registry import build_model
from ostinato.ops import select_ops
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.sample.sampler import sample
from ostinato.schedule.batch import Batch, StepResult

StartProgress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much it is in all)"""


class Runner:
    """A model in memory, with its cache, as the plan describes them."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        directory: Path | None,
        progress: StartProgress = lambda what, done, total: None,
    ) -> None:
        """Loads the weights in `directory`, or makes random ones if it is None.

        Raises ModelError if the weights do not match.
        """
        settings = plan.settings
        self.device = torch.device(settings.device)
        self.block_size = settings.block_size
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        ops = select_ops({name: choice.implementation for name, choice in plan.kernels.items()})
        build = Build(ops, getattr(torch, settings.dtype), self.device)
        begin = time.perf_counter()
        self.model = build_model(build, replace(spec, rope=settings.rope))
        if directory is None:
            randomize_weights(self.model, settings.seed)
        else:
            load_weights(self.model, directory, partial(progress, "Loading weights"))
        self.memory = allocate_memory(spec, plan, self.device)
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        self.measured: dict[str, Any] = {
            "load_seconds": round(time.perf_counter() - begin, 3),
            "weight_bytes": weight_bytes,
        }
        self.plan = plan
        self.graphs = self._make_graphs()

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Computes the batch, writes its keys, values and states, and samples where a row's next token is due."""
        hidden = self.graphs.run(step_inputs(batch, self.block_size, torch.device("cpu")))
        positions = logit_positions(batch)
        return StepResult(
            tuple(sample(lambda places: self.model.logits(hidden[[positions[i] for i in places]]), batch.rows))
        )

    @torch.inference_mode()
    def capture(self, progress: StartProgress = lambda what, done, total: None) -> None:
        """Captures every planned graph, and compares what they take with the plan.

        Raises CaptureError if a step cannot be captured, CapacityError if the graphs take more than was planned.
        """
        self.graphs.capture_all(progress)
        if not self.graphs.planned():
            return
        figures = self.measured["graphs"] = self.graph_figures()
        planned, observed = figures["planned_bytes"], figures["observed_bytes"]
        if observed > planned:
            raise CapacityError(
                f"the graphs take {observed} bytes, and {planned} were planned for them",
                [Remedy("graph_mode", "none")],
            )

    def graph_figures(self) -> dict[str, Any]:
        """Graphs captured so far, the time that took, and their memory beside the planned."""
        return {
            "captured": self.graphs.num_captured,
            "capture_seconds": round(self.graphs.capture_seconds, 3),
            "planned_bytes": self.plan.memory.graphs,
            "observed_bytes": self.graphs.num_bytes if self.graphs.planned() else 0,
        }

    def _make_graphs(self) -> Graphs:
        settings, memory = self.plan.settings, self.plan.memory
        buffers = StepBuffers(
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            -(-settings.max_model_len // settings.block_size) if memory.num_blocks else 0,
            memory.slots_per_request,
            self.device,
        )

        def persistent() -> Mapping[int, str]:
            return persistent_storages(buffers, self.model, self.memory)

        make_backend = {"tape": TapeBackend, "cuda": CudaBackend}[self.plan.capture.backend]
        backend: Backend = make_backend(self.model.build.ops.tap, persistent(), self.device)
        return Graphs(
            self.plan.capture,
            backend,
            lambda step: self.model(step, self.memory),
            buffers,
            self.memory,
            persistent=persistent,
            strict=settings.strict,
            check_replay=settings.check_replay,
        )
