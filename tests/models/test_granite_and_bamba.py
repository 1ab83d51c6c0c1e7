"""What Bamba and Granite 4 add to the parity of every architecture: limits, config spellings, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PretrainedConfig

from ostinato.errors import ModelError
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.plan.model import ModelSpec
from tests.models.test_models import PROMPT, logits_in_steps
from tests.support.checkpoints import RECIPES, checkpoint, oracle_logits, random_prompt

SPELLINGS = {"linear_attention": "mamba", "full_attention": "attention"}


def as_on_the_hub(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with the names that older versions of transformers wrote."""
    old = {**config, "torch_dtype": config["dtype"], "time_step_limit": [0.0, float("inf")]}
    del old["dtype"]
    rope = old.pop("rope_parameters", None)
    if rope:
        old |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if "layer_types" in old:
        old["layers_block_type"] = [SPELLINGS[word] for word in old.pop("layer_types")]
    if config["model_type"] == "bamba":
        old |= {"attn_rotary_emb": 8, "mamba_d_head": "auto"}
    return old


def spec_with(name: str, **changes: Any) -> ModelSpec:
    return model_spec({**read_config(checkpoint(name)), **changes})


@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid", "granitemoehybrid_dense"])
def test_hub_configs_mean_the_same_as_those_that_transformers_writes(name: str) -> None:
    config = read_config(checkpoint(name))
    assert model_spec(as_on_the_hub(config)) == model_spec(config)


@pytest.mark.parametrize("cuts", [[], [37, 38, 101, 149]], ids=["whole", "in odd chunks and single tokens"])
@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid"])
def test_a_narrow_time_step_limit_clamps_in_prefill_and_decode(
    name: str, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrowed() -> PretrainedConfig:
        config = RECIPES[name]()
        config.time_step_limit = (0.2, 0.5)
        return config

    prompt = random_prompt(PROMPT, seed=1)
    wide = oracle_logits(name, prompt)
    monkeypatch.setitem(RECIPES, f"{name}_narrow", narrowed)
    expected = oracle_logits(f"{name}_narrow", prompt)
    assert (expected - wide).abs().max() > 0.1 * wide.abs().max()
    error = (logits_in_steps(f"{name}_narrow", cuts) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_the_spec_names_the_kernels_of_what_the_model_has() -> None:
    state = {"causal_conv1d", "concat", "gated_rms_norm", "ssd_scan", "state_update"}
    common = state | {"attention", "embedding", "linear", "rms_norm", "rotary"}
    assert set(spec_with("bamba").ops) == common | {"rotary_angles"}
    assert set(spec_with("granitemoehybrid").ops) == common | {"moe", "route"}
    assert set(spec_with("granitemoehybrid_dense").ops) == common | {"rotary_angles"}
    assert set(spec_with("bamba", attn_layer_indices=None).ops) == common - {"attention", "rotary"}


def test_granite_without_layer_types_has_state_layers_only() -> None:
    spec = spec_with("granitemoehybrid", layer_types=None)
    assert (len(spec.state_layers), spec.attention_layers, spec.rope) == (4, (), None)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("bamba", {"hidden_act": "gelu"}, "supported: silu"),
        ("bamba", {"attn_layer_indices": [1, 4]}, "from 0 to 3"),
        ("bamba", {"attn_layer_indices": 1}, "from 0 to 3"),
        ("bamba", {"attn_rotary_emb": 16}, "rotates half of them, 8"),
        ("bamba", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotates 4 elements"),
        ("bamba", {"mamba_d_head": 12}, "mamba_expand \\* hidden_size = 128"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "supported: silu"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "supported: null, 'nope', 'rope'"),
        ("granitemoehybrid", {"layer_types": ["mamba", "mlp"] * 2}, "layer_types mlp; supported: "),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "1 layer_types for num_hidden_layers = 4"),
        ("granitemoehybrid", {"num_experts_per_tok": 7}, "should be 1 to 6"),
        ("granitemoehybrid_dense", {"partial_rotary_factor": 0.5}, "rotates all of them"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(name: str, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        spec_with(name, **changes)
