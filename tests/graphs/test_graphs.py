"""Graphs of a whole engine: what serves each step, how it is counted, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import EngineConfig
from ostinato.engine import core as engine_module
from ostinato.engine.core import EngineCore
from ostinato.errors import CapacityError, CaptureError, ConfigError, Remedy
from ostinato.graphs.buffers import StepBuffers
from ostinato.graphs.step_graphs import GraphCounts, GraphKey, StepForward, StepGraphs
from ostinato.json_io import to_json_data
from ostinato.layers.mlp import MLP
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.step_inputs import StepInputs
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.graphs.capture_sizes import CaptureSizes, LadderSettings, make_capture_sizes
from ostinato.plan.graphs.coverage import FULL_MODES, PIECEWISE_MODES, coverage
from ostinato.plan.plan import Plan, make_plan
from ostinato.runner.graph_setup import GraphMemoryCheck
from tests.support.checkpoints import random_prompt
from tests.support.engines import PROMPT, greedy, make_engine, run, tokens_of
from tests.support.plan_cases import GIB, cpu, hybrid

GRAPH_MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")

# What serves a step


class FakeGraph:
    """Gives one number per token: which graph it is."""

    def __init__(self, number: int, tokens: int) -> None:
        self.number, self.tokens = number, tokens

    def replay(self, _: StepInputs) -> torch.Tensor:
        return torch.full((self.tokens, 1), self.number)


class FakeBackend:
    """Notes what is captured, and computes nothing."""

    name = "fake"
    num_bytes = 0

    def __init__(self) -> None:
        self.captured: list[tuple[bool, int, int]] = []
        """(full, rows, tokens) of each graph."""

    def capture(self, _forward: StepForward, inputs: StepInputs, _splits: Any) -> FakeGraph:
        rows, tokens = inputs.read_slots.shape[0], inputs.token_ids.shape[0]
        self.captured.append((inputs.num_decode_rows == rows, rows, tokens))
        return FakeGraph(len(self.captured) - 1, tokens)


EAGER = -1


def eager_forward(inputs: StepInputs) -> torch.Tensor:
    return torch.full((inputs.token_ids.shape[0], 1), EAGER)


def step_of(rows: int, num_decode_rows: int, tokens: int, tokens_per_row: int = 1) -> StepInputs:
    """A step of this shape; what stands in it does not matter."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return StepInputs(
        token_ids=zeros(tokens, dtype=torch.int64),
        positions=zeros(tokens, dtype=torch.int64),
        row_starts=zeros(rows + 1),
        start_positions=zeros(rows),
        kv_lens=zeros(rows),
        block_tables=zeros(rows, 1),
        kv_cells=zeros(tokens, dtype=torch.int64),
        read_slots=zeros(rows),
        write_slots=zeros(rows, tokens_per_row),
        num_decode_rows=num_decode_rows,
    )


def check_all_batches(capture: CapturePlan, max_num_seqs: int, max_num_batched_tokens: int, is_lazy: bool) -> None:
    """Every batch that limits allow runs as the one range of the coverage that has it says, and is counted so."""
    backend = FakeBackend()
    buffers = StepBuffers(max_num_seqs, max_num_batched_tokens, 1, capture.tokens_per_row[-1], TorchArrays("cpu"))
    graphs = StepGraphs(capture, backend, eager_forward, buffers, [], strict=True)
    if not is_lazy:
        graphs.capture_all()
        assert len(backend.captured) == len(graphs.planned()) == len(set(graphs.planned()))
    promised = json.loads(json.dumps(to_json_data(capture.coverage)))
    expected = {"full": 0, "piecewise": 0, "eager": 0}
    padding = 0

    def check(inputs: StepInputs, entry: dict[str, Any]) -> None:
        nonlocal padding
        rows, tokens = inputs.read_slots.shape[0], inputs.token_ids.shape[0]
        expected[entry["mode"]] += 1
        hidden = graphs.run(inputs)
        number = int(hidden[0])
        if entry["mode"] == "eager":
            assert (number, len(hidden)) == (EAGER, tokens)
            return
        is_full, captured_rows, captured_tokens = backend.captured[number]
        assert is_full == (entry["mode"] == "full")
        assert entry["size"] == (captured_rows if is_full else captured_tokens)
        assert captured_tokens == len(hidden) >= tokens
        assert captured_rows >= rows or not is_full
        padding += captured_tokens - tokens

    for tokens_per_row in capture.tokens_per_row:
        for rows in range(1, max_num_seqs + 1):
            [entry] = [
                each
                for each in promised["decode"]
                if each["tokens_per_row"] == tokens_per_row and each["from"] <= rows <= each["to"]
            ]
            check(step_of(rows, rows, rows * tokens_per_row, tokens_per_row), entry)
    for tokens in range(1, max_num_batched_tokens + 1):
        [entry] = [each for each in promised["mixed"] if each["from"] <= tokens <= each["to"]]
        for rows in {1, min(tokens, max_num_seqs)}:
            for num_decode_rows in {0, rows - 1}:
                check(step_of(rows, num_decode_rows, tokens), entry)
    counts = graphs.counts.to_json()
    assert counts["steps"] == expected
    assert counts["padding"] == sum(graph["padding"] for graph in counts["graphs"]) == padding
    assert counts["unplanned"] == 0
    assert sum(counts["eager_reasons"].values()) == expected["eager"]
    served = {(graph["mode"], graph["size"], graph["tokens_per_row"]) for graph in counts["graphs"]}
    planned = {(key.mode, key.size, key.tokens_per_row or None) for key in graphs.planned()}
    assert served <= planned
    if is_lazy:
        assert len(backend.captured) == len(served)


