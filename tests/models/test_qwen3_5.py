"""Qwen3.5's configurations, in both spellings, and what of them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato import EngineConfig
from ostinato.errors import ConfigError, ModelError
from ostinato.models.checkpoint import load_spec, model_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.mixers import GatedDeltaSpec
from ostinato.plan.plan import make_plan
from tests.support.checkpoints import checkpoint

HUB: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "torch_dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "mamba_ssm_dtype": "float32",
    "tie_word_embeddings": True,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}


def test_both_spellings_give_the_same_model() -> None:
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(24)]
    rope = {"rope_theta": 10000000, "partial_rotary_factor": 0.25}
    left_out = ("rope_parameters", "full_attention_interval")
    other = {key: value for key, value in HUB.items() if key not in left_out} | rope | {"layer_types": kinds}
    spec = model_spec(HUB)
    assert model_spec(other) == spec
    assert spec.rope is not None
    assert spec.rope.rotary_dim == 64
    mixers = [layer.mixer for layer in spec.layers]
    assert mixers[0] == GatedDeltaSpec(num_heads=16, num_key_heads=16, key_dim=128, value_dim=128, conv_kernel=4)
    assert [mixer is None for mixer in mixers] == [kind == "full_attention" for kind in kinds]
    assert mixers[0].state["delta"].shape == (16, 128, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 24}, r"layer_types sliding_attention; supported: "),
        ({"layer_types": ["full_attention"]}, "1 layer_types for num_hidden_layers = 24"),
        ({"full_attention_interval": 0}, "full_attention_interval = 0, which should be a whole number of at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"linear_num_key_heads": 5}, "16 heads of a delta net, which 5 key heads cannot serve"),
        ({"model_type": "qwen3_5"}, "no 'text_config'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec(HUB | change)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_of_16_bits_are_refused_with_the_dtype_that_works(dtype: str) -> None:
    config = EngineConfig(model=str(checkpoint("qwen3_5_text")), ssm_state_dtype=dtype, cache_memory="16MiB")
    with pytest.raises(ConfigError, match="delta net layers lose what they add") as error:
        make_plan(config, load_spec(config), detect("cpu"))
    assert [(each.setting, each.value) for each in error.value.remedies] == [("ssm_state_dtype", "float32")]
