"""What a config.json and a checkpoint of MiniCPM-V 4.7 say, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.vision_utils import get_vision_nearest_position_ids

from ostinato.errors import ModelError
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, with_smallest_item
from ostinato.models.loader import build_model
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.runner.image_encoder import nearest_taps, patch_positions
from tests.support.vl_models import minicpmv4_7, vl_spec


def config(vision: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    whole = minicpmv4_7().to_dict()
    whole["vision_config"] |= vision or {}
    return whole | changes


def test_a_token_is_sixteen_patches_or_four() -> None:
    full, half = vl_spec("minicpmv4_7").vision, vl_spec("minicpmv4_7_4x").vision
    assert full is not None
    assert half is not None
    assert (full.patches_per_token, full.has_windows) == (16, True)
    assert (half.patches_per_token, half.has_windows) == (4, False)
    assert any("vit_merger" in name for weight in full.weights for name in weight.names)
    assert not any("vit_merger" in name for weight in half.weights for name in weight.names)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_whole_configs_flag_ties_the_embeddings(is_tied: bool) -> None:
    whole = config(tie_word_embeddings=is_tied)
    whole["text_config"]["tie_word_embeddings"] = not is_tied
    assert model_spec(whole).tied_embeddings == is_tied


def test_the_merger_of_windows_is_left_out_of_a_checkpoint_that_does_not_use_it() -> None:
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), vl_spec("minicpmv4_7_4x"))
    assert model.checkpoint_name("model.vision_tower.vit_merger.pre_norm.weight") is None
    assert model.checkpoint_name("model.vision_tower.post_layernorm.weight") is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"downsample_mode": "8x"}, "downsample_mode = '8x'; supported: 16x, 4x"),
        ({"merger_times": 2}, "merger_times = 2; supported: 1"),
        ({"merge_kernel_size": [2, 4]}, r"merge_kernel_size = \[2, 4\]; supported: \[2, 2\]"),
        ({"vision": {"window_kernel_size": [4, 4]}}, r"window_kernel_size = \[4, 4\]; supported: \[2, 2\]"),
        ({"insert_layer_id": 3}, "insert_layer_id = 3 in an encoder of 3 layers; it should be below"),
        ({"insert_layer_id": -1}, "insert_layer_id"),
        ({"vision": {"num_attention_heads": 5}}, "5 heads in an encoder of hidden_size 48"),
        ({"vision": {"image_size": 2}}, "patches be no larger than images"),
        ({"slice_start_id": None}, "slice_start_id"),
    ],
)
def test_encoders_that_are_not_implemented_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_spec(config(**changes))


@pytest.mark.parametrize("side", [7, 14, 28, 32, 70])
def test_a_patch_has_the_position_of_transformers(side: int) -> None:
    for grid in ((4, 8), (12, 20), (32, 32), (28, 40), (4, 68), (side, 2 * side)):
        positions = np.argwhere(np.ones(grid))
        taps, weights = nearest_taps(positions, grid, side)
        expected = get_vision_nearest_position_ids(torch.tensor([grid]), side)
        np.testing.assert_array_equal(taps[:, 0], expected.numpy())
        assert weights.tolist() == [[1, 0, 0, 0]] * len(positions)


def test_patches_of_a_window_are_neighbours() -> None:
    assert patch_positions((4, 8), 4, has_windows=True)[:8].tolist() == [
        *([0, 0], [0, 1], [1, 0], [1, 1]),
        *([0, 2], [0, 3], [1, 2], [1, 3]),
    ]
    assert patch_positions((4, 8), 4, has_windows=True)[16].tolist() == [0, 4]


def test_the_smallest_image_is_that_of_the_processor(tmp_path: Path) -> None:
    vision = model_spec(config({"patch_size": 14, "image_size": 980})).vision
    assert vision is not None
    assert with_smallest_item(vision, tmp_path).smallest_item == 64
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"scale_resolution": 224}))
    assert with_smallest_item(vision, tmp_path).smallest_item == 16
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"scale_resolution": "224"}))
    with pytest.raises(ModelError, match="images of at least '224' pixels"):
        with_smallest_item(vision, tmp_path)
