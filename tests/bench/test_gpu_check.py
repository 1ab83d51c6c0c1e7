"""`ostinato gpu-check`: its dry run, its parts' plans for a GPU that is not here, and its sums from plain numbers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ostinato import EngineConfig
from ostinato.bench import engine_driver, peers
from ostinato.bench.gpu import parts
from ostinato.bench.gpu.gpu_report import aims, decode_rows, make_report, overlap_rows, write_report
from ostinato.bench.gpu.parts import BUDGET, CheckPart, full_scale, make_parts, overlap, toy_scale
from ostinato.bench.gpu.run_parts import (
    Finished,
    PartOutcome,
    figures_of_tests,
    limit_of,
    measure_apart,
    run_parts,
    run_within,
    why_not,
)
from ostinato.bench.roofline import measure_bandwidth, measure_flops
from ostinato.cli.main import main
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from tools.plot_bench import draw

ROOT = Path(__file__).parents[2]
FULL, TOY = make_parts(full_scale(ROOT, 90)), make_parts(toy_scale())
H100 = CATALOGUE["h100-80gb"]


FOUND = {"triton": "3.7.1", "launches": 3, "findings": ["sm_90 kernel: stack 8 bytes"]}
"""The compiler's report."""


def quiet(_: str) -> None:
    """Reports nothing."""


def named(parts: tuple[CheckPart, ...], name: str) -> CheckPart:
    return next(part for part in parts if part.name == name)


def answered_here(kind: str, job: dict[str, Any]) -> dict[str, Any]:
    """As `worker.ask`, without its process."""
    module, function = engine_driver.JOBS[kind].split(":")
    answer = getattr(import_module(module), function)(json.loads(engine_driver.request_of(kind, job)))
    return {**json.loads(json.dumps(answer)), "peak_memory_bytes": 0}


