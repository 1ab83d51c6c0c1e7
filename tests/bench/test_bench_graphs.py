"""`ostinato bench graphs`: the figures from plain numbers, and the report on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ostinato import CapacityError, ConfigError, EngineConfig
from ostinato.bench.graphs import (
    STEPS,
    GraphBench,
    graph_tables,
    graphs,
    off_stride_configs,
    prompt_lengths,
)
from ostinato.bench.statistics import (
    GraphStepTimes,
    KernelShares,
    capture_figures,
    largest_cliff,
    min_steps,
    overall_figures,
    speed_ratio,
    step_figures,
)
from ostinato.bench.step_timing import Stopwatch, kernel_shares, make_decode_steps, run_eagerly, take_turns
from ostinato.cli.main import main
from ostinato.ops.arrays import TorchArrays, host_values
from ostinato.runner.inputs import make_step_inputs
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.engines import make_engine
from tests.support.tensors import as_tensor
from tools.plot_bench import draw

TINY = {"threads": 1, "dtype": "float32", "cache_memory": "16MiB", "capture_sizes": (8,), "capture_rows": (2, 4)}
FLAGS = ["--threads", "1", "--cache-memory", "16MiB", "--capture-sizes", "8", "--capture-rows", "2,4"]
TIMES = GraphStepTimes(rows=3, eager=[0.2, 0.4, 0.3], graph=[0.1, 0.1, 0.3])


def quiet(_: str) -> None:
    """Reports nothing."""


def measure(name: str, bench: GraphBench, **settings: Any) -> dict[str, Any]:
    return graphs({**TINY, "model": str(checkpoint(name)), **settings}, bench, quiet).data


def figures_of(rows: int, eager: float, graph: float, size: int | None = 4) -> dict[str, Any]:
    """Of a step that took so many seconds."""
    return step_figures(GraphStepTimes(rows, [eager], [graph]), "full", size, "tape")


def test_a_step_has_medians_in_milliseconds_and_the_speed_of_pairs() -> None:
    figures = step_figures(TIMES, "full", 4, "tape", KernelShares(eager=0.5, graph=0.8))
    assert (figures["rows"], figures["mode"], figures["graph_rows"], figures["padding"]) == (3, "full", 4, 1)
    assert figures["eager_ms"] == pytest.approx(300)
    assert figures["tape_ms"] == pytest.approx(100)
    assert figures["cuda_ms"] is None
    assert figures["speed"] == pytest.approx(2)  # of 2, 4 and 1, and not 300 over 100
    assert figures["kernel_ms"] == {"eager": pytest.approx(150), "tape": pytest.approx(80)}
    assert figures["rest_ms"] == {"eager": pytest.approx(150), "tape": pytest.approx(20)}


def test_the_time_of_a_graph_stands_under_its_backend() -> None:
    figures = step_figures(TIMES, "piecewise", 8, "cuda", floor={"fraction_reached": 0.5})
    assert figures["tape_ms"] is None
    assert figures["cuda_ms"] == pytest.approx(100)
    assert figures["kernel_ms"] is figures["rest_ms"] is None
    assert figures["floor"] == {"fraction_reached": 0.5}


def test_a_step_without_a_graph_has_figures_of_its_eager_form_only() -> None:
    figures = step_figures(TIMES, "eager", None, "tape", KernelShares(0.5, 0.5))
    assert figures["eager_ms"] == pytest.approx(300)
    assert figures["tape_ms"] is figures["speed"] is figures["graph_rows"] is figures["padding"] is None
    assert figures["kernel_ms"].keys() == figures["rest_ms"].keys() == {"eager"}


def test_the_speed_ratio_is_over_the_sizes_that_have_a_graph() -> None:
    steps = [figures_of(1, 2, 1), figures_of(2, 3, 4), figures_of(3, 3, 3), figures_of(5, 9, 1, size=None)]
    assert speed_ratio(steps) == {"median": 1, "worst": 0.75, "worst_rows": 2}
    assert speed_ratio(steps[3:]) is None


def test_a_cliff_is_found_whether_it_goes_up_or_down() -> None:
    steps = [figures_of(1, 2, 2), figures_of(2, 3, 4), figures_of(4, 1, 5), figures_of(5, 1, 1, size=None)]
    assert largest_cliff(steps, "eager_ms") == {"ratio": pytest.approx(3), "from": 2, "to": 4}
    assert largest_cliff(steps, "tape_ms") == {"ratio": pytest.approx(2), "from": 1, "to": 2}
    assert largest_cliff(steps[:1], "tape_ms") is None


def test_the_same_figures_are_made_of_the_least_times() -> None:
    times = [TIMES, GraphStepTimes(4, [0.3, 0.9, 0.9], [0.4, 0.5, 0.5])]
    steps = [step_figures(each, "full", 4, "tape") for each in times]
    steps.append(step_figures(GraphStepTimes(5, [0.6], [0.1]), "eager", None, "tape"))
    assert [step["least_ms"].keys() for step in steps] == [{"eager", "tape"}, {"eager", "tape"}, {"eager"}]
    least = overall_figures(min_steps(steps), "tape")
    assert least["ratio"] == {"median": pytest.approx(1.375), "worst": pytest.approx(0.75), "worst_rows": 4}
    assert least["cliff"]["eager"] == {"ratio": pytest.approx(2), "from": 4, "to": 5}
    assert least["cliff"]["tape"] == {"ratio": pytest.approx(4), "from": 3, "to": 4}


def test_capture_is_also_told_per_graph() -> None:
    measured = {"captured": 4, "capture_seconds": 2.0, "planned_bytes": 900, "observed_bytes": 800}
    figures = capture_figures(measured)
    assert (figures["graphs"], figures["seconds"], figures["seconds_per_graph"]) == (4, 2.0, 0.5)
    assert (figures["planned_bytes"], figures["observed_bytes"], figures["bytes_per_graph"]) == (900, 800, 200)


@pytest.mark.parametrize("name", ["nemotron_h", "llama", "mamba2"])
def test_a_decode_step_by_hand_is_what_the_engine_would_run(name: str) -> None:
    engine = make_engine(name, max_num_batched_tokens=20)
    steps = make_decode_steps(engine.runner, (1, 3), prompt_len=37, vocab_size=VOCAB_SIZE)
    step, first = (make_step_inputs(steps[size], engine.runner.block_size, TorchArrays("cpu")) for size in (3, 1))
    assert step.num_decode_rows == 3
    assert step.positions.tolist() == step.start_positions.tolist() == [37] * 3
    assert step.kv_lens.tolist() == [38] * 3
    memory = engine.plan.memory
    if memory.num_slots:
        assert step.read_slots.tolist() == step.write_slots[:, 0].tolist() == [1, 2, 3]
    if memory.num_blocks:
        assert len(set(step.block_tables.flatten().tolist())) == 9
        assert step.kv_cells.tolist() == [(3 * row + 3) * 16 + 37 - 32 for row in range(3)]
    for layer in engine.runner.layer_memory:
        kept = [cells[1:10] for cells in layer.block_tensors.values()] + [cells[1:4] for cells in layer.states.values()]
        for cells in map(host_values, kept):
            assert all((cells[0] == other).all() for other in cells[1:]), "one chunk was computed, and copied"
            assert cells[0].any()
    assert first.token_ids.tolist() == step.token_ids.tolist()[:1]
    with torch.inference_mode():
        assert as_tensor(run_eagerly(engine.runner, steps[3])()).isfinite().all()


def test_rows_that_the_cache_cannot_hold_at_once_are_refused() -> None:
    engine = make_engine("llama", cache_memory=None, max_model_len=32)
    blocks = engine.plan.memory.num_blocks
    with pytest.raises(CapacityError, match=f"need {blocks + 1} blocks, and the cache has {blocks - 1}"):
        make_decode_steps(engine.runner, (1,), prompt_len=16 * blocks, vocab_size=VOCAB_SIZE)


def test_every_round_times_each_size_both_ways() -> None:
    runner = make_engine(capture_sizes=(4,), capture_rows=(2,)).runner
    steps = make_decode_steps(runner, (1, 2), prompt_len=5, vocab_size=VOCAB_SIZE)
    before = runner.graphs.counts.to_json()["steps"]["full"]
    times = take_turns(runner, steps, rounds=3, say=quiet)
    assert [each.rows for each in times] == [1, 2]
    assert [(len(each.eager), len(each.graph)) for each in times] == [(6, 6), (6, 6)]
    assert all(seconds > 0 for each in times for seconds in (*each.eager, *each.graph))
    assert runner.graphs.counts.to_json()["steps"]["full"] - before == 2 * 2 * (3 + 1)


@pytest.mark.parametrize("mode", ["full_and_piecewise", "piecewise"])
def test_kernels_take_a_part_of_a_step_and_leave_the_tap_free(mode: str) -> None:
    runner = make_engine(capture_sizes=(4,), graph_mode=mode).runner
    steps = make_decode_steps(runner, (1, 4), prompt_len=5, vocab_size=VOCAB_SIZE)
    shares = kernel_shares(runner, steps, passes=1)
    assert shares.keys() == {1, 4}
    for share in shares.values():
        assert 0 < share.eager < 1
        assert 0 < share.graph < 1
    assert runner.model.build.ops.hook.recorder is None


def test_a_kernel_inside_a_kernel_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 4.0])
    monkeypatch.setattr("ostinato.bench.step_timing.time.perf_counter", lambda: next(moments))
    stopwatch = Stopwatch()
    inner = stopwatch.timed("inner", lambda: torch.zeros(1))
    stopwatch.kernel("outer", lambda: inner() + 1, (), {})
    assert stopwatch.seconds == 3.0


def test_the_report_tells_every_size_and_what_it_was_padded_to() -> None:
    report = measure("nemotron_h_dense", GraphBench(rows=(1, 2, 3, 4, 5, 9), prompt_len=12, rounds=1))
    assert report["command"] == "graphs"
    assert report["backend"] == "tape"
    assert {step["rows"]: (step["mode"], step["graph_rows"], step["padding"]) for step in report["steps"]} == {
        1: ("full", 2, 1),
        2: ("full", 2, 0),
        3: ("full", 4, 1),
        4: ("full", 4, 0),
        5: ("piecewise", 8, 3),
        9: ("eager", None, None),
    }
    for step in report["steps"]:
        ways = {"eager"} if step["graph_rows"] is None else {"eager", "tape"}
        assert step["cuda_ms"] is step["floor"] is None
        for way in ways:
            total = step[f"{way}_ms"]
            assert total > 0
            assert step["kernel_ms"][way] + step["rest_ms"][way] == pytest.approx(total)
    speeds = [step["speed"] for step in report["steps"][:-1]]
    assert report["ratio"]["worst"] == min(speeds)
    assert report["cliff"].keys() == report["least"]["cliff"].keys() == {"eager", "tape"}
    assert report["capture"]["graphs"] == 3
    assert 0 < report["capture"]["observed_bytes"] <= report["capture"]["planned_bytes"]
    assert report["off_stride"] is None
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(report, default=str))


def test_graphs_that_are_left_to_their_first_use_are_captured_all_the_same() -> None:
    report = measure("llama", GraphBench(rows=(2, 4), prompt_len=4, rounds=1), capture="lazy")
    assert report["capture"]["graphs"] == 3


def test_steps_of_one_of_several_ranks_are_not_timed_alone() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 2: this benchmark times steps of one process"):
        measure("llama", GraphBench(rows=(2,), prompt_len=4, rounds=1), tensor_parallel_size=2)


def test_an_open_max_num_seqs_and_its_ladder_stay_as_they_are_without_the_benchmark() -> None:
    open_sizes = {"capture_sizes": None, "capture_rows": None, "graph_mode": "full_decode_only", "capture": "lazy"}
    report = measure("llama", GraphBench(rows=(3, 9), prompt_len=4, rounds=1), **open_sizes)
    assert [step["graph_rows"] for step in report["steps"]] == [4, 16]
    assert report["settings"]["max_num_seqs"] == 32
    more = measure("llama", GraphBench(rows=(33,), prompt_len=4, rounds=1), **open_sizes)
    assert more["settings"]["max_num_seqs"] == more["steps"][0]["graph_rows"] == 33


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"graph_mode": "none"}, "graph_mode"),
        ({"capture_sizes": (1,), "capture_rows": (1,)}, "capture_rows"),
        ({"check_replay": True}, "check_replay"),
    ],
)
def test_settings_that_leave_nothing_to_measure_are_refused_before_a_weight_is_loaded(
    settings: dict[str, Any], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.engine.core.EngineCore", lambda _: pytest.fail("loaded"))
    with pytest.raises(ConfigError) as refused:
        measure("llama", GraphBench(rows=(2,), prompt_len=4, rounds=1), **settings)
    assert refused.value.remedies[0].setting == setting


@pytest.mark.parametrize(("budget", "prompt_len"), [(700, 128), (768, 128), (10, 64)])
def test_prompts_off_stride_fill_whole_steps(budget: int, prompt_len: int) -> None:
    lengths = prompt_lengths(budget, prompt_len)
    assert sum(lengths) == budget * STEPS
    assert 0 < min(lengths) <= max(lengths) <= prompt_len


def test_engines_off_stride_are_strict_and_share_the_memory() -> None:
    config = EngineConfig(model=str(checkpoint("llama")), max_num_seqs=4, max_model_len=64, strict=False)
    configs = off_stride_configs(config, (700, 768))
    assert {budget: each.max_num_batched_tokens for budget, each in configs.items()} == {700: 700, 768: 768}
    assert all(each.strict and each.max_capture_size == 1024 for each in configs.values())
    assert configs[700].cache_memory == configs[768].cache_memory
    own = off_stride_configs(config.with_settings(cache_memory="8MiB", capture_sizes=(700, 768)), (700, 768))
    assert {(each.cache_memory, each.max_capture_size) for each in own.values()} == {(8 * 2**20, None)}


def test_prefill_off_stride_runs_in_graphs_and_is_compared() -> None:
    bench = GraphBench(rows=(2,), prompt_len=12, rounds=2, off_stride=(26, 32))
    report = measure("nemotron_h_dense", bench, capture_sizes=(26, 32), capture_rows=(2,), max_num_seqs=8)["off_stride"]
    assert report["strict"] is True
    assert [result["max_num_batched_tokens"] for result in report["results"]] == [26, 32]
    for result in report["results"]:
        assert result["prompt_tokens"] == STEPS * result["max_num_batched_tokens"]
        assert result["prefill_tokens_per_second"]["min"] > 0
        assert result["steps"] == {"full": 0, "piecewise": 2 * STEPS, "eager": 0}
        assert result["padding"] == 0
    assert report["ratio"]["min"] <= report["ratio"]["median"] <= report["ratio"]["max"]


@pytest.mark.slow
def test_the_command_prints_tables_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--max-num-seqs", "3", "--prompt-len", "4", "--rounds", "1"]
    printed = []
    for last in (["--off-stride", "24,32"], ["--json"]):
        with pytest.raises(SystemExit) as end:
            main(["bench", "graphs", str(checkpoint("llama")), *flags, *last])
        assert not end.value.code
        printed.append(capsys.readouterr().out)
    tables, report = printed
    assert "full 2" in tables
    assert "largest cliff, tape" in tables
    assert "prefill by step size" in tables
    assert "24 over 32" in tables
    assert [step["rows"] for step in json.loads(report)["steps"]] == [1, 2, 3]


def test_the_tables_of_a_gpu_show_its_floor_and_no_time_in_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    floor = {"step_seconds": 0.05, "fraction_reached": 0.5}
    steps = [step_figures(TIMES, "piecewise", 4, "cuda", floor=floor)]
    steps.append(step_figures(GraphStepTimes(9, [0.3], [0.3]), "eager", None, "cuda"))
    measured = {"captured": 1, "capture_seconds": 1.0, "planned_bytes": 2**20, "observed_bytes": 2**19}
    report = {"backend": "cuda", "steps": steps, "capture": capture_figures(measured), "off_stride": None}
    report |= overall_figures(steps, "cuda") | {"least": overall_figures(min_steps(steps), "cuda")}
    console = Console(width=100)
    for table in graph_tables(report):
        table.print(console)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    times = "300.00 ms - 100.00 ms - 2.00x 50.00 ms 50%"
    assert ["3", "piecewise", "4", "1", *times.split()] in lines
    assert ["9", "eager", "-", "300.00", "ms", "-", "-", "-", "-", "-", "-"] in lines


@pytest.mark.parametrize(("option", "value"), [("--rows", "1,,2"), ("--off-stride", "0"), ("--off-stride", "700,700")])
def test_numbers_that_are_none_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "graphs", "demo", option, value])
    assert end.value.code == 2
    assert option in capsys.readouterr().err


GRAPH_REPORT = {
    "command": "graphs",
    "backend": "tape",
    "model": {"name": "/models/tiny"},
    "machine": {"cpu": "a processor", "threads": 2},
    "settings": {"device": "cpu", "dtype": "float32"},
    "steps": [figures_of(1, 0.2, 0.1), figures_of(4, 0.3, 0.2), figures_of(5, 0.4, 0.2, size=None)],
}


def test_a_plot_is_left_to_the_tool_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ostinato.cli.bench_steps.graphs", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as end:
        main(["bench", "graphs", "demo", "--plot", "steps.png"])
    assert end.value.code == 2
    assert "tools/plot_bench.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "name", "reason"),
    [
        ({"command": "latency"}, "a.png", "has no chart"),
        ({}, "a.png", "has no chart"),
        (None, "a.docx", "should end in"),
    ],
)
def test_the_tool_says_why_there_is_no_chart(
    report: dict[str, Any] | None, name: str, reason: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match=reason):
        draw(GRAPH_REPORT if report is None else report, tmp_path / name)


def test_the_plot_is_a_picture_of_the_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(GRAPH_REPORT, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    draw(GRAPH_REPORT, tmp_path / "steps.svg")
    assert "<svg" in (tmp_path / "steps.svg").read_text()
