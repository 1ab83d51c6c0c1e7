"""HRM-Text: stacks that run several times, whose weights stand once, and their two spellings in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import ModelError
from ostinato.models.checkpoint import model_spec, read_config
from tests.support.checkpoints import checkpoint
from tests.support.loading import load_checkpoint

HUB: dict[str, Any] = {
    "model_type": "hrm_text",
    "dtype": "bfloat16",
    "vocab_size": 65536,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 128,
    "num_layers_per_stack": 16,
    "H_cycles": 2,
    "L_cycles": 3,
    "L_bp_cycles": [0, 3],
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 128,
    "embedding_scale": 39.19,
    "max_position_embeddings": 4096,
    "prefix_lm": True,
}
"""The values of the published model of 1B."""


def test_every_use_has_keys_of_its_own_and_weights_count_once() -> None:
    spec = model_spec(HUB)
    assert len(spec.layers) == 128
    assert spec.is_prefix_lm
    assert {(layer.attention.num_kv_heads, layer.attention.sees_ahead) for layer in spec.layers if layer.attention} == {
        (12, True)
    }
    layer = 5 * 1536 * 1536 + 3 * 1536 * 4096
    owners = [use for use, each in enumerate(spec.layers) if each.parameters]
    assert owners == [*range(16), *range(48, 64)]
    assert {spec.layers[use].parameters for use in owners} == {each.used_parameters for each in spec.layers} == {layer}
    assert spec.num_parameters == 32 * layer + 2 * 65536 * 1536 + 1536


def test_a_config_that_states_the_layers_of_a_stack_alone_means_the_same() -> None:
    short = {name: value for name, value in HUB.items() if name not in ("num_layers_per_stack", "prefix_lm")}
    assert model_spec(short | {"num_hidden_layers": 16}) == model_spec(HUB)
    causal = model_spec(HUB | {"prefix_lm": False})
    assert not causal.is_prefix_lm
    assert not any(layer.attention.sees_ahead for layer in causal.layers if layer.attention)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu'; supported: silu"),
        ({"num_attention_heads": 7}, "num_attention_heads = 7, which should divide hidden_size = 1536"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4; supported: as many as num_attention_heads, 12"),
        ({"H_cycles": 0}, "H_cycles = 0, which should be a whole number of at least 1"),
        ({"num_layers_per_stack": 0}, "num_layers_per_stack = 0, which should be a whole number of at least 1"),
        ({"L_cycles": 10**6}, "num_hidden_layers above 1,024"),
        ({"embedding_scale": None, "initializer_range": 0.0}, "initializer_range = 0.0 and no embedding_scale"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec(HUB | change)


def test_projections_may_be_one_tensor_or_several(tmp_path: Path) -> None:
    """transformers writes one; in its memory, and so in checkpoints that are not written back, there are several."""
    stored = load_file(checkpoint("hrm_text") / "model.safetensors")
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        layer, _, inner = name.rpartition(".attn.gqkv_proj.weight")
        stem, _, pair = name.rpartition(".mlp.gate_up_proj.weight")
        if layer and not inner:
            for part, rows in zip(("gate", "q", "k", "v"), tensor.chunk(4), strict=True):
                apart[f"{layer}.self_attn.{part}_proj.weight"] = rows.contiguous()
        elif stem and not pair:
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                apart[f"{stem}.mlp.{part}_proj.weight"] = rows.contiguous()
        else:
            apart[name.replace(".attn.o_proj.", ".self_attn.o_proj.")] = tensor
    assert len(apart) == len(stored) + 4 * (3 + 1)
    save_file(apart, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(read_config(checkpoint("hrm_text"))))
    expected, loaded = (dict(load_checkpoint(each).named_parameters()) for each in (checkpoint("hrm_text"), tmp_path))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_stacks_layer_too_many_is_left_over(tmp_path: Path) -> None:
    stored = load_file(checkpoint("hrm_text") / "model.safetensors")
    name = "model.L_module.layers.1.attn.o_proj.weight"
    save_file(stored | {name.replace("s.1.", "s.2."): stored[name].clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(read_config(checkpoint("hrm_text"))))
    with pytest.raises(ModelError, match=r"left over \(1\): model.L_module.layers.2.attn.o_proj.weight"):
        load_checkpoint(tmp_path)
