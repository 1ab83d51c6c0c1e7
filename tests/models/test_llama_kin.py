"""The models that are Llama with other values: what their config.json may say, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.errors import CapacityError, ModelError
from ostinato.inspection import mismatches
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import load_spec, model_spec, read_config
from ostinato.models.config_json import ROPE_KINDS
from ostinato.models.loader import build_model, load_weights
from ostinato.models.random_weights import randomize_weights
from ostinato.models.registry import make_model
from ostinato.ops.arrays import TorchArrays, dtype_name
from ostinato.ops.dispatch import select_ops
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.models.test_models import BLOCK_SIZE, CPU, poisoned_memory
from tests.support.checkpoints import checkpoint, random_prompt, randomize, recipe
from tests.support.loading import load_with
from tests.support.plan_cases import GIB, cpu


def spec_with(name: str, **changes: Any) -> ModelSpec:
    config = {**read_config(checkpoint(name)), **changes}
    return model_spec({key: value for key, value in config.items() if value is not ...})


def rotating(spec: ModelSpec) -> list[bool]:
    return [layer.attention.rotates for layer in spec.layers if layer.attention is not None]


def test_smollm3_leaves_positions_out_where_the_list_or_the_interval_says_so() -> None:
    assert rotating(spec_with("smollm3")) == [True, True, False, True]
    assert rotating(spec_with("smollm3", no_rope_layers=[0, 1, 1, 0])) == [False, True, True, False]
    assert rotating(spec_with("smollm3", no_rope_layers=..., no_rope_layer_interval=2)) == [True, False, True, False]
    assert rotating(spec_with("smollm3", no_rope_layers=..., no_rope_layer_interval=...)) == [True, True, True, False]


def test_smollm3_has_a_theta_of_its_own_and_shares_its_embedding() -> None:
    spec = spec_with("smollm3", rope_parameters=..., tie_word_embeddings=...)
    assert spec.rope is not None
    assert spec.rope.theta == 2e6
    assert spec.tied_embeddings


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers if layer.attention is not None]


def test_the_layers_of_a_mistral_have_one_window_unless_it_is_the_whole_context() -> None:
    assert windows(spec_with("mistral")) == [37, 37]
    assert windows(spec_with("mistral", sliding_window=..., max_position_embeddings=32768)) == [4096, 4096]
    assert windows(spec_with("mistral", sliding_window=..., max_position_embeddings=...)) == [4096, 4096]
    for window in (None, 512, 4096):
        assert windows(spec_with("mistral", sliding_window=window)) == [None, None]


def test_the_layers_with_windows_are_those_that_are_named_or_those_of_the_architecture() -> None:
    switched = {"use_sliding_window": True, "sliding_window": 32}
    assert windows(spec_with("qwen2")) == [None, 48]
    assert windows(spec_with("qwen2", layer_types=..., max_window_layers=0)) == [48, 48]
    assert windows(spec_with("qwen2", layer_types=..., use_sliding_window=False)) == [None, None]
    assert windows(spec_with("qwen2", layer_types=["sliding_attention", "full_attention"])) == [48, None]
    assert windows(spec_with("qwen3", layer_types=..., max_window_layers=1, **switched)) == [None, 32, 32]
    assert windows(spec_with("smollm3", layer_types=..., **switched)) == [None, None, 32, None]
    assert windows(spec_with("smollm3", layer_types=...)) == [None] * 4


def test_gemma3_is_read_in_the_spelling_of_the_hub_too() -> None:
    hub = {
        "rope_parameters": ...,
        "rope_theta": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_local_base_freq": 300.0,
        "layer_types": ...,
        "sliding_window_pattern": 2,
    }
    spec = spec_with("gemma3_text")
    assert spec_with("gemma3_text", **hub) == spec
    assert windows(spec) == [40, None, 40]
    assert spec.rope is not None
    assert (spec.rope.kind, spec.rope.theta, spec.rope.parameters) == ("linear", 20000.0, {"factor": 4.0})
    (local,) = spec.other_ropes
    assert (local.kind, local.theta) == ("default", 300.0)
    least = spec_with("gemma3_text", **dict.fromkeys(hub, ...), sliding_window=..., query_pre_attn_scalar=...)
    assert least.rope is not None
    assert (least.rope.theta, least.other_ropes[0].theta) == (1e6, 1e4)
    assert least.hyperparameters.scale == 1 / 16
    assert [layer.kind for layer in least.layers] == ["local"] * 3


def test_gemma2_has_its_caps_unless_they_are_null() -> None:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    spec = spec_with("gemma2", **dict.fromkeys(names, ...), sliding_window=..., max_position_embeddings=...)
    assert [layer.attention.softcap for layer in spec.layers if layer.attention] == [50.0] * 3
    assert (spec.hyperparameters.logits_cap, windows(spec)) == (30.0, [4096, None, 4096])
    spec = spec_with("gemma2", **dict.fromkeys(names))
    assert spec.layers[0].attention is not None
    assert (spec.layers[0].attention.softcap, spec.hyperparameters.logits_cap) == (None, None)
    with pytest.raises(ModelError, match=r"attn_logit_softcapping = -1\.0; it should be above 0, or null for no cap"):
        spec_with("gemma2", attn_logit_softcapping=-1.0)


def test_gemma3_multiplies_its_embedding_by_what_its_dtype_makes_of_the_factor() -> None:
    ops = select_ops({})
    spec = replace(spec_with("gemma3_text"), hidden_size=72)
    factors = [
        make_model(WeightAllocator(ops, TorchArrays("cpu"), dtype_name(dtype)), spec).embedding.multiplier
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert factors == [pytest.approx(72**0.5, rel=1e-7), 8.5]


GEMMA4 = {
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "vocab_size": 262_144,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
"""The sizes of Gemma 4 E2B."""


def test_gemma4_stores_the_keys_of_15_layers_of_35() -> None:
    spec = model_spec(GEMMA4)
    attention = [layer.attention for layer in spec.layers if layer.attention is not None]
    assert [each.keys_of for each in attention[:15]] == [None] * 15
    assert [each.keys_of for each in attention[15:]] == [13, 13, 13, 13, 14] * 4
    assert [(each.head_dim, each.window) for each in attention[3:5]] == [(256, 512), (512, None)]
    plan = make_plan(EngineConfig(max_model_len=4096), spec, CATALOGUE["h100-80gb"])
    assert plan.memory.kv_block == 16 * 3 * 2 * 512 * 2
    assert plan.memory.window_block == 16 * 12 * 2 * 256 * 2
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.Gemma4TextConfig(**GEMMA4, layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7)
        )
    assert spec.num_parameters == theirs.num_parameters() + 35  # the numbers that layers multiply by


@pytest.mark.parametrize("device", ["cpu", *CATALOGUE])
def test_gemma4_is_planned_on_every_device(device: str) -> None:
    plan = make_plan(EngineConfig(), model_spec(GEMMA4), cpu(64 * GIB) if device == "cpu" else CATALOGUE[device])
    assert plan.settings.graph_mode == "full_and_piecewise"


def test_gemma4_is_read_in_the_spelling_of_the_hub_too() -> None:
    written = read_config(checkpoint("gemma4_text"))
    changes = {"per_layer_config": ..., "global_head_dim": 20, "num_global_key_value_heads": 4}
    assert "per_layer_config" in written
    assert spec_with("gemma4_text", **changes) == spec_with("gemma4_text")
    plain = spec_with("gemma4_text", **changes, attention_k_eq_v=False)
    assert {each.num_kv_heads for each in plain.attention_layers} == {2}


def test_random_norms_that_are_stored_less_1_multiply_by_1() -> None:
    model = make_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec_with("gemma3_text"))
    randomize_weights(model, 0)
    norms = {name: tensor for name, tensor in model.named_parameters() if "norm" in name}
    assert len(norms) == 3 * 6 + 1
    assert not any(bool(tensor.any()) for tensor in norms.values())


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mistral", {"sliding_window": 0}, ["sliding_window = 0", "a whole number of at least 1"]),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_window = 37", "all layers"]),
        ("mistral", {"sliding_window": "wide"}, ["sliding_window = 'wide'", "whole number"]),
        ("qwen2", {"use_sliding_window": False}, ["layer_types sliding_attention", "use_sliding_window = false"]),
        ("qwen2", {"sliding_window": None}, ["no sliding_window", "a whole number of at least 1"]),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types chunked_attention"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["1 layer_types", "num_hidden_layers = 2"]),
        ("gemma3_text", {"use_bidirectional_attention": True}, ["use_bidirectional_attention = true", "false"]),
        ("gemma3_text", {"hidden_activation": "gelu"}, ["hidden_activation = 'gelu'", "gelu_pytorch_tanh"]),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, ["full_attention, sliding_attention"]),
        ("gemma3_text", {"layer_types": ..., "sliding_window_pattern": 0}, ["sliding_window_pattern = 0"]),
        ("gemma3_text", {"model_type": "gemma3"}, ["config.json has no 'text_config'", "gemma3 model"]),
        ("gemma4_text", {"enable_moe_block": True}, ["no 'num_experts'", "gemma4_text model"]),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention = 'all'", "'vision'"]),
        ("gemma4_text", {"num_kv_shared_layers": 4}, ["num_kv_shared_layers = 4 of 5 layers", "no layer of a kind"]),
        ("gemma4_text", {"vocab_size_per_layer_input": 7}, ["vocab_size_per_layer_input = 7", "131"]),
        ("gemma4_text", {"final_logit_softcapping": 0}, ["final_logit_softcapping = 0.0", "above 0"]),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 8}}}, ["per_layer_config", "full_attention"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers = [1, 0]", "0 or 1 for each"]),
        ("smollm3", {"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        spec_with(name, **changes)
    assert all(word in error.value.message for word in words), error.value.message


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 2.0},
    "longrope": {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12, "original_max_position_embeddings": 64},
    "proportional": {"partial_rotary_factor": 0.5},
    "factors": {"factors": [1.0] * 12},
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_model_of_any_rope_is_planned_and_inspected_before_its_longest_request_is_known(kind: str) -> None:
    assert set(ROPES) == set(ROPE_KINDS)
    for keys in ({"rope_type": kind}, {"type": kind}):
        spec = spec_with("llama", rope_parameters=..., rope_scaling=ROPES[kind] | keys)
        assert spec.rope is not None
        assert spec.rope.kind == kind
        assert spec.calls is not None
        [missing] = mismatches(spec, [], of_gguf=False)
        assert "tensors are missing" in missing


def windowed(name: str, **rope: Any) -> Callable[[], transformers.PretrainedConfig]:
    """A recipe whose layers with a window have a rotary embedding that depends on the longest request."""

    def make_config() -> transformers.PretrainedConfig:
        config = recipe(name)
        config.rope_parameters |= {"sliding_attention": {"rope_theta": 700.0} | rope}
        if rope["rope_type"] == "dynamic":
            config.max_position_embeddings = 64
            config.rope_parameters |= {"full_attention": {"rope_theta": 5000.0} | rope}
        return config

    return make_config


DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 3.0}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 4 for i in range(12)],
    "long_factor": [2.0 + i for i in range(12)],
    "original_max_position_embeddings": 64,
    "factor": 3.0,
}


def dynamic_llama() -> transformers.PretrainedConfig:
    config = transformers.LlamaConfig.from_pretrained(checkpoint("llama"))
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 700.0, "factor": 4.0}
    return config


def dynamic_granite_swa() -> transformers.PretrainedConfig:
    """Layers of two rotary bases and one without positions."""
    config = recipe("granite_swa")
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_theta": 900.0} | DYNAMIC
    return config


def long_phi3() -> transformers.PretrainedConfig:
    """Factors that change what attention sees, so that the wrong ones would be noticed."""
    config = transformers.Phi3Config.from_pretrained(checkpoint("phi3"))
    config.original_max_position_embeddings = 64
    factors = {"short_factor": [1.0 + i / 4 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
    config.rope_parameters |= {"rope_type": "longrope", "original_max_position_embeddings": 64} | factors
    return config


@pytest.mark.parametrize(
    "make_config",
    [
        dynamic_llama,
        long_phi3,
        dynamic_granite_swa,
        windowed("gemma3_text", **DYNAMIC),
        windowed("gemma3_text", **LONG_ROPE),
        windowed("lfm3", **DYNAMIC),
        windowed("mellum", **DYNAMIC),
    ],
)
@pytest.mark.parametrize("length", [150, 65, 64, 40])
def test_a_dynamic_rope_equals_transformers_below_and_above_the_original_length(
    length: int, make_config: Callable[[], transformers.PretrainedConfig], tmp_path: Path
) -> None:
    """The longest request has `length` tokens, for which transformers computes the frequencies of a text as long."""
    config = make_config()
    oracle = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(oracle, 0)
    oracle.eval().save_pretrained(tmp_path)
    engine = EngineCore(EngineConfig(model=str(tmp_path), max_model_len=length, cache_memory="4MiB", threads=1))
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    prompt = random_prompt(length - 1, seed=1)
    output = engine.output(engine.add_request(prompt, params))
    assert output is not None
    while engine.has_unfinished:
        engine.step()
    [only] = output.outputs
    text = [*prompt, *only.token_ids]
    with torch.inference_mode():
        logits = oracle(torch.tensor([text]), use_cache=False).logits[0, :-1]
    scored = [*(output.prompt_logprobs or [])[1:], *(only.logprobs or [])]
    own = torch.tensor([each.logprob for each in scored if each is not None])
    expected = logits.log_softmax(-1)[torch.arange(length - 1), text[1:]]
    torch.testing.assert_close(own, expected, atol=1e-4 * logits.abs().max().item(), rtol=0)


def test_youtus_head_dim_is_the_part_of_a_key_that_is_rotated() -> None:
    rotated = read_config(checkpoint("youtu"))["qk_rope_head_dim"]
    assert spec_with("youtu", head_dim=rotated) == spec_with("youtu", head_dim=None) == spec_with("youtu", head_dim=...)
    with pytest.raises(ModelError, match=rf"head_dim = 2, .* qk_rope_head_dim = {rotated} elements of a key"):
        spec_with("youtu", head_dim=2)


def test_key_heads_that_are_not_mentioned_are_asked_for_unless_each_head_has_its_own() -> None:
    """In transformers Mistral has 8 then, and Llama as many as heads."""
    attention = spec_with("llama", num_key_value_heads=...).attention_layers[0]
    assert attention.num_kv_heads == attention.num_heads
    attention = spec_with("mistral", num_key_value_heads=None).attention_layers[0]
    assert attention.num_kv_heads == attention.num_heads
    with pytest.raises(ModelError, match="no 'num_key_value_heads', which a mistral model needs"):
        spec_with("mistral", num_key_value_heads=...)


ROPE = {"rope_type": "default", "rope_theta": 900.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True, "mlp_only_layers": [], "hidden_size": 40}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 21, "tie_word_embeddings": False}),
    ("mixtral", {"sliding_window": None, "num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": None}),
    ("mixtral", {"tie_word_embeddings": True, "num_key_value_heads": 4, "intermediate_size": 20}),
    ("granite", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "hidden_size": 56}),
    ("granitemoe", {"attention_bias": False, "tie_word_embeddings": False, "num_experts_per_tok": 1}),
    ("ernie4_5", {"use_bias": False, "tie_word_embeddings": False, "head_dim": 10, "num_key_value_heads": 1}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": False, "tie_word_embeddings": True}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": False, "hidden_size": 52}),
    ("olmo3", {"attention_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("olmo3", {"layer_types": ["full_attention"] * 3, "sliding_window": 512, "intermediate_size": 50}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}),
    ("exaone4", {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "hidden_size": 44}),
    ("hrm_text", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "head_dim": 40}),
    ("hrm_text", {"L_cycles": 0, "num_hidden_layers": 4, "embedding_scale": None, "rope_parameters": YARN}),
    ("hrm_text", {"H_cycles": 3, "L_cycles": 1, "num_hidden_layers": ..., "num_attention_heads": 4}),
    ("hrm_text", {"num_layers_per_stack": ..., "num_hidden_layers": 3, "mlp_bias": False}),
    ("mellum", {"attention_bias": False, "norm_topk_prob": False, "tie_word_embeddings": False}),
    ("mellum", {"mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": ["full_attention"] * 3}),
    ("ministral3", {"sliding_window": 25, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("ministral3", {"rope_parameters": ROPE | {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 19}}),
    ("phi3", {"sliding_window": None, "tie_word_embeddings": False, "rope_parameters": ROPE}),
    ("phi3", {"num_key_value_heads": 4, "hidden_size": 96, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    ("gemma3_text", {"attn_logit_softcapping": 2.0}),
    ("gemma3_text", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": YARN}}),
    ("lfm3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE}}),
    ("lfm3", {"rms_norm_eps": 0.05}),
    ("youtu", {"rope_interleave": None}),
    ("ernie4_5", {"head_dim": None}),
    ("falcon_h1_normed", {"mamba_norm_before_gate": None}),
    ("bamba", {"mamba_conv_bias": None}),
    ("bailing_hybrid", {"rope_parameters": ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.5}}),
    ("youtu", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    ("bailing_hybrid", {"rope_parameters": YARN | {"mscale_all_dim": 1.3}}),
    ("bailing_hybrid", {"moe_renormalize": None}),
    ("kimi_linear", {"tie_word_embeddings": True}),
    ("gpt_oss", {"num_local_experts": ..., "num_experts": 5}),
    ("jamba", {"num_experts": ..., "num_local_experts": 5}),
    ("mixtral", {"num_local_experts": ..., "num_experts": 5}),
    ("nemotron_h", {"n_routed_experts": ..., "num_local_experts": 12}),
    ("cohere2", {"attention_bias": False, "tie_word_embeddings": False, "logit_scale": 2.0}),
    ("cohere2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "hidden_size": 72}),
]
"""Recipes with other values of what a config.json may say, `...` for none."""


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_other_values_of_a_recipe_equal_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = recipe(name)
    stated = {name: value for name, value in (config.to_dict() | changes).items() if value is not ...}
    oracle = transformers.AutoModelForCausalLM.from_config(type(config)(**stated), dtype=torch.float32)
    randomize(oracle, 1)
    oracle.eval().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stated | {"dtype": "float32"}))
    spec = model_spec(read_config(tmp_path))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    load_weights(model, tmp_path)
    prompt = tuple(random_prompt(90, seed=2))
    row = BatchRow("r", prompt, 0, tuple(range(1, 7)), 0, (2,), num_logits=len(prompt))
    with torch.inference_mode():
        logits = model.compute_logits(model(make_step_inputs(Batch((row,), 0), BLOCK_SIZE, CPU), poisoned_memory(spec)))
        expected = oracle(torch.tensor([prompt]), use_cache=False).logits[0]
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "prefix", "names"),
    [
        ("qwen3_moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    ],
)
def test_experts_that_a_checkpoint_has_as_stacks_are_the_same(
    name: str, prefix: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint(name), tmp_path, dirs_exist_ok=True)
    tensors, spec = load_file(tmp_path / "model.safetensors"), spec_with(name)
    for i, layer in enumerate(spec.layers):
        if layer.experts is not None:
            here = f"model.layers.{i}.{prefix}."
            gate, up, down = (
                torch.stack([tensors.pop(f"{here}{e}.{part}.weight") for e in range(layer.experts.num_experts)])
                for part in names
            )
            tensors |= {f"{here}gate_up_proj": torch.cat((gate, up), 1), f"{here}down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stacked = dict(load_with(tmp_path).named_parameters())
    assert all(torch.equal(stacked[path], tensor) for path, tensor in load_with(checkpoint(name)).named_parameters())


def test_the_prediction_head_of_mellum_is_left_out(tmp_path: Path) -> None:
    shutil.copytree(checkpoint("mellum"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors") | {"mtp.layers.0.eh_proj.weight": torch.zeros(4, 8)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert not any("mtp" in path for path, _ in load_with(tmp_path).named_parameters())


def test_rows_that_are_neighbours_in_a_checkpoint_keep_their_scales() -> None:
    plain, small = (
        dict(load_with(checkpoint("ernie4_5"), quantization=how).named_parameters()) for how in ("none", "int8")
    )
    name = "model.layers.0.self_attn.qkv.weight"
    found = small[name].float() * small[f"{name}_scale"][:, None]
    torch.testing.assert_close(found, plain[name], atol=plain[name].abs().max().item() / 100, rtol=0)
    whole = load_file(checkpoint("ernie4_5") / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(plain[name][:12], torch.cat((whole[0:12:2], whole[1:12:2])))


HUB: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Mixtral-8x7B": (
        46_702_792_704,
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
    ),
    "Phi-4-mini": (
        3_836_021_760,
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
    ),
    "Olmo-3-7B": (
        7_298_011_136,
        {
            "model_type": "olmo3",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "attention_factor": 1.2079441541679836,
                "original_max_position_embeddings": 8192,
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 100278,
        },
    ),
    "EXAONE-4.0-1.2B": (
        1_279_391_488,
        {
            "model_type": "exaone4",
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "layer_types": ["full_attention"] * 30,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "rope_theta": 1000000,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
            "vocab_size": 102400,
        },
    ),
    "c4ai-command-r7b": (
        8_028_033_024,
        {
            "model_type": "cohere2",
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.25,
            "max_position_embeddings": 132096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rope_theta": 50000,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "vocab_size": 256000,
        },
    ),
    "ERNIE-4.5-0.3B": (
        360_748_032,
        {
            "model_type": "ernie4_5",
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 131072,
            "num_attention_heads": 16,
            "num_hidden_layers": 18,
            "num_key_value_heads": 2,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "vocab_size": 103424,
        },
    ),
    "Seed-OSS-36B": (
        36_151_104_512,
        {
            "model_type": "seed_oss",
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "max_position_embeddings": 524288,
            "mlp_bias": False,
            "num_attention_heads": 80,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": False,
            "vocab_size": 155136,
        },
    ),
    "gemma-2-2b": (
        2_614_341_888,
        {
            "model_type": "gemma2",
            "head_dim": 256,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "vocab_size": 256000,
        },
    ),
    "gemma-3-4b": (
        4_300_079_472,
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
        },
    ),
    "Youtu-LLM-2B": (
        1_961_560_064,
        {
            "model_type": "youtu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "kv_lora_rank": 512,
            "num_attention_heads": 16,
            "num_hidden_layers": 32,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_theta": 1600000,
            "v_head_dim": 128,
            "vocab_size": 128256,
        },
    ),
}
"""Models of the hub: the number of their parameters, and what their config.json says."""


@pytest.mark.parametrize("name", HUB)
def test_a_model_of_the_hub_has_its_parameters_and_is_planned_from_its_config_alone(name: str, tmp_path: Path) -> None:
    parameters, config = HUB[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16", "hidden_act": "silu"}))
    plan_config = EngineConfig(model=str(tmp_path), max_model_len=8192)
    spec = load_spec(plan_config)
    assert spec.num_parameters == parameters
    assert spec.weight_bytes("bfloat16") == 2 * parameters
    plans = []
    for device in CATALOGUE.values():
        try:
            plans.append(make_plan(plan_config, spec, device))
        except CapacityError:
            assert 2 * parameters > device.memory_bytes / 3, device.name
    assert plans
    for plan in plans:
        assert plan.memory.weights == 2 * parameters
        chosen = [decision.effective for decision in plan.decisions if decision.topic == "rope"]
        assert chosen == (["long_factor"] if name == "Phi-4-mini" else [])
