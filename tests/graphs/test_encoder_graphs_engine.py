"""The encoder's graphs in an engine: captured at start-up or when first used, timed, and within the planned memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from ostinato import CapacityError, EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.runner.model_runner import ModelRunner
from tests.support.vision_parity import make_prompt
from tests.support.vl_models import random_items, vl_checkpoint

BUDGETS = (4, 16, 40)


def engine_of(**settings: Any) -> EngineCore:
    small = {"threads": 1, "dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, "cache_memory": "16MiB"}
    sizes = {"capture_sizes": (8,), "capture_rows": (2,), "encoder_token_budgets": BUDGETS}
    return EngineCore(EngineConfig(model=str(vl_checkpoint("qwen3_vl")), **small | sizes | settings))


def test_start_up_times_every_budget_and_the_plan_says_what_was_measured_for_which_decision() -> None:
    engine = engine_of()
    measured = engine.plan.measured["encoder"]
    assert measured["decides"] == "encoder_graph_mode"
    assert [one["budget"] for one in measured["timed"]] == list(BUDGETS)
    for one in measured["timed"]:
        assert one["graph_seconds"] > 0 < one["eager_seconds"]
        assert one["runs"] == ("eager" if one["graph_seconds"] > one["eager_seconds"] else "graph")
    assert measured["captured"] == 3
    assert 0 < measured["observed_bytes"] <= measured["planned_bytes"] == engine.plan.encoder.graph_bytes
    assert json.loads(json.dumps(engine.plan.to_json()))["measured"]["encoder"] == measured


def test_left_to_their_first_use_they_are_captured_and_timed_then() -> None:
    engine = engine_of(capture="lazy")
    assert "encoder" not in engine.plan.measured
    assert engine.stats()["encoder"]["graphs"]["captured"] == 0
    with torch.inference_mode():
        engine.runner.encoder_graphs.run(random_items("qwen3_vl", [(4, 6)], seed=1))
    graphs = engine.stats()["encoder"]["graphs"]
    assert graphs["captured"] == 1
    assert [one["budget"] for one in graphs["timed"]] == [16]


def test_a_budget_above_the_largest_image_is_for_the_images_of_several_requests() -> None:
    engine = engine_of(
        encoder_graph_mode="always", encoder_token_budgets=(32, 64, 128), encoder_max_items_per_batch=8,
        max_model_len=64, max_num_batched_tokens=256,
    )  # fmt: skip
    assert engine.plan.encoder is not None
    assert engine.plan.encoder.max_item_tokens == 64
    images = ((8, 8), (8, 8))
    for seed in range(4):
        prompt = make_prompt("qwen3_vl", (3, ("image", images, seed), 5), seed)
        engine.add_request(prompt.token_ids, SamplingParams(temperature=0, max_tokens=2), media=prompt)
    while engine.has_unfinished:
        engine.step()
    [used] = engine.stats()["encoder"]["graphs"]["budgets"]
    assert (used["budget"], used["packs"], used["items"], used["padding"]) == (128, 1, 8, 0)


def test_nothing_is_captured_for_none() -> None:
    engine = engine_of(encoder_graph_mode="none")
    graphs = engine.stats()["encoder"]["graphs"]
    assert graphs["captured"] == graphs["observed_bytes"] == graphs["planned_bytes"] == 0
    assert "encoder" not in engine.plan.measured


def test_graphs_that_take_more_than_was_planned_are_an_error() -> None:
    engine = engine_of(capture="lazy")
    plan = replace(engine.plan, encoder=replace(engine.plan.encoder, graph_bytes=1000), measured={})
    runner = ModelRunner(plan, engine.spec, engine.directory)
    with pytest.raises(CapacityError, match=r"the encoder's graphs take \d+ bytes, and 1000 were planned") as caught:
        runner.capture()
    assert [(remedy.setting, remedy.value) for remedy in caught.value.remedies] == [("encoder_graph_mode", "none")]
