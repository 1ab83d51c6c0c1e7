"""The real encoders as graphs: what transformers computes, whatever stands in the padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ostinato.graphs.cuda import CudaBackend
from ostinato.graphs.encoder_graphs import EncoderGraphs
from ostinato.graphs.step_graphs import weight_storages
from ostinato.layers.allocation import WeightAllocator
from ostinato.media.media_item import MediaItem
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import Ops, select_ops
from ostinato.ops.operations import OPERATIONS
from ostinato.ops.reference.attention import of_all_segments
from ostinato.runner.graph_setup import make_encoder_graphs
from ostinato.runner.image_encoder import write_encoder_inputs
from tests.graphs.test_graph_cuda import needs_gpu
from tests.support.encoder_stand_in import CPU, plan_of
from tests.support.pretended_gpu import PretendedDriver
from tests.support.vl_models import VL_RECIPES, ops_of, oracle_encode, random_items, vl_checkpoint, vl_model, vl_spec

GRIDS = ((4, 6), (2, 2), (8, 4), (6, 10), (2, 14), (12, 12))


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("name", VL_RECIPES)
def test_graphs_of_an_encoder_give_what_the_oracle_gives_and_padding_reaches_nothing(name: str, kind: str) -> None:
    vision = vl_spec(name).vision
    assert vision is not None
    graphs = make_encoder_graphs(plan_of((6, 16, 24), 3), vision, vl_model(name, ops_of(name, kind)))
    graphs.capture_all()
    items = random_items(name, GRIDS, seed=3)
    for sizes in ((0,), (1, 0, 2), (3, 1), range(len(GRIDS))):
        graphs._backend.arena.poison()
        check_encoded(graphs, name, [items[i] for i in sizes])
    counts = graphs.counts.to_json()
    # One of the images is above the largest budget, unless all have one size.
    assert (counts["hits"], counts["misses"]) == ((12, 0) if vision.image_side else (11, 1))


def check_encoded(graphs: EncoderGraphs, name: str, items: Sequence[MediaItem]) -> None:
    graphs._buffers.arrays["patches"].fill(np.nan)
    graphs._buffers.arrays["tap_weights"].fill(np.nan)
    given = graphs.run(items)
    right = oracle_encode(name, items).split([item.num_tokens for item in items])
    for own, expected in zip(given, right, strict=True):
        torch.testing.assert_close(own.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VL_RECIPES)
def test_an_encoder_is_captured_for_cuda_where_attention_does_not_look_at_the_host(name: str) -> None:
    """On a pretended device, whose graphs are lists of torch's calls."""
    ops, vision = select_ops({}), vl_spec(name).vision
    assert vision is not None
    kernels = {name: getattr(ops, name) for name in OPERATIONS}
    kernels["encoder_attention"] = ops.hook.wrap("encoder_attention", of_all_segments)
    model = vl_model(name, Ops(kernels, ops.hook))
    driver = PretendedDriver()
    graphs = EncoderGraphs(
        plan_of((6, 16, 24), 3),
        vision,
        model.encode,
        partial(write_encoder_inputs, vision=vision),
        CPU,
        "float32",
        lambda persistent: CudaBackend(ops.hook, persistent, CPU, driver),
        lambda: weight_storages(model),
    )
    graphs.capture_all()
    assert driver.log == ["aside", "begin", "end", "back"] * 3
    driver.poison()
    items = random_items(name, GRIDS, seed=4)
    for sizes in ((0,), (1, 0, 2), (3, 1)):
        check_encoded(graphs, name, [items[i] for i in sizes])
    assert graphs.counts.to_json()["hits"] == 6


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", VL_RECIPES)
def test_graphs_of_an_encoder_on_a_gpu(name: str) -> None:
    vision = vl_spec(name).vision
    assert vision is not None
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cuda"), "float32"), vl_spec(name))
    load_weights(model, vl_checkpoint(name))
    graphs = make_encoder_graphs(replace(plan_of((6, 16, 24), 3), backend="cuda"), vision, model)
    graphs.capture_all()
    items = random_items(name, GRIDS, seed=5)
    for sizes in ((0,), (1, 0, 2), (3, 1), range(len(GRIDS))):
        check_encoded(graphs, name, [items[i] for i in sizes])
