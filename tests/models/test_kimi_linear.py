"""Kimi Linear: both spellings of its config.json, what is refused, and what its checkpoints hold otherwise than the
model. Ling 3.0, as far as it differs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ostinato import LLM, ModelError, SamplingParams
from ostinato.formats.mapped_files import SINGLE
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, deinterleaved_index, load_weights, transpose_first
from ostinato.models.weight_table import with_weight_table
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.kernels import choose_kernels
from ostinato.plan.mixers import GatedDeltaSpec
from ostinato.plan.quantization import Quantization
from tests.support.checkpoints import checkpoint, oracle, random_prompt
from tests.support.loading import load_checkpoint
from tests.support.parity import make_engine

ATTENTION_LAYERS = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED: dict[str, Any] = {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": ATTENTION_LAYERS,
        "kda_layers": [i for i in range(1, 28) if i not in ATTENTION_LAYERS],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
}


def test_the_published_config_gives_layers_by_their_numbers_and_a_latent_per_token() -> None:
    spec = with_weight_table(model_spec(PUBLISHED))
    kinds = ["attention" if i in ATTENTION_LAYERS else "delta_net" for i in range(1, 28)]
    assert [layer.kind for layer in spec.layers] == kinds
    assert spec.layers[0].mixer == GatedDeltaSpec(
        num_heads=32, num_key_heads=32, key_dim=128, value_dim=128, conv_kernel=4, per_channel=True
    )
    assert [layer.experts is None for layer in spec.layers] == [True, *[False] * 26]
    assert (spec.max_position_embeddings, spec.rope) == (1048576, None)
    assert sum(attention.kv_elements_per_token for attention in spec.attention_layers) == 7 * 576
    # 48 billion in all, 3 billion of which a token meets: as the model is called.
    inactive = sum(layer.inactive_parameters for layer in spec.layers)
    assert round(spec.num_parameters / 1e9) == 49
    assert round((spec.num_parameters - inactive) / 1e9) == 3


def test_the_spelling_of_transformers_gives_the_same_spec() -> None:
    config = {name: value for name, value in PUBLISHED.items() if name not in ("linear_attn_config", "head_dim")}
    del config["first_k_dense_replace"], config["mla_use_nope"], config["moe_router_activation_func"]
    kinds = ["full_attention" if i in ATTENTION_LAYERS else "linear_attention" for i in range(1, 28)]
    written = {
        "layer_types": kinds,
        "mlp_layer_types": ["dense", *["sparse"] * 26],
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    }
    assert model_spec(config | written) == model_spec(PUBLISHED)
    attributes = {"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob"}
    attributes |= {"num_expert_group": "n_group", "num_experts": "num_local_experts"}
    attributes |= {"num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts"}
    assert model_spec({attributes.get(name, name): value for name, value in PUBLISHED.items()}) == model_spec(PUBLISHED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func = 'softmax'; supported: sigmoid"),
        ({"mla_use_nope": False}, "mla_use_nope = False; supported: true"),
        ({"q_lora_rank": 64}, "q_lora_rank = 64; supported: null"),
        ({"attention_bias": True}, "attention_bias = True; supported: false"),
        ({"use_grouped_topk": False}, "use_grouped_topk = False; supported: true"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2; supported: 1"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1; supported: 0"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8; supported: as many as num_attention_heads, 32"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: silu"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0, which should be a whole number of at least 1"),
        ({"num_expert_group": 3}, "num_expert_group = 3, which should part 256 experts"),
        ({"num_experts_per_token": 257}, "num_experts_per_token = 257, which should be 1 to 256"),
        ({"linear_attn_config": None}, "neither layer_types nor kda_layers and full_attn_layers in linear_attn_config"),
        ({"linear_attn_config": [1]}, r"linear_attn_config = \[1\], which should be an object"),
        ({"num_hidden_layers": 26}, "should be the numbers from 1 to 26, each once"),
        ({"layer_types": ["mamba"] * 27}, "layer_types mamba; supported: linear_attention, full_attention"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec(PUBLISHED | change)


def test_layers_that_have_no_number_or_two_are_refused() -> None:
    for wrong in ([*ATTENTION_LAYERS, 5], ATTENTION_LAYERS[:-1], [*ATTENTION_LAYERS[:-1], "27"]):
        numbers = PUBLISHED["linear_attn_config"] | {"full_attn_layers": wrong}
        with pytest.raises(ModelError, match="should be the numbers from 1 to 27, each once"):
            model_spec(PUBLISHED | {"linear_attn_config": numbers})


def test_on_a_gpu_every_operation_has_a_kernel_that_graphs_hold_heads_of_latents_too() -> None:
    kernels = choose_kernels(with_weight_table(model_spec(PUBLISHED)), CATALOGUE["h100-80gb"])
    assert {choice.implementation for choice in kernels.values()} == {"triton"}
    assert all(choice.capturable for choice in kernels.values())


def test_heads_wider_than_the_tiles_attend_by_the_reference_and_the_plan_says_so() -> None:
    kernels = choose_kernels(with_weight_table(model_spec(PUBLISHED | {"kv_lora_rank": 1024})), CATALOGUE["h100-80gb"])
    attention = kernels["attention"]
    assert attention.implementation == "reference"
    assert attention.reason == "its triton kernel takes 576 elements of a head, and the model has 1088"
    assert not attention.capturable


def test_convolutions_longer_than_the_kernels_are_the_references() -> None:
    config = PUBLISHED["linear_attn_config"] | {"short_conv_kernel_size": 8}
    kernels = choose_kernels(
        with_weight_table(model_spec(PUBLISHED | {"linear_attn_config": config})), CATALOGUE["h100-80gb"]
    )
    convolution = kernels["causal_conv1d"]
    assert convolution.implementation == "reference"
    assert convolution.reason == "its triton kernel takes 7 taps of a convolution, and the model has 8"
    assert {choice.implementation for op, choice in kernels.items() if op != "causal_conv1d"} == {"triton"}


def test_the_first_of_parts_that_take_turns_may_lie_transposed() -> None:
    """Two turns of two rows and one."""
    rows = torch.arange(18.0).view(6, 3)
    ordered = rows[deinterleaved_index(6, (2, 1))]
    transpose_first(ordered, (2, 1))
    first = [[0.0, 3.0, 1.0, 4.0, 2.0, 5.0], [9.0, 12.0, 10.0, 13.0, 11.0, 14.0]]
    assert ordered[:4].reshape(2, 6).tolist() == first
    assert ordered[4:].tolist() == [rows[2].tolist(), rows[5].tolist()]


def test_latents_give_the_keys_and_values_of_transformers() -> None:
    """A head's score of a latent is that of its key, and what it makes of a latent its value."""
    theirs, loaded = oracle("kimi_linear").model.layers[1].self_attn, load_checkpoint(checkpoint("kimi_linear"))
    ours = loaded.backbone.layers[1].self_attn.kv_b_proj
    generator = torch.Generator().manual_seed(0)
    latents, q = torch.randn(5, 20, generator=generator), torch.randn(5, 4, 10, generator=generator)
    with torch.inference_mode():
        keys, values = theirs.expand_kv(latents.view(1, 1, 5, 20), torch.zeros(1, 1, 5, 6))
    scores = torch.einsum("qhd,hkd->hqk", q, keys[0, :, :, :10])
    torch.testing.assert_close(torch.einsum("qhr,kr->hqk", ours.to_latents(q), latents), scores)
    given = ours.to_values(latents.unsqueeze(1).expand(5, 4, 20))
    torch.testing.assert_close(given, values[0].transpose(0, 1))