@st.composite
def graph_settings(draw: st.DrawFn) -> dict[str, Any]:
    values: dict[str, Any] = {
        "capture_sizes": draw(st.lists(st.integers(1, 80), min_size=1, max_size=5)),
        "max_capture_size": draw(st.integers(1, 80)),
        "capture_rows": draw(st.lists(st.integers(1, 16), min_size=1, max_size=4)),
        "performance_mode": draw(st.sampled_from(["balanced", "interactivity"])),
    }
    if draw(st.booleans()):
        values["max_capture_size"] = max(values["capture_sizes"])
    else:
        values.pop(draw(st.sampled_from(["capture_sizes", "max_capture_size"])))
    chosen = draw(st.sets(st.sampled_from(sorted(values))))
    if "capture_sizes" in chosen:
        chosen.discard("performance_mode")
    return {name: value for name, value in values.items() if name in chosen}


@settings(max_examples=60, deadline=None)
@given(
    chosen=graph_settings(),
    graph_mode=st.sampled_from(GRAPH_MODES),
    max_num_seqs=st.integers(1, 12),
    more_tokens=st.integers(0, 50),
    is_lazy=st.booleans(),
)
def test_every_batch_of_any_plan_is_served_as_the_plan_says(
    chosen: dict[str, Any], graph_mode: str, max_num_seqs: int, more_tokens: int, is_lazy: bool
) -> None:
    config = EngineConfig(
        graph_mode=graph_mode,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + 16 + more_tokens,
        max_model_len=64,
        **chosen,
    )
    plan = make_plan(config, hybrid(), cpu(64 * GIB))
    assert plan.settings.max_num_seqs == max_num_seqs
    check_all_batches(plan.capture, max_num_seqs, plan.settings.max_num_batched_tokens, is_lazy)


@settings(max_examples=60, deadline=None)
@given(
    chosen=graph_settings(),
    graph_mode=st.sampled_from(GRAPH_MODES),
    max_num_seqs=st.integers(1, 8),
    k=st.integers(1, 3),
    is_lazy=st.booleans(),
)
def test_every_batch_is_served_as_covered_also_with_several_tokens_per_row(
    chosen: dict[str, Any], graph_mode: Any, max_num_seqs: int, k: int, is_lazy: bool
) -> None:
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs * (1 + k) + 16,
        "num_speculative_tokens": k,
    }
    sizes = dict(chosen)
    if "capture_sizes" in sizes:
        sizes.pop("max_capture_size", None)
    ladders = make_capture_sizes(LadderSettings(**limits, **sizes))
    captured = CaptureSizes(
        ladders.tokens if graph_mode in PIECEWISE_MODES else (), ladders.rows if graph_mode in FULL_MODES else ()
    )
    capture = CapturePlan(
        backend="tape",
        graph_mode=graph_mode,
        tokens=captured.tokens,
        rows=captured.rows,
        tokens_per_row=(1, 1 + k),
        splits=(),
        coverage=coverage(captured, graph_mode, **limits),
        uncovered=(),
    )
    check_all_batches(capture, max_num_seqs, limits["max_num_batched_tokens"], is_lazy)


# Counts