def measured_here(part: CheckPart, limit: float, checkout: Path) -> PartOutcome:
    """As `measure_apart`, in this process, but for the tests and the compiler."""
    if part.kind in ("tests", "compile"):
        return measure_apart(part, limit, checkout)
    return PartOutcome(part, "ok", 1.0, limit, data=answered_here("gpu", {"part": asdict(part)})["data"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No large probes."""
    for module in ("throughput", "profile"):
        monkeypatch.setattr(
            f"ostinato.bench.{module}.measure_bandwidth", lambda device, isa: measure_bandwidth(device, 2**22, isa)
        )
    monkeypatch.setattr("ostinato.bench.profile.measure_flops", lambda *args: measure_flops(*args, size=64))


@pytest.mark.usefixtures("quick")
def test_the_dry_run_does_every_part_on_a_cpu_and_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.cli.gpu_check.measure_apart", measured_here)
    monkeypatch.setattr(peers, "run_in_process", answered_here)
    with pytest.raises(SystemExit) as ended:
        main(["gpu-check", "--dry-run", "--checkout", str(ROOT), "--output", str(tmp_path), "--budget", "100000"])
    data = json.loads((tmp_path / "report.json").read_text())
    outcomes = {part["name"]: (part["outcome"], part["reason"]) for part in data["parts"]}
    missing = {} if "overlap" in EngineConfig.model_fields else {"overlap": "skipped"}
    assert {name: outcome for name, (outcome, _) in outcomes.items()} == {
        part.name: missing.get(part.name, "ok") for part in TOY
    }, outcomes
    assert ended.value.code == 0
    assert data["is_dry_run"]
    assert named_data(data, "tests")["passed"] >= 3
    both = [step for step in data["decode"] if step["rows"] == 1]
    assert [step["model"] for step in both] == ["8b", "300m"]
    figures = ("step_seconds", "reached", "graph_seconds", "eager_seconds", "kernel_seconds")
    assert all(step[figure] > 0 for step in both for figure in figures)
    assert both[1]["transformers_seconds"] > 0
    text = (tmp_path / "report.txt").read_text()
    for words in ("decode, batch size 2", "prefill by step size", "first token", "A dry run"):
        assert words in text
    assert "could not be made" not in text
    draw(data, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def named_data(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(part["data"] for part in data["parts"] if part["name"] == name)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_are_compiled_in_a_process_of_their_own_and_its_mistake_is_told() -> None:
    part = named(TOY, "compile")
    done = measure_apart(part, 600, ROOT)
    assert (done.outcome, done.reason) == ("ok", None)
    assert done.data is not None
    assert set(done.data["kernels"]["sm_90"]) == {"embedding_kernel"}
    failed = measure_apart(replace(part, options={"arguments": ["--no-such-option"]}), 600, ROOT)
    assert failed.outcome == "failed"
    assert failed.reason is not None
    assert "unrecognized arguments" in failed.reason or "required" in failed.reason


def test_a_part_runs_in_a_process_of_its_own_and_its_mistake_is_told() -> None:
    part = named(TOY, "start")
    done = measure_apart(part, 600, ROOT)
    assert (done.outcome, done.reason) == ("ok", None)
    assert done.data is not None
    assert done.data["planned_bytes"]["weights"] == done.data["observed_bytes"]["weights"]
    broken = CheckPart("start", "start", "broken", 1, {"model": "demo", "block_size": 17}, part.options)
    failed = measure_apart(broken, 600, ROOT)
    assert failed.outcome == "failed"
    assert failed.reason is not None
    assert "block_size" in failed.reason


def test_a_process_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"path = pathlib.Path({str(tmp_path)!r}) / 'pid'\n"
        "path.write_text(str(child.pid)); print('began', flush=True); time.sleep(1000)\n"
    )
    seconds = 0.5
    finished = run_within([sys.executable, "-c", code], seconds)
    while not (tmp_path / "pid").exists():  # on a busy machine it had no time to begin
        seconds *= 2
        finished = run_within([sys.executable, "-c", code], seconds)
    assert finished.status is None
    assert finished.output == "began\n"
    pid = int((tmp_path / "pid").read_text())
    assert not (Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes())


def test_parts_take_what_is_left_and_what_the_budget_does_not_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ostinato.bench.gpu.run_parts.time.monotonic", lambda: now[0])
    takes = {"a": 4.0, "b": 30.0, "c": 1.0}
    limits = {}

    def measure(part: CheckPart, limit: float) -> PartOutcome:
        limits[part.name] = limit
        now[0] += min(takes[part.name], limit)
        return PartOutcome(part, "ok" if takes[part.name] <= limit else "timed out", 0.0, limit)

    parts = [CheckPart(name, "start", name, 10) for name in "abc"]
    parts.insert(1, CheckPart("x", "overlap", "x", 5, needs_setting="no_such_setting"))
    seen: list[int] = []
    outcomes = run_parts(parts, 40, measure, quiet, lambda so_far: seen.append(len(so_far)))
    assert limits == {"a": 15, "b": 26, "c": 10}
    assert [each.outcome for each in outcomes] == ["ok", "skipped", "timed out", "ok"]
    assert outcomes[1].reason == "this version has no setting no_such_setting"
    assert seen == [1, 2, 3, 4]
    now[0] = 0.0
    last = run_parts([parts[0], parts[3]], 12, measure, quiet)[-1]
    assert (last.outcome, last.reason) == ("skipped", "it is planned to take 10 s, and 8 s of the budget are left")
    assert limit_of(parts[:1], 9.9) is None


def test_all_files_with_tests_for_a_gpu_are_run() -> None:
    files = named(FULL, "tests").options["arguments"]
    assert {"tests/gpu/test_gpu_parity.py", "tests/graphs/test_graph_cuda.py"} <= set(files)
    assert "tests/test_layout.py" not in files


def test_the_budget_of_nine_minutes_holds_all_parts() -> None:
    assert sum(part.seconds for part in FULL) <= BUDGET <= 9 * 60
    assert [(part.name, part.kind) for part in FULL] == [(part.name, part.kind) for part in TOY]


class Stop(Exception):
    """What stands in for an engine: the settings have come so far."""


@pytest.mark.parametrize("part", [part for part in FULL if part.kind not in ("compile", "tests", "overlap", "encoder")])
def test_every_part_can_be_planned_for_an_h100(part: CheckPart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the engine, which needs the GPU."""
    plans = []

    def engine(config: EngineConfig, *_: object) -> None:
        from ostinato.bench.engine_driver import plan_of

        plans.append(plan_of(config))
        raise Stop

    def ask(kind: str, job: dict[str, Any]) -> dict[str, Any]:
        return answered_here(kind, job)

    monkeypatch.setattr("ostinato.bench.engine_driver.detect", lambda _: H100)
    monkeypatch.setattr("ostinato.engine.core.EngineCore", engine)
    monkeypatch.setattr(peers, "run_in_process", ask)
    with pytest.raises(Stop):
        parts.run_job({"part": json.loads(json.dumps(asdict(part)))})
    [plan] = plans
    assert plan.device == H100
    wanted = part.options.get("rows") or part.options.get("batch_sizes") or (1,)
    assert plan.settings.max_num_seqs >= max(wanted)


def test_overlap_is_measured_off_and_on_in_turns() -> None:
    """By another setting that is off and on, with which the engine needs no GPU."""
    options = {"prompt_len": 8, "output_len": 3, "batch_sizes": (1, 2), "rounds": 1}
    settings = dict(named(TOY, "overlap").settings)
    data = overlap(settings, options, quiet, "speculative_adaptive")
    kernels = {"decode": [{"batch_size": 2, "total": {"seconds": 0.5}}]}
    one, two = overlap_rows({"overlap": data, "kernels-300m": kernels})
    assert (one["rows"], one["kernel_seconds"], two["kernel_seconds"]) == (1, None, 0.5)
    assert one["off_seconds"] > 0
    assert two["on_seconds"] > 0


ALONE = """
tests/gpu/test_a.py::test_one[x-y z] PASSED                              [ 20%]
tests/gpu/test_a.py::test_two FAILED                                     [ 40%]
tests/gpu/test_a.py::test_three SKIPPED (needs an NVIDIA GPU)            [ 60%]
tests/gpu/test_b.py::test_four ERROR                                     [ 80%]
=========================== short test summary info ============================
FAILED tests/gpu/test_a.py::test_two - assert 1 == 2
ERROR tests/gpu/test_b.py::test_four - RuntimeError: CUDA error
1 failed, 1 passed, 1 skipped, 1 error in 2.00s
"""
SHARED = """
[gw0] [ 33%] PASSED tests/gpu/test_a.py::test_one[x-y z]
[gw1] [ 66%] FAILED tests/gpu/test_a.py::test_two
"""


def test_what_pytest_said_is_counted_alone_and_with_workers_and_if_it_was_ended() -> None:
    finished = Finished(1, ALONE, "", 2.0)
    figures = figures_of_tests(finished)
    assert (figures["passed"], figures["failed"], figures["skipped"]) == (1, 2, 1)
    assert figures["failures"] == [
        {"test": "tests/gpu/test_a.py::test_two", "reason": "assert 1 == 2"},
        {"test": "tests/gpu/test_b.py::test_four", "reason": "RuntimeError: CUDA error"},
    ]
    assert why_not(finished, figures) == "2 of 3 tests failed"
    ended = Finished(None, SHARED.replace("FAILED", "PASSED"), "", 9.0)
    assert why_not(ended, figures_of_tests(ended)) == "ended after 9 s; 2 tests had passed"
    assert figures_of_tests(Finished(1, SHARED, "", 1.0))["failures"][0]["reason"] is None
    nothing = Finished(5, "no tests ran", "", 1.0)
    assert why_not(nothing, figures_of_tests(nothing)) == "pytest ended with status 5: no tests ran"


def found(seconds: float) -> dict[str, Any]:
    """Of steps of 1 and 64 rows that need 65 bytes and take so many seconds."""
    step = {"floor": {"step_bytes": {"total": 65}, "fraction_reached": 0.1}}
    update = {"kernel": "state_update", "bytes": 40.0, "seconds": seconds}
    return {
        "decode-8b": {"results": [{"batch_size": 1, "decode_step_seconds": {"p50": seconds}, **step}]},
        "kernels-8b": {
            "decode": [
                {
                    "batch_size": rows,
                    "kernels": [update],
                    "total": {"seconds": seconds / 2},
                    "predicted": {"linear": 0.25, "attention": 0.5},
                }
                for rows in (1, 64)
            ]
        },
        "tests": {"failed": 2},
    }


def test_aims_are_met_missed_or_not_measured() -> None:
    rows = {row["name"]: row for row in aims(found(seconds=2.0), bandwidth=50)}
    one = rows["8B, 1 row: part of bandwidth"]
    assert (one["reached"], one["is_met"]) == (0.65, True)
    update = rows["8B, state_update from 64 rows on: part of bandwidth"]
    assert (update["reached"], update["is_met"]) == (0.4, False)
    assert rows["tests that failed"]["is_met"] is False
    assert rows["8B, 256 rows: part of bandwidth"]["is_met"] is None
    assert all(row["is_met"] is None for row in aims({}, None))


def test_a_decode_step_has_the_figures_of_all_parts_side_by_side() -> None:
    one, other = decode_rows(found(seconds=2.0), bandwidth=None)
    assert (one["model"], one["rows"], one["step_seconds"], one["tokens_per_second"]) == ("8b", 1, 2.0, 0.5)
    assert one["reached"] == 0.1  # no catalogue has its bandwidth
    assert (one["kernel_seconds"], one["predicted_seconds"], one["transformers_seconds"]) == (1.0, 0.75, None)
    assert (other["rows"], other["step_seconds"], other["kernel_seconds"]) == (64, None, 1.0)


def test_a_report_is_made_of_failures_alone_and_of_data_that_cannot_be_shown(tmp_path: Path) -> None:
    outcomes = [
        PartOutcome(named(FULL, "compile"), "failed", 3.0, 9.0, "1 launches with findings", FOUND),
        PartOutcome(
            named(FULL, "tests"), "failed", 3.0, 9.0, "2 of 3 failed", figures_of_tests(Finished(1, ALONE, "", 2.0))
        ),
        PartOutcome(named(FULL, "start"), "timed out", 9.0, 9.0, "ended after 9 s", trace="CUDA error"),
        PartOutcome(named(FULL, "decode-8b"), "ok", 9.0, 9.0, data={"results": [{}]}),
    ]
    report = make_report(outcomes, H100, BUDGET, is_dry=False)
    data, text, *_ = write_report(report, tmp_path)
    assert [part["outcome"] for part in json.loads(data.read_text())["parts"]] == [
        "failed",
        "failed",
        "timed out",
        "ok",
    ]
    assert "test_two" in text.read_text()
    assert "sm_90 kernel: stack 8 bytes" in text.read_text()
    assert "decode-8b: its tables could not be made" in text.read_text()


def test_without_a_gpu_the_check_says_what_runs_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if os.path.exists("/proc/driver/nvidia"):
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["gpu-check", "--checkout", str(ROOT), "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "--dry-run runs every part on the CPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["gpu-check", "--dry-run", "--checkout", str(tmp_path)])
    assert "has no benchmarks/models and tests/gpu" in capsys.readouterr().err
