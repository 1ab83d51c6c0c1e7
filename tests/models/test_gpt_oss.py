"""gpt-oss: experts in MXFP4 as the hub's checkpoints have them, and what the config of 20 billion parameters plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ostinato import LLM, CapacityError, EngineConfig, ModelError, SamplingParams
from ostinato.formats.mapped_files import SINGLE
from ostinato.layers.allocation import BlockView, WeightAllocator, checkpoint_views
from ostinato.models.checkpoint import load_spec, model_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.ops.quant.dequantize import dequantize
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.tensor_parallel import Rank
from tests.support.checkpoints import random_prompt, randomize
from tests.support.loading import load_with
from tests.support.native_sets import runnable_sets
from tests.support.plan_cases import GIB, cpu
from tests.support.recipes import gpt_oss

STACKS = ("gate_up_proj", "down_proj")
QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}

CONFIG_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "quantization_config": QUANTIZED,
}
"""The hub's config.json of gpt-oss-20b: its sizes, and that its experts are in MXFP4."""


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint with experts in MXFP4, and transformers' model with what transformers says that they stand for."""
    config = gpt_oss()
    config.intermediate_size = 128
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, 0)
    directory = tmp_path_factory.mktemp("mxfp4")
    generator = torch.Generator().manual_seed(3)
    packed = {}
    for i, layer in enumerate(model.model.layers):
        for name in STACKS:
            weight = getattr(layer.mlp.experts, name)
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(120, 125, shape, generator=generator).to(torch.uint8)
            weight.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
            assert weight.shape == (experts, inputs, outputs)
            prefix = f"model.layers.{i}.mlp.experts.{name}"
            packed |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    model.save_pretrained(directory)
    tensors = load_file(directory / SINGLE)
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(STACKS)}
    save_file(plain | packed, directory / SINGLE, metadata={"format": "pt"})
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"quantization_config": QUANTIZED}))
    return directory, model.eval()


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_every_weight_is_what_transformers_makes_of_its_blocks(quantised: tuple[Path, Any], quantization: str) -> None:
    directory, oracle = quantised
    places = dict(checkpoint_views(load_with(directory, kernels="reference", quantization=quantization)))
    for name in STACKS:
        place = places[f"model.layers.1.mlp.experts.{name}"]
        assert isinstance(place, BlockView) == (quantization == "auto")
        found = dequantize(place.name, place.bytes) if isinstance(place, BlockView) else place
        expected = getattr(oracle.model.layers[1].mlp.experts, name).transpose(1, 2)
        if name == "gate_up_proj":  # gates and values take turns in the checkpoint
            expected = torch.cat((expected[:, ::2], expected[:, 1::2]), dim=1)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kernels", [*(["auto"] if runnable_sets() else []), "reference"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_and_logprobs_equal_transformers(quantised: tuple[Path, Any], kernels: str, deterministic: bool) -> None:
    if deterministic and kernels == "reference":
        pytest.skip("references do not keep the order of their sums")
    directory, oracle = quantised
    prompt = random_prompt(60, seed=5)
    llm = LLM(str(directory), kernels=kernels, deterministic=deterministic, dtype="float32", max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
    [output] = llm.generate([prompt], params)
    tokens = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens
    expected = logits.log_softmax(-1)
    largest = float(logits.abs().max())
    for step, entries in enumerate(output.outputs[0].logprobs):
        for token, logprob in ((entries.token_id, entries.logprob), *entries.top):
            assert abs(logprob - float(expected[step, token])) < 1e-4 * largest


def test_a_stack_without_its_scales_is_named(quantised: tuple[Path, Any], tmp_path: Path) -> None:
    directory, _ = quantised
    tensors = load_file(directory / SINGLE)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(ModelError, match=r"missing \(1\): model.layers.0.mlp.experts.down_proj_scales"):
        load_with(tmp_path)


def write_gguf(path: Path, oracle: Any) -> Path:
    """The checkpoint as llama.cpp's converter writes it: experts in MXFP4, gates and values in tensors of their own."""
    config = oracle.config
    writer = gguf.GGUFWriter(str(path), "gpt-oss")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    for name, tensor in oracle.state_dict().items():
        stem = name.removesuffix(".weight").removesuffix("_bias").removesuffix(".bias")
        end = "bias" if name.endswith("bias") else "weight"
        parts = {stem: tensor}
        if stem.endswith(STACKS) and end == "weight":
            parts = {stem: tensor.transpose(1, 2)}
        if stem.endswith("gate_up_proj"):
            halves = (whole[:, i::2] for whole in parts.values() for i in range(2))
            parts = dict(zip((stem.replace("gate_up", "gate"), stem.replace("gate_up", "up")), halves, strict=True))
        for part, values in parts.items():
            called = f"{names.get_name(part)}.{end}"
            array = values.contiguous().numpy()
            if end == "weight" and ".experts." in part:
                kind = gguf.GGMLQuantizationType.MXFP4
                writer.add_tensor(called, gguf.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(called, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gguf_file_has_the_same_weights(quantised: tuple[Path, Any], ranks: int, tmp_path: Path) -> None:
    directory, oracle = quantised
    oracle.config.swiglu_alpha, oracle.config.swiglu_limit = 1.702, 7.0  # which files do not say
    path = write_gguf(tmp_path / "model.gguf", oracle)
    for rank in range(ranks):
        found, expected = (of_rank(source, rank, ranks) for source in (path, directory))
        assert found.keys() == expected.keys()
        for name, place in found.items():
            other = expected[name]
            assert isinstance(place, BlockView) == isinstance(other, BlockView)
            if isinstance(place, BlockView) and isinstance(other, BlockView):
                pair = dequantize("MXFP4", place.bytes), dequantize("MXFP4", other.bytes)
                assert torch.equal(*pair), name
            else:
                assert torch.equal(place, other), name  # type: ignore[arg-type]


def of_rank(source: Path, rank: int, ranks: int) -> dict[str, Any]:
    """The weights of one rank, each with its name in the checkpoint."""
    config = EngineConfig(model=str(source), kernels="reference", dtype="float32", tensor_parallel_size=ranks)
    build = WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32", rank=Rank(rank, ranks))
    model = build_model(build, load_spec(config))
    load_weights(model, source)
    return dict(checkpoint_views(model))


def plan_20b(tmp_path: Path, memory: int | str, **settings: Any) -> Plan:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_20B))
    config = EngineConfig(model=str(tmp_path), **settings)
    device = cpu(memory) if isinstance(memory, int) else CATALOGUE[memory]
    return make_plan(config, load_spec(config), device)


def test_20_billion_parameters_fit_into_16_gb_by_their_config_alone(tmp_path: Path) -> None:
    assert model_spec(CONFIG_20B).num_parameters == 20_914_757_184
    plan = plan_20b(tmp_path, 16 * 10**9, max_model_len=4096)
    # 24 layers of 32 experts with 3 x 2880 x 2880 weights of 4.25 bits; all else in bfloat16.
    experts = 24 * 32 * 3 * 2880 * 2880
    rest = 20_914_757_184 - experts
    assert experts * 17 / 32 + 2 * rest <= plan.memory.weights <= experts * 17 / 32 + 2 * rest + 32 * 2**20
    [decision] = [decision for decision in plan.decisions if decision.topic == "quantization"]
    assert decision.effective == "MXFP4"
    with pytest.raises(CapacityError):
        plan_20b(tmp_path, 12 * 10**9, max_model_len=4096)
    assert 12 * GIB < plan.memory.weights < 13 * GIB


def test_a_gpu_runs_the_experts_in_mxfp4_too(tmp_path: Path) -> None:
    plan = plan_20b(tmp_path, "h100-80gb", max_model_len=4096)
    [decision] = [decision for decision in plan.decisions if decision.topic == "quantization"]
    assert decision.effective == "MXFP4"
    assert plan.kernels["moe"].implementation == "triton"
    assert 12 * GIB < plan.memory.weights < 13 * GIB
