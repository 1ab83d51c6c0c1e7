"""What every benchmark returns: how a report is printed, and what it says of the command and the machine."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from ostinato.bench.profile import decode_phases
from ostinato.bench.report import BenchReport, Column, Table, at, format_value
from ostinato.cli.main import main
from ostinato.graphs.tape import Tape
from ostinato.plan.device.linux import cpu_model
from tests.support.engines import make_engine
from tests.support.fake_openai import fake_openai

COLUMNS = (
    Column("load", "load", is_text=True),
    Column("latency", "name", is_text=True),
    Column("p50", "seconds.p50", "ms", help="the median"),
)


def printed(report: BenchReport | Table) -> str:
    console = Console(file=io.StringIO(), width=100)
    report.print(console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "format", "text"),
    [
        (None, "ms", "-"),
        (0.0123, "ms", "12.3 ms"),
        (1234.4, "count", "1,234"),
        (0.5, "percent", "50%"),
        (2, "{:.2f}x", "2.00x"),
        (2048, "bytes", "2 KiB"),
        ("as it is", "count", "as it is"),
        (3, lambda value: "!" * value, "!!!"),
    ],
)
def test_values_are_shown_in_their_format(value: object, format: str, text: str) -> None:
    assert format_value(value, format) == text


def test_a_path_ends_where_something_is_none() -> None:
    assert at({"floor": {"seconds": 3}}, "floor.seconds") == 3
    assert at({"floor": None}, "floor.seconds") is None


def test_names_that_stand_above_are_left_out_and_what_was_not_measured_is_a_dash() -> None:
    rows = [
        {"load": "one", "name": "first", "seconds": {"p50": 0.001}},
        {"load": "one", "name": "second", "seconds": None},
        {"load": "two", "name": "second", "seconds": {"p50": 1.0}},
    ]
    lines = [line.split() for line in printed(Table(COLUMNS, rows, "latencies")).splitlines()]
    assert lines == [
        ["latencies"],
        ["load", "latency", "p50"],
        ["one", "first", "1.0", "ms"],
        ["second", "-"],
        ["two", "second", "1000.0", "ms"],
        ["p50:", "the", "median"],
    ]


def test_a_report_prints_its_facts_and_notes() -> None:
    data = {"command": "latency", "command_line": "ostinato bench latency demo", "date": "2026-11-22"}
    text = printed(BenchReport(data, {"model": "demo [bold]"}, [], notes=["the machine was busy"]))
    for part in ("demo [bold]", "ostinato bench latency demo", "2026-11-22", "the machine was busy"):
        assert part in text
    assert json.loads(BenchReport(data, {}, []).to_json()) == data


def test_a_report_names_the_command_the_date_and_the_processor_but_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "1", "--output-tokens", "2", "--concurrency", "1", "--ignore-eos", "--api-key", "sk-hidden"]
    with fake_openai() as server, pytest.raises(SystemExit):
        main(["bench", "serve", "--base-url", server.base_url, *flags, "--json"])
    report = json.loads(capsys.readouterr().out)
    line = f"ostinato bench serve --base-url {server.base_url} --concurrency 1 --requests 1 --output-tokens 2"
    assert report["command_line"] == f"{line} --ignore-eos --json"
    assert report["machine"]["cpu"] == cpu_model()
    assert report["date"][:2] == "20"


def test_an_engine_whose_phases_were_timed_is_as_it_was_before() -> None:
    engine, replay = make_engine(), Tape.replay
    before = set(vars(engine)), set(vars(engine.runner)), set(vars(engine.scheduler))
    steps = decode_phases(engine, rows=2, context=5, steps=3)
    assert len(steps) == 3
    assert all(seconds >= 0 for step in steps for seconds in step.values())
    assert (set(vars(engine)), set(vars(engine.runner)), set(vars(engine.scheduler))) == before
    assert Tape.replay is replay
