"""The plan's graphs: which there are on which device, what they take, and what every batch will run as."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError
from ostinato.plan.graphs.capture_plan import choose_capture
from ostinato.plan.graphs.capture_sizes import LadderSettings, make_capture_sizes
from ostinato.plan.graphs.coverage import FULL_MODES, PIECEWISE_MODES, dispatch
from ostinato.plan.limits import Limits
from ostinato.plan.memory.graph_memory import Capture, LargestGraphs, arena_bytes, buffer_bytes, graph_bytes
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from tests.support.plan_cases import (
    CUDA_GRAPHS,
    GIB,
    MAMBA2,
    MIB,
    TAPES,
    attention_layer,
    cpu,
    gpu,
    hybrid,
    mamba2_layer,
    mlp_layer,
    model,
)

MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
STATE_OPS = ("causal_conv1d", "ssd_scan", "state_update")


def test_graphs_are_captured_when_first_needed_where_a_capture_is_cheap_unless_the_user_says_when() -> None:
    def chosen(device: Any, **asked: Any) -> str:
        return make_plan(EngineConfig(**asked), hybrid(), device).settings.capture

    assert (chosen(cpu(64 * GIB)), chosen(gpu(80 * GIB))) == ("lazy", "startup")
    for asked in ("lazy", "startup"):
        assert chosen(cpu(64 * GIB), capture=asked) == chosen(gpu(80 * GIB), capture=asked) == asked
    with_encoder = choose_capture(EngineConfig(), "tape", has_encoder=True)
    assert with_encoder == "startup"


def with_kernels(*ops: str) -> ModelSpec:
    """A hybrid that calls these operations beside those that any model does."""
    return replace(hybrid(), ops=("linear", "rms_norm", *ops))


def decided(plan: Plan) -> dict[str, tuple[Any, Any]]:
    return {decision.topic: (decision.requested, decision.effective) for decision in plan.decisions}


# Modes and kernels


@pytest.mark.parametrize("mode", MODES)
def test_a_tape_holds_every_kernel_so_any_mode_is_kept(mode: str) -> None:
    plan = make_plan(EngineConfig(graph_mode=mode), with_kernels("attention", "moe", *STATE_OPS), cpu(64 * GIB))
    assert (plan.capture.backend, plan.capture.graph_mode, plan.settings.graph_mode) == ("tape", mode, mode)
    assert "graph_mode" not in decided(plan)
    assert all(choice.capturable for choice in plan.kernels.values())


def test_a_mode_has_only_its_own_ladders() -> None:
    found = {}
    for mode in MODES:
        capture = make_plan(EngineConfig(graph_mode=mode), hybrid(), cpu(64 * GIB)).capture
        found[mode] = (len(capture.tokens), len(capture.rows))
    assert found == {
        "none": (0, 0), "piecewise": (11, 0), "full_decode_only": (0, 7), "full_and_piecewise": (11, 7),
    }  # fmt: skip


@pytest.mark.parametrize("op", ["attention", "causal_conv1d", "moe"])
def test_an_open_mode_loses_full_graphs_where_a_kernel_of_decode_reads_on_the_host(op: str) -> None:
    plan = make_plan(EngineConfig(), with_kernels(op), gpu(80 * GIB))
    assert (plan.capture.backend, plan.capture.graph_mode, plan.capture.rows) == ("cuda", "piecewise", ())
    [decision] = [decision for decision in plan.decisions if decision.topic == "graph_mode"]
    assert (decision.requested, decision.effective) == ("full_and_piecewise", "piecewise")
    assert op in decision.reason
    assert not plan.kernels[op].capturable


@pytest.mark.parametrize("mode", FULL_MODES)
def test_a_given_mode_with_full_graphs_is_refused_there_with_modes_that_work(mode: str) -> None:
    spec = with_kernels("attention")
    with pytest.raises(ConfigError, match="attention") as error:
        make_plan(EngineConfig(graph_mode=mode), spec, gpu(80 * GIB))
    assert [(remedy.setting, remedy.value) for remedy in error.value.remedies] == [
        ("graph_mode", "piecewise"), ("graph_mode", "none"),
    ]  # fmt: skip
    for remedy in error.value.remedies:
        make_plan(EngineConfig(graph_mode=remedy.value), spec, gpu(80 * GIB))


@pytest.mark.parametrize("op", ["state_update", "ssd_scan"])
def test_what_decode_does_not_call_or_reads_nothing_leaves_full_graphs_possible(op: str) -> None:
    plan = make_plan(EngineConfig(), with_kernels(op), gpu(80 * GIB))
    assert plan.capture.graph_mode == "full_and_piecewise"
    assert plan.kernels[op].capturable == (op == "state_update")


@pytest.mark.parametrize(
    ("ops", "device", "mode", "splits"),
    [
        (("attention", "moe", *STATE_OPS), cpu(64 * GIB), "full_and_piecewise", ("attention", "state")),
        (("attention", "moe", *STATE_OPS), gpu(80 * GIB), "piecewise", ("attention", "state", "moe")),
        (("attention",), cpu(64 * GIB), "piecewise", ("attention",)),
        (STATE_OPS, gpu(80 * GIB), "piecewise", ("state",)),
        ((), gpu(80 * GIB), "full_and_piecewise", ()),
        (("attention", *STATE_OPS), cpu(64 * GIB), "full_decode_only", ()),
    ],
)
def test_piecewise_graphs_leave_out_what_depends_on_rows_or_cannot_be_captured(ops, device, mode, splits) -> None:
    assert make_plan(EngineConfig(graph_mode=mode), with_kernels(*ops), device).capture.splits == splits


# Ladders


def test_the_token_ladder_is_that_of_the_rows_asked_for_whatever_slots_fit() -> None:
    roomy, tight = (make_plan(EngineConfig(), hybrid(), gpu(memory)) for memory in (80 * GIB, GIB // 2))
    assert tight.settings.max_num_seqs < 64 < roomy.settings.max_num_seqs == 256
    assert tight.capture.tokens == roomy.capture.tokens
    assert tight.capture.tokens[-1] == 512
    assert (tight.capture.rows[-1], roomy.capture.rows[-1]) == (tight.settings.max_num_seqs, 256)


def test_given_rows_that_do_not_fit_their_slots_are_refused_and_remedies_keep_the_token_ladder() -> None:
    config, device = EngineConfig(max_num_seqs=300), gpu(2200 * MIB)
    with pytest.raises(CapacityError) as error:
        make_plan(config, hybrid(), device)
    remedies = {remedy.setting: remedy.value for remedy in error.value.remedies}
    assert f"lower max_num_seqs to at most {remedies['max_num_seqs']}" in error.value.message
    fewer = make_plan(config.with_settings(max_num_seqs=remedies["max_num_seqs"]), hybrid(), device)
    assert 256 < remedies["max_num_seqs"] == fewer.capture.rows[-1] < 300
    assert fewer.capture.tokens == make_plan(config, hybrid(), gpu(80 * GIB)).capture.tokens


def test_the_smallest_utilization_that_holds_given_rows_is_named_and_leaves_the_tokens_alone() -> None:
    config = EngineConfig(max_num_seqs=300, memory_utilization=0.5)
    with pytest.raises(CapacityError) as error:
        make_plan(config, hybrid(), gpu(3 * GIB))
    [value] = [remedy.value for remedy in error.value.remedies if remedy.setting == "memory_utilization"]
    assert f"raise memory_utilization to at least {value}" in error.value.message
    plan = make_plan(config.with_settings(memory_utilization=value), hybrid(), gpu(3 * GIB))
    assert plan.capture.tokens[-1] == 512
    with pytest.raises(CapacityError):
        make_plan(config.with_settings(memory_utilization=round(value - 0.01, 2)), hybrid(), gpu(3 * GIB))


def test_given_sizes_that_no_batch_reaches_are_left_out_as_decisions() -> None:
    config = EngineConfig(capture_sizes=[2000, 4, 4, 64], capture_rows=[1, 100])
    plan = make_plan(config, hybrid(), cpu(64 * GIB))
    assert (plan.capture.tokens, plan.capture.rows) == ((4, 64), (1,))
    assert decided(plan)["capture_sizes"] == ([4, 64, 2000], [4, 64])
    assert decided(plan)["capture_rows"] == ([1, 100], [1])


def test_a_largest_size_other_than_that_of_the_given_is_refused_with_both_remedies() -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(EngineConfig(capture_sizes=[4, 64], max_capture_size=32), hybrid(), cpu(64 * GIB))
    remedies = {remedy.setting: remedy.value for remedy in error.value.remedies}
    assert remedies == {"max_capture_size": 64, "capture_sizes": [4, 32]}


@pytest.mark.parametrize(
    ("mode", "given", "idle"),
    [
        ("none", {"capture_sizes": [4], "check_replay": True}, {"capture_sizes", "check_replay"}),
        (
            "none",
            {"max_capture_size": 4, "performance_mode": "interactivity"},
            {"max_capture_size", "performance_mode"},
        ),
        ("piecewise", {"capture_rows": [1, 2], "max_capture_size": 64}, {"capture_rows"}),
        ("full_decode_only", {"max_capture_size": 64}, {"max_capture_size"}),
        ("full_decode_only", {"capture_sizes": [4]}, set()),
        ("full_decode_only", {"capture_sizes": [4], "capture_rows": [4]}, {"capture_sizes"}),
        ("full_and_piecewise", {"capture_rows": [1, 2], "max_capture_size": 64}, set()),
    ],
)
def test_settings_that_a_mode_makes_nothing_of_are_said_to_be_without_effect(mode, given, idle) -> None:
    plan = make_plan(EngineConfig(graph_mode=mode, **given), hybrid(), cpu(64 * GIB))
    found = {decision.topic for decision in plan.decisions if "without effect" in decision.reason}
    assert found == idle
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


# Coverage


def test_by_default_a_cpu_runs_large_mixed_batches_eagerly_and_says_what_would_cover_them() -> None:
    capture = make_plan(EngineConfig(), hybrid(), cpu(64 * GIB)).capture
    assert {entry.mode for entry in capture.coverage.decode} == {"full"}
    last = capture.coverage.mixed[-1]
    assert (last.from_, last.to, last.mode, last.size) == (65, 1024, "eager", None)
    [entry] = capture.uncovered
    assert entry.batches == last
    assert [(change.setting, change.value) for change in entry.changes] == [("max_capture_size", 1024)]
    covered = make_plan(EngineConfig(max_capture_size=1024), hybrid(), cpu(64 * GIB))
    assert covered.capture.uncovered == ()
    assert covered.memory.graphs - make_plan(EngineConfig(), hybrid(), cpu(64 * GIB)).memory.graphs == entry.memory


def test_a_batch_size_off_the_stride_has_a_graph_of_its_own_where_it_is_within_the_largest() -> None:
    config = EngineConfig(max_num_batched_tokens=700, max_capture_size=1024)
    capture = make_plan(config, hybrid(), cpu(64 * GIB)).capture
    assert (capture.tokens[-1], capture.uncovered) == (700, ())


def test_without_graphs_the_mode_is_what_would_cover_and_one_that_the_kernels_allow() -> None:
    for device, mode in ((cpu(64 * GIB), "full_and_piecewise"), (gpu(80 * GIB), "piecewise")):
        plan = make_plan(EngineConfig(graph_mode="none"), with_kernels("attention"), device)
        assert {entry.mode for entry in (*plan.capture.coverage.decode, *plan.capture.coverage.mixed)} == {"eager"}
        for entry in plan.capture.uncovered:
            changes = {change.setting: change.value for change in entry.changes}
            assert changes["graph_mode"] == mode
            make_plan(EngineConfig(**changes), with_kernels("attention"), device)


def test_the_json_has_ladders_and_ranges() -> None:
    data = make_plan(EngineConfig(max_num_seqs=3, max_capture_size=4), hybrid(), cpu(64 * GIB)).to_json()["capture"]
    assert (data["backend"], data["graph_mode"]) == ("tape", "full_and_piecewise")
    assert (data["tokens"], data["rows"], data["tokens_per_row"]) == ([1, 2, 4], [1, 2, 3], [1])
    assert data["coverage"]["mixed"] == [
        {"from": 1, "to": 1, "mode": "piecewise", "size": 1},
        {"from": 2, "to": 2, "mode": "piecewise", "size": 2},
        {"from": 3, "to": 4, "mode": "piecewise", "size": 4},
        {"from": 5, "to": 1024, "mode": "eager", "size": None},
    ]
    assert data["coverage"]["decode"][-1] == {"tokens_per_row": 1, "from": 3, "to": 3, "mode": "full", "size": 3}


def test_open_ladders_are_lowered_before_it_is_said_that_nothing_fits() -> None:
    config = EngineConfig(dtype="float32", enable_prefix_caching=False, graph_mode="piecewise")
    least = {"max_num_batched_tokens": 256, "max_model_len": 16}
    roomy = make_plan(config.with_settings(max_num_seqs=1, **least), hybrid(), gpu(GIB)).memory
    device = replace(gpu(GIB), memory_bytes=int((roomy.used + 100 * 1024) / 0.9))
    plan = make_plan(config, hybrid(), device)
    assert plan.capture.tokens == (1, 2)
    [decision] = [decision for decision in plan.decisions if decision.topic == "max_capture_size"]
    assert (decision.requested, decision.effective) == (256, 2)
    assert "max_num_seqs 1" in decision.reason
    # As if the rows that fit had been given.
    given = make_plan(config.with_settings(max_num_seqs=plan.settings.max_num_seqs), hybrid(), device)
    assert (given.capture, given.memory) == (plan.capture, plan.memory)


def test_given_rows_have_smaller_ladders_only_where_one_request_needs_the_room() -> None:
    given: dict[str, Any] = {"max_num_seqs": 200, "max_model_len": 16, "graph_mode": "piecewise"}
    config, spec = EngineConfig(dtype="float32", enable_prefix_caching=False, **given), model(attention_layer())
    small = make_plan(config.with_settings(max_capture_size=20, max_num_batched_tokens=256), spec, gpu(GIB)).memory
    plan = make_plan(config, spec, replace(gpu(GIB), memory_bytes=int(small.used / 0.9) + 1))
    [decision] = [decision for decision in plan.decisions if decision.topic == "max_capture_size"]
    assert 20 <= decision.effective == plan.capture.tokens[-1] < decision.requested
    assert "run eagerly" in decision.reason


def test_given_rows_of_full_graphs_are_refused_where_there_can_be_none() -> None:
    spec = with_kernels("attention")
    with pytest.raises(ConfigError) as error:
        make_plan(EngineConfig(capture_rows=[1, 2]), spec, gpu(8 * GIB))
    assert "capture_rows" in error.value.message
    assert "attention (reference)" in error.value.message
    assert {remedy.setting: remedy.value for remedy in error.value.remedies} == {
        "capture_rows": None, "graph_mode": "piecewise",
    }  # fmt: skip
    for remedy in error.value.remedies:
        make_plan(EngineConfig(capture_rows=[1, 2]).with_settings(**{remedy.setting: remedy.value}), spec, gpu(8 * GIB))
    assert make_plan(EngineConfig(capture_rows=[1, 2]), spec, cpu(64 * GIB)).capture.rows == (1, 2)


def test_a_mode_that_adds_sizes_is_refused_beside_given_sizes_and_remedies_work() -> None:
    config = EngineConfig(capture_sizes=[8, 64], performance_mode="interactivity")
    with pytest.raises(ConfigError) as error:
        make_plan(config, hybrid(), cpu(64 * GIB))
    tokens = [
        make_plan(config.with_settings(**{remedy.setting: remedy.value}), hybrid(), cpu(64 * GIB)).capture.tokens
        for remedy in error.value.remedies
    ]
    assert tokens == [(8, 64), (*range(1, 33), 40, 48, 56, 64)]


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    rows = draw(st.integers(1, 700))
    sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=6)
    values: dict[str, Any] = {
        "graph_mode": draw(st.sampled_from(MODES)),
        "max_num_seqs": rows,
        "max_num_batched_tokens": rows + draw(st.integers(16, 3000)),
        "capture_rows": draw(sizes),
        "performance_mode": draw(st.sampled_from(["balanced", "interactivity"])),
    }
    top = draw(st.sampled_from(["capture_sizes", "max_capture_size"]))
    values[top] = draw(sizes) if top == "capture_sizes" else draw(st.integers(1, 3000))
    chosen = draw(st.lists(st.sampled_from(sorted(values)), unique=True))
    return EngineConfig(**{name: values[name] for name in chosen})


OPS = st.sampled_from([("linear",), ("linear", "attention", *STATE_OPS)])


@settings(max_examples=150, deadline=None)
@given(configs(), st.integers(200, 20_000), st.sampled_from([cpu, gpu]), OPS)
@pytest.mark.slow
def test_coverage_is_complete_and_disjoint_and_agrees_with_dispatch(config, mebibytes, device, ops) -> None:
    try:
        plan = make_plan(config, replace(hybrid(), ops=ops), device(mebibytes * MIB))
    except (CapacityError, ConfigError):
        return
    capture, limits = plan.capture, plan.settings
    assert capture.graph_mode == limits.graph_mode
    assert not capture.tokens or capture.graph_mode in PIECEWISE_MODES
    assert not capture.rows or capture.graph_mode in FULL_MODES
    assert (plan.memory.graphs == 0) == (capture.max_tokens == 0)
    for ranges, most in ((capture.coverage.decode, limits.max_num_seqs), (capture.coverage.mixed, None)):
        assert ranges[0].from_ == 1
        assert ranges[-1].to == (most or limits.max_num_batched_tokens)
        assert all(after.from_ == before.to + 1 for before, after in pairwise(ranges))
    for decode in capture.coverage.decode:
        for rows in {decode.from_, decode.to}:
            found = dispatch(capture.ladders(), capture.graph_mode, rows, 1, rows)
            assert found == (decode.mode, decode.size)
            assert capture.coverage.mode_of(rows, 1, rows) == decode.mode
    for mixed in capture.coverage.mixed:
        for tokens in {mixed.from_, mixed.to}:
            assert dispatch(capture.ladders(), capture.graph_mode, 1, None, tokens) == (mixed.mode, mixed.size)
    eager = [entry for entry in (*capture.coverage.decode, *capture.coverage.mixed) if entry.mode == "eager"]
    assert [entry.batches for entry in capture.uncovered] == eager
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_ladders_of_a_plan_are_those_of_the_pure_function() -> None:
    config = EngineConfig(max_num_seqs=20, max_num_batched_tokens=300, max_capture_size=257)
    capture = make_plan(config, hybrid(), cpu(64 * GIB)).capture
    expected = make_capture_sizes(LadderSettings(max_num_seqs=20, max_num_batched_tokens=300, max_capture_size=257))
    assert capture.ladders() == expected


# Memory


def test_graphs_take_their_buffers_and_one_arena_for_the_largest() -> None:
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=100, max_model_len=33)
    buffers = 3 * 8 * 100 + 4 * (4 + 3 + 3 + 3 + 3 * 2 + 3 * 3)
    assert buffer_bytes(100, 3, max_blocks=3, slots_per_request=2) == buffers

    def size(largest: LargestGraphs) -> int:
        return graph_bytes(hybrid(), "float32", largest, limits=limits, block_size=16, capture=TAPES)

    assert size(LargestGraphs(10, 3, 2)) == buffers + arena_bytes(hybrid(), "float32", LargestGraphs(10, 0, 0), TAPES)
    assert size(LargestGraphs(4, 3, 2)) == buffers + arena_bytes(hybrid(), "float32", LargestGraphs(0, 6, 1), TAPES)
    assert size(LargestGraphs(0, 0, 2)) == 0


def test_an_arena_grows_with_tokens_width_and_the_states_that_it_gathers() -> None:
    narrow, wide = model(mlp_layer(), mlp_layer()), model(mlp_layer(), mamba2_layer())

    def size(spec: ModelSpec, dtype: str, tokens: int, capture: Capture, gathered_rows: int = 0) -> int:
        return arena_bytes(spec, dtype, LargestGraphs(tokens, 0, 0), capture, gathered_rows)

    for capture in (TAPES, CUDA_GRAPHS):
        assert size(narrow, "float32", 64, capture) == size(model(mlp_layer()), "float32", 64, capture)
        assert size(narrow, "float32", 128, capture) == 2 * size(narrow, "float32", 64, capture)
        assert size(narrow, "bfloat16", 64, capture) < size(narrow, "float32", 64, capture)
    gathered = size(wide, "float32", 64, CUDA_GRAPHS, 8) - size(wide, "float32", 64, CUDA_GRAPHS)
    assert gathered >= 8 * 3 * 4 * MAMBA2.ssm_state_elements


def test_memory_of_graphs_follows_the_largest_size_and_none_takes_none() -> None:
    sizes = [
        make_plan(EngineConfig(**changes), hybrid(), cpu(64 * GIB)).memory.graphs
        for changes in ({"graph_mode": "none"}, {"max_capture_size": 8}, {}, {"max_capture_size": 1024})
    ]
    assert 0 == sizes[0] < sizes[1] < sizes[2] < sizes[3]


def test_graphs_take_room_from_the_cache() -> None:
    plans = [
        make_plan(EngineConfig(max_num_seqs=8, graph_mode=mode), hybrid(), gpu(GIB))
        for mode in ("none", "full_and_piecewise")
    ]
    none, full = (plan.memory for plan in plans)
    one_block = none.kv_block + none.state_slot
    assert abs((none.cache - full.cache) - full.graphs) <= one_block


def test_what_fits_without_graphs_or_with_smaller_ones_is_refused_with_those_remedies() -> None:
    spec, device = model(attention_layer(), mlp_layer(), max_position_embeddings=2048), gpu(40 * MIB)
    fixed = {"max_num_seqs": 4, "max_num_batched_tokens": 600, "max_model_len": 2048}
    lean = make_plan(EngineConfig(**fixed, graph_mode="none"), spec, gpu(80 * GIB)).memory
    need = lean.weights + lean.activations + (2048 // 16 + 1) * lean.kv_block
    device = gpu(int((need + MIB) / 0.9) + 1)
    config = EngineConfig(**fixed, max_capture_size=600)
    with pytest.raises(CapacityError) as error:
        make_plan(config, spec, device)
    remedies = {remedy.setting: remedy.value for remedy in error.value.remedies}
    assert remedies["graph_mode"] == "none"
    assert "set graph_mode to none" in error.value.message
    assert f"lower max_capture_size to at most {remedies['max_capture_size']}" in error.value.message
    for setting in ("graph_mode", "max_capture_size"):
        make_plan(config.with_settings(**{setting: remedies[setting]}), spec, device)
    with pytest.raises(CapacityError):
        make_plan(config.with_settings(max_capture_size=remedies["max_capture_size"] + 1), spec, device)
