"""`ostinato bench serve`: what it sends, its figures from plain numbers, its command; and what serving costs."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ostinato import ConfigError, RequestError
from ostinato.bench.serve.load_generator import LoadRun, RequestOutcome, Target
from ostinato.bench.serve.sweep import (
    ServeBench,
    at_once,
    meets_slo,
    remarks,
    seconds_per_token,
    serve,
    serve_figures,
    try_server,
)
from ostinato.bench.serve.workload import (
    Lengths,
    LoadSpec,
    TokenEstimate,
    make_conversations,
    make_ruler,
    parse_lengths,
)
from ostinato.bench.statistics import summary
from ostinato.cli.main import main
from ostinato.plan.capacity.estimate import Deadline, parse_deadline
from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.patience import PATIENCE
from tools.plot_bench import draw

TEN = Lengths("uniform", 10, 10)
PLAIN = TokenEstimate(1.0)


def quiet(_: str) -> None:
    """Reports nothing."""


# Lengths


@pytest.mark.parametrize(("text", "least", "most"), [("7", 7, 7), ("uniform:3:9", 3, 9), ("lognormal:100:0", 100, 100)])
def test_lengths_are_drawn_from_their_whole_range(text: str, least: int, most: int) -> None:
    rng = random.Random(1)
    drawn = [parse_lengths("--prompt-tokens", text).draw(rng) for _ in range(300)]
    assert (min(drawn), max(drawn)) == (least, most)
    assert str(parse_lengths("--prompt-tokens", text)) == text


def test_lognormal_lengths_have_the_median_and_the_spread_that_were_asked_for() -> None:
    rng = random.Random(1)
    drawn = [parse_lengths("--prompt-tokens", "lognormal:200:0.5").draw(rng) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(200, rel=0.05)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(0.5, rel=0.05)
    assert min(Lengths("lognormal", 1, 3).draw(rng) for _ in range(100)) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "1.5", "uniform:9:3", "uniform:0:3", "uniform:3", "normal:3:4", "lognormal:9:-1", "lognormal:9:9"]
)
def test_lengths_of_another_form_are_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--output-tokens .* should be a number such as 128, uniform:LEAST:MOST"):
        parse_lengths("--output-tokens", text)


# Workload


def test_arrivals_are_a_poisson_process_that_begins_at_once() -> None:
    conversations = make_conversations(LoadSpec(2000, TEN, TEN), PLAIN, chat=False, rate=5.0)
    arrivals = [each.arrival for each in conversations]
    gaps = [later - sooner for sooner, later in pairwise(arrivals)]
    assert arrivals[0] == 0
    assert min(gaps) > 0
    # Of an exponential distribution, mean and standard deviation are the same.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)
    for rate in (None, math.inf):
        together = make_conversations(LoadSpec(5, TEN, TEN), PLAIN, chat=False, rate=rate)
        assert [each.arrival for each in together] == [0] * 5


def test_the_same_seed_sends_the_same_and_every_run_has_texts_of_its_own() -> None:
    load = LoadSpec(20, Lengths("uniform", 1, 50), Lengths("uniform", 1, 50), turns=2, think_seconds=2.0)
    first, again, second = (make_conversations(load, PLAIN, chat=False, rate=1.0, number=n) for n in (0, 0, 1))
    assert first == again
    texts, others = ([turn.text for each in run for turn in each.turns] for run in (first, second))
    assert not set(texts) & {text for text in others if " " in text}
    assert [len(text.split()) for text in texts] == [len(text.split()) for text in others]
    for ours, theirs in zip(first, second, strict=True):
        assert ours.arrival == theirs.arrival
        assert [turn.output_tokens for turn in ours.turns] == [turn.output_tokens for turn in theirs.turns]
    assert all(each.turns[0].think_seconds == 0 < each.turns[1].think_seconds for each in first)


def test_groups_share_a_prefix_before_what_is_their_own() -> None:
    load = LoadSpec(6, TEN, TEN, prefix_tokens=30, prefix_groups=2, turns=2)
    conversations = make_conversations(load, TokenEstimate(per_word=2.0), chat=True)
    prefixes = [tuple(each.turns[0].text.split()[:15]) for each in conversations]
    assert prefixes[0::2] == [prefixes[0]] * 3
    assert prefixes[1::2] == [prefixes[1]] * 3
    assert prefixes[0] != prefixes[1]
    assert {len(each.turns[0].text.split()) for each in conversations} == {20}
    assert {len(each.turns[1].text.split()) for each in conversations} == {5}
    assert len({each.turns[0].text for each in conversations}) == 6


def test_a_ruler_is_the_line_through_two_prompts() -> None:
    ruler = make_ruler([(10, 25), (100, 205)])
    assert ruler == TokenEstimate(per_word=2.0, overhead=5.0)
    assert ruler.words(105, opening=True) == 50
    assert ruler.words(100, opening=False) == 50
    assert ruler.words(1, opening=True) == 1
    # A server that says the same of any prompt measures nothing.
    assert make_ruler([(10, 50), (100, 50)]) == TokenEstimate(0.5)


def test_problems_are_asked_in_the_form_of_the_endpoint_and_never_twice() -> None:
    load = LoadSpec(8, TEN, None, turns=2)
    first, second = (make_conversations(load, PLAIN, chat=False, number=number) for number in (0, 1))
    texts = [turn.text for each in (*first, *second) for turn in each.turns]
    assert len(set(texts)) == 32
    assert all(text.startswith("Q: ") and text.endswith("\nA:") for text in texts)
    assert not make_conversations(load, PLAIN, chat=True)[0].turns[0].text.startswith("Q:")


# Figures


def outcome(due: float, times: tuple[float, ...], tokens: int | None = None, **more: Any) -> RequestOutcome:
    """Sent a tenth of a second late, and over with its last piece of text."""
    end = more.pop("end", times[-1] if times else due + 1)
    more.setdefault("prompt_tokens", 10)
    return RequestOutcome(0, due, due + 0.1, end, times, output_tokens=tokens, **more)


def measured(*outcomes: RequestOutcome, seconds: float = 10.0) -> LoadRun:
    return LoadRun(list(outcomes), seconds, not_sent=0, cpu_seconds=1.0, loop_lags=[0.001, 0.003])


def test_latencies_count_from_when_a_request_was_due() -> None:
    figures = serve_figures(measured(outcome(1.0, (3.0, 4.0, 6.0), 7), outcome(2.0, (3.0,), 1)), None)
    assert figures["time_to_first_token"]["mean"] == 1.5
    assert figures["end_to_end"]["max"] == 5.0
    assert figures["time_between_chunks"] == {"mean": 1.5, "p50": 1.0, "p90": 2.0, "p99": 2.0, "max": 2.0}
    # Six tokens after the first one in three seconds; a reply of one token has no such time.
    assert figures["time_per_output_token"]["mean"] == figures["time_per_output_token"]["max"] == 0.5
    assert figures["generator"]["send_lag"]["max"] == pytest.approx(0.1)
    assert figures["generator"]["cpu_share"] == 0.1
    assert figures["generator"]["loop_lag"]["max"] == 0.003


def test_rates_count_complete_replies_alone() -> None:
    failed = outcome(0.0, (1.0, 2.0), error="timeout", detail="late")
    figures = serve_figures(measured(outcome(0.0, (1.0, 2.0), 5), outcome(1.0, (2.0, 3.0)), failed), None)
    assert (figures["requests"], figures["complete"], figures["errors"]) == (3, 2, {"timeout": 1})
    assert figures["requests_per_second"] == 0.2
    assert figures["output_tokens_per_second"] == 0.7
    assert figures["total_tokens_per_second"] == 2.7
    assert figures["goodput"] is figures["met_deadline"] is None


def test_goodput_counts_requests_that_meet_both_limits() -> None:
    deadline = Deadline(first_token=1.0, between_tokens=0.5)
    just = outcome(0.0, (1.0, 2.0), 3)
    late = outcome(0.0, (1.01, 2.0), 3)
    slow = outcome(0.0, (0.5, 2.0), 3)
    single = outcome(0.0, (0.5,), 1)
    broken = outcome(0.0, (0.5, 0.6), 3, error="broken_stream")
    empty = outcome(0.0, (), 0)
    assert [meets_slo(deadline, each) for each in (just, late, slow, single, broken, empty)] == [
        True, False, False, True, False, False,
    ]  # fmt: skip
    figures = serve_figures(measured(just, late, slow, single, broken, empty), deadline)
    assert (figures["met_deadline"], figures["goodput"], figures["empty"]) == (2, 0.2, 1)


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    assert summary(range(1, 101)) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert summary([3.0]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 3.0)
    assert summary([]) is None
    assert seconds_per_token(outcome(0.0, (1.0,), 9)) is None


def test_requests_at_once_are_those_that_were_sent_and_are_not_over() -> None:
    runs = [outcome(0.0, (), end=2.1), outcome(1.0, (), end=3.1), outcome(2.0, (), end=5.0)]
    assert at_once(runs) == {"mean": pytest.approx((2.0 + 2.0 + 2.9) / 5), "most": 2}


def test_a_deadline_is_two_times_in_milliseconds() -> None:
    assert parse_deadline("500:50.5") == Deadline(0.5, 0.0505)
    for text in ("500", "500:", "0:50", "a:b", "1:2:3", "inf:5", "nan:5"):
        with pytest.raises(ConfigError, match="--deadline"):
            parse_deadline(text)


# The report and the command


def target(server: FakeServer, chat: bool = False, **more: Any) -> Target:
    return Target(server.base_url, "fake-model", chat, timeout=PATIENCE, **more)


def test_prompts_have_the_lengths_that_the_server_counts() -> None:
    bench = ServeBench(LoadSpec(4, TEN, Lengths("uniform", 45, 45)), rates=(math.inf,), concurrencies=(2,))
    with fake_openai() as server:
        report = serve(target(server), bench, quiet).data
    assert report["ruler"] == {"per_word": 2.0, "overhead": 5.0, "measured": True}
    assert [(each["rate"], each["concurrency"]) for each in report["results"]] == [("inf", None), (None, 2)]
    for result in report["results"]:
        assert (result["complete"], result["tokens"]["prompt"], result["tokens"]["output"]) == (4, 4 * 45, 40)
        assert [each["prompt_tokens"] for each in result["outcomes"]] == [45] * 4
    # Trials are no longer than what was asked for.
    assert [len(body["prompt"].split()) for body in server.bodies[:3]] == [4, 14, 20]
    assert len({body["prompt"] for body in server.bodies}) == len(server.bodies) == 11
    assert json.loads(json.dumps(report)) == report


def test_a_server_that_counts_nothing_gets_prompts_of_a_guessed_length_and_a_remark() -> None:
    bench = ServeBench(LoadSpec(2, TEN, TEN), concurrencies=(1,))
    with fake_openai(counts_usage=False) as server:
        report = serve(target(server), bench, quiet).data
    assert report["ruler"]["measured"] is False
    said = "\n".join(remarks(report))
    assert "sent no usage in 2 replies" in said
    assert "guesses" in said


def test_a_trial_asks_no_problem_that_counts() -> None:
    with fake_openai() as server:
        serve(target(server), ServeBench(LoadSpec(4, TEN, None, turns=2), concurrencies=(2,)), quiet)
    assert len(server.bodies) == 9
    assert not any(body["prompt"].startswith(server.bodies[0]["prompt"]) for body in server.bodies[1:])


def test_a_server_that_refuses_the_first_request_is_not_measured() -> None:
    with fake_openai(fault=lambda number, body: "429") as server, pytest.raises(RequestError) as refused:
        try_server(target(server), LoadSpec(2, TEN, None))
    assert "http_429, the queue is full" in refused.value.message


def command(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", *flags])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


SMALL = ["--requests", "3", "--prompt-tokens", "20", "--output-tokens", "4", "--timeout", "60"]


def test_the_command_prints_tables_or_json_and_never_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SMALL, "--rate", "200,inf", "--deadline", "60000:60000", "--api-key", "sk-hidden", "--endpoint", "chat"]
    with fake_openai(fault=lambda number, body: "429" if number == 3 else None) as server:
        status, tables, _ = command(capsys, "--base-url", server.base_url, *flags)
        _, report, _ = command(capsys, "--base-url", server.base_url, *flags, "--seed", "1", "--json")
    assert status == 0
    assert set(server.keys) == {"Bearer sk-hidden"}
    assert "sk-hidden" not in tables + report
    assert "fake-model" in tables
    for name in ("200/s", "all at once", "first token", "in time/s", "1 x http_429, such as: the queue is full"):
        assert name in tables
    results = json.loads(report)["results"]
    assert [(each["rate"], each["met_deadline"]) for each in results] == [(200.0, 3), ("inf", 3)]


def test_the_key_may_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-there")
    with fake_openai() as server:
        command(capsys, "--base-url", server.base_url, *SMALL, "--concurrency", "2")
    assert set(server.keys) == {"Bearer sk-there"}
    assert server.most_running <= 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "either --rate"),
        (["--rate", "1", "--concurrency", "1"], "either --rate"),
        (["--rate", "0"], "--rate '0'"),
        (["--rate", "1,fast"], "--rate '1,fast'"),
        (["--rate", "nan"], "--rate 'nan'"),
        (["--concurrency", "0"], "--concurrency"),
        (["--rate", "1", "--shared-prefix", "9:0"], "--shared-prefix"),
        (["--rate", "1", "--workload", "problems", "--prompt-tokens", "9"], "--prompt-tokens is for --workload words"),
        (["--rate", "1", "--workload", "problems", "--shared-prefix", "9"], "--shared-prefix is for --workload words"),
        (["--rate", "1", "--base-url", "localhost"], "should be a URL"),
        (["--rate", "1", "--plot", "load.png"], "tools/plot_bench.py"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_sent(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, said = command(capsys, "--model", "m", *flags)
    assert status == 2
    assert message in said


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_openai() as server:
        pass
    status, _, said = command(capsys, "--base-url", server.base_url, "--rate", "1")
    assert status == 2
    assert f"no server answers at {server.base_url}" in said


def test_a_plot_shows_distributions_of_one_run_and_percentiles_of_several(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench = ServeBench(LoadSpec(3, TEN, TEN), rates=(500.0, math.inf), deadline=Deadline(1, 1))
    with fake_openai(fault=lambda number, body: "429" if number in (3, 4, 5) else None) as server:
        report = serve(target(server), bench, quiet).data
    draw(report, tmp_path / "sweep.svg")
    assert "arrivals per second" in (tmp_path / "sweep.svg").read_text()
    draw({**report, "results": report["results"][:1]}, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
