"""How costs grow: bookkeeping in calls of Python, which no other process disturbs; and the report of `bench scale`."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.bench.scale import BLOCK, FakeEngine, filled_with_blocks, filled_with_requests
from ostinato.cli.main import main
from ostinato.config import EngineConfig
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import make_plan
from tools.plot_bench import draw


def calls(run: Callable[[], object]) -> int:
    """Functions of Python, and of C from Python, that a run calls."""
    number = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what it finalises for other tests would be counted too
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return number


@pytest.mark.parametrize(
    ("fill", "few", "many"),
    [(filled_with_requests, 10, 1000), (filled_with_blocks, 128, 4096)],
    ids=["waiting", "cached"],
)
@pytest.mark.slow
def test_a_step_does_not_look_at_what_waits_or_is_cached(
    fill: Callable[[int], FakeEngine], few: int, many: int
) -> None:
    of_few, of_many = (fill(number) for number in (few, many))
    for _ in range(BLOCK):  # the steps in which blocks fill are among them
        assert calls(of_few.step) == calls(of_many.step)


@pytest.mark.slow
def test_what_a_prompt_costs_does_not_grow_with_the_rows_beside_it() -> None:
    def each(max_num_seqs: int) -> float:
        engine, prompts = FakeEngine(0, max_num_seqs), 512

        def run() -> None:
            for _ in range(prompts):
                engine.add(BLOCK, 1)
            while engine.scheduler.has_unfinished:
                engine.step()

        return calls(run) / prompts

    assert each(256) < 1.5 * each(16)


def test_a_plan_does_not_take_longer_with_a_limit() -> None:
    device = replace(detect("cpu"), memory_bytes=2**44)
    config = EngineConfig(model="demo", max_model_len=256)
    few, many = (config.with_settings(max_num_seqs=number) for number in (256, 4096))
    spec = load_spec(config)
    assert calls(lambda: make_plan(many, spec, device)) < 3 * calls(lambda: make_plan(few, spec, device))


def test_the_report_has_each_cost_at_each_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = "bench scale demo --depths 16,64 --rows 1,2 --cached-blocks 64,128 --waiting 2,4 --limits 1,8 --rounds 1"
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--json"])
    assert not ended.value.code
    report = json.loads(capsys.readouterr().out)
    rows = report["results"]
    assert [(row["cost"], row["by"], row["number"]) for row in rows] == [
        ("bookkeeping", "cached blocks", 64),
        ("bookkeeping", "cached blocks", 128),
        ("bookkeeping", "waiting requests", 2),
        ("bookkeeping", "waiting requests", 4),
        ("each prompt", "prompts", 2),
        ("each prompt", "prompts", 4),
        ("plan", "max_num_seqs", 1),
        ("plan", "max_num_seqs", 8),
        ("step", "depth", 16),
        ("step", "depth", 64),
        ("step", "rows", 1),
        ("step", "rows", 2),
    ]
    assert all(row["seconds"]["min"] > 0 for row in rows)
    assert [row["order"] is None for row in rows] == [True, False] * 6
    assert all(row["growth"] == 1 for row in rows[::2])
    pytest.importorskip("matplotlib")
    draw(report, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 0


@pytest.mark.parametrize(
    "flags", [["--tensor-parallel-size", "2"], ["--speculative", "ngram:2"]], ids=["ranks", "drafts"]
)
def test_steps_with_ranks_or_drafts_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    monkeypatch.setattr("ostinato.bench.scale.step_seconds", lambda _: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "scale", "demo", *flags])
    assert ended.value.code
    assert "this benchmark times steps" in " ".join(capsys.readouterr().err.split())
