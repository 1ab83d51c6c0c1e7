"""`ostinato bench profile`: the figures from plain numbers, and the report on tiny models."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ostinato import ConfigError
from ostinato.bench.profile import (
    ProfileBench,
    Roofline,
    kernel_figures,
    profile,
    total_figures,
)
from ostinato.bench.roofline import Bandwidth, measure_bandwidth, measure_flops
from ostinato.bench.step_phases import PhaseClock, phase_figures
from ostinato.bench.step_timing import Stopwatch, experts_read, shortest_pass
from ostinato.cli.main import main
from ostinato.ops.kernel_cost import KernelCost
from ostinato.plan.device.kernel_support import detect_native
from ostinato.runner.model_runner import ModelRunner
from ostinato.scheduler.batch import Batch
from tests.support.checkpoints import checkpoint

TINY = {"threads": 1, "dtype": "float32", "cache_memory": "16MiB"}
BENCH = ProfileBench(batch_sizes=(1, 3), context=20, prefill=40, rounds=2)
ROOFS = Roofline(bytes_per_second=1000, flops_per_second=50)
PHASES = {"loop", "schedule", "run", "inputs", "buffers", "model", "sampling", "logits", "update", "deliver"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No large probes."""
    monkeypatch.setattr(
        "ostinato.bench.profile.measure_bandwidth", lambda device, isa: measure_bandwidth(device, 2**22, isa)
    )
    monkeypatch.setattr("ostinato.bench.profile.measure_flops", lambda *args: measure_flops(*args, size=64))


def measure(name: str, **settings: Any) -> dict[str, Any]:
    return profile({**TINY, "model": str(checkpoint(name)), **settings}, BENCH, lambda _: None).data


def test_the_pass_that_is_shortest_in_all_counts() -> None:
    late = [("a", 9.0), ("b", 0.5), ("a", 3.0)]
    assert shortest_pass([late, [("a", 2.0), ("b", 4.0), ("a", 1.0)]]) == [("a", 2.0), ("b", 4.0), ("a", 1.0)]


def test_kernels_come_longest_first_beside_what_bounds_them() -> None:
    calls = [("norm", 1.0), ("linear", 2.0), ("linear", 6.0), ("scan", 1.0)]
    work = {"linear": KernelCost(num_bytes=2000, flops=50), "scan": KernelCost(num_bytes=100, flops=25)}
    linear, norm, scan = kernel_figures(calls, work, ROOFS)
    assert (linear["kernel"], linear["calls"], linear["seconds"], linear["share"]) == ("linear", 2, 8.0, 0.8)
    assert (linear["floor_seconds"], linear["fraction_reached"]) == (2.0, 0.25)  # its bytes
    assert (scan["floor_seconds"], scan["fraction_reached"]) == (0.5, 0.5)  # its operations
    assert norm["bytes"] is norm["flops"] is norm["floor_seconds"] is norm["fraction_reached"] is None
    assert total_figures([linear, norm, scan]) == {
        "seconds": 10.0,
        "floor_seconds": 2.5,
        "fraction_reached": 0.25,
    }


def test_the_floor_of_experts_is_that_of_those_that_a_step_s_tokens_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []

    def noted(runner: ModelRunner, step: Batch) -> list[int]:
        read.append(experts_read(runner, step))
        return read[-1]

    monkeypatch.setattr("ostinato.bench.step_timing.experts_read", noted)
    report = measure("qwen3_5_moe_text")
    steps = [*report["decode"], report["prefill"]]
    one, *others = (next(each for each in step["kernels"] if each["kernel"] == "moe") for step in steps)
    assert set(read[0]) == {read[0][0]}  # top_k in each layer
    for figures, step, counts, tokens in zip(others, steps[1:], read[1:], (3, 40), strict=True):
        assert figures["flops"] == pytest.approx(tokens * one["flops"])
        assert figures["bytes"] == pytest.approx(one["bytes"] * sum(counts) / sum(read[0]))
        assert 1 < sum(counts) / sum(read[0]) <= tokens
        assert step["total"]["floor_seconds"] > figures["floor_seconds"] > 0


def test_phases_are_medians_over_steps() -> None:
    steps = [{"schedule": seconds, "model": 2 * seconds} for seconds in (1.0, 9.0, 2.0)]
    assert phase_figures(steps) == {"schedule": 2.0, "model": 4.0}


def test_a_phase_stands_still_while_an_inner_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ostinato.bench.step_phases.time.perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    clock = PhaseClock()
    inner = clock.timed("inner", lambda: wait(5))

    def work() -> None:
        wait(1)
        inner()
        inner()
        wait(2)

    clock.timed("outer", work)()
    assert clock.seconds == {"outer": 3, "inner": 10}


def test_a_kernel_inside_a_kernel_belongs_to_it() -> None:
    clock = Stopwatch()
    clock.kernel("outer", lambda: clock.kernel("inner", lambda: torch.zeros(1), (), {}), (), {})
    assert [name for name, _ in clock.calls] == ["outer"]


@pytest.mark.skipif(detect_native().isa is None, reason=detect_native().reason)
def test_bandwidth_is_also_measured_natively() -> None:
    bandwidth = measure_bandwidth(torch.device("cpu"), 2**22, detect_native().isa)
    assert isinstance(bandwidth, Bandwidth)
    assert 1e8 < bandwidth.read < 1e13


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_report_has_every_kernel_of_a_step_and_every_phase(kernels: str) -> None:
    report = measure("nemotron_h_dense", kernels=kernels)
    assert [step["batch_size"] for step in report["decode"]] == [1, 3]
    for step in report["decode"]:
        assert step["way"] == "tape"
        names = {each["kernel"] for each in step["kernels"]}
        assert {"linear", "state_update", "causal_conv1d", "attention", "rms_norm", "logits"} <= names
        assert "ssd_scan" not in names
        assert sum(each["share"] for each in step["kernels"]) == pytest.approx(1)
        assert step["phases"].keys() == PHASES
        assert all(seconds >= 0 for seconds in step["phases"].values())
    assert {"ssd_scan", "linear", "logits"} <= {each["kernel"] for each in report["prefill"]["kernels"]}
    assert report["prefill"]["step_seconds"] > 0
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(report, default=str))


def test_steps_without_a_full_graph_are_profiled_eagerly() -> None:
    report = measure("llama", graph_mode="none")
    assert [step["way"] for step in report["decode"]] == ["eager", "eager"]
    assert all(step["phases"]["model"] > 0 for step in report["decode"])


@pytest.mark.parametrize(
    "setting", [{"speculative": "ngram:2"}, {"tensor_parallel_size": 2}], ids=lambda each: next(iter(each))
)
def test_a_profile_with_drafts_or_ranks_is_refused_before_a_weight_is_loaded(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    monkeypatch.setattr("ostinato.engine.core.EngineCore", lambda _: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=next(iter(setting))):
        measure("llama", **setting)


def test_the_command_prints_tables_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--batch-sizes", "2", "--context", "8", "--prefill", "9", "--rounds", "1"]
    flags += ["--threads", "1", "--cache-memory", "16MiB"]
    printed = []
    for last in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            main(["bench", "profile", str(checkpoint("llama")), *flags, *last])
        assert not end.value.code
        printed.append(capsys.readouterr().out)
    tables, report = printed
    assert "decode, batch size 2" in tables
    assert "prefill, 9 tokens" in tables
    assert json.loads(report)["command"] == "profile"
    assert json.loads(report)["products"] in " ".join(tables.split())
