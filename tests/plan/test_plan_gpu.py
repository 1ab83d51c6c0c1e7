"""Plans for GPUs that need not be here: full graphs of every shape, their kernels' launches, and the time of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ostinato import EngineConfig
from ostinato.models.checkpoint import load_spec
from ostinato.ops import scratch
from ostinato.ops.operations import OPERATIONS
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.kernels import choose_kernels
from ostinato.plan.launches import LAUNCH_SECONDS, launches_of, with_launches
from ostinato.plan.layer_specs import IndexerSpec
from ostinato.plan.memory.activations import LARGE_SEGMENT, SMALL_SEGMENT, pool_bytes, workspace_bytes
from ostinato.plan.model import DrafterSpec, ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.render.tables import print_plan, render_launches
from ostinato.plan.rope import RopeSpec
from ostinato.units import MiB
from tests.support.plan_cases import ATTENTION, attention_layer, model
from tests.support.recipes import RECIPES
from tests.support.vl_models import VL_RECIPES

MODELS = sorted(path.name for path in Path("benchmarks/models").iterdir())
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@cache
def spec_of(name: str) -> Any:
    return load_spec(EngineConfig(model=f"benchmarks/models/{name}"))


def plan_for(name: str, device: str = "h100-80gb", **settings: Any) -> Plan:
    config = EngineConfig(model=f"benchmarks/models/{name}", **settings)
    return make_plan(config, spec_of(name), CATALOGUE[device])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("speculative", [None, DRAFTS])
def test_every_shape_has_full_graphs_piecewise_ones_and_those_of_its_encoder(name: str, speculative: Any) -> None:
    plan = plan_for(name, speculative=speculative)
    capture = plan.capture
    assert capture.graph_mode == "full_and_piecewise"
    assert "graph_mode" not in {decision.topic for decision in plan.decisions}
    assert {entry.mode for entry in capture.coverage.decode} == {"full"}
    assert capture.tokens_per_row[-1] == (1 if speculative is None else 4)
    assert capture.tokens
    assert "moe" not in capture.splits
    for op, choice in plan.kernels.items():
        assert choice.implementation == "triton", op
        assert choice.capturable
    if plan.encoder is not None:
        assert (plan.encoder.graph_mode, plan.encoder.backend) == ("auto", "cuda")
        assert plan.encoder.token_budgets


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_of_a_plan_shows_its_launches(name: str) -> None:
    for op, choice in plan_for(name).kernels.items():
        assert OPERATIONS[op].triton is not None
        assert choice.launches, op
        assert choice.launches_per_call >= 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*RECIPES, *VL_RECIPES])
def test_every_recipe_has_a_plan_for_every_device_of_the_catalogue(recipe: str, tmp_path: Path) -> None:
    {**RECIPES, **VL_RECIPES}[recipe]().save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), max_num_seqs=4, max_model_len=256, dtype="bfloat16")
    spec = load_spec(config)
    for device in CATALOGUE.values():
        plan = make_plan(config, spec, device)
        assert Plan.from_json(plan.to_json()) == plan
        assert set(plan.kernels) >= set(spec.ops)


def test_an_indexer_has_launches_of_its_own() -> None:
    attention = replace(ATTENTION, indexer=IndexerSpec(num_heads=3, head_dim=32, budget=64, ratio=16))
    spec = model(attention_layer(attention), rope=RopeSpec("default", 1e4, 16, 64, {}))
    kernels = choose_kernels(replace(spec, ops=("rotary", "rotate")), CATALOGUE["h100-80gb"])
    sizes = {"dtype": "bfloat16", "capability": 90, "max_model_len": 64, "block_size": 16}
    planned = with_launches(kernels, spec, [(1, 1)], **sizes)
    rotated = {
        op: [(launch.blocks["HEAD_DIM"], launch.blocks["HALF"]) for launch in planned[op].launches]
        for op in ("rotary", "rotate")
    }
    assert rotated == {"rotary": [(ATTENTION.head_dim, 8), (32, 0)], "rotate": [(32, 8)]}


def test_each_layer_is_launched_with_its_own_rotary_embedding_and_a_draft_model_with_its_own() -> None:
    def halves(spec: ModelSpec) -> list[int]:
        kernels = choose_kernels(replace(spec, ops=("rotary",)), CATALOGUE["h100-80gb"])
        sizes = {"dtype": "bfloat16", "capability": 90, "max_model_len": 64, "block_size": 16}
        launches = with_launches(kernels, spec, [(1, 1)], **sizes)["rotary"].launches
        return [launch.blocks["HALF"] for launch in launches]

    whole, half, quarter = (RopeSpec("default", 1e4, ATTENTION.head_dim // part, 64, {}) for part in (1, 2, 4))
    layers = [attention_layer(replace(ATTENTION, rope=rope)) for rope in (0, 1)]
    draft = model(*layers, rope=half)
    draft = replace(draft, other_ropes=(quarter,))
    target = model(layers[0], rope=whole)
    width = ATTENTION.head_dim // 2
    assert (halves(target), halves(draft)) == ([width], [width // 2, width // 4])
    drafter = DrafterSpec("draft", draft.layers, model=draft)
    assert halves(replace(target, drafter=drafter)) == [width, width // 2, width // 4]


@pytest.mark.parametrize("name", ["qwen3-5-300m", "qwen3-5-moe-450m"])
def test_prompts_of_delta_nets_are_counted_with_both_launches_and_their_scratch(name: str) -> None:
    plan, spec = plan_for(name), spec_of(name)
    assert [launch.kernel for launch in plan.kernels["delta_scan"].launches] == [
        "delta_chunk_kernel",
        "delta_scan_kernel",
    ]
    assert plan.kernels["delta_scan"].launches_per_call == 2
    decode, prompt = (step for step in plan.prediction.steps if step.rows == 1)
    nets = sum(layer.mixer is not None for layer in spec.layers)
    assert decode.launches is not None
    assert prompt.launches == decode.launches + nets
    limits = plan.settings
    size = {"tokens": limits.max_num_batched_tokens, "rows": limits.max_num_seqs}
    needed = scratch.triton_delta_scan(**size, num_heads=16, key_dim=128, value_dim=128, per_channel=False)
    assert plan.memory.activations > needed.shared > size["tokens"] * 16 * 4 * (4 * 128 + 16)


def test_full_graphs_alone_can_be_asked_for() -> None:
    plan = plan_for("qwen3-410m", graph_mode="full_decode_only")
    assert plan.capture.rows
    assert not plan.capture.tokens


def test_capture_is_planned_in_time_by_what_is_launched() -> None:
    plan = plan_for("nemotron-h-300m")
    time = plan.capture.time
    assert time is not None
    whole = launches_of(spec_of("nemotron-h-300m").calls, plan.kernels)
    kept = launches_of(spec_of("nemotron-h-300m").calls, plan.kernels, plan.capture.splits)
    rows, tokens = len(plan.capture.rows), len(plan.capture.tokens)
    assert time.graphs == rows + tokens
    assert time.launches == rows * whole + tokens * kept
    assert kept < whole
    assert time.source.startswith("an estimate")
    drafted = plan_for("nemotron-h-300m", speculative=DRAFTS).capture.time
    assert drafted is not None
    assert drafted.seconds > time.seconds
    assert plan_for("nemotron-h-300m", graph_mode="none").capture.time is None


def test_a_step_is_predicted_at_five_numbers_of_rows_and_for_a_prompt() -> None:
    steps = plan_for("nemotron-h-300m").prediction.steps
    assert [step.rows for step in steps] == [1, 8, 32, 128, 256, 1]
    assert [step.tokens_per_row for step in steps] == [1, 1, 1, 1, 1, 512]
    for step in steps:
        assert step.launches is not None
        assert step.eager_seconds == max(step.seconds, step.launches * LAUNCH_SECONDS)
    bytes_of_one = steps[0].seconds * CATALOGUE["h100-80gb"].bandwidth
    assert bytes_of_one == pytest.approx(plan_for("nemotron-h-300m").memory.weights, rel=0.2)


def test_the_plan_names_floors_estimates_and_launches() -> None:
    console = Console(width=250)
    plan = plan_for("nemotron-h-300m")
    with console.capture() as capture:
        print_plan(plan, console)
        console.print(render_launches(plan))
    text = capture.get()
    for words in ("at least", "tokens/s at the most", "which is an estimate", "capture takes", "state_update_kernel"):
        assert words in text


def test_a_pool_of_graphs_has_torchs_pieces_beside_its_tensors() -> None:
    assert pool_bytes(0) == 0
    assert pool_bytes(400) == 500 + SMALL_SEGMENT + LARGE_SEGMENT
    assert workspace_bytes(90, streams=2) == 128 * MiB
    assert workspace_bytes(80, streams=1) < 16 * MiB


def test_a_plan_with_launches_comes_back_from_json(tmp_path: Path) -> None:
    plan = plan_for("falcon-h1-170m")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
