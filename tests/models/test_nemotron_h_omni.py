"""What a config.json and a checkpoint of Nemotron 3 Nano Omni say, and what is refused of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.errors import ModelError
from ostinato.formats.mapped_files import SINGLE
from ostinato.layers.allocation import WeightAllocator
from ostinato.media.media_item import MediaItem
from ostinato.media.media_prompt import media_prompt, placeholders
from ostinato.models.checkpoint import model_spec, with_smallest_item
from ostinato.models.loader import build_model, load_weights
from ostinato.models.nemotron_h_omni.spec import NO_IMAGES, SOUNDS
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.layer_specs import VisionSpec
from tests.support.media_cases import IMAGE, encode, tokenizer, vision_spec
from tests.support.vl_models import nemotron_h_omni, vl_checkpoint, vl_spec

GATED = "nemotron_h_omni_gated"


def config(**changes: Any) -> dict[str, Any]:
    return nemotron_h_omni().to_dict() | changes


def vision_of(given: dict[str, Any]) -> VisionSpec:
    vision = model_spec(given).vision
    assert vision is not None
    return vision


def test_names_of_released_checkpoints_mean_the_same() -> None:
    released = config(audio_config={"hidden_size": 8})
    current = model_spec(released)
    names = {"text_config": "llm_config", "image_token_id": "img_context_token_id", "audio_config": "sound_config"}
    for name, old in {**names, "vision_hidden_size": "vit_hidden_size"}.items():
        released[old] = released.pop(name)
    assert model_spec(released) == current
    assert model_spec(released | {"vision_hidden_size": 1280}) == current  # a default, which is no statement
    assert current.left_out == SOUNDS
    assert model_spec(config()).left_out is None


def test_the_encoder_of_an_empty_vision_config_is_the_published_one() -> None:
    vision = vision_of(config(vision_config={}, vision_hidden_size=1280))
    assert (vision.hidden_size, vision.num_layers, vision.num_heads, vision.intermediate_size) == (1280, 32, 16, 5120)
    assert (vision.num_positions, vision.num_prefix, vision.prefix_tokens, vision.patch_elements) == (16384, 10, 3, 768)
    # 653 million, of which 21 million are positions; and the projector to 64.
    assert (
        vision.parameters
        == 32 * (12 * 1280**2 + 13 * 1280 + 2 * 1280) + 1280 * (768 + 16384 + 10) + 100 * (5120 + 64) + 5120
    )


def test_without_a_token_of_images_the_text_is_served_and_the_plan_says_so() -> None:
    spec = model_spec(config(image_token_id=None))
    assert (spec.vision, spec.left_out) == (None, NO_IMAGES)
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    load_weights(model, vl_checkpoint("nemotron_h_omni"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"downsample_ratio": 0.25}, "downsample_ratio = 0.25; supported: 0.5"),
        ({"vision_hidden_size": 64}, "vision_hidden_size = 64; its encoder's hidden_size is 48"),
        ({"vision_config": {"hidden_size": 48, "num_attention_heads": 5}}, "5 heads in an encoder of hidden_size 48"),
        (
            {"vision_config": {"hidden_size": 48, "hidden_act": "tanh"}},
            "supported: gelu, gelu_pytorch_tanh, silu, relu2",
        ),
        ({"vision_config": {"hidden_size": 48, "max_img_size": 2**22}}, "max_img_size at most 2,048 patches"),
        ({"vision_config": {"hidden_size": 48, "num_cls_tokens": 0}}, "num_cls_tokens = 0; none should be 0"),
        ({"vision_config": {"hidden_size": 48, "mlp_ratio": 0.0}}, "mlp_ratio = 0.0"),
    ],
)
def test_encoders_that_are_not_implemented_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_spec(config(**changes))


def test_scales_and_a_norm_that_a_checkpoint_leaves_out_have_the_values_of_transformers(tmp_path: Path) -> None:
    """Released checkpoints have no scales, and none has the norm. Of other tensors none may be left out."""
    shutil.copytree(vl_checkpoint(GATED), tmp_path / "less")
    stored = json.loads((tmp_path / "less" / "config.json").read_text())
    stored["vision_config"]["layerscale_value"] = 0.5
    file = tmp_path / "less" / SINGLE
    tensors = {
        name: tensor
        for name, tensor in load_file(file).items()
        if "layer_scale" not in name and "vision_final_layernorm" not in name
    }
    save_file(tensors, file, metadata={"format": "pt"})
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), model_spec(stored))
    load_weights(model, tmp_path / "less")
    weights = dict(model.named_parameters())
    scales = [weight for name, weight in weights.items() if name.endswith("lambda1")]
    assert len(scales) == 4
    assert all(torch.equal(scale, torch.full((48,), 0.5)) for scale in scales)
    assert weights["vision_final_layernorm.weight"].eq(1).all()
    assert weights["vision_final_layernorm.bias"].eq(0).all()
    tensors.pop("mlp1.0.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing \(1\): mlp1\.0\.weight"):
        load_weights(model, tmp_path / "less")


def test_tensors_of_sounds_and_videos_are_left_out() -> None:
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), vl_spec(GATED))
    radio = "vision_model.radio_model"
    for name in ("sound_encoder.encoder.a", "sound_projection.norm.weight", f"{radio}.input_conditioner.norm_mean"):
        assert model.checkpoint_name(name) is None
    for name in (f"{radio}.summary_idxs", f"{radio}.model.patch_generator.video_embedder.weight"):
        assert model.checkpoint_name(name) is None
    assert model.checkpoint_name(f"{radio}.model.blocks.0.norm1.weight") is not None


def test_an_image_has_the_text_of_transformers_processor_around_it() -> None:
    vision = vision_spec(places="enclosed", video_token_id=None, start_token_id=None, end_token_id=None)
    vision = VisionSpec(**{**vars(vision), "enclosing": vl_spec(GATED).vision.enclosing})  # type: ignore[union-attr]
    own = placeholders(tokenizer().token_text, encode, vision)
    image = MediaItem(torch.zeros(24, 1).numpy(), (4, 6), 6, "an image")
    found = media_prompt(f"a{IMAGE}b", [image], own, encode, vision)
    assert found.token_ids == encode(f"a<img>{IMAGE * 6}</img>b")


def test_the_smallest_image_is_that_of_the_processor(tmp_path: Path) -> None:
    vision = vision_of(config(vision_config={}, vision_hidden_size=1280))
    assert with_smallest_item(vision, tmp_path).smallest_item == 256
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_num_patches": 64}))
    assert with_smallest_item(vision, tmp_path).smallest_item == 16
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_num_patches": "64"}))
    with pytest.raises(ModelError, match="images of at least '64' pixels"):
        with_smallest_item(vision, tmp_path)
