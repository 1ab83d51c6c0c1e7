"""The graphs of a model's vision encoder, as the plan wants them."""

from __future__ import annotations

from functools import partial
from typing import Protocol, runtime_checkable

import torch

from ostinato.engine.run.encoder_inputs import write_images
from ostinato.engine.run.graphing import BACKENDS
from ostinato.graphs.encoder import EncoderGraphs
from ostinato.graphs.graphs import weight_storages
from ostinato.layers.step import EncoderInputs
from ostinato.models.base import CausalLM
from ostinato.plan.encoder.choice import EncoderPlan
from ostinato.plan.model import VisionSpec


@runtime_checkable
class HasEncoder(Protocol):
    """A model that takes images."""

    def encode(self, inputs: EncoderInputs) -> torch.Tensor:
        """-> [patches / merge_size ** 2, rows, hidden]; what belongs to padding may be anything."""
        ...


def make_encoder_graphs(
    plan: EncoderPlan, vision: VisionSpec, model: CausalLM, *, check_replay: bool = False
) -> EncoderGraphs:
    """What encodes images with `model`: an arena and buffers of its own beside those of the text part's graphs, if the
    plan has encoder graphs at all."""
    assert isinstance(model, HasEncoder), "a model with a VisionSpec encodes images"
    device, tap = model.embedding.weight.device, model.build.ops.tap
    return EncoderGraphs(
        plan,
        vision,
        model.encode,
        partial(write_images, vision=vision),
        device,
        lambda persistent: BACKENDS[plan.backend](tap, persistent, device),
        lambda: weight_storages(model),
        check_replay=check_replay,
    )
