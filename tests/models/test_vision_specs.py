"""What a config.json of a model with an encoder of images says, and what is refused of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from ostinato import EngineConfig
from ostinato.errors import ConfigError, ModelError
from ostinato.json_io import from_plain
from ostinato.models.checkpoint import model_spec
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.plan import make_plan
from ostinato.plan.rope import RopeSpec, axes
from ostinato.plan.speculation import with_drafter
from tests.support.plan_cases import GIB, cpu

TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
    "rope_theta": 5000000,
    "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    "tie_word_embeddings": True,
}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 2560,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "decoder_sparse_step": 3}


def config(text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """As published Qwen3-VL-4B has it."""
    return {
        "model_type": "qwen3_vl",
        "text_config": TEXT | (text or {}),
        "vision_config": VISION | (vision or {}),
        "tie_word_embeddings": True,
        **given,
    }


def moe(**text: Any) -> dict[str, Any]:
    return config(EXPERTS | text, model_type="qwen3_vl_moe")


def test_the_published_model_has_the_parameters_that_its_page_says() -> None:
    spec = model_spec(config())
    assert spec.num_parameters == 4_437_815_808
    assert spec.weight_bytes("bfloat16") == 2 * spec.num_parameters
    assert spec.vision is not None
    assert (spec.vision.hidden_rows, spec.vision.patch_elements, spec.vision.patches_per_token) == (4, 1536, 4)
    assert (spec.dtype, spec.tied_embeddings, spec.max_position_embeddings) == ("bfloat16", True, 262144)
    assert next(iter(spec.linears)).linears[0] == "model.language_model.layers.0.self_attn.q_proj"


def test_time_height_and_width_take_turns() -> None:
    """From angle 60 on height and width have theirs, and the rest is time's."""
    rope = model_spec(config()).rope
    assert rope is not None
    assert rope.theta == 5000000
    assert axes(rope) == [0, 1, 2] * 20 + [0] * 4
    shorter = model_spec(config({"rope_scaling": {"mrope_section": [44, 8, 12]}})).rope
    assert shorter is not None
    assert [axes(shorter).count(axis) for axis in range(3)] == [44, 8, 12]
    assert from_plain(RopeSpec, {**vars(rope), "sections": [24, 20, 20]}) == rope


def test_tied_embeddings_are_the_whole_model_s_word_and_not_the_text_part_s() -> None:
    whole = config({"tie_word_embeddings": False})
    assert model_spec(whole).tied_embeddings
    assert not model_spec(config(tie_word_embeddings=False)).tied_embeddings
    assert not model_spec(config(tie_word_embeddings=None)).tied_embeddings
    # transformers does not write its default, but what a text part has otherwise.
    del whole["tie_word_embeddings"]
    assert not model_spec(whole | {"text_config": TEXT}).tied_embeddings


def test_experts_are_in_every_third_layer_but_for_those_that_are_named() -> None:
    spec = model_spec(moe(num_hidden_layers=12, mlp_only_layers=[5]))
    assert [i for i, layer in enumerate(spec.layers) if layer.experts is not None] == [2, 8, 11]
    assert {(experts.num_experts, experts.top_k) for layer in spec.layers if (experts := layer.experts)} == {(8, 2)}
    assert {"moe", "route"} <= set(spec.ops)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(vision={"num_position_embeddings": 0}), "embeddings = 0, which should be a whole number of at least 1"),
        (config(vision={"out_hidden_size": 2048}), "out_hidden_size = 2048; the text part's hidden_size is 2560"),
        (config(vision={"num_heads": 15}), "15 heads in an encoder of hidden_size 1024"),
        (config(vision={"num_heads": 512}), "should be a multiple of 4"),
        (config(vision={"deepstack_visual_indexes": [5, 24]}), r"\[5, 24\].*0 to 23"),
        (config(vision={"deepstack_visual_indexes": [11, 5]}), "ascending"),
        (config({"num_hidden_layers": 2}), "no more than the text part's 2"),
        (config(vision={"hidden_act": "relu"}), "'relu'; supported: gelu_pytorch_tanh, gelu"),
        (config(vision={"rope_parameters": {"rope_type": "linear"}}), "'linear' for the encoder; supported: axial"),
        (config({"rope_scaling": {"mrope_section": [24, 40]}}), "three whole numbers"),
        (config({"rope_scaling": {"mrope_interleaved": False}}), "mrope_interleaved = false; supported: true"),
        ({"model_type": "qwen3_vl", "vision_config": VISION}, "no 'text_config'"),
        (moe(norm_topk_prob=False), "norm_topk_prob = False; supported: true"),
        (moe(num_experts_per_tok=9), "num_experts_per_tok = 9, which should be 1 to 8"),
        (moe(decoder_sparse_step=0), "decoder_sparse_step = 0"),
    ],
)
def test_what_the_model_does_not_do_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        model_spec(given)


