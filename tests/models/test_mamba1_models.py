"""What Mamba, Falcon-Mamba and Jamba add to the parity of all architectures: published configs, spellings, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.errors import ModelError
from ostinato.layers.sketch import Sketch
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.registry import make_model
from ostinato.plan.mixers import Mamba1Spec
from ostinato.plan.model import ModelSpec
from tests.support.checkpoints import checkpoint

MAMBA_130M: dict[str, Any] = {
    "model_type": "mamba", "conv_kernel": 4, "d_inner": 1536, "d_model": 768, "expand": 2, "fused_add_norm": True,
    "hidden_act": "silu", "hidden_size": 768, "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "n_layer": 24,
    "num_hidden_layers": 24, "pad_vocab_size_multiple": 8, "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {},
    "state_size": 16, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_rank": 48,
    "torch_dtype": "float32", "use_bias": False, "use_conv_bias": True, "vocab_size": 50280,
}  # fmt: skip
FALCON_MAMBA_7B: dict[str, Any] = {
    "model_type": "falcon_mamba", "conv_kernel": 4, "expand": 16, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "mixer_rms_eps": 1e-06, "num_hidden_layers": 64,
    "residual_in_fp32": True, "state_size": 16, "tie_word_embeddings": False, "time_step_rank": 256,
    "torch_dtype": "bfloat16", "use_bias": False, "use_conv_bias": True, "use_falcon_mambapy": False,
    "vocab_size": 65024,
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1,
    "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
    "mamba_inner_layernorms": True, "mamba_proj_bias": False, "max_position_embeddings": 262144, "n_ctx": 262144,
    "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_mamba_kernels": True, "vocab_size": 65536,
}  # fmt: skip


def spec_with(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return model_spec({**config, **changes})


@pytest.mark.parametrize(
    ("config", "parameters", "states", "attends", "dtype"),
    [
        (MAMBA_130M, 129_135_360, 24, 0, "float32"),
        (FALCON_MAMBA_7B, 7_272_665_088, 64, 0, "bfloat16"),
        (JAMBA, 51_570_323_328, 28, 4, "bfloat16"),
    ],
    ids=["mamba", "falcon_mamba", "jamba"],
)
def test_published_configs_have_the_published_sizes(
    config: dict[str, Any], parameters: int, states: int, attends: int, dtype: str
) -> None:
    spec = model_spec(config)
    assert (spec.num_parameters, spec.dtype) == (parameters, dtype)
    assert (len(spec.state_layers), len(spec.attention_layers), spec.rope) == (states, attends, None)
    assert spec.supports_all_checkpoints


def test_a_slot_holds_a_layers_last_inputs_and_a_state_for_each_channel() -> None:
    (mixer,) = set(model_spec(FALCON_MAMBA_7B).state_layers)
    assert mixer == Mamba1Spec(channels=8192, state_size=16, conv_kernel=4, time_step_rank=256)
    assert mixer.state["conv"].shape == (3, 8192)
    assert mixer.state["ssm"].shape == (8192, 16)
    assert mixer.state.num_bytes({"model": 2, "state": 4}) == 3 * 8192 * 2 + 8192 * 16 * 4


def test_layers_of_jamba_lie_where_periods_and_offsets_put_them() -> None:
    layers = model_spec(JAMBA).layers
    assert [i for i, layer in enumerate(layers) if layer.attention is not None] == [4, 12, 20, 28]
    assert [i for i, layer in enumerate(layers) if layer.experts is not None] == list(range(1, 32, 2))
    assert all((layer.attention is None) != (layer.mixer is None) for layer in layers)


@pytest.mark.parametrize("num_experts", [0, 1])
def test_jamba_with_one_expert_has_mlps_alone(num_experts: int) -> None:
    spec = spec_with(JAMBA, num_experts=num_experts, num_experts_per_tok=1)
    assert all(layer.experts is None for layer in spec.layers)
    assert {"moe", "route"}.isdisjoint(spec.ops)


@pytest.mark.parametrize("config", [MAMBA_130M, FALCON_MAMBA_7B, JAMBA], ids=["mamba", "falcon_mamba", "jamba"])
def test_a_rank_of_time_steps_that_is_left_open_is_a_sixteenth_of_the_hidden_size(config: dict[str, Any]) -> None:
    name = "mamba_dt_rank" if config is JAMBA else "time_step_rank"
    without = {key: value for key, value in config.items() if key != name}
    assert spec_with(config, **{name: "auto"}) == model_spec(without) == model_spec(config)
    (mixer,) = set(spec_with(without, hidden_size=config["hidden_size"] + 8).state_layers)
    assert isinstance(mixer, Mamba1Spec)
    assert mixer.time_step_rank == config["hidden_size"] // 16 + 1


def test_without_its_own_key_the_inner_size_follows_from_expand() -> None:
    without = {key: value for key, value in MAMBA_130M.items() if key != "intermediate_size"}
    assert model_spec(without) == model_spec(MAMBA_130M)
    (mixer,) = set(spec_with(without, expand=3).state_layers)
    assert isinstance(mixer, Mamba1Spec)
    assert mixer.channels == 3 * 768


def test_the_spec_names_the_kernels_of_what_the_model_has() -> None:
    common = {
        "causal_conv1d",
        "concat",
        "embedding",
        "gated_rms_norm",
        "linear",
        "rms_norm",
        "selective_scan",
        "selective_update",
    }
    assert set(model_spec(MAMBA_130M).ops) == set(model_spec(FALCON_MAMBA_7B).ops) == common
    assert set(model_spec(JAMBA).ops) == common | {"attention", "moe", "rotary", "route"}


def test_rates_and_time_steps_stay_in_float32() -> None:
    """And nothing else but them does."""
    layer = next(layer for layer in model_spec(JAMBA).layers if layer.mixer is not None)
    names = {name for weight in layer.weights if weight.in_float32 for name in weight.names}
    assert names == {"mamba.A_log", "mamba.D", "mamba.dt_proj.bias"}


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (MAMBA_130M, {"hidden_act": "gelu"}, "supported: silu"),
        (MAMBA_130M, {"rms_norm": False}, "supported: true"),
        (MAMBA_130M, {"state_size": 0}, "without channels, states"),
        (FALCON_MAMBA_7B, {"time_step_rank": 0}, "rank of its time steps"),
        (FALCON_MAMBA_7B, {"time_step_rank": "large"}, "should be a whole number"),
        (FALCON_MAMBA_7B, {"conv_kernel": None, "use_conv_bias": 1}, "should be true or false"),
        (JAMBA, {"hidden_act": "gelu"}, "supported: silu"),
        (JAMBA, {"mamba_inner_layernorms": False}, "supported: true"),
        (JAMBA, {"sliding_window": 4096}, "supported: null"),
        (JAMBA, {"attn_layer_offset": 8}, "should be below attn_layer_period = 8"),
        (JAMBA, {"expert_layer_offset": 3}, "should be below expert_layer_period = 2"),
        (JAMBA, {"expert_layer_period": 0}, "should be below expert_layer_period = 0"),
        (JAMBA, {"num_experts_per_tok": 17}, "should be 1 to 16"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelError) as raised:
        spec_with(config, **changes)
    assert expected in str(raised.value)


def test_the_original_name_of_the_embedding_is_known() -> None:
    for name in ("mamba", "falcon_mamba"):
        model = make_model(Sketch(), model_spec(read_config(checkpoint(name))))
        assert model.checkpoint_name("backbone.embedding.weight") == "backbone.embeddings.weight"
