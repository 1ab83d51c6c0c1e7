"""Qwen3.5 with images: what its config.json says, in the hub's spelling, and what is refused of it."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.errors import ModelError
from ostinato.models.checkpoint import model_spec
from ostinato.plan.mixers import GatedDeltaSpec
from ostinato.plan.rope import axes
from tests.models.test_qwen3_5 import HUB

TEXT = {name: value for name, value in HUB.items() if name != "model_type"}
VISION = {
    "depth": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_heads": 12,
    "patch_size": 16,
    "out_hidden_size": 1024,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


def config(text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5",
        "text_config": TEXT | (text or {}),
        "vision_config": VISION | (vision or {}),
        "tie_word_embeddings": True,
        **given,
    }


def test_the_text_part_is_the_text_model_with_positions_in_time_height_and_width() -> None:
    spec, text = model_spec(config()), model_spec(HUB)
    assert [layer.mixer for layer in spec.layers] == [layer.mixer for layer in text.layers]
    assert isinstance(spec.layers[0].mixer, GatedDeltaSpec)
    assert (spec.dtype, spec.tied_embeddings, spec.ssm_state_dtype) == ("bfloat16", True, "float32")
    assert spec.rope is not None
    assert axes(spec.rope) == [0, 1, 2] * 10 + [0, 1]
    assert spec.vision is not None
    assert spec.vision.hidden_rows == 1
    assert (spec.vision.image_token_id, spec.vision.start_token_id) == (248056, 248053)
    assert spec.num_parameters == text.num_parameters + spec.vision.parameters


def test_sections_are_the_published_ones_where_config_json_names_none() -> None:
    rope = {name: value for name, value in HUB["rope_parameters"].items() if name != "mrope_section"}
    assert model_spec(config({"rope_parameters": rope})).rope == model_spec(config()).rope


def test_experts_are_in_every_layer() -> None:
    spec = model_spec(config(EXPERTS, model_type="qwen3_5_moe"))
    assert {layer.experts.num_experts if layer.experts else None for layer in spec.layers} == {8}
    assert {"moe", "route", "delta_update"} <= set(spec.ops)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(vision={"deepstack_visual_indexes": [5]}), r"deepstack_visual_indexes = \[5\]; supported: none"),
        (config(vision={"out_hidden_size": 2048}), "out_hidden_size = 2048; the text part's hidden_size is 1024"),
        (config({"attn_output_gate": False}), "attn_output_gate = False; supported: true"),
        (config({"rope_parameters": {"mrope_interleaved": False}}), "mrope_interleaved = false; supported: true"),
        ({"model_type": "qwen3_5", "vision_config": VISION}, "no 'text_config'"),
    ],
)
def test_what_the_model_does_not_do_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        model_spec(given)


def test_the_head_is_the_text_model_s() -> None:
    head = model_spec(config({"mtp_num_hidden_layers": 1})).head
    text = model_spec(HUB | {"mtp_num_hidden_layers": 1}).head
    assert head is not None
    assert text is not None
    assert [layer.attention for layer in head.layers] == [layer.attention for layer in text.layers]
    assert head.num_parameters == text.num_parameters
    assert model_spec(config()).head is None
