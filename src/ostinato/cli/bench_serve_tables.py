"""The tables of `ostinato bench serve` and `ostinato bench serve-overhead`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli.bench_tables import columns, milliseconds
from ostinato.cli.output import figures_table

LATENCIES = {
    "time_to_first_token": "first token",
    "time_per_output_token": "per token",
    "time_between_chunks": "chunk gap",
    "end_to_end": "request",
}
OVERHEAD_LENGTHS = "{requests} requests, {concurrency} at a time, {output_tokens} new"
LATE = 0.1
"""Of the median time to the first token: how late the generator may be (p99) before a remark says so."""


def show_serve(report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(_facts(report))
    for table in (_rates(report), _latencies(report), _requests(report)):
        console.print(table)
    for remark in remarks(report):
        console.print(Text(remark, style="dim italic"), soft_wrap=True)


def load_name(result: Mapping[str, Any]) -> str:
    if result["concurrency"] is not None:
        return f"{result['concurrency']} at a time"
    return "all at once" if result["rate"] == "inf" else f"{result['rate']:g}/s"


def remarks(report: Mapping[str, Any]) -> Iterator[str]:
    """What the reader should know: errors with an example, lengths that are guesses, a generator that was late."""
    for result in report["results"]:
        name = load_name(result)
        for kind, detail in result["error_details"].items():
            yield f"{name}: {result['errors'][kind]} x {kind}, such as: {detail}"
        if result["not_sent"]:
            yield f"{name}: {result['not_sent']} turns were not sent, as the turn before had failed"
        if result["empty"]:
            yield f"{name}: {result['empty']} replies had no text; they meet no deadline"
        if result["tokens"]["uncounted"]:
            uncounted = result["tokens"]["uncounted"]
            yield f"{name}: the server sent no usage in {uncounted} replies; their tokens are the pieces of text"
        yield from _late(name, result)
    ruler = report["ruler"]
    if report["settings"]["prompt_tokens"] is not None and not ruler["measured"]:
        per_word = ruler["per_word"]
        yield f"the server does not count prompts, so their lengths are guesses: {per_word:g} tokens per word"


def _late(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    first, generator = result["time_to_first_token"], result["generator"]
    lags = {each: generator[each] and generator[each]["p99"] for each in ("send_lag", "loop_lag")}
    worst = max((lag for lag in lags.values() if lag is not None), default=0.0)
    if first is not None and worst > LATE * first["p50"]:
        share = f"{generator['cpu_share']:.0%} of a core"
        yield f"{name}: the generator itself was late (p99 {milliseconds(worst)}, {share}), and latencies contain that"


def _facts(report: Mapping[str, Any]) -> Table:
    server, settings = report["server"], report["settings"]
    facts = figures_table(report["command"], justify="left")
    facts.add_row("server", f"{server['base_url']}, {settings['endpoint']}")
    facts.add_row("model", server["model"])
    prompt = "word problems" if settings["prompt_tokens"] is None else f"{settings['prompt_tokens']} prompt tokens"
    if settings["prefix_tokens"]:
        prompt = f"{settings['prefix_tokens']} shared in {settings['prefix_groups']} groups, then {prompt}"
    count = f"{settings['requests']} requests"
    if settings["turns"] > 1:
        think = f"thinking {settings['think_seconds']:g} s"
        count = f"{settings['requests']} conversations of {settings['turns']} turns ({think})"
    facts.add_row("load", f"{count}, {prompt}, {settings['output_tokens']} new, seed {settings['seed']}")
    deadline = settings["deadline"]
    if deadline is not None:
        first, between = (milliseconds(deadline[name]) for name in ("first_token", "between_tokens"))
        facts.add_row("deadline", f"first token in {first}, {between} per token after it")
    return facts


def _rates(report: Mapping[str, Any]) -> Table:
    has_deadline = report["settings"]["deadline"] is not None
    names = ["complete", "failed", "requests/s", *(["in time/s"] if has_deadline else [])]
    table = columns("load", *names, "new tokens/s", "tokens/s")
    for result in report["results"]:
        table.add_row(
            load_name(result),
            f"{result['complete']:,}",
            f"{result['requests'] - result['complete'] + result['not_sent']:,}",
            f"{result['requests_per_second']:.2f}",
            *([f"{result['goodput']:.2f}"] if has_deadline else []),
            f"{result['output_tokens_per_second']:,.1f}",
            f"{result['total_tokens_per_second']:,.1f}",
        )
    return table


def _latencies(report: Mapping[str, Any]) -> Table:
    table = columns("load", "latency", "mean", "p50", "p90", "p99", "max")
    table.columns[1].justify = "left"
    for column in table.columns[:2]:
        column.no_wrap = True
    for result in report["results"]:
        name = load_name(result)
        for latency, label in LATENCIES.items():
            figures = result[latency]
            cells = (milliseconds(figures and figures[each]) for each in ("mean", "p50", "p90", "p99", "max"))
            table.add_row(name, label, *cells)
            name = ""
    return table


def _requests(report: Mapping[str, Any]) -> Table:
    """Tokens per complete request, requests under way, and what the generator took for itself."""
    table = columns("load", "prompt", "cached", "new", "chunks", "at once", "late p99", "generator")
    for result in report["results"]:
        tokens, complete = result["tokens"], max(1, result["complete"])
        counts = (tokens[name] for name in ("prompt", "cached", "output", "chunks"))
        lag = result["generator"]["send_lag"]
        table.add_row(
            load_name(result),
            *("-" if count is None else f"{count / complete:,.1f}" for count in counts),
            f"{result['at_once']['mean']:.1f}",
            milliseconds(lag and lag["p99"]),
            f"{result['generator']['cpu_share']:.0%} CPU",
        )
    return table


def overhead_tables(report: Mapping[str, Any]) -> list[Table]:
    """Both rates and their ratio; then what the server and the generator did, round by round."""
    rates = columns("output tokens/s", "median", "min", "max")
    for name, label in (("server", "server"), ("generate", "LLM.generate")):
        spread = report[f"{name}_tokens_per_second"]
        rates.add_row(label, *(f"{spread[each]:,.0f}" for each in ("median", "min", "max")))
    rates.add_row("ratio", *(f"{report['ratio'][each]:.3f}" for each in ("median", "min", "max")))
    rounds = columns("round", "first token p50", "per token p50", "at once", "generator's CPU", "same answers")
    for number, (served, same) in enumerate(zip(report["served"], report["same_answers"], strict=True), start=1):
        rounds.add_row(
            str(number),
            *(milliseconds(served[name] and served[name]["p50"]) for name in list(LATENCIES)[:2]),
            f"{served['at_once']['mean']:.1f}",
            f"{served['generator']['cpu_share']:.0%}",
            f"{same} of {report['settings']['requests']}",
        )
    return [rates, rounds]
