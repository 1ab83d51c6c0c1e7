"""The rates of this machine: every kernel that a prediction asks for is measured. How fast it is, no test says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import ConfigError
from ostinato.bench.engine_driver import plan_of
from ostinato.bench.kernel_rates import KernelProbe
from ostinato.bench.measure_rates import machine_of, measure_rates
from ostinato.cli.main import main
from ostinato.config import EngineConfig
from ostinato.models.checkpoint import load_spec
from ostinato.ops.kernel_cost import StepShape
from ostinato.plan.device.kernel_support import NOT_THIS_CPU, detect_native
from ostinato.plan.prediction import MEASURED, PASSES
from tests.support.checkpoints import checkpoint
from tests.support.native_sets import skip_unless_planned

needs_native = pytest.mark.usefixtures("native_kernels")


@pytest.fixture
def native_kernels() -> None:
    skip_unless_planned("native")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory, few sizes, one round."""
    monkeypatch.setattr("ostinato.bench.measure_rates.NUM_BYTES", 2**16)
    for name, value in {"FEW_TOKENS": (1,), "MANY_TOKENS": (9,), "ROWS": (1, 2), "PROMPT": 16, "MAX_CALLS": 2}.items():
        monkeypatch.setattr(f"ostinato.bench.kernel_rates.{name}", value)
    for name, value in {"WIDTH": 64, "OUTPUTS": 32, "CHANNELS": 64}.items():
        monkeypatch.setattr(f"ostinato.bench.kernel_rates.{name}", value)


def config(name: str = "nemotron_h_dense", **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(checkpoint(name)), threads=1, cache_memory="16MiB", **settings)


@needs_native
@pytest.mark.parametrize(
    ("dtype", "name"), [("float32", "nemotron_h_dense"), ("bfloat16", "jamba"), ("float32", "qwen3_5_moe_text")]
)
@pytest.mark.slow
def test_what_is_measured_predicts_steps_of_every_kernel(dtype: str, name: str) -> None:
    made = config(name, dtype=dtype)
    plan = plan_of(made)
    rates = measure_rates(plan)
    assert (rates.dtype, rates.threads) == (dtype, 1)
    assert {each.operation for each in rates.rates} == {*MEASURED, *PASSES}
    assert all(each.bytes_per_second > 0 for each in rates.rates)
    assert rates.row_seconds >= 0
    assert 0 <= rates.other_load <= 1
    machine = machine_of(load_spec(made), plan, measure=True, say=lambda _: None)
    assert machine is not None
    for step in (StepShape(3, 1, 20, decodes=True), StepShape(1, 30, 0, decodes=False)):
        assert machine.predict(step).seconds > 0


@needs_native
def test_the_time_of_a_call_is_that_of_all_calls_over_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.ops.dispatch import load_extension

    isa = detect_native().isa
    assert isa is not None
    now = iter(range(100))
    monkeypatch.setattr("ostinato.bench.kernel_rates.time.perf_counter", lambda: float(next(now)))
    probe = KernelProbe(load_extension(isa), torch.float32, 2**16)
    x, weight = torch.ones(2, 16), torch.ones(16)
    assert probe.seconds_of("rms_norm", 2, [((x, weight, 1e-5), {})] * 4) == 0.25


def test_without_native_kernels_there_is_nothing_to_measure() -> None:
    plan = plan_of(config())
    without = replace(plan, device=replace(plan.device, native=NOT_THIS_CPU))
    with pytest.raises(ConfigError, match="native kernels"):
        measure_rates(without)


@needs_native
@pytest.mark.slow
def test_the_command_measures_keeps_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ["plan", str(checkpoint("llama")), "--threads", "1", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(flags)
    before = json.loads(capsys.readouterr().out)["prediction"]
    assert before["steps"] == []
    assert "--measure" in before["reason"]
    with pytest.raises(SystemExit, match="0"):
        main([*flags, "--measure"])
    printed = capsys.readouterr()
    assert str(tmp_path) in printed.err
    measured = json.loads(printed.out)["prediction"]
    assert measured["steps"]
    with pytest.raises(SystemExit, match="0"):
        main(flags)
    assert json.loads(capsys.readouterr().out)["prediction"] == measured
    assert measured["rates"]["dtype"] == "float32"
    assert isinstance(measured["rates"]["bandwidth"], float)
