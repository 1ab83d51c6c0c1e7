"""Rotary frequencies: both spellings of config.json, and equality with transformers for every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ostinato.errors import ModelError
from ostinato.models.config_json import parse_rope
from ostinato.plan.rope import inverse_frequencies, resolve_rope

HEAD_DIM = 64

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 4.5,
        "original_max_position_embeddings": 512,
    },
    "llama3 without an original length": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"rope_type": "proportional", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn with betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 3.0,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "original_max_position_embeddings": 512,
    },
    "yarn with only mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "original_max_position_embeddings": 512,
    },
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 512,
    },
    "yarn over a short original length": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4,
    },
}


def both_spellings(scaling: dict, theta: float) -> list[dict]:
    outer = {"model_type": "llama", "max_position_embeddings": 2048}
    return [
        {**outer, "rope_theta": theta, "rope_scaling": scaling},
        {**outer, "rope_parameters": {**scaling, "rope_theta": theta}},
    ]


def oracle(scaling: dict, theta: float, partial: float, seq_len: int | None = None):
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rope_parameters={**scaling, "rope_theta": theta, "partial_rotary_factor": partial},
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=seq_len)


def assert_same(found: tuple[list[float], float], expected: tuple[torch.Tensor, float]) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), expected[0], rtol=2e-6, atol=0.0)
    assert found[1] == pytest.approx(expected[1], rel=1e-12)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_gives_the_frequencies_of_transformers(name: str, theta: float, partial: float) -> None:
    scaling = SCALINGS[name]
    for config in both_spellings(scaling, theta):
        rope, decision = resolve_rope(parse_rope(config, HEAD_DIM, default_partial=partial), 2048)
        assert decision is None
        assert_same(inverse_frequencies(rope), oracle(scaling, theta, partial))


def test_without_scaling_the_frequencies_are_those_of_transformers() -> None:
    config = {"model_type": "llama", "rope_theta": 50000.0}
    embedding = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=HEAD_DIM, rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
    )
    expected = (embedding.inv_freq, embedding.attention_scaling)
    assert_same(inverse_frequencies(parse_rope(config, HEAD_DIM)), expected)


def test_an_unscaled_config_may_name_nothing_at_all() -> None:
    rope = parse_rope({"model_type": "llama"}, 16)
    assert (rope.kind, rope.theta, rope.rotary_dim, rope.original_max_position) == ("default", 10000.0, 16, 0)


@pytest.mark.parametrize(
    ("config", "rotary_dim"),
    [
        ({"partial_rotary_factor": 0.25}, 16),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}}, 48),
        ({"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.75}}, 48),
        ({}, 32),
    ],
)
def test_the_rotated_part_is_read_from_either_place(config: dict, rotary_dim: int) -> None:
    assert parse_rope(config, HEAD_DIM, default_partial=0.5).rotary_dim == rotary_dim


def test_the_older_key_for_the_kind_is_read() -> None:
    assert parse_rope({"rope_scaling": {"type": "linear", "factor": 2}}, 16).parameters == {"factor": 2.0}


@pytest.mark.parametrize("length", [2049, 3000, 8192])
def test_dynamic_beyond_the_original_length_is_fixed_for_max_model_len(length: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    for config in both_spellings(scaling, 10000.0):
        rope, decision = resolve_rope(parse_rope(config, HEAD_DIM), length)
        assert decision is not None
        assert (decision.topic, decision.requested) == ("rope", "dynamic")
        assert str(length) in decision.reason
        assert_same(inverse_frequencies(rope), oracle(scaling, 10000.0, 1.0, seq_len=length))


def test_dynamic_up_to_the_original_length_is_the_default() -> None:
    config = {"rope_theta": 10000.0, "max_position_embeddings": 2048}
    dynamic = parse_rope({**config, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, HEAD_DIM)
    rope, decision = resolve_rope(dynamic, 2048)
    assert rope == parse_rope(config, HEAD_DIM)
    assert decision is not None
    assert decision.effective == "default"


def test_a_yarn_factor_left_out_is_the_ratio_of_the_lengths() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 512}
    rope = parse_rope({"max_position_embeddings": 2048, "rope_scaling": scaling}, HEAD_DIM)
    assert rope.parameters["factor"] == 4.0


def test_an_original_length_beside_the_scaling_wins() -> None:
    config = {"original_max_position_embeddings": 256, "rope_scaling": SCALINGS["llama3"]}
    assert parse_rope(config, HEAD_DIM).original_max_position == 256


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "axial"}, ["axial", "default, linear, llama3, yarn, dynamic"]),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "original_max_position_embeddings": 64},
            ["short_factor = [1.0]", "numbers above 0"],
        ),
        ({"rope_type": "linear"}, ["factor"]),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, ["high_freq_factor"]),
        ({"rope_type": "linear", "factor": "two"}, ["factor", "a finite number"]),
        ({"full_attention": {"rope_type": "default"}}, ["layer"]),
    ],
)
def test_a_rope_that_cannot_be_used_is_refused_by_name(scaling: dict, words: list[str]) -> None:
    for config in both_spellings(scaling, 10000.0):
        with pytest.raises(ModelError) as error:
            parse_rope(config, HEAD_DIM)
        assert all(word in error.value.message for word in words)


def test_kinds_that_do_not_depend_on_length_are_left_alone() -> None:
    rope = parse_rope(both_spellings(SCALINGS["linear"], 10000.0)[0], HEAD_DIM)
    assert resolve_rope(rope, 10**6) == (rope, None)
    assert resolve_rope(replace(rope, kind="default"), 1)[0].kind == "default"
