"""Graphs of a model and of its vision encoder, according to the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ostinato.errors import CapacityError, Remedy
from ostinato.graphs.buffers import StepBuffers
from ostinato.graphs.encoder_graphs import EncoderGraphs
from ostinato.graphs.step_graphs import CaptureBackend, StepGraphs, persistent_storages, weight_storages
from ostinato.graphs.tape import TapeBackend
from ostinato.graphs.tensor_refs import StepForward
from ostinato.json_io import JsonMapping
from ostinato.models.base import CausalLM
from ostinato.ops.arrays import dtype_name, memory_address
from ostinato.ops.step_inputs import Array, LayerCache
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.encoder.encoder_plan import EncoderPlan
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.plan import Plan
from ostinato.runner.image_encoder import write_encoder_inputs

log = logging.getLogger("ostinato.graphs")
_NO_OTHERS: Mapping[str, Array] = {}


def make_graphs(
    plan: Plan,
    capture: CapturePlan,
    model: CausalLM,
    forward: StepForward,
    memory: Sequence[LayerCache],
    *,
    max_tokens: int,
    others: Mapping[str, Array] = _NO_OTHERS,
    make_backend: Callable[..., CaptureBackend] | None = None,
    check_size: Callable[[], object] = lambda: None,
) -> StepGraphs:
    """Return graphs of `forward`, a part of `model` that works on `memory`, with buffers for `max_tokens` tokens.

    `others` are further buffers that it reads, by name. `make_backend` replaces the plan's backend; `check_size` is
    that of `StepGraphs`.
    """
    settings, arrays = plan.settings, model.build.arrays
    most = -(-settings.max_model_len // settings.block_size)
    buffers = StepBuffers(
        settings.max_num_seqs,
        max_tokens,
        most if plan.memory.num_blocks else 0,
        capture.tokens_per_row[-1],
        arrays,
        takes_images=model.spec.vision is not None,
        max_window_blocks=most if plan.memory.num_window_blocks else 0,
        media_token_id=None if model.spec.vision is None else model.spec.vision.text_token_id,
        is_prefix_lm=model.spec.is_prefix_lm,
    )

    def persistent() -> Mapping[int, str]:
        named = {memory_address(buffer): name for name, buffer in others.items()}
        return {**persistent_storages(buffers, model, memory), **named}

    backend = (make_backend or backend_class(capture.backend))(model.build.ops.hook, persistent(), arrays)
    return StepGraphs(
        capture,
        backend,
        forward,
        buffers,
        memory,
        persistent=persistent,
        strict=settings.strict,
        check_replay=settings.check_replay,
        check_size=check_size,
    )


def backend_class(name: str) -> Callable[..., Any]:
    """Return the class of the backend of this name in a plan."""
    if name == "tape":
        return TapeBackend
    from ostinato.graphs.cuda import CudaBackend  # it imports torch

    return CudaBackend


def make_encoder_graphs(
    plan: EncoderPlan, vision: VisionSpec, model: CausalLM, *, check_replay: bool = False
) -> EncoderGraphs:
    """Return the graphs that encode images with `model`, or an eager encoder if the plan has no encoder graphs.

    Their arena and buffers are separate from those of the text part's graphs.
    """
    arrays, hook = model.build.arrays, model.build.ops.hook
    return EncoderGraphs(
        plan,
        vision,
        model.encode,
        partial(write_encoder_inputs, vision=vision),
        arrays,
        dtype_name(model.build.dtype),
        lambda persistent: backend_class(plan.backend)(hook, persistent, arrays),
        lambda: weight_storages(model),
        check_replay=check_replay,
    )


class GraphMemoryCheck:
    """Check that graphs take no more memory than was planned.

    A tape's memory is known to the byte. The memory of torch's pool on a GPU is an estimate: there the graphs may take
    more, as long as it fits into what the plan leaves of the device, and that is logged once.
    """

    def __init__(self, device: DeviceSpec, available: int) -> None:
        """Create a check. `available` bytes of the device may be used as planned."""
        self._spare = device.memory_bytes - available if device.kind == "cuda" else 0
        self._told: set[str] = set()

    def __call__(self, what: str, figures: JsonMapping, remedy: Remedy) -> None:
        """Raise CapacityError with the `remedy` if they take too much."""
        planned, observed = figures["planned_bytes"], figures["observed_bytes"]
        if observed <= planned:
            return
        found = f"{what} take {observed} bytes, and {planned} were planned for them"
        if observed > planned + self._spare:
            raise CapacityError(found, [remedy])
        if what not in self._told:
            self._told.add(what)
            log.warning("%s; they fit into what memory_utilization leaves of the device", found)
