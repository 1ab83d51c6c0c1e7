"""OLMo Hybrid: what its config.json may leave out, attention without positions, and checkpoints as published."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import ModelError
from ostinato.formats.mapped_files import SINGLE
from ostinato.models.checkpoint import model_spec
from ostinato.plan.mixers import GatedDeltaSpec
from tests.support.checkpoints import checkpoint
from tests.support.loading import load_checkpoint

HUB: dict[str, Any] = {
    "model_type": "olmo_hybrid",
    "dtype": "bfloat16",
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "num_key_value_heads": 30,
    "max_position_embeddings": 65536,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
}


def test_sizes_of_delta_nets_follow_from_the_others() -> None:
    spec = model_spec(HUB)
    assert [layer.attention is not None for layer in spec.layers] == [i % 4 == 3 for i in range(32)]
    assert spec.layers[0].mixer == GatedDeltaSpec(
        num_heads=30, num_key_heads=30, key_dim=96, value_dim=192, conv_kernel=4
    )
    assert spec.rope is None
    assert spec.hyperparameters.beta_scale == 2.0
    assert model_spec(HUB | {"linear_allow_neg_eigval": False}).hyperparameters.beta_scale == 1.0


def test_the_last_of_few_layers_has_attention() -> None:
    kinds = [layer.kind for layer in model_spec(HUB | {"num_hidden_layers": 3}).layers]
    assert kinds == ["delta_net", "delta_net", "attention"]


@pytest.mark.parametrize(
    ("given", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 700.0}}, 700.0),
        ({"rope_parameters": None}, 10000.0),
        ({"rope_parameters": None, "rope_theta": None}, None),
    ],
)
def test_attention_has_no_positions_where_theta_is_null(given: dict[str, Any], theta: float | None) -> None:
    rope = model_spec(HUB | given).rope
    assert (None if rope is None else rope.theta) == theta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_key_heads": 7}, "30 heads of a delta net, which 7 key heads cannot serve"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads = 0, which should be a whole number of at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["sliding_attention"] * 32}, r"layer_types sliding_attention; supported: "),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec(HUB | change)


def test_a_checkpoint_may_have_one_convolution_and_the_names_of_transformers(tmp_path: Path) -> None:
    copy = tmp_path / "whole"
    shutil.copytree(checkpoint("olmo_hybrid"), copy)
    tensors = load_file(copy / SINGLE)
    for layer in (0, 2):
        prefix = f"model.layers.{layer}."
        parts = [tensors.pop(f"{prefix}linear_attn.{part}_conv1d.weight") for part in "qkv"]
        tensors[f"{prefix}linear_attn.conv1d.weight"] = torch.cat(parts)
        tensors[f"{prefix}input_layernorm.weight"] = tensors.pop(f"{prefix}attention_layer_norm.weight")
        tensors[f"{prefix}post_attention_layernorm.weight"] = tensors.pop(f"{prefix}feedforward_layer_norm.weight")
    save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    apart, whole = (
        dict(load_checkpoint(directory).named_parameters()) for directory in (checkpoint("olmo_hybrid"), copy)
    )
    assert apart.keys() == whole.keys()
    assert all(torch.equal(apart[key], whole[key]) for key in whole)
