"""`ostinato gpu-check`: its parts' plans for a GPU that is not here, and its judgement from plain numbers.

`make gpu-rehearsal` runs all of it, with planted faults."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ostinato import EngineConfig
from ostinato.bench.gpu import parts
from ostinato.bench.gpu.gpu_report import MARKS, decode_rows, make_report, part_rows, recurrence_rows, write_report
from ostinato.bench.gpu.parts import MINUTES, PARTS, Check, make_checks
from ostinato.bench.gpu.run_parts import (
    CheckOutcome,
    Finished,
    figures_of_tests,
    limit_of,
    measure_apart,
    outcome_of,
    run_checks,
    run_within,
    why_not,
)
from ostinato.cli.main import main
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from tests.support.pretended_gpu import PLANTS
from tools.plot_bench import draw

ROOT = Path(__file__).parents[2]
FULL = make_checks(ROOT, 90)
H100 = CATALOGUE["h100-80gb"]


FOUND = {"triton": "3.7.1", "launches": 3, "findings": ["sm_90 kernel: stack 8 bytes"]}
"""The compiler's report."""


def quiet(_: str) -> None:
    """Reports nothing."""


def named(name: str) -> Check:
    return next(check for check in FULL if check.name == name)


SMALL = {"model": "demo", "random_weights": True, "device": "cpu", "threads": 1, "dtype": "float32"}
SIZES = {"cache_memory": "16MiB", "max_num_seqs": 2, "capture_sizes": "8", "capture_rows": "1"}
COVERED = replace(
    named("coverage"),
    settings=SMALL | SIZES,
    options={"rows": (1, 2), "too_many": 1000, "slots_memory": "4MiB"},
)


@pytest.mark.slow
def test_a_check_runs_in_a_process_of_its_own_and_its_mistake_is_told() -> None:
    """Here, the graphs of decode steps, of which one size has none."""
    done = measure_apart(COVERED, 600, ROOT)
    assert (done.outcome, done.reason) == ("ok", None)
    assert done.data is not None
    one, two = done.data["results"]
    assert (one["planned"], two["planned"]) == ("full", "piecewise")
    assert 1 <= done.data["slots"]["named"] < 1000
    failed = measure_apart(replace(COVERED, settings=SMALL | SIZES | {"block_size": 17}), 600, ROOT)
    assert failed.outcome == "failed"
    assert failed.reason is not None
    assert "block_size" in failed.reason


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
def test_kernels_are_compiled_in_a_process_of_their_own_and_its_mistake_is_told() -> None:
    toy = ["--engines", "bfloat16", "--capability", "90", "--kernel", "embedding", "--jobs", "1"]
    check = replace(named("compile"), options={"arguments": [*toy, "benchmarks/models/nemotron-h-300m"]})
    done = measure_apart(check, 600, ROOT)
    assert (done.outcome, done.reason) == ("ok", None)
    assert done.data is not None
    assert set(done.data["kernels"]["sm_90"]) == {"embedding_kernel"}
    failed = measure_apart(replace(check, options={"arguments": ["--no-such-option"]}), 600, ROOT)
    assert failed.outcome == "failed"
    assert failed.reason is not None
    assert "unrecognized arguments" in failed.reason or "required" in failed.reason


def test_a_process_is_judged_by_its_end_its_faults_and_what_it_kept() -> None:
    check = named("updates")
    kept = '{"data": {"results": [1]}}\n'

    def judged(status: int | None, output: str, errors: str = "") -> tuple[str, object, object]:
        outcome = outcome_of(check, Finished(status, output, errors, 2.0), 9.0)
        return outcome.outcome, outcome.reason, outcome.data

    assert judged(0, kept) == ("ok", None, {"results": [1]})
    assert judged(None, kept + '{"data": {"resu') == ("timed out", "ended after 9 s", {"results": [1]})
    assert judged(1, kept, "Traceback\nCUDA error") == ("failed", "status 1: CUDA error", {"results": [1]})
    assert judged(None, "") == ("timed out", "ended after 9 s", None)
    assert judged(0, "")[0] == judged(0, "no JSON")[0] == "failed"
    whole = '{"data": {"is_whole": true, "results": [1]}}\n'
    assert judged(-11, whole, "a crash")[0] == judged(None, whole)[0] == "ok"
    assert "other projects' kernels were not: ended after 9 s" in str(judged(None, whole)[1])
    faults = '{"data": {"faults": ["outputs differ", "no graph"]}}'
    assert judged(0, faults)[:2] == ("failed", "outputs differ, and 1 more")


def test_a_process_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"path = pathlib.Path({str(tmp_path)!r}) / 'pid'\n"
        "path.write_text(str(child.pid)); print('began', flush=True); time.sleep(1000)\n"
    )
    seconds = 0.5
    finished = run_within([sys.executable, "-c", code], seconds)
    while not finished.output:  # on a busy machine it had no time to begin
        seconds *= 2
        finished = run_within([sys.executable, "-c", code], seconds)
    assert finished.status is None
    assert finished.output == "began\n"
    pid = int((tmp_path / "pid").read_text())
    assert not (Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes())


