"""A small vision encoder, images for it, and its graphs: all that graphs need of a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ostinato.graphs.buffers import EncoderBuffers
from ostinato.graphs.encoder_graphs import EncoderGraphs
from ostinato.graphs.step_graphs import weight_storages
from ostinato.graphs.tape import TapeBackend
from ostinato.layers.module import Module
from ostinato.media.media_item import MediaItem
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import Ops, select_ops
from ostinato.ops.step_inputs import EncoderInputs
from ostinato.plan.device.detect import detect
from ostinato.plan.encoder.encoder_plan import EncoderPlan
from ostinato.plan.layer_specs import VisionSpec

CPU = TorchArrays("cpu")
HIDDEN = 16
VISION = VisionSpec(
    hidden_size=HIDDEN, num_layers=1, num_heads=1, intermediate_size=32, patch_size=2, temporal_patch_size=1,
    merge_size=2, in_channels=3, out_hidden_size=8, num_positions=9, deepstack_layers=(0,),
    image_token_id=1, video_token_id=2, start_token_id=3, end_token_id=4,
)  # fmt: skip


class Encoder(Module):
    """Every patch sees the mean of its own image, and of no other; four of them make one token of two rows."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def of(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        self.ops = ops
        self.embed = of(HIDDEN, VISION.patch_elements)
        self.table = of(VISION.num_positions, HIDDEN)
        self.norm = of(HIDDEN)
        self.project = of(HIDDEN, HIDDEN)
        self.merge = of(2 * VISION.out_hidden_size, 4 * HIDDEN)
        self.mix = ops.hook.wrap("mix", mean_of_image)

    def encode(self, inputs: EncoderInputs) -> torch.Tensor:
        """-> [tokens, 2, out_hidden]"""
        ops = self.ops
        x = ops.linear(inputs.patches, self.embed)
        x = x + (self.table[inputs.taps] * inputs.tap_weights.unsqueeze(-1)).sum(1)
        x = x + inputs.positions.sum(-1, keepdim=True).float() / 100
        x = ops.linear(self.mix(ops.rms_norm(x, self.norm, 1e-6), inputs.starts), self.project, residual=x)
        merged = ops.linear(x.reshape(-1, 4 * HIDDEN), self.merge)
        return merged.reshape(-1, 2, VISION.out_hidden_size)


def mean_of_image(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """[patches, size] -> the same shape; zeros for patches of no image."""
    out = torch.zeros_like(x)
    bounds = starts.tolist()
    for begin, end in pairwise(bounds):
        out[begin:end] = x[begin:end].mean(0)
    return out


def image(tokens: int, seed: int = 0) -> MediaItem:
    """Of 2 rows and `2 * tokens` columns of random patches."""
    rng = np.random.default_rng([tokens, seed])
    patches = rng.standard_normal((4 * tokens, VISION.patch_elements), dtype=np.float32)
    return MediaItem(patches, (2, 2 * tokens), tokens, f"{tokens} {seed}")


def inputs_of(items: Sequence[MediaItem]) -> EncoderInputs:
    counts = [len(item.patches) for item in items]
    patches = torch.from_numpy(np.concatenate([item.patches for item in items]))
    places = torch.cat([torch.arange(count) for count in counts])
    return EncoderInputs(
        patches=patches,
        taps=(places.unsqueeze(-1) + torch.arange(4)) % VISION.num_positions,
        tap_weights=(torch.arange(4) + places.unsqueeze(-1) % 3).float() / 10,
        positions=torch.stack((places % 2, places // 2), -1),
        starts=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
    )


def write(buffers: EncoderBuffers, items: Sequence[MediaItem]) -> EncoderInputs:
    inputs = inputs_of(items)
    for name, array in buffers.arrays.items():
        value = getattr(inputs, name)
        array[: len(value)] = value
    return buffers.view(inputs.num_tokens)


def plan_of(budgets: Sequence[int] = (4, 8, 16), max_items: int = 4, mode: str = "always") -> EncoderPlan:
    return EncoderPlan(
        token_budgets=tuple(budgets), max_items_per_batch=max_items, max_item_tokens=64, graph_mode=mode,
        reason="", backend="tape", num_cells=65, cell_bytes=64, cache_bytes=4160, graph_bytes=1 << 20,
        activation_bytes=0, video_pruning_rate=0.0, whole_images=False,
    )  # fmt: skip


class Encoding:
    """The stand-in with its graphs. `ways` has the budgets that ran, and None for each eager pack."""

    def __init__(self, plan: EncoderPlan | None = None, *, native: bool = True, **settings: Any) -> None:
        isa = detect("cpu").native.isa if native else None
        kernels = ("linear", "rms_norm")
        self.model = Encoder(select_ops(dict.fromkeys(kernels, "native" if isa else "reference"), isa))
        self.eager_packs: list[int] = []
        self.hook = self.model.ops.hook

        def make_backend(persistent: Any) -> TapeBackend:
            self.backend = TapeBackend(self.hook, persistent, CPU)
            return self.backend

        self.graphs = EncoderGraphs(
            plan or plan_of(), VISION, self.model.encode, write, CPU, "float32", make_backend,
            lambda: weight_storages(self.model), **settings,
        )  # fmt: skip

    def run(self, *items: MediaItem) -> list[torch.Tensor]:
        return self.graphs.run(items)

    def alone(self, item: MediaItem) -> torch.Tensor:
        """Eagerly, with nothing beside it."""
        return self.model.encode(inputs_of([item]))