def serve(engine: EngineCore, lengths: tuple[int, ...] = (40, 7, 23), max_tokens: int = 8) -> list[list[int]]:
    """Requests that come one by one -> their tokens."""
    for length in lengths:
        engine.add_request(PROMPT[:length], greedy(max_tokens=max_tokens), request_id=f"{length}")
        engine.step()
    done = run(engine)
    assert [output.error for output in done.values()] == [None] * len(done)
    return [done[f"{length}"].outputs[0].token_ids for length in lengths]


@pytest.mark.parametrize("graph_mode", GRAPH_MODES)
def test_steps_add_up_and_padding_is_what_sizes_leave_of_tokens(graph_mode: str) -> None:
    engine = make_engine(graph_mode=graph_mode, max_num_batched_tokens=24)
    shapes = []
    runs = engine.runner.graphs.run

    def noted(inputs: StepInputs) -> torch.Tensor:
        shapes.append((inputs.read_slots.shape[0], inputs.num_decode_rows, inputs.token_ids.shape[0]))
        return runs(inputs)

    engine.runner.graphs.run = noted  # type: ignore[method-assign]
    serve(engine)
    stats = engine.stats()
    counts = stats["graphs"]
    assert json.loads(json.dumps(counts)) == counts
    assert sum(counts["steps"].values()) == stats["steps"] == len(shapes)
    served = counts["graphs"]
    assert all(graph["size"] * graph["steps"] == graph["tokens"] + graph["padding"] for graph in served)
    assert sum(counts["eager_tokens"].values()) + sum(graph["tokens"] for graph in served) == stats["computed_tokens"]
    traffic = counts["traffic"]
    decode, mixed = traffic["decode"].get("1", {}), traffic["mixed"]
    assert sum(decode.values()) == sum(rows == decoding for rows, decoding, _ in shapes)
    assert sum(int(size) * steps for size, steps in mixed.items()) == sum(
        tokens for rows, decoding, tokens in shapes if rows != decoding
    )


def test_eager_steps_are_counted_with_their_reason() -> None:
    engine = make_engine(graph_mode="full_decode_only", capture_rows=[1], max_num_batched_tokens=24)
    serve(engine)
    counts = engine.stats()["graphs"]
    mixed = "mixed: full_decode_only has no graphs for it"
    assert counts["eager_reasons"].keys() == {"decode: no graph of so many rows", mixed}
    assert counts["steps"]["eager"] == sum(counts["eager_reasons"].values())
    assert counts["unplanned"] == 0
    without = make_engine(graph_mode="none")
    serve(without)
    assert without.stats()["graphs"]["eager_reasons"] == {"graph_mode is none": without.stats()["steps"]}


def test_counts_of_two_kinds_of_graphs_of_one_size_stay_apart() -> None:
    counts = GraphCounts()
    counts.count_replay(GraphKey("full", 4, 1), 3)
    counts.count_replay(GraphKey("full", 4, 2), 6)
    counts.count_replay(GraphKey("piecewise", 4), 1)
    counts.count_replay(GraphKey("full", 4, 2), 8)
    assert counts.to_json()["graphs"] == [
        {"mode": "full", "size": 4, "tokens_per_row": 1, "steps": 1, "tokens": 3, "padding": 1},
        {"mode": "full", "size": 4, "tokens_per_row": 2, "steps": 2, "tokens": 14, "padding": 2},
        {"mode": "piecewise", "size": 4, "tokens_per_row": None, "steps": 1, "tokens": 1, "padding": 3},
    ]


# Strict


def forget(engine: EngineCore, **ladders: tuple[int, ...]) -> None:
    """Let the engine miss graphs that its plan has promised."""
    graphs = engine.runner.graphs
    graphs._ladders = replace(graphs._ladders, **ladders)


@pytest.mark.parametrize(
    ("ladders", "shape"),
    [
        ({"tokens": ()}, "24 tokens in 1 rows"),
        ({"tokens": (1, 8)}, "24 tokens in 1 rows"),
        ({"tokens": (24,), "rows": ()}, None),
        ({"tokens": (), "rows": (1, 2)}, "24 tokens in 1 rows"),
    ],
)
def test_under_strict_a_step_without_its_planned_graph_is_an_error_that_names_its_shape(
    ladders: dict[str, tuple[int, ...]], shape: str | None
) -> None:
    engine = make_engine(strict=True, max_num_batched_tokens=24, max_capture_size=24)
    forget(engine, **ladders)
    engine.add_request(PROMPT, greedy())
    [output] = run(engine).values()
    if shape is None:  # a piecewise graph serves decode instead
        assert output.error is None
        return
    assert isinstance(output.error, ConfigError)
    assert shape in output.error.message
    assert output.error.remedies == (Remedy("strict", False),)
    assert engine.stats()["failed_steps"] == 1


