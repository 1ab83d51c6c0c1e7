"""`ostinato bench serve-overhead`: its figures from plain numbers, the server that it starts, and its report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ostinato import ModelError, RequestError
from ostinato.bench.serve.cpu_profile import (
    ENGINE,
    FRONT,
    GENERATED,
    GENERATOR,
    OTHER,
    PROCESSES,
    Sampler,
    Used,
    cost_figures,
    cost_tables,
    part_of,
)
from ostinato.bench.serve.load_generator import LoadRun, RequestOutcome
from ostinato.bench.serve.overhead import OverheadRound, compare_round, overhead_figures, server_process
from ostinato.cli.main import main
from ostinato.config_fields import setting_flags
from tests.support.text_checkpoint import text_checkpoint

ANSWER: dict[str, Any] = {"texts": ["a", "b"], "output_tokens": 8, "seconds": 2.0}


SOURCE = Path(__file__).parents[2] / "src"


def run_of(*outcomes: RequestOutcome) -> LoadRun:
    return LoadRun(list(outcomes), seconds=4.0, not_sent=0, cpu_seconds=0.0, loop_lags=[])


def outcome(number: int, text: str, **more: Any) -> RequestOutcome:
    return RequestOutcome(number, 0.0, 0.0, 4.0, (1.0, 4.0), text, 3, 4, **more)


def test_a_round_compares_rates_and_the_answers_to_each_prompt() -> None:
    assert compare_round(run_of(outcome(0, "a"), outcome(1, "c")), ANSWER) == OverheadRound(2.0, 4.0, 1, 8, 8)
    assert compare_round(run_of(outcome(0, "b"), outcome(1, "a")), ANSWER).same == 0


def test_a_server_that_fails_a_request_is_not_compared() -> None:
    failed = outcome(1, "", error="http_500", detail="a step failed")
    with pytest.raises(RequestError, match="failed 1 of 2 requests: http_500, a step failed"):
        compare_round(run_of(outcome(0, "a"), failed), ANSWER)


def test_the_ratio_is_that_of_each_round() -> None:
    figures = overhead_figures(
        [OverheadRound(9.0, 10.0, 2), OverheadRound(10.0, 20.0, 2), OverheadRound(16.0, 20.0, 1)]
    )
    assert figures["ratio"] == {"median": 0.8, "min": 0.5, "max": 0.9}
    assert figures["server_tokens_per_second"]["median"] == 10
    assert figures["generate_tokens_per_second"]["median"] == 20
    assert figures["same_answers"] == [2, 2, 1]


def test_what_is_used_is_told_per_token_of_all_rounds_and_small_parts_are_left_out() -> None:
    def round_of(seconds: float) -> dict[str, Used]:
        parts = {"model": seconds, "loop": seconds / 1000}
        return {name: Used(0.75 * seconds, 0.25 * seconds, parts, {"model": seconds / 2}) for name in PROCESSES}

    figures = cost_figures([round_of(1.0), round_of(3.0)], dict.fromkeys(PROCESSES, 4000))
    assert figures["engine"] == {
        "user": 750, "system": 250, "parts": {"model": 1000, "loop": 1}, "main_parts": {"model": 500},
    }  # fmt: skip
    [table] = cost_tables(figures)
    assert [(row["part"], row["us"]) for row in table.rows if row["process"] == "engine"] == [
        ("", 1000),
        ("model", 1000),
    ]


def test_a_sampler_tells_the_part_that_the_main_thread_is_in() -> None:
    here, there = ("here", ("test_bench_serve_overhead.py:spin",)), ("there", ("test_bench_serve_overhead.py",))
    sampler = Sampler((here, there))

    def spin(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    before = time.process_time()
    sampler.start()
    try:
        spin(0.2)
    finally:
        sampler.stop()
    spent = time.process_time() - before
    assert 0.1 < sampler.seconds["here"] <= spent
    assert sampler.main_seconds["here"] <= spent
    assert part_of(None, (here, there)) == OTHER


@pytest.mark.parametrize(
    "place", [place for parts in (ENGINE, FRONT, GENERATOR) for _, places in parts for place in places]
)
def test_every_place_of_a_part_is_there(place: str) -> None:
    name, _, function = place.partition(":")
    if name == "pydantic/":
        return
    found = [
        path for path in SOURCE.rglob("*.py") if name in f"{path}" and (name.endswith("/") or f"{path}".endswith(name))
    ]
    assert found
    assert not function or any(f"def {function}(" in path.read_text() for path in found)


def test_settings_are_handed_to_the_server_as_flags() -> None:
    settings = {"model": "demo", "strict": True, "enable_prefix_caching": False, "capture_rows": (2, 4), "threads": 1}
    assert setting_flags(settings) == [
        "--model", "demo", "--strict", "--no-enable-prefix-caching", "--capture-rows", "2,4", "--threads", "1",
    ]  # fmt: skip


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ModelError, match="the server ended with status 2") as failed, server_process({"threads": -1}):
        pass
    assert "threads" in failed.value.message


@pytest.mark.slow
def test_the_report_has_both_the_same_answers_and_what_each_part_takes_of_the_processor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--threads", "1", "--dtype", "float32", "--cache-memory", "8MiB", "--max-model-len", "96"]
    load = ["--concurrency", "3", "--requests", "5", "--prompt-tokens", "30", "--output-tokens", "uniform:4:6"]
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve-overhead", str(text_checkpoint()), *flags, *load, "--rounds", "1", "--profile", "--json"])
    assert not end.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["same_answers"] == [5]
    assert report["settings"]["max_num_seqs"] == report["settings"]["concurrency"] == 3
    [served] = report["served"]
    assert (served["complete"], served["errors"], served["at_once"]["most"]) == (5, {}, 3)
    assert report["ratio"]["median"] == pytest.approx(
        report["server_tokens_per_second"]["median"] / report["generate_tokens_per_second"]["median"]
    )
    assert report["model"]["architecture"] == "nemotron_h"
    cost = report["microseconds_per_token"]
    assert cost.keys() == PROCESSES.keys()
    assert all(each["user"] + each["system"] > 0 for each in cost.values())
    assert cost[GENERATED]["parts"].keys() & dict(ENGINE).keys()