def test_keys_and_values_of_latents_are_not_quantised_and_all_other_linears_are() -> None:
    model = load_checkpoint(checkpoint("kimi_linear"), Quantization())
    attention, delta_net = model.backbone.layers[1].self_attn, model.backbone.layers[0].mixer
    assert attention.kv_b_proj.weight.dtype == torch.float32
    small = (delta_net.in_proj, delta_net.in_proj_small, delta_net.f_b_proj, delta_net.g_b_proj, delta_net.out_proj)
    for linear in (attention.in_proj, attention.o_proj, *small):
        assert linear.weight.dtype == torch.int8


def test_a_dense_mlp_may_be_called_as_published_or_as_transformers_saves_it(tmp_path: Path) -> None:
    copy = tmp_path / "published"
    shutil.copytree(checkpoint("kimi_linear"), copy)
    tensors = load_file(copy / SINGLE)
    dense = [name for name in tensors if name.startswith(("model.layers.0.block_sparse_moe", "model.layers.3.block"))]
    assert len(dense) == 6
    for name in dense:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
    save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    saved, published = (
        dict(load_checkpoint(directory).named_parameters()) for directory in (checkpoint("kimi_linear"), copy)
    )
    assert all(torch.equal(saved[name], published[name]) for name in saved | published)


def test_a_token_keeps_one_latent_in_each_layer_with_attention() -> None:
    """Neither keys nor values of heads: the plan's blocks and the memory of a runner say the same."""
    config = json.loads((checkpoint("kimi_linear") / "config.json").read_text())
    engine = make_engine("kimi_linear", kernels="reference")
    attention = [memory for memory in engine.runner.layer_memory if memory.k_cache is not None]
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert [memory.v_cache for memory in attention] == [None, None]
    assert {tuple(memory.k_cache.shape[2:]) for memory in attention} == {(1, width)}
    assert engine.plan.memory.kv_block == 2 * engine.plan.settings.block_size * width * 4


