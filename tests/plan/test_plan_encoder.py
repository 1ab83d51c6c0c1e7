"""The plan of a vision encoder: its graphs, its cache, its part of the memory, and every decision on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, ModelError
from ostinato.models.checkpoint import load_spec, with_smallest_item
from ostinato.ops.operations import ENCODER_OPS
from ostinato.plan.decision import Decision
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.encoder.encoder_plan import EncoderPlan, choose_encoder
from ostinato.plan.encoder.memory import encoder_buffer_bytes, encoder_graph_bytes, encoding_bytes
from ostinato.plan.kernels import KernelChoice
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.render.tables import render_plan
from tests.support.plan_cases import GIB, MIB, VISION, attention_layer, cpu, gpu, mlp_layer, model, with_vision

TEXT = model(attention_layer(), mlp_layer())
IMAGES = with_vision(TEXT)
CELL = 3 * 512 * 2
"""Bytes: the token and two rows of DeepStack, in bfloat16."""


def planned(device: DeviceSpec | None = None, spec: ModelSpec = IMAGES, **settings: Any) -> Plan:
    return make_plan(EngineConfig(**settings), spec, device or cpu(64 * GIB))


def encoder(device: DeviceSpec | None = None, spec: ModelSpec = IMAGES, **settings: Any) -> EncoderPlan:
    plan = planned(device, spec, **settings).encoder
    assert plan is not None
    return plan


def decided(plan: Plan) -> dict[str, Decision]:
    return {decision.topic: decision for decision in plan.decisions}


def shown(plan: Plan) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_plan(plan))
    return " ".join(console.export_text().split())


def test_an_image_whose_tokens_see_each_other_has_room_in_a_step_beside_all_that_decode() -> None:
    assert IMAGES.vision is not None
    spec = replace(IMAGES, vision=replace(IMAGES.vision, is_bidirectional=True))
    limits: dict[str, Any] = {"max_num_seqs": 10, "max_num_batched_tokens": 300, "max_model_len": 512}
    plan = encoder(spec=spec, **limits)
    assert (plan.max_item_tokens, plan.whole_images) == (290, True)
    assert encoder(spec=spec, **limits, speculative="ngram:3").max_item_tokens == 260
    assert (encoder(**limits).max_item_tokens, encoder(**limits).whole_images) == (300, False)
    shown_limit = "max_num_batched_tokens, less the tokens of max_num_seqs"
    assert f"more: refused ({shown_limit})" in shown(planned(spec=spec, **limits))


def test_a_model_of_text_alone_has_no_encoder_and_gives_it_no_memory() -> None:
    plan = planned(spec=TEXT)
    assert plan.encoder is None
    assert plan.to_json()["encoder"] is None
    assert plan.model.vision is None
    assert (plan.memory.encoder_graphs, plan.memory.encoder_cache) == (0, 0)
    assert "encoder" not in shown(plan)


def test_budgets_double_from_the_smallest_image_to_the_largest_that_a_step_encodes() -> None:
    plan = encoder()
    assert plan.token_budgets == (64, 128, 256, 512, 1024)
    assert (plan.max_items_per_batch, plan.max_item_tokens) == (16, 1024)
    assert (plan.graph_mode, plan.backend) == ("auto", "tape")
    assert encoder(gpu(80 * GIB)).token_budgets[-2:] == (2048, 4096)
    assert encoder(gpu(80 * GIB), max_model_len=1000).max_item_tokens == 1000
    assert encoder(max_num_batched_tokens=300).token_budgets == (64, 128, 256, 300)
    smaller = with_vision(TEXT, replace(VISION, smallest_item=9))
    assert encoder(spec=smaller, max_num_batched_tokens=100).token_budgets == (9, 18, 36, 72, 100)


def test_the_sections_of_memory_are_what_the_encoder_s_plan_says() -> None:
    plan = planned()
    assert plan.encoder is not None
    assert (plan.encoder.num_cells, plan.encoder.cell_bytes) == (4 * 1024 + 1, CELL)
    assert plan.memory.encoder_cache == plan.encoder.cache_bytes == (4 * 1024 + 1) * CELL
    assert plan.memory.encoder_graphs == plan.encoder.graph_bytes > 0
    assert plan.memory.activations >= plan.encoder.activation_bytes
    parts = ("weights", "activations", "graphs", "encoder_graphs", "encoder_cache", "cache")
    assert plan.memory.used == sum(getattr(plan.memory, part) for part in parts)


def test_a_step_s_buffers_hold_places_and_cells_of_tokens_too() -> None:
    assert planned().memory.graphs - planned(spec=TEXT).memory.graphs == 1024 * (8 * (3 + 1) + 4)


def test_the_encoder_s_weights_are_among_the_model_s() -> None:
    without, with_encoder = planned(spec=TEXT).memory.weights, planned().memory.weights
    assert with_encoder - without == VISION.parameters * 2


def test_a_plan_with_images_is_read_back_as_it_was_written() -> None:
    plan = planned(gpu(8 * GIB), video_pruning_rate=0.25)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    data = planned().to_json()
    assert data["encoder"]["token_budgets"] == [64, 128, 256, 512, 1024]
    assert data["model"]["vision"] == {
        "parameters": 1_500_000, "layers": 4, "hidden_size": 128, "token_side": 32, "hidden_rows": 3,
        "smallest_item": 64,
    }  # fmt: skip


def test_pruning_turns_graphs_off_and_the_plan_says_so() -> None:
    plan = planned(video_pruning_rate=0.5)
    assert plan.encoder is not None
    assert (plan.encoder.graph_mode, plan.encoder.token_budgets, plan.encoder.graph_bytes) == ("none", (), 0)
    decision = decided(plan)["encoder_graph_mode"]
    assert (decision.requested, decision.effective) == ("auto", "none")
    assert "video_pruning_rate" in decision.reason
    assert "encoder_graph_mode none: with video_pruning_rate" in shown(plan)
    assert "0.5 of a video's tokens are left out" in shown(plan)


@pytest.mark.parametrize(
    ("settings", "mode", "word"),
    [
        ({}, "auto", "timed against eager"),
        ({"encoder_graph_mode": "always"}, "always", "whether or not it is faster"),
        ({"encoder_graph_mode": "none"}, "none", "as given"),
        ({"graph_mode": "none"}, "none", "graph_mode is none"),
        ({"graph_mode": "none", "encoder_graph_mode": "always"}, "always", "as given"),
        ({"graph_mode": "piecewise"}, "auto", "timed"),
    ],
)
def test_the_encoder_has_graphs_where_steps_have_them_or_where_they_are_asked_for(settings, mode, word) -> None:
    plan = planned(**settings)
    assert plan.encoder is not None
    assert (plan.encoder.graph_mode, bool(plan.encoder.token_budgets)) == (mode, mode != "none")
    assert word in plan.encoder.reason
    changed = mode != settings.get("encoder_graph_mode", "auto")
    assert ("encoder_graph_mode" in decided(plan)) == changed


def test_graphs_that_are_always_wanted_and_cannot_be_are_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match="video_pruning_rate") as error:
        planned(encoder_graph_mode="always", video_pruning_rate=0.5)
    remedies = {remedy.setting: remedy.value for remedy in error.value.remedies}
    assert remedies == {"video_pruning_rate": 0.0, "encoder_graph_mode": "auto"}
    for setting, value in remedies.items():
        planned(**{"encoder_graph_mode": "always", "video_pruning_rate": 0.5} | {setting: value})


def test_a_kernel_that_no_graph_can_hold_turns_the_encoder_s_graphs_off() -> None:
    kernels = {op: KernelChoice("reference", "a test", capturable=op != "encoder_attention") for op in IMAGES.ops}
    choice = choose_encoder(EngineConfig(), IMAGES, "bfloat16", kernels, "cuda", 1)
    assert choice is not None
    assert choice.mode == "none"
    assert "backend cuda cannot hold encoder_attention (reference)" in choice.reason
    with pytest.raises(ConfigError, match="always is impossible"):
        choose_encoder(EngineConfig(encoder_graph_mode="always"), IMAGES, "bfloat16", kernels, "cuda", 1)


def test_budgets_above_the_largest_image_are_kept_as_a_decision() -> None:
    plan = planned(encoder_token_budgets=[256, 2048])
    assert plan.encoder is not None
    assert plan.encoder.token_budgets == (256, 2048)
    decision = decided(plan)["encoder_token_budgets"]
    assert (decision.requested, decision.effective) == ([256, 2048], [256, 2048])
    assert "1024 tokens" in decision.reason
    assert "(max_num_batched_tokens)" in decision.reason
    assert plan.encoder.graph_bytes == encoder_graph_bytes(
        VISION, "bfloat16", (256, 2048), 2048, backend="tape", sees_all=False
    )
    assert "encoder_token_budgets" not in decided(planned(encoder_token_budgets=[256, 1024]))


def test_contradicting_budgets_are_refused_with_remedies_that_work() -> None:
    given: dict[str, Any] = {"encoder_token_budgets": [64, 256], "encoder_max_items_per_batch": 100}
    with pytest.raises(ConfigError) as error:
        planned(**given)
    remedies = {remedy.setting: remedy.value for remedy in error.value.remedies}
    assert remedies == {"encoder_max_items_per_batch": 64, "encoder_token_budgets": [256]}
    for setting, value in remedies.items():
        planned(**given | {setting: value})


def test_more_items_than_a_step_has_tokens_are_refused_with_the_most_that_work() -> None:
    with pytest.raises(ConfigError, match="1024") as error:
        planned(encoder_max_items_per_batch=2000)
    assert [(each.setting, each.value) for each in error.value.remedies] == [("encoder_max_items_per_batch", 1024)]
    assert encoder(encoder_max_items_per_batch=1024).token_budgets == (1024,)


@pytest.mark.parametrize(
    ("settings", "cached", "word"),
    [
        ({}, 4 * 1024, "4 of the largest images"),
        ({"cache_memory": 8 * 2048 * CELL}, 2047, "as many as there is room for"),
        ({"cache_memory": 2048 * CELL}, 1024, "one of the largest images"),
    ],
)
def test_the_encoder_cache_holds_one_of_the_largest_images_and_four_where_that_is_little(settings, cached, word):
    plan = planned(**settings, max_model_len=2048)
    assert plan.encoder is not None
    assert plan.encoder.num_cells == cached + 1
    decision = decided(plan)["encoder_cache_tokens"]
    assert (decision.requested, decision.effective) == (None, cached)
    assert word in decision.reason


def test_a_given_cache_is_kept_and_what_it_cannot_hold_is_told() -> None:
    plan = planned(encoder_cache_tokens=900)
    assert plan.encoder is not None
    assert plan.encoder.num_cells == 901
    decision = decided(plan)["max_item_tokens"]
    assert (decision.requested, decision.effective) == (1024, 900)
    assert "encoder_cache_tokens" in decision.reason
    assert "encoder_cache_tokens" not in decided(plan)
    assert "max_item_tokens" not in decided(planned(encoder_cache_tokens=1024))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"max_num_batched_tokens": 50, "max_num_seqs": 1}, "max_num_batched_tokens"),
        ({"max_model_len": 50}, "max_model_len"),
        ({"encoder_cache_tokens": 50}, "encoder_cache_tokens"),
    ],
)
def test_the_plan_says_so_where_not_even_the_smallest_image_is_served(settings, word: str) -> None:
    decision = decided(planned(**settings))["max_item_tokens"]
    assert (decision.requested, decision.effective) == (64, 50)
    assert "no image is served" in decision.reason
    assert word in decision.reason


@pytest.mark.parametrize(
    "settings",
    [
        {"encoder_token_budgets": [64]},
        {"encoder_max_items_per_batch": 4},
        {"encoder_cache_tokens": 100},
        {"encoder_graph_mode": "always"},
        {"video_pruning_rate": 0.5},
        {"allow_remote_images": True},
    ],
)
def test_settings_of_images_are_without_effect_on_a_model_of_text(settings: dict[str, Any]) -> None:
    [(name, value)] = settings.items()
    decision = decided(planned(spec=TEXT, **settings))[name]
    assert (decision.requested, decision.effective) == (value, value)
    assert decision.reason == "without effect: the model takes text alone"


def test_budgets_are_without_effect_where_there_are_no_graphs() -> None:
    decisions = decided(planned(encoder_graph_mode="none", encoder_token_budgets=[64], encoder_max_items_per_batch=2))
    for name in ("encoder_token_budgets", "encoder_max_items_per_batch"):
        assert decisions[name].reason == "without effect: the encoder has no graphs"


def test_a_device_that_is_too_small_for_budgets_or_cache_names_what_would_fit() -> None:
    given: dict[str, Any] = {"encoder_token_budgets": [64, 512, 200_000], "max_model_len": 128}
    with pytest.raises(CapacityError, match=r"the encoder's graphs .*encoder_token_budgets") as error:
        planned(gpu(GIB), **given)
    remedies = {remedy.setting: remedy.value for remedy in error.value.remedies}
    assert remedies["encoder_token_budgets"] == [64, 512]
    assert remedies["encoder_graph_mode"] == "none"
    assert "set encoder_graph_mode to none" in error.value.message
    for setting, value in remedies.items():
        planned(gpu(GIB), **given | {setting: value})

    with pytest.raises(CapacityError, match=r"the encoder's cache .*lower encoder_cache_tokens to at most") as error:
        planned(gpu(GIB), encoder_cache_tokens=10**6)
    most = {remedy.setting: remedy.value for remedy in error.value.remedies}["encoder_cache_tokens"]
    planned(gpu(GIB), encoder_cache_tokens=most)
    with pytest.raises(CapacityError):
        planned(gpu(GIB), encoder_cache_tokens=most + 1)


def test_a_budget_that_does_not_fit_may_be_left_out_where_that_is_enough() -> None:
    given: dict[str, Any] = {"encoder_token_budgets": [200_000], "max_model_len": 128}
    with pytest.raises(CapacityError) as error:
        planned(gpu(GIB), **given)
    remedies = {remedy.setting: remedy.value for remedy in error.value.remedies}
    assert remedies["encoder_token_budgets"] is None
    assert "leave out encoder_token_budgets" in error.value.message
    assert planned(gpu(GIB), **given | {"encoder_token_budgets": None}).encoder is not None


def test_open_limits_are_lowered_until_the_encoder_fits_too() -> None:
    wide = with_vision(TEXT, replace(VISION, hidden_size=1024, intermediate_size=4096))
    plan = planned(gpu(800 * MIB), wide)
    assert plan.encoder is not None
    assert 256 <= plan.settings.max_num_batched_tokens < 4096
    assert plan.encoder.max_item_tokens == plan.settings.max_num_batched_tokens
    assert plan.encoder.token_budgets[-1] == plan.encoder.max_item_tokens
    assert planned(gpu(800 * MIB), TEXT).settings.max_num_batched_tokens == 8192
    reason = decided(plan)["max_num_batched_tokens"].reason
    assert "and the encoder's cache" in reason


def test_items_that_the_lowered_limits_cannot_hold_are_a_capacity_error_that_names_the_most() -> None:
    wide = with_vision(TEXT, replace(VISION, hidden_size=1024, intermediate_size=4096))
    with pytest.raises(CapacityError, match="encoder_max_items_per_batch 4096 is more") as error:
        planned(gpu(800 * MIB), wide, encoder_max_items_per_batch=4096)
    remedies = {remedy.setting: remedy.value for remedy in error.value.remedies}
    assert remedies["encoder_max_items_per_batch"] < 4096
    for setting, value in remedies.items():
        planned(gpu(800 * MIB), wide, **{"encoder_max_items_per_batch": 4096} | {setting: value})


def test_buffers_hold_pixels_taps_and_places_of_each_patch() -> None:
    patch = 4 * 1536 + 4 * 8 + 4 * 4 + 2 * 8
    assert encoder_buffer_bytes(VISION, "float32", tokens=10, items=3) == 40 * patch + 4 * 4


def test_encoding_takes_more_with_references_and_a_mask_over_all_patches() -> None:
    native = [*ENCODER_OPS]
    sizes = {
        name: encoding_bytes(VISION, "bfloat16", 1000, threads=1, **settings)
        for name, settings in {
            "native": {"native": native, "sees_all": False},
            "references": {"native": (), "sees_all": False},
            "masked": {"native": (), "sees_all": True},
        }.items()
    }
    assert sizes["native"] < sizes["references"] < sizes["masked"]
    assert sizes["masked"] - sizes["references"] == 5 * 4000**2


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({}, 64),
        ({"preprocessor_config.json": {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}}, 64),
        ({"preprocessor_config.json": {"min_pixels": 3136}}, 4),
        ({"preprocessor_config.json": {"size": {"shortest_edge": 1025}}}, 2),
        ({"preprocessor_config.json": {"patch_size": 16}}, 64),
        ({"processor_config.json": {"image_processor": {"size": {"shortest_edge": 4096}}}}, 4),
        ({"processor_config.json": {}, "preprocessor_config.json": {"min_pixels": 10_240}}, 10),
    ],
)
def test_the_smallest_image_is_as_the_image_processor_makes_it(tmp_path: Path, files, tokens: int) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert with_smallest_item(VISION, tmp_path).smallest_item == tokens


@pytest.mark.parametrize("pixels", [-1, 2.5, True, "many", [1]])
def test_a_smallest_image_of_no_size_is_refused(tmp_path: Path, pixels: object) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": pixels}))
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        with_smallest_item(VISION, tmp_path)


def test_the_tables_say_which_images_each_budget_serves_and_what_is_refused() -> None:
    words = shown(planned())
    assert "encoder 4 layers, hidden 128, 1,500,000 parameters; a token for 32 x 32 pixels" in words
    assert "encoder_graph_mode auto: after capture each budget's graph is timed" in words
    assert "budgets, tokens 64, 128, 256, 512, 1024" in words
    assert "images in one graph at most 16" in words
    assert "64 tokens, 256 x 256 pixels: budget 64 128 tokens, 352 x 352 pixels: budget 128 256 tokens" in words
    assert "1024 tokens, 1024 x 1024 pixels: budget 1024 more: refused (max_num_batched_tokens)" in words
    assert "cache 4,096 tokens of 3 KiB, 12 MiB in all" in words
    assert "encoder graphs" in words
    assert "encoder cache" in words


def test_the_tables_say_which_images_run_eagerly_and_what_would_cover_them() -> None:
    words = shown(planned(encoder_token_budgets=[64, 256], encoder_cache_tokens=900))
    assert "900 tokens, 960 x 960 pixels: eager, alone; encoder_token_budgets 64, 256, 900 would cover them" in words
    assert "more: refused (encoder_cache_tokens)" in words
    without = shown(planned(encoder_graph_mode="none"))
    assert "an image of up to 1024 tokens, 1024 x 1024 pixels: eager, alone more: refused" in without


@pytest.mark.parametrize("name", ["qwen3-vl-2b", "qwen3-vl-300m"])
@pytest.mark.parametrize("device", [cpu(64 * GIB), gpu(24 * GIB)])
def test_the_models_of_the_benchmarks_have_a_plan_with_an_encoder(name: str, device: DeviceSpec) -> None:
    config = EngineConfig(model=str(Path(__file__).parents[2] / "benchmarks/models" / name))
    plan = make_plan(config, load_spec(config), device)
    assert plan.encoder is not None
    assert plan.encoder.token_budgets[0] == 64
    assert plan.encoder.graph_mode == "auto"
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert "encoder cache" in shown(plan)
