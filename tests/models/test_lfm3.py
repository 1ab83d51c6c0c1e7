"""LFM3's config.json: its defaults, its rotary embeddings, its plan on every device, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from ostinato.config import EngineConfig
from ostinato.errors import ModelError
from ostinato.models.checkpoint import model_spec
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.mixers import ShortConvSpec
from ostinato.plan.plan import make_plan
from tests.support.plan_cases import GIB, cpu

PUBLISHED = transformers.Lfm3Config(dtype="bfloat16").to_dict()
"""The sizes of LFM3-1.7B, which are the defaults of transformers."""
SEEING = transformers.Lfm3VlConfig(dtype="bfloat16").to_dict()
"""The sizes of LFM3-VL-2B."""
DEFAULTS = ("layer_types", "rope_parameters", "head_dim", "sliding_window", "conv_L_cache", "norm_eps")


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as error:
        model_spec(config)
    return error.value.message


def test_a_config_of_sizes_alone_is_the_published_model() -> None:
    spec = model_spec(PUBLISHED)
    assert spec == model_spec({name: value for name, value in PUBLISHED.items() if name not in DEFAULTS})
    assert round(spec.num_parameters / 1e9, 1) == 1.7
    first = ["conv", "conv", "global", "conv", "local", "conv", "global", "conv"]
    assert [layer.kind for layer in spec.layers[:8]] == first
    assert {layer.attention.window for layer in spec.layers if layer.attention is not None} == {None, 256}
    assert spec.layers[0].mixer == ShortConvSpec(channels=2048, width=7)
    assert spec.tied_embeddings


def test_only_half_of_the_angles_of_attention_without_a_window_turn() -> None:
    spec = model_spec(PUBLISHED)
    assert spec.rope is not None
    (local,) = spec.other_ropes
    assert [layer.attention.rope for layer in spec.layers[:7] if layer.attention is not None] == [0, 1, 0]
    assert (spec.rope.kind, spec.rope.theta) == ("proportional", 1e6)
    assert spec.rope.parameters == {"partial_rotary_factor": 0.5}
    assert (local.kind, local.theta, local.rotary_dim) == ("default", 1e4, 128)


@pytest.mark.parametrize("config", [PUBLISHED, SEEING], ids=["lfm3", "lfm3_vl"])
@pytest.mark.parametrize("device", ["cpu", *CATALOGUE])
def test_it_is_planned_on_every_device_with_full_graphs(device: str, config: dict[str, Any]) -> None:
    spec = cpu(64 * GIB) if device == "cpu" else CATALOGUE[device]
    plan = make_plan(EngineConfig(), model_spec(config), spec)
    assert plan.memory.num_slots > 1
    assert plan.memory.window_block > 0
    assert plan.settings.graph_mode == "full_and_piecewise"
    if config is SEEING:
        assert plan.encoder is not None
        assert plan.encoder.max_items_per_batch <= min(plan.encoder.token_budgets)


def test_a_model_with_images_is_the_text_model_and_an_encoder() -> None:
    spec, text = model_spec(SEEING), model_spec(PUBLISHED)
    assert spec.layers == text.layers
    assert spec.vision is not None
    assert spec.num_parameters == text.num_parameters + spec.vision.parameters
    assert (round(spec.num_parameters / 1e9, 1), spec.vision.parameters) == (1.9, 189_380_352)
    bare = {"model_type": "lfm3_vl", "dtype": "bfloat16", "text_config": SEEING["text_config"], "vision_config": {}}
    assert model_spec(bare) == spec


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"text_config": {"model_type": "lfm2"}}, ["model_type = 'lfm2'", "'lfm3'"]),
        ({"vision_config": {"conv_kernel_size": 4}}, ["conv_kernel_size = 4", "odd"]),
        ({"vision_config": {"num_key_value_heads": 5}}, ["16 heads", "5 key heads"]),
        ({"vision_config": {"num_attention_heads": 3}}, ["3 heads", "multiple of 4"]),
        ({"vision_config": {"layer_types": ["conv"]}}, ["1 layer_types", "14"]),
        ({"vision_config": {"rope_parameters": {"rope_type": "linear"}}}, ["rope_type = 'linear'", "axial"]),
        ({"vision_config": {"patch_size": [16, 16]}}, ["patch_size = [16, 16]", "whole number"]),
        ({"projector_hidden_act": "relu"}, ["projector_hidden_act = 'relu'", "gelu"]),
    ],
)
def test_an_encoder_that_is_not_implemented_is_refused_by_name(changed: dict[str, Any], words: list[str]) -> None:
    message = refusal(SEEING | changed)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, ["full_attention, sliding_attention"]),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
            ["64 of 128 elements", "sliding_attention", "proportional"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            ["partial_rotary_factor = 1.5", "0 to 1"],
        ),
        ({"layer_types": ["conv"]}, ["1 layer_types", "24"]),
        ({"layer_types": ["mamba"] * 24}, ["layer_types mamba", "conv, sliding_attention, full_attention"]),
        ({"sliding_window": 0}, ["sliding_window = 0", "a whole number of at least 1"]),
        ({"conv_L_cache": 1}, ["1 taps"]),
        ({"use_attention_gate": "yes"}, ["use_attention_gate = 'yes'", "true or false"]),
    ],
)
def test_what_the_model_does_not_implement_is_refused_by_name(changed: dict[str, Any], words: list[str]) -> None:
    message = refusal(PUBLISHED | changed)
    assert all(word in message for word in words), message
