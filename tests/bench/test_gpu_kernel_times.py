"""The times of operations on a GPU: which calls are captured together, on a pretended device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ostinato.bench.gpu.kernel_times import captured, operation_times, step_seconds
from ostinato.bench.profile import ProfileBench, profile
from ostinato.bench.statistics import Calls
from ostinato.bench.step_timing import make_decode_steps
from ostinato.engine.core import EngineCore
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import make_engine
from tests.support.pretended_gpu import PretendedDriver


def times_of(engine: EngineCore, driver: PretendedDriver | None) -> tuple[Calls, tuple[str, ...]]:
    steps = make_decode_steps(engine.runner, (2,), prompt_len=9, vocab_size=VOCAB_SIZE)
    return operation_times(engine.runner, steps[2], 2, passes=1, driver=driver)


def test_each_operation_is_a_graph_of_all_its_calls() -> None:
    engine, driver = make_engine("nemotron_h_dense", kernels="reference"), PretendedDriver()
    calls, eager = times_of(engine, driver)
    assert eager == ()
    assert calls[-1][0] == "logits"
    counts = Counter(name for name, _ in calls)
    layers = Counter(layer.kind for layer in engine.spec.layers)
    assert counts["state_update"] == counts["causal_conv1d"] == layers["mamba2"] > 0
    assert counts["attention"] == layers["attention"] > 0
    assert all(seconds > 0 for _, seconds in calls)
    assert len(driver.segments) == len(counts)
    assert [each for each in driver.log if each != "replay"] == ["aside", "begin", "end", "back"] * len(counts)
    assert driver.log.count("replay") >= len(counts)
    on_a_cpu, _ = times_of(make_engine("nemotron_h_dense"), None)
    assert Counter(name for name, _ in on_a_cpu) == counts


def test_an_operation_that_no_graph_can_hold_is_timed_as_it_is_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, driver = make_engine("nemotron_h_dense", kernels="reference"), PretendedDriver()
    attention = engine.runner.model.build.ops.attention

    def reads_on_the_host(*args: object, **kwargs: object) -> torch.Tensor:
        if driver.log[-1:] == ["begin"]:
            raise RuntimeError("operation not permitted when stream is capturing")
        result: torch.Tensor = attention(*args, **kwargs)
        return result

    ops = engine.runner.model.build.ops
    monkeypatch.setattr(ops, "attention", ops.tap.wrap("attention", reads_on_the_host))
    calls, eager = times_of(engine, driver)
    assert eager == ("attention",)
    assert all(seconds > 0 for name, seconds in calls if name == "attention")
    assert driver.log.count("begin") == driver.log.count("end")


def test_a_capture_that_fails_is_ended() -> None:
    driver = PretendedDriver()

    def fails() -> None:
        if driver.log[-1] == "begin":
            raise RuntimeError("not permitted")

    assert captured([fails], driver) is None
    assert driver.log == ["aside", "begin", "end", "back"]


def test_a_step_is_timed_as_the_engine_runs_it() -> None:
    runner = make_engine("llama").runner
    step = make_decode_steps(runner, (2,), prompt_len=9, vocab_size=VOCAB_SIZE)[2]
    before = runner.graphs.counts.to_json()["steps"]["full"]
    assert step_seconds(runner, step, passes=3) > 0
    assert runner.graphs.counts.to_json()["steps"]["full"] - before == 4


def test_a_profile_by_operation_has_the_kernels_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.bench.roofline import Bandwidth

    monkeypatch.setattr("ostinato.bench.profile.measure_bandwidth", lambda *_, **__: Bandwidth(1e10, 1e10))
    monkeypatch.setattr("ostinato.bench.profile.measure_flops", lambda *_: 1e11)
    settings = {"model": "demo", "random_weights": True, "threads": 1, "dtype": "float32", "cache_memory": "16MiB"}
    settings |= {"capture_sizes": "16"}
    both = [
        profile(settings, ProfileBench((2,), 8, 16, 1, by_operation=by_operation), lambda _: None).data
        for by_operation in (False, True)
    ]
    one, other = ({each["kernel"]: each["calls"] for each in data["decode"][0]["kernels"]} for data in both)
    assert {name: one[name] for name in other} == other
    assert both[1]["decode"][0]["phases"] == {}
    assert both[1]["prefill"]["way"] == "piecewise"
