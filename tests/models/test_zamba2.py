"""Zamba2: blocks that several layers use, which stand once in the weights and in checkpoints once or several times."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from ostinato import ModelError
from ostinato.formats.mapped_files import SINGLE
from ostinato.inspection import mismatches, stored_tensors
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.ops.kernel_cost import StepShape
from ostinato.plan.kernel_costs import kernel_work, prefill_flops
from ostinato.plan.quantization import Quantization
from tests.models.test_models import PROMPT, logits_in_steps
from tests.support.checkpoints import RECIPES, checkpoint, oracle, oracle_logits, random_prompt
from tests.support.loading import load_checkpoint
from tests.support.recipes import COMMON

USES = (6, 12, 18, 24, 30, 36, 42, 47, 51)
HUB: dict[str, Any] = {
    "model_type": "zamba2",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2560,
    "num_hidden_layers": 54,
    "layers_block_type": ["hybrid" if i in USES else "mamba" for i in range(54)],
    "hybrid_layer_ids": list(USES),
    "num_mem_blocks": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "attention_hidden_size": 5120,
    "attention_head_dim": 160,
    "intermediate_size": 10240,
    "hidden_act": "gelu",
    "adapter_rank": 128,
    "use_shared_mlp_adapter": True,
    "use_shared_attention_adapter": False,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_headdim": 64,
    "n_mamba_heads": 80,
    "time_step_limit": None,
}


def test_every_use_of_a_block_is_an_attention_layer_and_its_weights_count_once() -> None:
    spec = model_spec(HUB)
    assert [i for i, layer in enumerate(spec.layers) if layer.attention is not None] == list(USES)
    assert all(layer.mixer is not None for layer in spec.layers)
    (attention,) = set(spec.attention_layers)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 32, 160)
    mamba = spec.layers[0].parameters
    block = 2 * 2560 + 4 * 2560 * 2560 * 3 + 2 * 2560 * 2560 + 2560 + 3 * 2560 * 10240
    adapters, linear = 128 * (2560 + 2 * 10240), 2560 * 2560
    assert spec.layers[18].parameters == mamba + adapters + linear
    assert spec.layers[6].parameters == spec.layers[12].parameters == spec.layers[18].parameters + block
    assert spec.layers[18].used_parameters == spec.layers[6].used_parameters == spec.layers[6].parameters
    whole = 32000 * 2560 + 2560 + 54 * (mamba + 3 * 80) + 9 * (adapters + linear) + 2 * block
    assert spec.num_parameters == whole
    assert spec.weight_bytes("bfloat16") == 2 * whole + 2 * 54 * 3 * 80
    assert prefill_flops(spec).per_token > 2 * (whole + 7 * block - 32000 * 2560 - 2560 - 54 * 3 * 80)


def test_a_step_reads_a_block_once_in_every_use_however_it_is_stored() -> None:
    """Work is that of products, in the model's dtype or in 8 bits."""
    spec, step = model_spec(HUB), StepShape(1, 1, 0, True)
    once = replace(spec, layers=tuple(replace(layer, shared_weights=()) for layer in spec.layers))
    block = sum(row.num_elements for row in spec.layers[18].shared_weights)
    for quantization, width in ((None, 2), (Quantization(), 1)):
        read = [
            kernel_work(replace(each, quantization=quantization), "bfloat16", "float32", step)["linear"]
            for each in (spec, once)
        ]
        assert read[0] is not None
        assert read[1] is not None
        assert read[0].flops - read[1].flops == 7 * 2 * block
        assert read[0].num_bytes - read[1].num_bytes == pytest.approx(7 * width * block, rel=0.01)