def test_checks_take_what_is_left_and_what_the_budget_does_not_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ostinato.bench.gpu.run_parts.time.monotonic", lambda: now[0])
    takes = {"a": 4.0, "b": 30.0, "c": 1.0}
    limits = {}

    def measure(check: Check, limit: float) -> CheckOutcome:
        limits[check.name] = limit
        now[0] += min(takes[check.name], limit)
        return CheckOutcome(check, "ok" if takes[check.name] <= limit else "timed out", 0.0, limit)

    checks = [Check(name, "seeds", "start", name, 10) for name in "abc"]
    seen: list[int] = []
    outcomes = run_checks(checks, 40, measure, quiet, lambda so_far: seen.append(len(so_far)))
    assert limits == {"a": 20, "b": 26, "c": 10}
    assert [each.outcome for each in outcomes] == ["ok", "timed out", "ok"]
    assert seen == [1, 2, 3]
    now[0] = 0.0
    last = run_checks([checks[0], checks[2]], 12, measure, quiet)[-1]
    assert (last.outcome, last.reason) == ("skipped", "it is planned to take 10 s, and 8 s of the budget are left")
    assert limit_of(checks[:1], 9.9) is None


def test_all_files_with_tests_for_a_gpu_are_run() -> None:
    files = named("gpu-tests").options["arguments"]
    assert {"tests/gpu/test_gpu_parity.py", "tests/graphs/test_graph_cuda.py"} <= set(files)
    assert "tests/test_layout.py" not in files


def test_ten_minutes_hold_all_checks_of_eight_parts_in_their_order() -> None:
    assert sum(check.seconds for check in FULL) <= MINUTES * 60
    assert list(dict.fromkeys(check.part for check in FULL)) == list(PARTS)
    assert len(PARTS) == 8
    assert {mark.part for mark in MARKS} <= set(PARTS)


def test_a_fault_is_planted_in_every_part() -> None:
    assert {named(name).part for name in PLANTS.values()} == set(PARTS)


class Stop(Exception):
    """What stands in for an engine: the settings have come so far."""