# Ling 3.0

LING: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "dtype": "bfloat16",
    "vocab_size": 157184,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "num_experts": 512,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "short_conv_kernel_size": 4,
    "partial_rotary_factor": 0.5,
    "model_max_length": 262144,
    "num_nextn_predict_layers": 1,
}
"""The sizes that transformers has as defaults, in the published spelling."""


def test_ling_has_attention_at_the_end_of_each_group_a_bounded_decay_and_a_head_after_the_last_layer() -> None:
    spec = with_weight_table(model_spec(LING))
    assert [i for i, layer in enumerate(spec.layers) if layer.attention is not None] == [5, 11, 17, 23, 29, 35, 41]
    assert spec.layers[0].mixer == GatedDeltaSpec(32, 32, 128, 128, 4, per_channel=True)
    assert [layer.experts is None for layer in spec.layers] == [True, True, *[False] * 40]
    assert (spec.hyperparameters.decay_bound, spec.max_position_embeddings) == (-5.0, 262144)
    # All of the shared key is rotated, whatever the rotated part of a head is.
    assert spec.rope is not None
    assert (spec.rope.theta, spec.rope.rotary_dim) == (6e6, 64)
    assert spec.head is not None
    assert {weight.names[0].split(".")[2] for weight in spec.head.table} == {"42"}
    assert model_spec(LING | {"kda_safe_gate": False}).hyperparameters.decay_bound == 0.0
    assert model_spec(LING | {"num_nextn_predict_layers": 0}).head is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_conv_kernel_size": None}, "has no 'short_conv_kernel_size', which a bailing_hybrid model needs"),
        ({"kda_lower_bound": 0.5}, "kda_lower_bound = 0.5; it should be below 0, or kda_safe_gate false"),
        ({"layer_group_size": 0}, "layer_group_size = 0, which should be a whole number of at least 1"),
        ({"layer_group_size": -1}, "layer_group_size = -1, which should be a whole number of at least 1"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2; supported: 0 and 1"),
        ({"mtp_layer_types": ["linear_attention"]}, "supported: \\['full_attention'\\]"),
        ({"q_lora_rank": 64}, "q_lora_rank = 64; supported: null"),
        ({"attention_bias": True}, "attention_bias = True; supported: false"),
    ],
)
def test_what_ling_does_not_have_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec(LING | change)


def test_a_head_of_ling_may_call_its_last_norm_as_others_do_and_its_copies_are_not_read(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("bailing_hybrid_head"), copy)
    tensors = load_file(copy / SINGLE)
    tensors["model.layers.4.shared_head.norm.weight"] = tensors.pop("model.layers.4.final_layernorm.weight")
    tensors["model.layers.4.embed_tokens.weight"] = torch.zeros(131, 64)
    save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    spec = model_spec(read_config(copy))
    loaded = []
    for directory in (copy, checkpoint("bailing_hybrid_head")):
        model = build_model(
            WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), replace(spec, drafter=spec.head)
        )
        load_weights(model, directory)
        loaded.append(dict(model.named_parameters()))
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0] | loaded[1])


def test_decays_without_a_bound_are_those_of_transformers(tmp_path: Path) -> None:
    """The other branch of `kda_safe_gate`: the same weights with the flag off, in both."""
    ours = tmp_path / "unbounded"
    shutil.copytree(checkpoint("bailing_hybrid"), ours)
    config = json.loads((ours / "config.json").read_text()) | {"kda_safe_gate": False}
    (ours / "config.json").write_text(json.dumps(config))
    prompt = random_prompt(40, 1)
    with torch.inference_mode():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32).eval()
        expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    engine = LLM(model=str(ours), dtype="float32", threads=1)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, ignore_eos=True)
    [output] = engine.generate([prompt], params)
    assert output.prompt_logprobs is not None
    found = [each.logprob for each in output.prompt_logprobs if each is not None]
    right = [float(expected[i, token]) for i, token in enumerate(prompt[1:])]
    assert found == pytest.approx(right, abs=1e-4 * float(expected.abs().max()))
