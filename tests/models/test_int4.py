"""Models whose weights are made 4-bit: what becomes of each matrix, and that every way to run them agrees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ostinato import LLM, ConfigError, EngineConfig, SamplingParams
from ostinato.formats.mapped_files import SINGLE
from ostinato.layers.allocation import BlockView, checkpoint_views
from ostinato.models import random_weights
from ostinato.models.checkpoint import load_spec
from ostinato.models.loader import load_weights
from ostinato.models.random_weights import randomize_weights
from ostinato.ops.quant.quantize import WeightQuantizers
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.quantization import BlockQuantization
from ostinato.plan.weights import Weight
from ostinato.verify.logit_loss import compare_logits
from tests.models.test_quantization import PLAIN, build, dequantized, make_engine, spec_of, tokens, values
from tests.support.checkpoints import checkpoint, random_prompt, recipe
from tests.support.plan_cases import GIB, cpu
from tests.support.quantized_checkpoints import compressed

ALL = BlockQuantization((), "int4_g128", head="Q8_0", least_rows=128)


def blocks(rows: int, columns: int, quantization: BlockQuantization = ALL, **facts: object) -> str | None:
    """The format of a matrix."""
    weight = replace(Weight((rows, columns), "linear", can_be_quantised=True), **facts)  # type: ignore[arg-type]
    found = quantization.blocks_of(weight)
    return None if found is None else found[0][0]


def test_a_matrix_has_the_largest_groups_that_fill_its_rows() -> None:
    assert blocks(256, 512) == "int4_g128"
    assert blocks(256, 576) == "int4_g64"
    assert blocks(256, 96) == "int4_g32"
    assert blocks(256, 100) is None
    assert blocks(256, 576, replace(ALL, format="int4_g32")) == "int4_g32"


def test_small_projections_stay_and_the_lm_head_has_8_bits() -> None:
    assert blocks(127, 512) is None
    assert blocks(127, 512, replace(ALL, least_rows=0)) == "int4_g128"
    assert blocks(32000, 576, is_lm_head=True) == "Q8_0"
    assert blocks(32000, 100, is_lm_head=True) is None
    assert blocks(32000, 576, replace(ALL, head=None), is_lm_head=True) == "int4_g64"


def test_both_matrices_of_experts_lie_in_blocks_or_neither_does() -> None:
    up = Weight((4, 256, 512), "experts", can_be_quantised=True, quantized_with_in_size=128)
    assert ALL.blocks_of(up) == (("int4_g128", 256),)
    assert ALL.blocks_of(replace(up, quantized_with_in_size=96)) == (("int4_g32", 256),)
    assert ALL.blocks_of(replace(up, quantized_with_in_size=100)) is None


def test_the_plan_says_what_becomes_4_bit_and_what_does_not() -> None:
    config = EngineConfig(model="demo", quantization="int4")
    plan = make_plan(config, load_spec(config), cpu(8 * GIB))
    [decision] = [decision for decision in plan.decisions if decision.topic == "quantization"]
    assert (decision.requested, decision.effective) == ("int4", "int4_g128")
    for part in (
        "made while loading; ",
        "one scale and zero point per 128 elements of a row",
        "with the LM head (the embedding stays) in 8 bits (Q8_0)",
        "fewer than 128 outputs",
    ):
        assert part in decision.reason
    assert Plan.from_json(plan.to_json()) == plan
    small = make_plan(config.with_settings(quantization="int8"), load_spec(config), cpu(8 * GIB))
    assert plan.memory.weights < 0.8 * small.memory.weights


def test_4_bits_and_the_8_of_their_head_run_on_a_gpu_as_they_lie() -> None:
    config = EngineConfig(model="demo", quantization="int4")
    plan = make_plan(config, load_spec(config), CATALOGUE["h100-80gb"])
    assert {plan.kernels[op].implementation for op in ("linear", "embedding")} == {"triton"}
    on_a_cpu = make_plan(config, load_spec(config), cpu(8 * GIB))
    assert plan.memory.weights == on_a_cpu.memory.weights
    products = [launch for launch in plan.kernels["linear"].launches if launch.kernel == "quantized_product"]
    assert {launch.blocks["INPUTS"] for launch in products} >= {32, 64, 128}


def test_8_bit_checkpoints_are_not_made_4_bit(tmp_path: Path) -> None:
    compressed("llama", tmp_path, 32, "pack-quantized")
    with pytest.raises(ConfigError, match="8-bit weights of compressed-tensors, one scale per 32"):
        spec_of(tmp_path, quantization="int4")


@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "qwen3_next"])
def test_each_tensor_becomes_the_blocks_that_are_made_of_it_alone(name: str) -> None:
    directory = checkpoint(name)
    model = build(small_rows(spec_of(directory, quantization="int4_g32")))
    load_weights(model, directory)
    ordered = {name for _, _, row in model.weights() if row.row_interleave for name in row.names}
    places, count = {name: place for name, place in checkpoint_views(model) if name not in ordered}, 0
    for key, tensor in load_file(directory / SINGLE).items():
        place = places.get(model.checkpoint_name(key) or "")
        if isinstance(place, BlockView):
            rows = place.flat()
            of_rows = tensor.transpose(-1, -2) if tensor.shape != place.shape else tensor
            expected = torch.empty_like(rows.bytes)
            WeightQuantizers().quantize_blocks(of_rows.flatten(0, -2), expected, place.name)
            assert torch.equal(rows.bytes, expected), key
            count += 1
    assert count > 6


@pytest.mark.parametrize("period", [13, random_weights.PERIOD], ids=["rows longer than the period", "as they are"])
def test_random_weights_are_nearly_those_of_the_plain_model(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "PERIOD", period)
    plain = build(spec_of(checkpoint("bamba"), quantization="none"))
    made = build(small_rows(spec_of(checkpoint("bamba"), quantization="int4_g32")))
    for model in (plain, made):
        randomize_weights(model, seed=3)
    expected, found = values(plain), values(made)
    for name, place in checkpoint_views(made):
        if isinstance(place, BlockView):
            apart = (dequantized(place) - expected[name]).square().mean() / expected[name].square().mean()
            assert apart < 0.01, name
        else:
            assert torch.equal(found[name], expected[name]), name


def small_rows(spec):  # type: ignore[no-untyped-def]
    """Models of the tests have small matrices alone."""
    return replace(spec, quantization=replace(spec.quantization, least_rows=0))


# Running


@pytest.mark.parametrize("quantization", ["int4", "int4_g32"])
def test_cache_graphs_and_drafts_give_the_plain_tokens(quantization: str) -> None:
    directory = checkpoint("nemotron_h_dense_head")
    expected = tokens(directory, quantization=quantization, **PLAIN)
    for settings in (
        {"kernels": "reference", **PLAIN},
        {"graph_mode": "full_and_piecewise", "strict": True, "check_replay": True},
        {"graph_mode": "none", "max_num_batched_tokens": 32},
        {"speculative": "mtp:2", "speculative_adaptive": "off", "strict": True},
    ):
        assert tokens(directory, quantization=quantization, **settings) == expected, settings


def test_the_plan_counts_what_the_engine_loads() -> None:
    for settings in ({"speculative": "mtp:2"}, {"speculative": f"draft:{checkpoint('granitemoehybrid_dense')}:2"}):
        engine = make_engine(checkpoint("nemotron_h_head"), quantization="int4_g32", **settings)
        assert engine.plan.memory.weights == engine.runner.measured["weight_bytes"]


def test_logits_are_nearly_those_of_the_weights_before() -> None:
    engine = make_engine(checkpoint("bamba"), quantization="int4_g32")
    exact = EngineConfig(model=str(checkpoint("bamba")), dtype="float32", cache_memory="16MiB", threads=1)
    loss = compare_logits(engine, exact, [(random_prompt(40, seed), random_prompt(30, seed + 1)) for seed in (4, 6)])
    assert loss.positions == 60
    # Of random weights in many layers: what each loses adds up.
    assert 0 < loss.mean_difference < 0.2
    assert 0 < loss.kl_divergence < 0.5


def test_a_head_drafts_where_the_embedding_is_blocks_too() -> None:
    """Rows of blocks are of other sizes than hidden states."""
    config = recipe("qwen3_5_text_head")
    assert config.tie_word_embeddings
    settings: dict[str, Any] = {"quantization": "int4_g32", "cache_memory": "16MiB", "threads": 1, "dtype": "float32"}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = [
        LLM(str(checkpoint("qwen3_5_text_head")), **settings, **drafts).generate([list(range(5, 30))], greedy)
        for drafts in ({}, {"speculative": "mtp:2", "speculative_adaptive": "off"})
    ]
    plain, drafted = (each[0].outputs[0].token_ids for each in outputs)
    assert plain == drafted