def test_under_strict_a_decode_step_without_its_graph_is_named_by_its_rows() -> None:
    engine = make_engine(strict=True, max_num_batched_tokens=64, graph_mode="full_decode_only")
    forget(engine, rows=(1,))
    engine.add_request(PROMPT, greedy(), request_id="first")
    engine.step()
    engine.add_request(PROMPT[:9], greedy())
    done = run(engine)
    assert {type(output.error) for output in done.values()} == {ConfigError}
    assert "2 rows of 1 tokens" in str(done["first"].error)


def test_without_strict_such_a_step_runs_eagerly_and_is_counted_as_unplanned() -> None:
    engine = make_engine(max_num_batched_tokens=24, max_capture_size=24)
    expected = serve(engine)
    again = make_engine(max_num_batched_tokens=24, max_capture_size=24)
    forget(again, tokens=(), rows=(1, 2))
    assert serve(again) == expected
    counts = again.stats()["graphs"]
    assert counts["unplanned"] == counts["steps"]["eager"] > 0


def test_under_strict_steps_that_the_plan_runs_eagerly_are_fine() -> None:
    for settings_ in ({"graph_mode": "none"}, {"graph_mode": "full_decode_only"}, {"max_capture_size": 4}):
        engine = make_engine(strict=True, max_num_batched_tokens=24, **settings_)
        serve(engine)
        counts = engine.stats()["graphs"]
        assert counts["steps"]["eager"] > 0
        assert counts["unplanned"] == 0


# Capture


def test_lazy_graphs_are_captured_when_they_are_first_needed() -> None:
    eager, lazy = make_engine(capture="startup"), make_engine(capture="lazy")
    graphs = lazy.runner.graphs
    assert graphs._graphs == {}
    assert len(eager.runner.graphs._graphs) == len(graphs.planned()) > 4
    tokens = serve(lazy)
    assert tokens == serve(eager)
    figures = ("steps", "padding", "graphs", "eager_reasons", "traffic", "planned_bytes")
    assert [lazy.stats()["graphs"][name] for name in figures] == [eager.stats()["graphs"][name] for name in figures]
    assert lazy.stats()["graphs"]["captured"] < eager.stats()["graphs"]["captured"]
    used = {
        GraphKey(graph["mode"], graph["size"], graph["tokens_per_row"] or 0)
        for graph in lazy.stats()["graphs"]["graphs"]
    }
    assert graphs._graphs.keys() == used
    assert 0 < len(used) < len(graphs.planned())
    assert graphs.capture_seconds > 0


def test_at_start_every_planned_graph_is_captured_largest_first_and_measured() -> None:
    said = []
    engine = EngineCore(
        make_config(max_num_batched_tokens=24, capture="startup"), lambda *progress: said.append(progress)
    )
    graphs = engine.runner.graphs
    assert list(graphs._graphs) == graphs.planned()
    tokens = [key.tokens for key in graphs.planned()]
    assert tokens == sorted(tokens, reverse=True)
    shown = [(what, done, total) for what, done, total in said if "graphs" in what]
    assert [done for _, done, _ in shown] == list(range(len(tokens) + 1))
    assert {total for _, _, total in shown} == {len(tokens)}
    assert "piecewise, 8 tokens" in shown[0][0]
    measured = engine.plan.measured["graphs"]
    assert measured["captured"] == len(tokens)
    assert 0 < measured["observed_bytes"] == graphs.num_bytes <= measured["planned_bytes"]
    assert measured["planned_bytes"] == engine.plan.memory.graphs


def make_config(**chosen: Any) -> EngineConfig:
    engine = make_engine(graph_mode="none")
    defaults = {"max_model_len": 96, "max_num_seqs": 4, "cache_memory": "8MiB", "threads": 1, "dtype": "float32"}
    return EngineConfig(model=str(engine.directory), **(defaults | chosen))


def test_graphs_that_take_more_than_planned_are_an_error_whose_remedy_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def frugal(*arguments: Any) -> Plan:
        plan = make_plan(*arguments)
        return replace(plan, memory=replace(plan.memory, graphs=1000))

    monkeypatch.setattr(engine_module, "make_plan", frugal)
    with pytest.raises(CapacityError, match="1000 were planned") as raised:
        make_engine(capture="startup")
    assert raised.value.remedies
    for remedy in raised.value.remedies:
        assert len(tokens_of(make_engine(**{remedy.setting: remedy.value}), greedy())) == 12


