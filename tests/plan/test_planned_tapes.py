"""The plan knows what tapes take: those of a vision encoder, of a model and of what makes its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.graphs.encoder_graphs import EncoderGraphs
from ostinato.graphs.step_graphs import weight_storages
from ostinato.graphs.tape import TapeBackend
from ostinato.layers.allocation import WeightAllocator
from ostinato.layers.sketch import Sketch
from ostinato.layers.vision import VisionEncoder
from ostinato.models.checkpoint import load_spec
from ostinato.models.weight_table import encoder_calls
from ostinato.ops.arrays import TorchArrays, dtype_name
from ostinato.ops.dispatch import select_ops
from ostinato.ops.operations import ENCODER_OPS
from ostinato.plan.encoder.memory import encoder_graph_bytes
from ostinato.plan.layer_specs import VisionSpec
from ostinato.runner.image_encoder import write_encoder_inputs
from tests.support.assistants import assistant_checkpoint
from tests.support.checkpoints import RECIPES, checkpoint
from tests.support.encoder_stand_in import plan_of
from tests.support.native_sets import runnable_sets, skip_unless_planned, threads
from tests.support.recipes import HEADED
from tests.support.vl_models import VL_RECIPES, vl_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU = TorchArrays("cpu")
KERNELS = ["reference", *(["native"] if runnable_sets() else [])]


def vision_of(name: str) -> VisionSpec:
    vision = load_spec(EngineConfig(model=name)).vision
    assert vision is not None
    return vision


DEMO = vision_of("demo-vl")
MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


def with_calls(vision: VisionSpec) -> VisionSpec:
    """An encoder of other sizes, with the calls that it makes."""
    sketch = Sketch()
    encoder = VisionEncoder(sketch, vision, 10000.0, "gelu_pytorch_tanh")
    return replace(vision, calls=encoder_calls(sketch, encoder, vision))


LARGER = with_calls(
    replace(vision_of(str(MODELS / "qwen3-vl-300m")), num_layers=3, deepstack_layers=(0, 1), num_positions=16)
)
"""As wide as the real one, and as deep as a test has time for."""


@st.composite
def visions(draw: st.DrawFn) -> VisionSpec:
    heads, layers, merge = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    vision = replace(
        DEMO,
        hidden_size=heads * draw(st.sampled_from([8, 16, 24])),
        num_heads=heads,
        num_layers=layers,
        intermediate_size=draw(st.integers(1, 150)),
        patch_size=draw(st.integers(1, 6)),
        merge_size=merge,
        out_hidden_size=draw(st.integers(1, 200)),
        deepstack_layers=tuple(sorted(draw(st.sets(st.integers(0, layers - 1))))),
    )
    return with_calls(vision)


def captured(vision: VisionSpec, dtype: str, budgets: Sequence[int], items: int, kernels: str) -> EncoderGraphs:
    isa = runnable_sets()[0] if kernels == "native" else None
    ops = select_ops(dict.fromkeys(ENCODER_OPS, kernels), isa)
    encoder = VisionEncoder(
        WeightAllocator(ops, TorchArrays("cpu"), dtype_name(DTYPES[dtype])), vision, 10000.0, "gelu_pytorch_tanh"
    )
    graphs = EncoderGraphs(
        plan_of(budgets, items),
        vision,
        encoder.forward,
        partial(write_encoder_inputs, vision=vision),
        CPU,
        dtype,
        lambda persistent: TapeBackend(ops.hook, persistent, CPU),
        lambda: weight_storages(encoder),
    )
    with torch.inference_mode():
        for weight in encoder.parameters():
            weight.zero_()
        graphs.capture_all()
    return graphs


@given(
    vision=visions(),
    dtype=st.sampled_from(sorted(DTYPES)),
    budgets=st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted),
    items=st.integers(1, 40),
    kernels=st.sampled_from(KERNELS),
    num_threads=st.sampled_from([1, 2]),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_graphs_take_what_was_planned_to_the_byte(vision, dtype, budgets, items, kernels, num_threads):
    items = min(items, *budgets)
    with threads(num_threads):
        graphs = captured(vision, dtype, budgets, items, kernels)
    planned = encoder_graph_bytes(vision, dtype, budgets, items, backend="tape", sees_all=False)
    assert graphs.num_bytes == planned


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("vision", "budgets"), [(DEMO, (9, 36, 144, 300)), (LARGER, (8, 16))], ids=["demo-vl", "larger"]
)
def test_graphs_of_real_encoders_take_what_was_planned_to_the_byte(vision, budgets, dtype, kernels):
    graphs = captured(vision, dtype, budgets, 4, kernels)
    assert graphs.num_bytes == encoder_graph_bytes(vision, dtype, budgets, 4, backend="tape", sees_all=False)


def test_every_call_but_the_last_is_read_by_a_later_one():
    calls = DEMO.calls.calls
    read = [number for call in calls for number in call.reads]
    assert sorted(set(read)) == list(range(len(calls) - 1))
    assert DEMO.calls.result == len(calls) - 1
    assert all(number < at for at, call in enumerate(calls) for number in call.reads)


def test_an_arena_grows_with_the_tokens():
    sizes = [DEMO.calls.arena_bytes(2, patches) for patches in range(0, 400, DEMO.patches_per_token)]
    assert sizes == [i * sizes[1] for i in range(len(sizes))]


def test_a_smaller_budget_is_laid_out_as_a_larger_one_and_never_takes_more():
    """With sizes in whole cache lines of a step, not of an entry, 47 tokens would take more than 48."""
    vision = with_calls(
        replace(
            DEMO,
            hidden_size=16,
            num_heads=2,
            num_layers=2,
            intermediate_size=46,
            patch_size=4,
            merge_size=3,
            out_hidden_size=200,
            deepstack_layers=(),
        )
    )
    graphs = captured(vision, "bfloat16", (47, 48), 1, "reference")
    assert graphs.num_bytes == encoder_graph_bytes(vision, "bfloat16", (47, 48), 1, backend="tape", sees_all=False)
    assert graphs.num_bytes == captured(vision, "bfloat16", (48,), 1, "reference").num_bytes


# Text


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECIPES)
def test_tapes_of_a_model_take_what_was_planned(name, dtype, kernels):
    assert_planned(str(checkpoint(name)), dtype, kernels)


@pytest.mark.parametrize("graph_mode", ["full_decode_only", "piecewise"])
def test_tapes_of_one_kind_take_what_was_planned(graph_mode):
    assert_planned(str(checkpoint("nemotron_h")), "bfloat16", "reference", graph_mode=graph_mode)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", VL_RECIPES)
def test_tapes_of_a_model_that_takes_images_take_what_was_planned(name, kernels):
    assert_planned(str(vl_checkpoint(name)), "bfloat16", kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HEADED)
def test_tapes_of_a_model_and_its_head_take_what_was_planned(name, dtype, kernels):
    assert_planned(str(checkpoint(name)), dtype, kernels, speculative="mtp:3")


def test_tapes_of_a_model_that_takes_images_and_its_head_take_what_was_planned():
    assert_planned(str(vl_checkpoint("qwen3_5")), "bfloat16", "reference", speculative="mtp:3")


def test_tapes_of_a_model_and_its_draft_model_take_what_was_planned():
    draft = checkpoint("granitemoehybrid_dense")
    assert_planned(str(checkpoint("nemotron_h")), "float32", "reference", speculative=f"draft:{draft}:2")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("name", "kind"), [("gemma4_text", "plain"), ("gemma4", "untied")])
def test_tapes_of_a_model_and_its_assistant_take_what_was_planned(name, kind, kernels):
    speculative = f"draft:{assistant_checkpoint(name, kind)}:2"
    assert_planned(str(checkpoint(name)), "float32", kernels, speculative=speculative)


@pytest.mark.parametrize("quantization", ["int8", "int8_g128"])
def test_tapes_of_a_quantised_model_take_what_was_planned(quantization):
    assert_planned(str(checkpoint("nemotron_h")), "bfloat16", "reference", quantization=quantization)


def assert_planned(model: str, dtype: str, kernels: str, **settings: Any) -> None:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 96, "cache_memory": "64MiB"}
    skip_unless_planned(kernels)
    config = {"model": model, "dtype": dtype, "kernels": kernels, "threads": 1, "block_size": 16, "capture": "startup"}
    config |= sizes | settings
    graphs = EngineCore(EngineConfig(**config)).runner.measured["graphs"]
    # A head's buffer of hidden states is planned, and is not counted as one of the graphs.
    assert graphs["observed_bytes"] > 0
    assert 0 <= graphs["planned_bytes"] - graphs["observed_bytes"] < 4096
