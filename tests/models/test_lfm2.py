"""LFM2's config.json in its published spellings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, ModelError
from ostinato.models.checkpoint import model_spec
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.mixers import Mamba2Spec, ShortConvSpec, StateArray
from ostinato.plan.plan import make_plan
from tests.support.plan_cases import GIB, cpu, hybrid

SHAPE = json.loads((Path(__file__).parents[2] / "benchmarks/models/lfm2-350m/config.json").read_text())
FIRST_SPELLING = {
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 1024,
    "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 1024,
    "conv_dim_out": 1024,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 1024,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
"""As the first checkpoints were published, with sizes of an MLP that is adjusted, and indices of attention layers."""


MOE = {
    "model_type": "lfm2_moe",
    "conv_L_cache": 3,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65536,
}


def test_both_spellings_of_the_350m_checkpoint_are_one_model() -> None:
    spec = model_spec(SHAPE)
    assert spec == model_spec(FIRST_SPELLING)
    assert spec.hyperparameters.intermediate_size == 4608
    assert spec.num_parameters == 354_483_968
    assert [layer.kind for layer in spec.layers].count("conv") == 10
    assert spec.tied_embeddings
    assert spec.rope is not None
    assert (spec.rope.theta, spec.rope.rotary_dim) == (1e6, 64)


def test_a_short_convolution_keeps_its_last_inputs_and_nothing_else() -> None:
    mixer = model_spec(SHAPE).layers[0].mixer
    assert mixer == ShortConvSpec(channels=1024, width=3)
    assert mixer.state.arrays == (StateArray("conv", (2, 1024), "model"),)
    plan = make_plan(EngineConfig(), model_spec(SHAPE), cpu(64 * GIB))
    assert plan.memory.state_slot == 10 * 2 * 1024 * 2
    [state] = plan.model.states
    assert (state.layer, state.array, state.shape, state.dtype) == ("conv", "conv", (2, 1024), "bfloat16")
    assert state.num_bytes == 2 * 1024 * 2


def test_the_dtype_of_recurrences_is_no_matter_where_there_are_none() -> None:
    """A convolution's inputs are in the model's dtype whatever that of states is."""
    device = cpu(64 * GIB)
    given = {"ssm_state_dtype": "bfloat16", "ssm_state_rounding": "stochastic"}
    plans = [make_plan(EngineConfig(**settings), model_spec(SHAPE), device) for settings in ({}, given)]
    assert plans[0].memory == plans[1].memory
    assert not [each for each in plans[1].decisions if each.topic == "ssm_state_dtype"]


def test_the_8b_checkpoint_with_experts_has_as_many_parameters_as_it_is_called_after() -> None:
    """LFM2-8B-A1B: 8.3 billion parameters, of which a token meets 1.6 billion with the embedding."""
    kinds = ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]
    spec = model_spec(MOE | {"layer_types": kinds})
    assert round(spec.num_parameters / 1e9, 1) == 8.3
    assert round((spec.num_parameters - sum(layer.inactive_parameters for layer in spec.layers)) / 1e9, 1) == 1.6
    assert [layer.experts is None for layer in spec.layers] == [True, True] + [False] * 22
    assert {layer.experts.top_k for layer in spec.layers if layer.experts is not None} == {4}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layer_types": None}, ["layer_types"]),
        ({"num_experts_per_tok": 33}, ["num_experts_per_tok = 33", "1 to 32"]),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        model_spec(MOE | {"layer_types": ["conv"] * 24} | changed)
    for word in words:
        assert word in error.value.message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"layer_types": ["conv", "sliding_attention"], "num_hidden_layers": 2},
            ["sliding_attention", "full_attention"],
        ),
        ({"layer_types": ["conv"]}, ["1 layer_types", "16"]),
        ({"layer_types": None, "full_attn_idxs": [2, 16]}, ["[16]", "0 to 15"]),
        ({"block_use_swiglu": False}, ["block_use_swiglu", "true"]),
        ({"conv_dim": 512}, ["conv_dim = 512", "1024"]),
        ({"conv_L_cache": 1}, ["1 taps"]),
    ],
)
def test_what_the_model_does_not_implement_is_refused_by_name(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        model_spec({**SHAPE, **changed})
    for word in words:
        assert word in error.value.message


def test_stochastic_rounding_is_refused_where_a_state_layer_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mamba2Spec, "rounds_stochastically", False)
    with pytest.raises(ConfigError, match="Mamba-2 layers round states to nearest alone") as error:
        make_plan(EngineConfig(ssm_state_dtype="bfloat16", ssm_state_rounding="stochastic"), hybrid(), cpu(64 * GIB))
    assert {remedy.setting for remedy in error.value.remedies} == {"ssm_state_rounding", "ssm_state_dtype"}


SEEING: dict[str, Any] = {
    "model_type": "lfm2_vl",
    "dtype": "bfloat16",
    "text_config": {name: value for name, value in FIRST_SPELLING.items() if name != "torch_dtype"},
    "vision_config": {"model_type": "siglip2_vision_model", "vision_use_head": False},
}
"""The sizes of LFM2-VL-450M."""


@pytest.mark.parametrize("device", ["cpu", *CATALOGUE])
def test_a_model_with_images_is_planned_on_every_device(device: str) -> None:
    spec, text = model_spec(SEEING), model_spec(FIRST_SPELLING)
    assert spec.vision is not None
    assert (spec.layers, spec.num_parameters) == (text.layers, text.num_parameters + spec.vision.parameters)
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(transformers.Lfm2VlConfig(**SEEING))
    assert spec.num_parameters == theirs.num_parameters()
    plan = make_plan(EngineConfig(), spec, cpu(64 * GIB) if device == "cpu" else CATALOGUE[device])
    assert plan.memory.num_slots > 1
    assert plan.encoder is not None
    assert plan.settings.graph_mode == "full_and_piecewise"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"text_config": {"model_type": "lfm3"}}, ["model_type = 'lfm3'", "'lfm2'"]),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, ["siglip_vision_model", "siglip2_vision_model"]),
        ({"vision_config": {"num_patches": 200}}, ["num_patches = 200", "no square"]),
        ({"vision_config": {"num_attention_heads": 7}}, ["7 heads", "768"]),
        ({"vision_config": {"hidden_act": "relu"}}, ["hidden_act = 'relu'", "gelu_pytorch_tanh"]),
        ({"projector_hidden_act": "relu"}, ["projector_hidden_act = 'relu'", "gelu"]),
    ],
)
def test_an_encoder_that_is_not_implemented_is_refused_by_name(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        model_spec(SEEING | changed)
    assert all(word in error.value.message for word in words), error.value.message
