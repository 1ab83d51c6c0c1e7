"""The runner owns tensors: weights and cache memory. It computes batches and knows no policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ostinato.engine.inputs import logit_positions, step_inputs
from ostinato.engine.memory import allocate_memory
from ostinato.layers.build import Build
from ostinato.models.loader import load_weights
from ostinato.models.random import randomize_weights
from ostinato.models.registry import build_model
from ostinato.ops import select_ops
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.sample.sampler import sample
from ostinato.schedule.batch import Batch, StepResult


class Runner:
    """A model in memory, with its cache, as the plan describes them."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        directory: Path | None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Loads the weights in `directory`, or makes random ones if it is None.

        `progress` is called with (tensors loaded, tensors in all). Raises ModelError if the weights do not match.
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
            load_weights(self.model, directory, progress)
        self.memory = allocate_memory(spec, plan, self.device)
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        self.measured: dict[str, Any] = {
            "load_seconds": round(time.perf_counter() - begin, 3),
            "weight_bytes": weight_bytes,
        }

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Computes the batch, writes its keys, values and states, and samples where a row's next token is due."""
        hidden = self.model(step_inputs(batch, self.block_size, self.device), self.memory)
        positions = logit_positions(batch)
        return StepResult(
            tuple(sample(lambda places: self.model.logits(hidden[[positions[i] for i in places]]), batch.rows))
        )