@pytest.mark.parametrize("check", [each for each in FULL if each.kind in ("start", "throughput", "profile", "graphs")])
def test_every_engine_of_a_check_can_be_planned_for_an_h100(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the engine, which needs the GPU."""
    plans = []

    def engine(config: EngineConfig, *_: object) -> None:
        from ostinato.bench.engine_driver import plan_of

        plans.append(plan_of(config))
        raise Stop

    monkeypatch.setattr("ostinato.bench.engine_driver.detect", lambda _: H100)
    monkeypatch.setattr("ostinato.engine.core.EngineCore", engine)
    with pytest.raises(Stop):
        parts.run_job({"check": json.loads(json.dumps(asdict(check)))})
    [plan] = plans
    assert plan.device == H100
    wanted = check.options.get("rows") or check.options.get("batch_sizes") or (1,)
    assert plan.settings.max_num_seqs >= max(wanted)


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
    """Of steps of 1 and 64 rows that need 70 bytes and take so many seconds."""
    step = {"floor": {"step_bytes": {"total": 70}, "fraction_reached": 0.1}}
    update = {"operation": "state_update", "tokens": 64, "bytes": 40.0, "seconds": seconds}
    others = {"fla-core": {"reason": "left out: fla is not installed"}, "flashinfer-python": {"seconds": 1.0}}
    return {
        "decode-8b": {"results": [{"batch_size": 1, "decode_step_seconds": {"p50": seconds}, **step}]},
        "operations-8b": {"decode": [{"batch_size": rows, "total": {"seconds": seconds / 2}} for rows in (1, 64)]},
        "updates": {
            "results": [{**update, "rows": 1, "seconds": 9.0, "others": {}}, {**update, "rows": 64, "others": others}]
        },
        "predicted-8b": {"steps": [{"rows": 1, "cuda_ms": 10.0, "predicted_ms": 9.0, "predicted_ratio": 0.9}]},
    }


def judged(data: Mapping[str, Any], bandwidth: float | None) -> dict[str, dict[str, Any]]:
    return {mark.name: mark.row(data, bandwidth) for mark in MARKS}


def test_marks_are_met_missed_or_not_measured() -> None:
    rows = judged(found(seconds=2.0), bandwidth=50)
    one = rows["8B, 1 row: part of bandwidth"]
    assert (one["reached"], one["is_met"]) == (0.7, True)
    update = rows["state_update from 64 rows on: part of bandwidth"]
    assert (update["reached"], update["is_met"]) == (0.4, False)
    assert rows["8B: largest misprediction of a step"]["is_met"] is True
    assert rows["8B, 128 rows: part of bandwidth"]["is_met"] is None
    assert all(row["is_met"] is None for row in judged({}, None).values())


def test_a_part_is_ok_only_if_all_of_it_ran_and_every_mark_is_met() -> None:
    """Of a part with a mark, by the outcomes of its two checks and whether the mark is met."""
    two = (named("decode-8b"), named("operations-8b"))

    def outcome_of_part(first: str, second: str, is_met: bool | None) -> tuple[str, str | None]:
        outcomes = [
            CheckOutcome(check, outcome, 1.0, 9.0, None if outcome == "ok" else "why")  # type: ignore[arg-type]
            for check, outcome in zip(two, (first, second), strict=True)
        ]
        marks = [{"part": "decode", "name": "fast", "is_met": is_met}, {"part": "seeds", "name": "x", "is_met": None}]
        [row] = part_rows(outcomes, marks)
        return row["outcome"], row["reason"]

    assert outcome_of_part("ok", "ok", True) == ("ok", None)
    assert outcome_of_part("ok", "ok", False) == ("missed", "fast")
    assert outcome_of_part("ok", "ok", None) == ("not measured", "fast")
    assert outcome_of_part("ok", "failed", True) == ("failed", "operations-8b: why")
    assert outcome_of_part("skipped", "timed out", False)[0] == "timed out"
    assert outcome_of_part("ok", "skipped", True)[0] == "incomplete"
    assert outcome_of_part("skipped", "skipped", None)[0] == "skipped"


def test_a_part_that_did_not_run_is_never_ok() -> None:
    """Of none of the parts, whether or not it has marks."""
    outcomes = [CheckOutcome(check, "skipped", 0.0, 0.0, "no time") for check in FULL]
    rows = part_rows(outcomes, list(judged({}, None).values()))
    assert [row["name"] for row in rows] == list(PARTS)
    assert {row["outcome"] for row in rows} == {"skipped"}


def test_a_decode_step_and_others_kernels_have_the_figures_of_all_checks_side_by_side(tmp_path: Path) -> None:
    one, other = decode_rows(found(seconds=2.0), bandwidth=None)
    assert (one["model"], one["rows"], one["step_seconds"], one["tokens_per_second"]) == ("8b", 1, 2.0, 0.5)
    assert one["reached"] == 0.1  # no catalogue has its bandwidth
    assert (one["kernel_seconds"], one["predicted_seconds"], one["graph_seconds"]) == (1.0, 0.009, 0.01)
    assert (other["rows"], other["step_seconds"], other["kernel_seconds"]) == (64, None, 1.0)
    own = recurrence_rows(found(seconds=2.0), bandwidth=50)
    assert [(row["rows"], row["whose"], row["seconds"], row["reached"]) for row in own] == [
        (1, "ostinato", 9.0, 40 / 50 / 9),
        (64, "ostinato", 2.0, 0.4),
        (64, "fla-core", None, None),
        (64, "flashinfer-python", 1.0, 0.8),
    ]
    draw(
        {"command": "gpu-check", "device": {"name": "h100"}, "note": None, "decode": [one, other]},
        tmp_path / "plot.png",
    )
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_report_is_made_of_failures_alone_and_of_data_that_cannot_be_shown(tmp_path: Path) -> None:
    outcomes = [
        CheckOutcome(named("compile"), "failed", 3.0, 9.0, "1 launches with findings", FOUND),
        CheckOutcome(
            named("gpu-tests"), "failed", 3.0, 9.0, "2 of 3 failed", figures_of_tests(Finished(1, ALONE, "", 2.0))
        ),
        CheckOutcome(named("memory"), "timed out", 9.0, 9.0, "ended after 9 s", trace="CUDA error"),
        CheckOutcome(named("decode-8b"), "ok", 9.0, 9.0, data={"results": [{}]}),
    ]
    report = make_report(outcomes, H100, 600, None)
    data, text, *_ = write_report(report, tmp_path)
    written = json.loads(data.read_text())
    assert [check["outcome"] for check in written["checks"]] == ["failed", "failed", "timed out", "ok"]
    assert {part["name"]: part["outcome"] for part in written["parts"]} == {
        "kernels": "failed",
        "seeds": "timed out",
        "verify": "failed",
        "decode": "not measured",
    }
    assert "test_two" in text.read_text()
    assert "sm_90 kernel: stack 8 bytes" in text.read_text()
    assert "decode-8b: its tables could not be made" in text.read_text()


def test_without_a_gpu_the_check_says_what_runs_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if os.path.exists("/proc/driver/nvidia"):
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["gpu-check", "--checkout", str(ROOT), "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "gpu-rehearsal" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["gpu-check", "--checkout", str(tmp_path)])
    assert "has no benchmarks/models and tests/gpu" in capsys.readouterr().err
