"""The graphs of a model, as the plan wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ostinato.graphs.buffers import StepBuffers
from ostinato.graphs.cuda import CudaBackend
from ostinato.graphs.graphs import Backend, Forward, Graphs, persistent_storages
from ostinato.graphs.tape import TapeBackend
from ostinato.layers.step import LayerMemory
from ostinato.models.base import CausalLM
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.plan import Plan

BACKENDS = {"tape": TapeBackend, "cuda": CudaBackend}
"""By the name that a plan has for them."""
_NO_OTHERS: Mapping[str, torch.Tensor] = {}


def make_graphs(
    plan: Plan,
    capture: CapturePlan,
    model: CausalLM,
    forward: Forward,
    memory: Sequence[LayerMemory],
    *,
    max_tokens: int,
    others: Mapping[str, torch.Tensor] = _NO_OTHERS,
    make_backend: Callable[..., Backend] | None = None,
) -> Graphs:
    """Graphs of `forward`, a part of `model` that works on `memory`, over buffers for steps of `max_tokens` tokens.

    `others` are further buffers that it reads, by name. `make_backend` stands in for the plan's backend.
    """
    settings, device = plan.settings, model.embedding.weight.device
    buffers = StepBuffers(
        settings.max_num_seqs,
        max_tokens,
        -(-settings.max_model_len // settings.block_size) if plan.memory.num_blocks else 0,
        capture.tokens_per_row[-1],
        device,
        takes_images=model.spec.vision is not None,
    )

    def persistent() -> Mapping[int, str]:
        named = {buffer.untyped_storage().data_ptr(): name for name, buffer in others.items()}
        return {**persistent_storages(buffers, model, memory), **named}

    backend = (make_backend or BACKENDS[capture.backend])(model.build.ops.tap, persistent(), device)
    return Graphs(
        capture,
        backend,
        forward,
        buffers,
        memory,
        persistent=persistent,
        strict=settings.strict,
        check_replay=settings.check_replay,
    )
