"""The models that are Llama with other values: what their config.json may say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.errors import ModelError
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.plan.model import ModelSpec
from tests.support.checkpoints import checkpoint


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


@pytest.mark.parametrize("window", [None, 512, 4096])
def test_a_mistral_whose_window_is_the_whole_context_runs(window: int | None) -> None:
    assert spec_with("mistral", sliding_window=window) == spec_with("mistral")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mistral", {"sliding_window": 128}, ["sliding_window = 128", "at most 128"]),
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 32768}, ["sliding_window = 4096"]),
        ("mistral", {"sliding_window": "wide"}, ["sliding_window = 'wide'", "whole number"]),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types sliding_attention"]),
        (
            "qwen2",
            {"layer_types": ..., "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
            ["layers 1 to 1", "supported: attention over all of it"],
        ),
        (
            "smollm3",
            {"layer_types": ..., "use_sliding_window": True, "sliding_window": 32},
            ["layers 0 to 3", "supported: attention over all of it"],
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers = [1, 0]", "0 or 1 for each"]),
        ("smollm3", {"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        spec_with(name, **changes)
    assert all(word in error.value.message for word in words), error.value.message