def test_a_config_without_kinds_means_those_of_the_architecture() -> None:
    short = {name: value for name, value in HUB.items() if name != "layers_block_type"}
    assert model_spec(short).layers == model_spec(HUB).layers
    with pytest.raises(ModelError, match="num_hidden_layers = 38 and no layers_block_type; a zamba2 model has 54"):
        model_spec(short | {"num_hidden_layers": 38})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu'; supported: gelu, gelu_pytorch_tanh, silu"),
        ({"layers_block_type": ["attention"] * 54}, "layers_block_type attention; supported: .*hybrid"),
        ({"use_long_context": True}, "use_long_context = True; supported: false"),
        ({"use_conv_bias": False}, "use_conv_bias = False; supported: true"),
        ({"use_shared_mlp_adapter": False}, "use_shared_mlp_adapter = False; supported: true"),
        ({"num_mem_blocks": 0}, "num_mem_blocks = 0, which should be a whole number of at least 1"),
        ({"attention_head_dim": 80}, "attention_head_dim = 80; .* it is 160"),
        ({"attention_hidden_size": 2560}, "attention_hidden_size = 2560; .* it is 5120"),
        ({"mamba_headdim": 32}, "mamba_headdim = 32 and n_mamba_heads = 80; .* hidden_size = 5120"),
        ({"n_mamba_heads": 7, "mamba_headdim": None}, "n_mamba_heads = 7, which should divide .* = 5120"),
        ({"num_attention_heads": 7}, "num_attention_heads = 7, which should divide .* = 5120"),
        (
            {"use_shared_attention_adapter": True, "num_key_value_heads": 8},
            "num_key_value_heads = 8; supported with adapters: as many as num_attention_heads, 32",
        ),
        ({"model_type": "zamba"}, "first generation is not implemented; the second, whose model_type is zamba2"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec(HUB | change)


def plain() -> PretrainedConfig:
    """One block, fewer key heads than query heads, no positions, no adapters but the MLP's, and no bias. (Without
    tied embeddings transformers ties no blocks either.)"""
    return transformers.Zamba2Config(
        **COMMON,
        layers_block_type=["hybrid", "mamba", "hybrid"],
        num_hidden_layers=3,
        num_mem_blocks=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        hidden_act="silu",
        adapter_rank=12,
        n_mamba_heads=4,
        mamba_expand=3,
        mamba_d_state=8,
        chunk_size=64,
        time_step_min=1e-9,
    )


@pytest.mark.parametrize("cuts", [[], [37, 38, 101, 149]], ids=["whole", "in odd chunks and single tokens"])
def test_one_block_without_positions_equals_transformers(cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "zamba2_plain", plain)
    expected = oracle_logits("zamba2_plain", random_prompt(PROMPT, seed=1))
    error = (logits_in_steps("zamba2_plain", cuts) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def tensors_as(stored: str) -> dict[str, torch.Tensor]:
    """Those of the recipe, the blocks' under each layer that uses one, or under the last of these."""
    tensors = dict(oracle("zamba2").state_dict())
    tensors.pop("lm_head.weight")
    if stored == "under the last":
        tensors = {name: value for name, value in tensors.items() if ".1.shared_transformer" not in name}
    return {name: value.clone() for name, value in tensors.items()}


@pytest.mark.parametrize("stored", ["under each", "under the last"])
def test_a_block_may_be_stored_under_any_of_its_layers(stored: str, tmp_path: Path) -> None:
    once = load_file(checkpoint("zamba2") / SINGLE)
    tensors = tensors_as(stored)
    assert (tensors.keys() > once.keys()) == (stored == "under each")
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("zamba2"), copy)
    save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    expected, given = (
        dict(load_checkpoint(directory).named_parameters()) for directory in (checkpoint("zamba2"), copy)
    )
    assert expected.keys() == given.keys()
    assert all(torch.equal(expected[name], given[name]) for name in expected)
    found = stored_tensors(copy)
    assert not mismatches(model_spec(read_config(copy)), found, of_gguf=False)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.shared_transformer.self_attn.q_proj.weight",
        "model.layers.1.shared_transformer.self_attn.linear_q_adapter_list.1.0.weight",
        "model.layers.2.shared_transformer.feed_forward.gate_up_proj_adapter_list.3.0.weight",
    ],
)
def test_what_belongs_to_no_use_is_left_over(name: str, tmp_path: Path) -> None:
    """A block of a layer without one, an adapter for a use of the other block, and one for a use that is none."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("zamba2"), copy)
    save_file(load_file(copy / SINGLE) | {name: torch.ones(20, 64)}, copy / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"left over \(1\): {name}"):
        load_checkpoint(copy)


def test_copies_of_a_block_that_differ_are_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("zamba2"), copy)
    tensors = tensors_as("under each")
    name = "model.layers.4.shared_transformer.self_attn.o_proj.weight"
    tensors[name] += 1
    save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"other values than another copy of the same weight \(1\): {name}"):
        load_checkpoint(copy)
