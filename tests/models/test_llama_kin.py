"""The models that are Llama with other values: what their config.json may say, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.errors import ModelError
from ostinato.inspection import mismatches
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.config_json import ROPE_KINDS
from ostinato.models.random_weights import randomize_weights
from ostinato.models.registry import make_model
from ostinato.ops.dispatch import select_ops
from ostinato.plan.model import ModelSpec
from tests.support.checkpoints import checkpoint, random_prompt, randomize


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
    local = spec.hyperparameters.local_rope
    assert (local.kind, local.theta) == ("default", 300.0)
    least = spec_with("gemma3_text", **dict.fromkeys(hub, ...), sliding_window=..., query_pre_attn_scalar=...)
    assert least.rope is not None
    assert (least.rope.theta, least.hyperparameters.local_rope.theta) == (1e6, 1e4)
    assert least.hyperparameters.scale == 1 / 16
    assert [layer.kind for layer in least.layers] == ["local"] * 3


def test_gemma3_multiplies_its_embedding_by_what_its_dtype_makes_of_the_factor() -> None:
    ops, cpu = select_ops({}), torch.device("cpu")
    spec = replace(spec_with("gemma3_text"), hidden_size=72)
    factors = [
        make_model(WeightAllocator(ops, dtype, cpu), spec).embedding.multiplier
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert factors == [pytest.approx(72**0.5, rel=1e-7), 8.5]


def test_random_norms_that_are_stored_less_1_multiply_by_1() -> None:
    model = make_model(WeightAllocator(select_ops({}), torch.float32, torch.device("cpu")), spec_with("gemma3_text"))
    randomize_weights(model, 0)
    norms = {name: tensor for name, tensor in model.named_parameters() if "norm" in name}
    assert len(norms) == 3 * 6 + 1
    assert not any(bool(tensor.any()) for tensor in norms.values())


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mistral", {"sliding_window": 0}, ["sliding_window = 0", "1 or more"]),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_window = 37", "all layers"]),
        ("mistral", {"sliding_window": "wide"}, ["sliding_window = 'wide'", "whole number"]),
        ("qwen2", {"use_sliding_window": False}, ["layer_types sliding_attention", "use_sliding_window = false"]),
        ("qwen2", {"sliding_window": None}, ["no sliding_window", "1 or more"]),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types chunked_attention"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["1 layer_types", "num_hidden_layers = 2"]),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0", "null"]),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping = 50.0", "null"]),
        ("gemma3_text", {"use_bidirectional_attention": True}, ["use_bidirectional_attention = true", "false"]),
        ("gemma3_text", {"hidden_activation": "gelu"}, ["hidden_activation = 'gelu'", "gelu_pytorch_tanh"]),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, ["full_attention, sliding_attention"]),
        ("gemma3_text", {"layer_types": ..., "sliding_window_pattern": 0}, ["sliding_window_pattern = 0"]),
        ("gemma3_text", {"model_type": "gemma3"}, ["config.json has no 'text_config'", "gemma3 model"]),
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


@pytest.mark.parametrize("length", [150, 65, 64, 40])
def test_a_dynamic_rope_equals_transformers_below_and_above_the_original_length(length: int, tmp_path: Path) -> None:
    """The longest request has `length` tokens, for which transformers computes the frequencies of a text as long."""
    config = transformers.LlamaConfig.from_pretrained(checkpoint("llama"))
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 700.0, "factor": 4.0}
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
