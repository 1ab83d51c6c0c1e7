"""What encoding images asks torch for: no more than the plan counts, in every encoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model
from ostinato.ops.arrays import TorchArrays
from ostinato.plan.encoder.memory import encoder_peak_bytes
from tests.support.allocations import peak_bytes
from tests.support.vl_models import VL_RECIPES, encoder_inputs, ops_of, random_items


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("name", VL_RECIPES)
def test_an_encoder_holds_no_more_at_once_than_the_plan_counts(name: str, kernels: str, tmp_path: Path) -> None:
    """Its MLP is as wide as real ones, so that its intermediate results may be the most."""
    config = VL_RECIPES[name]().to_dict()
    vision = config["vision_config"]
    if "hidden_size" in vision:  # not without an encoder
        vision["intermediate_size"] = 5 * vision["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = model_spec(read_config(tmp_path))
    model = build_model(WeightAllocator(ops_of(name, kernels), TorchArrays("cpu"), "float32"), spec)
    assert spec.vision is not None
    items = random_items(name, [(16, 16)], seed=0)
    inputs = encoder_inputs(items, spec.vision)
    with torch.inference_mode():
        for weight in model.parameters():
            weight.zero_()
        peak = peak_bytes(lambda: model.encode(inputs))
    planned = encoder_peak_bytes(spec.vision, "float32", items[0].num_tokens, widens=kernels == "reference")
    assert planned / 4 < peak <= planned