GEMMA4 = {
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "text_config": {
        "vocab_size": 262_144,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {"hidden_size": 768, "num_attention_heads": 12},
}


def gemma4(vision: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """Sizes like those of Gemma 4, with an encoder of its default sizes."""
    return GEMMA4 | {"vision_config": {**GEMMA4["vision_config"], **(vision or {})}} | given


def test_gemma4_is_planned_with_its_encoder_from_its_config_alone() -> None:
    spec = model_spec(gemma4())
    assert spec.vision is not None
    theirs = transformers.Gemma4VisionConfig(**GEMMA4["vision_config"])
    with torch.device("meta"):
        tower = transformers.AutoModel.from_config(theirs)
    # The projection beside the tower has as many weights as it has inputs and outputs.
    assert spec.vision.parameters == tower.num_parameters() + 768 * 2560
    sees = {layer.attention.window: layer.attention.sees_ahead for layer in spec.layers if layer.attention}
    assert sees == {512: True, None: False}
    plan = make_plan(EngineConfig(), spec, cpu(64 * GIB))
    assert plan.encoder is not None
    assert plan.encoder.whole_images
    # A step has room for one image beside 32 requests that decode.
    assert plan.encoder.max_item_tokens == 1024 - 32


def test_what_of_gemma4_is_not_run_is_said() -> None:
    cases = [
        ({}, None, True),
        ({"audio_config": {}}, "the encoder of sounds is not run", True),
        ({"vision_config": None, "audio_config": {}}, "the encoder of sounds is not run", False),
    ]
    for changes, words, sees in cases:
        spec = model_spec(gemma4(**changes))
        assert (spec.vision is not None) == sees
        assert (words or "") in (spec.left_out or "")
        assert (spec.left_out is None) == (words is None)
    plan = make_plan(EngineConfig(), model_spec(gemma4(audio_config={})), cpu(64 * GIB))
    [decision] = [each for each in plan.decisions if each.topic == "model"]
    assert decision.effective == "its text and images"


@pytest.mark.parametrize(
    ("vision", "expected"),
    [
        ({"num_key_value_heads": 6}, "12 heads of 64, 6 of keys; supported: as many of keys"),
        ({"head_dim": 32}, "12 heads of 32, 12 of keys"),
        ({"hidden_activation": "gelu"}, "'gelu'; supported: gelu_pytorch_tanh"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' for the encoder; supported: axial, default"),
        ({"attention_bias": True}, "attention_bias = True; supported: false"),
    ],
)
def test_what_the_encoder_of_gemma4_does_not_do_is_refused(vision: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        model_spec(gemma4(vision))


UNIFIED = {
    "model_type": "gemma4_unified",
    "dtype": "bfloat16",
    "text_config": {
        "vocab_size": 262_144,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    },
    "vision_config": {},
}
"""Sizes like those of Gemma 4 12B."""


def test_gemma4_unified_has_the_parameters_of_transformers() -> None:
    spec = model_spec(UNIFIED)
    assert spec.vision is not None
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**UNIFIED))
    assert spec.num_parameters == theirs.num_parameters() + 48  # the numbers that layers multiply by
    sees = {layer.attention.window: layer.attention.sees_ahead for layer in spec.layers if layer.attention}
    assert sees == {1024: True, None: False}
    assert (spec.max_position_embeddings, spec.vision.token_side, spec.vision.video_token_id) == (262_144, 48, 258_884)
    causal = model_spec(UNIFIED | {"text_config": UNIFIED["text_config"] | {"use_bidirectional_attention": None}})
    assert not any(layer.attention.sees_ahead for layer in causal.layers if layer.attention)


@pytest.mark.parametrize("device", ["cpu", *CATALOGUE])
def test_gemma4_unified_is_planned_on_every_device(device: str) -> None:
    """Of which some have no room for 16 bits."""
    on = cpu(64 * GIB) if device == "cpu" else CATALOGUE[device]
    plan = make_plan(EngineConfig(quantization="int8"), model_spec(UNIFIED), on)
    assert plan.encoder is not None
    assert plan.encoder.whole_images
    assert plan.encoder.graph_mode != "none"
    assert plan.encoder.max_item_tokens >= 224


@pytest.mark.parametrize(
    ("vision", "expected"),
    [
        ({"output_proj_dims": 64}, "mm_embed_dim = 3840, output_proj_dims = 64, .* the first two and "),
        ({"mm_posemb_size": 0}, "mm_posemb_size = 0; .* all above 0"),
        ({"patch_size": 0}, "patch_size times pooling_kernel_size = 0"),
        ({"model_patch_size": 16}, "patch_size times pooling_kernel_size = 48, model_patch_size = 16"),
    ],
)
def test_what_the_embedder_of_gemma4_unified_does_not_do_is_refused(vision: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        model_spec(UNIFIED | {"vision_config": vision})


def test_without_a_token_of_videos_gemma4_takes_none() -> None:
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({}, 258_884),
        ({"video_token_id": None}, None),
        ({"video_token_id": 262_144}, None),
        ({"video_token_id": 9}, 9),
    ]
    for changes, token_id in cases:
        for config in (gemma4(**changes), UNIFIED | changes):
            vision = model_spec(config).vision
            assert vision is not None
            assert vision.video_token_id == token_id


def test_sounds_of_gemma4_unified_are_not_run_and_it_says_so() -> None:
    spec = model_spec(UNIFIED | {"audio_config": {}, "vision_config": None})
    assert "the encoder of sounds is not run" in (spec.left_out or "")
    assert spec.vision is None
    assert model_spec(UNIFIED).left_out is None


def test_words_of_gemma4_that_gemma4_unified_does_not_know_mean_nothing() -> None:
    """As in transformers."""
    text = UNIFIED["text_config"] | {"hidden_size_per_layer_input": 256, "enable_moe_block": True, "num_experts": 8}
    assert model_spec(UNIFIED | {"text_config": text}) == model_spec(UNIFIED)


def test_a_draft_model_with_an_encoder_is_refused() -> None:
    spec = model_spec(config())
    with pytest.raises(ConfigError, match="give one of text alone"):
        with_drafter(EngineConfig(speculative="draft:small:2"), spec, spec)