def test_a_graph_captured_late_that_takes_more_than_planned_fails_the_step_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def frugal(*arguments: Any) -> Plan:
        plan = make_plan(*arguments)
        return replace(plan, memory=replace(plan.memory, graphs=1000))

    monkeypatch.setattr(engine_module, "make_plan", frugal)
    engine = make_engine(capture="lazy")
    engine.add_request(PROMPT[:4], greedy())
    [output] = engine.step()
    assert isinstance(output.error, CapacityError)
    assert output.error.remedies == (Remedy("graph_mode", "none"),)


def test_without_graphs_nothing_is_captured_or_measured() -> None:
    engine = make_engine(graph_mode="none")
    assert engine.runner.graphs.planned() == []
    assert "graphs" not in engine.plan.measured
    assert engine.plan.memory.graphs == 0


# Replays against eager steps


def test_check_replay_finds_a_python_number_that_changes_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    forward = MLP.forward

    def counting(self: MLP, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = forward(self, x, residual)
        return out * (1 + calls % 7) if isinstance(out, torch.Tensor) else out  # a sketch has no values

    monkeypatch.setattr(MLP, "forward", counting)
    assert_found_by_check_replay("piecewise")


@pytest.mark.parametrize("graph_mode", ["piecewise", "full_decode_only"])
def test_check_replay_finds_a_count_of_rows_that_was_baked_in(monkeypatch: pytest.MonkeyPatch, graph_mode: str) -> None:
    """A graph of four rows has four of them, whatever the step has."""
    engine_type = type(make_engine(graph_mode="none").runner.model)
    forward = engine_type.forward

    def scaled(self: Any, inputs: StepInputs, memory: Any) -> torch.Tensor:
        out = forward(self, inputs, memory)
        return out * (1 + inputs.num_decode_rows) if isinstance(out, torch.Tensor) else out

    monkeypatch.setattr(engine_type, "forward", scaled)
    assert_found_by_check_replay(graph_mode)


@patch("ostinato.runner.model_runner.choose_arrays", lambda plan, spec: TorchArrays("cpu"))
def assert_found_by_check_replay(graph_mode: str) -> None:
    """The mistake is not seen without the check, and with it the first replay that it changes is named."""
    chosen: dict[str, Any] = {"graph_mode": graph_mode, "capture_sizes": [4, 64], "max_num_batched_tokens": 64}
    serve(make_engine(**chosen))
    engine = make_engine(check_replay=True, **chosen)
    for length in (40, 23, 12):
        engine.add_request(PROMPT[:length], greedy(), request_id=f"{length}")
    errors = [output.error for output in run(engine).values()]
    assert all(isinstance(error, CaptureError) for error in errors)
    assert "Python value" in str(errors[0])
    size = "full, 4 rows of 1" if graph_mode == "full_decode_only" else "piecewise, 4 tokens"
    assert any(size in str(error) or "piecewise, 64 tokens" in str(error) for error in errors)


def test_check_replay_gives_the_same_tokens() -> None:
    assert serve(make_engine(check_replay=True)) == serve(make_engine())


def test_a_step_that_fails_leaves_graphs_that_serve_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a kernel runs out of memory in the middle of a replay."""
    engine, other = make_engine(max_num_batched_tokens=24), make_engine(max_num_batched_tokens=24)
    graphs = engine.runner.graphs
    expected = serve(other)
    pad = graphs.buffers.pad

    def breaking(rows: int, tokens: int, to_rows: int, to_tokens: int) -> None:
        pad(rows, tokens, to_rows, to_tokens)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graphs.buffers, "pad", breaking)
    engine.add_request(random_prompt(30, seed=9), greedy())
    [output] = run(engine).values()
    assert "out of memory" in str(output.error)
    monkeypatch.undo()
    assert serve(engine) == expected


def test_graphs_of_a_gpu_may_take_what_the_plan_leaves_of_the_device_and_it_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = CATALOGUE["h100-80gb"]
    check = GraphMemoryCheck(gpu, gpu.memory_bytes - 1000)
    for observed in (500, 1400, 1500):
        check("the graphs", {"planned_bytes": 500, "observed_bytes": observed}, Remedy("graph_mode", "none"))
    [told] = caplog.messages
    assert told.startswith("the graphs take 1400 bytes, and 500 were planned for them; they fit into what")
    with pytest.raises(CapacityError, match="the graphs take 1501 bytes"):
        check("the graphs", {"planned_bytes": 500, "observed_bytes": 1501}, Remedy("graph_mode", "none"))
