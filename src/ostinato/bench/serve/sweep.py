"""Sweep of a server under load: several rates, or several numbers of concurrent requests, and their statistics.

The statistics are pure functions of a run's outcomes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from typing import Any

from ostinato.bench.report import BenchReport, Column, ProgressCallback, Table, format_value, machine_facts, run_facts
from ostinato.bench.serve.load_client import check_url
from ostinato.bench.serve.load_generator import LoadRun, RequestOutcome, Target, run_load, run_on_loop
from ostinato.bench.serve.workload import (
    LoadSpec,
    ScriptedConversation,
    ScriptedTurn,
    TokenEstimate,
    make_conversations,
    make_ruler,
    random_words,
)
from ostinato.bench.statistics import summary
from ostinato.errors import ConfigError, RequestError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.plan.capacity.estimate import Deadline


def serve_figures(run: LoadRun, deadline: Deadline | None) -> JsonObject:
    """Return rates, latencies and errors of one run.

    Latencies count from the moment when a request was due, not from when it was sent, so that a slow server cannot hide
    behind a generator that waits for it. Rates count complete replies, over the time from the first arrival to the last
    end. There is a time between chunks for each gap, and a time per output token for each request.
    """
    complete = [outcome for outcome in run.outcomes if outcome.error is None]
    output_tokens = sum(map(count_tokens, complete))
    first = [seconds for outcome in complete if (seconds := first_token_seconds(outcome)) is not None]
    met = None if deadline is None else sum(meets_slo(deadline, outcome) for outcome in run.outcomes)
    return {
        "requests": len(run.outcomes),
        "complete": len(complete),
        "errors": dict(Counter(outcome.error for outcome in run.outcomes if outcome.error is not None)),
        "error_details": {
            outcome.error: outcome.detail for outcome in reversed(run.outcomes) if outcome.error is not None
        },
        "not_sent": run.not_sent,
        "empty": len(complete) - len(first),
        "seconds": run.seconds,
        "requests_per_second": len(complete) / run.seconds,
        "output_tokens_per_second": output_tokens / run.seconds,
        "total_tokens_per_second": (output_tokens + _sum(outcome.prompt_tokens for outcome in complete)) / run.seconds,
        "met_deadline": met,
        "goodput": None if met is None else met / run.seconds,
        "time_to_first_token": summary(first),
        "time_per_output_token": summary([t for outcome in complete if (t := seconds_per_token(outcome)) is not None]),
        "time_between_chunks": summary(
            [later - sooner for outcome in complete for sooner, later in pairwise(outcome.chunk_times)]
        ),
        "end_to_end": summary([outcome.end - outcome.due for outcome in complete]),
        "at_once": at_once(run.outcomes),
        "tokens": _token_figures(complete),
        "generator": {
            "send_lag": summary([outcome.sent - outcome.due for outcome in run.outcomes]),
            "loop_lag": summary(run.loop_lags),
            "cpu_seconds": run.cpu_seconds,
            "cpu_share": run.cpu_seconds / run.seconds,
        },
        "outcomes": [_outcome_figures(outcome) for outcome in run.outcomes],
    }


def meets_slo(deadline: Deadline, outcome: RequestOutcome) -> bool:
    """Return whether a request is complete, has text, and came in time.

    In time are its first piece of text, and on average the tokens after that.
    """
    first = first_token_seconds(outcome)
    return outcome.error is None and first is not None and deadline.is_met(first, seconds_per_token(outcome))


def first_token_seconds(outcome: RequestOutcome) -> float | None:
    """Return the seconds from when it was due to its first piece of text; None without text."""
    return outcome.chunk_times[0] - outcome.due if outcome.chunk_times else None


def seconds_per_token(outcome: RequestOutcome) -> float | None:
    """Return the mean time of the tokens after the first, from the first text to the last; None with one token."""
    tokens = count_tokens(outcome)
    if tokens < 2 or len(outcome.chunk_times) < 2:
        return None
    return (outcome.chunk_times[-1] - outcome.chunk_times[0]) / (tokens - 1)


def count_tokens(outcome: RequestOutcome) -> int:
    """Return the output tokens that the server counted, or else the number of pieces of text."""
    return len(outcome.chunk_times) if outcome.output_tokens is None else outcome.output_tokens


def at_once(outcomes: Sequence[RequestOutcome]) -> dict[str, float]:
    """Return the number of requests in progress: most at one moment, and the mean over the run."""
    ends = max(outcome.end for outcome in outcomes)
    changes = sorted(chain.from_iterable(((outcome.sent, 1), (outcome.end, -1)) for outcome in outcomes))
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return {"mean": sum(outcome.end - outcome.sent for outcome in outcomes) / ends, "most": most}


def _token_figures(complete: Sequence[RequestOutcome]) -> JsonObject:
    """Return the tokens of all complete replies together. Replies that the server did not count are `uncounted`."""
    cached = [outcome.cached_tokens for outcome in complete if outcome.cached_tokens is not None]
    return {
        "prompt": _sum(outcome.prompt_tokens for outcome in complete),
        "cached": sum(cached) if cached else None,
        "output": sum(map(count_tokens, complete)),
        "chunks": sum(len(outcome.chunk_times) for outcome in complete),
        "uncounted": sum(outcome.output_tokens is None for outcome in complete),
    }


def _outcome_figures(outcome: RequestOutcome) -> JsonObject:
    return {
        "conversation": outcome.conversation,
        "due": outcome.due,
        "time_to_first_token": first_token_seconds(outcome),
        "time_per_output_token": seconds_per_token(outcome),
        "end_to_end": outcome.end - outcome.due,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": count_tokens(outcome),
        "error": outcome.error,
    }


def _sum(counts: Any) -> int:
    return sum(count or 0 for count in counts)


FEW_WORDS = 4
"""Words in the shortest of the prompts that measure the tokens per word."""
ASSUMED_RULER = TokenEstimate(per_word=1.2)
"""Estimate for servers that do not report the tokens of a prompt."""
LATENCIES = {
    "time_to_first_token": "first token",
    "time_per_output_token": "per token",
    "time_between_chunks": "chunk gap",
    "end_to_end": "request",
}
LATE = 0.1
"""Largest lateness of the generator (p99) without a remark, as a share of the median time to the first token."""


@dataclass(frozen=True)
class ServeBench:
    """The measured load: `load` at each of `rates`, or with each of `concurrencies` under way at a time.

    Rates are per second, infinity for all at once, and arrivals do not wait for answers. One of the two is empty.
    """

    load: LoadSpec
    rates: tuple[float, ...] = ()
    concurrencies: tuple[int, ...] = ()
    deadline: Deadline | None = None


def serve(target: Target, bench: ServeBench, say: ProgressCallback) -> BenchReport:
    """Measure each rate or concurrency, one after the other, each with its own prompts.

    Up to three requests come before them and are not counted: they try the server, and measure the tokens per word.
    Raises RequestError if the server refuses them.
    """
    say("trying the server")
    ruler, is_measured = try_server(target, bench.load)
    results = []
    points: list[tuple[float | None, int | None]] = [(rate, None) for rate in bench.rates]
    points += [(None, concurrency) for concurrency in bench.concurrencies]
    for number, (rate, concurrency) in enumerate(points):
        say(f"{rate:g} per second" if rate is not None else f"{concurrency} at a time")
        conversations = make_conversations(bench.load, ruler, chat=target.chat, rate=rate, number=number)
        run = run_on_loop(run_load(target, conversations, concurrency))
        # JSON has no infinity.
        named = "inf" if rate is not None and math.isinf(rate) else rate
        results.append({"rate": named, "concurrency": concurrency, **serve_figures(run, bench.deadline)})
    data = {
        **run_facts("serve"),
        "server": {"base_url": target.base_url, "model": target.model},
        "settings": load_settings(target, bench.load) | {"deadline": bench.deadline and asdict(bench.deadline)},
        "machine": machine_facts(),
        "ruler": {**asdict(ruler), "measured": is_measured},
        "results": results,
    }
    return BenchReport(data, _lines(data), serve_tables(data), list(remarks(data)))


def load_settings(target: Target, load: LoadSpec) -> dict[str, object]:
    """Return the settings of the load as plain data, without the API key."""
    lengths = {name: getattr(load, name) for name in ("prompt_tokens", "output_tokens")}
    return {
        **asdict(load),
        **{name: None if each is None else str(each) for name, each in lengths.items()},
        "endpoint": "chat" if target.chat else "completions",
        "ignore_eos": target.ignore_eos,
        "timeout": target.timeout,
    }


def find_model(base_url: str, api_key: str | None) -> str:
    """Return the first model that the server offers. Raises ConfigError if there is no server, or it offers none."""
    import httpx2  # imported late, since every start of the command line imports this file

    check_url(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        # Like the load itself, this goes straight to the server, whatever proxies the environment names.
        answer = httpx2.get(f"{base_url.rstrip('/')}/models", headers=headers, timeout=30, trust_env=False)
    except httpx2.HTTPError as error:
        raise ConfigError(
            f"no server answers at {base_url} ({error}); start one, or give --base-url of one that runs"
        ) from None
    try:
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError):
        said = f"status {answer.status_code}"
        raise ConfigError(f"{base_url}/models names no model ({said}); give --model, or another --base-url") from None


def try_server(target: Target, load: LoadSpec) -> tuple[TokenEstimate, bool]:
    """Return the tokens of a word for this server, and whether the server reported them itself."""
    if load.prompt_tokens is None:
        # Another seed keeps the counted prompts out of the server's cache.
        alone = replace(load, requests=1, turns=1, seed=-1 - load.seed)
        run_on_loop(_asked(target, make_conversations(alone, TokenEstimate(1.0), chat=target.chat)))
        return TokenEstimate(1.0), False
    rng = random.Random(f"{load.seed} trial")

    def tokens_of(words: int) -> int | None:
        run = run_on_loop(_asked(target, [ScriptedConversation(0.0, (ScriptedTurn(random_words(rng, words), 1),))]))
        return run.outcomes[0].prompt_tokens

    few_tokens = tokens_of(FEW_WORDS)
    if few_tokens is None:
        return ASSUMED_RULER, False
    # The prompt is as long as the counted ones, since a few words say little about the others, and hardly longer, as
    # that may be the model's limit. The first guess includes the template, so it is too short.
    wanted = load.prompt_tokens.first + load.prefix_tokens
    ruler = TokenEstimate(few_tokens / FEW_WORDS)
    for _ in range(2):
        words = max(2 * FEW_WORDS, ruler.words(wanted, opening=True))
        tokens = tokens_of(words)
        if tokens is None:
            return ASSUMED_RULER, False
        ruler = make_ruler([(FEW_WORDS, few_tokens), (words, tokens)])
    return ruler, True


async def _asked(target: Target, conversations: Sequence[ScriptedConversation]) -> LoadRun:
    run = await run_load(target, conversations, concurrency=1)
    failed = next((outcome for outcome in run.outcomes if outcome.error is not None), None)
    if failed is not None:
        raise RequestError(f"{target.url} does not answer a first request: {failed.error}, {failed.detail}")
    return run


def _lines(data: JsonMapping) -> dict[str, str]:
    """Return the facts to print."""
    server, settings, machine = data["server"], data["settings"], data["machine"]
    prompt = "word problems" if settings["prompt_tokens"] is None else f"{settings['prompt_tokens']} prompt tokens"
    if settings["prefix_tokens"]:
        prompt = f"{settings['prefix_tokens']} shared in {settings['prefix_groups']} groups, then {prompt}"
    requests = f"{settings['requests']} requests"
    if settings["turns"] > 1:
        think = f"thinking {settings['think_seconds']:g} s"
        requests = f"{settings['requests']} conversations of {settings['turns']} turns ({think})"
    lines = {
        "server": f"{server['base_url']}, {settings['endpoint']}",
        "model": server["model"],
        "load": f"{requests}, {prompt}, {settings['output_tokens']} new, seed {settings['seed']}",
        "generator": f"{machine['cpu']}, {machine['cores']} cores",
    }
    deadline = settings["deadline"]
    if deadline is not None:
        first, between = (format_value(deadline[name], "ms") for name in ("first_token", "between_tokens"))
        lines["deadline"] = f"first token in {first}, {between} per token after it"
    return lines


def serve_tables(data: JsonMapping) -> list[Table]:
    """Return tables of rates, of latencies, and of tokens, requests under way and the generator's own time.

    Tokens are per complete request.
    """
    results, load = data["results"], Column("load", load_name, is_text=True)
    in_time = [Column("in time/s", "goodput", "{:,.2f}")] if data["settings"]["deadline"] is not None else []
    rates = (
        load,
        Column("complete", "complete", "count"),
        Column("failed", lambda result: result["requests"] - result["complete"] + result["not_sent"], "count"),
        Column("requests/s", "requests_per_second", "{:,.2f}"),
        *in_time,
        Column("new tokens/s", "output_tokens_per_second", "{:,.1f}"),
        Column("tokens/s", "total_tokens_per_second", "{:,.1f}"),
    )
    statistics = ("mean", "p50", "p90", "p99", "max")
    latencies = (
        load,
        Column("latency", "latency", is_text=True),
        *(Column(name, f"seconds.{name}", "ms") for name in statistics),
    )
    rows = [
        {**result, "latency": label, "seconds": result[latency]}
        for result in results
        for latency, label in LATENCIES.items()
    ]

    def per_request(name: str) -> Column:
        def value(result: JsonMapping) -> float | None:
            tokens = result["tokens"][name]
            return None if tokens is None else tokens / max(1, result["complete"])

        return Column("new" if name == "output" else name, value, "{:,.1f}")

    requests = (
        load,
        *map(per_request, ("prompt", "cached", "output", "chunks")),
        Column("at once", "at_once.mean", "{:,.1f}"),
        Column("late p99", "generator.send_lag.p99", "ms"),
        Column("generator", "generator.cpu_share", "{:.0%} CPU"),
    )
    return [Table(rates, results), Table(latencies, rows), Table(requests, results)]


def load_name(result: Mapping[str, object]) -> str:
    if result["concurrency"] is not None:
        return f"{result['concurrency']} at a time"
    return "all at once" if result["rate"] == "inf" else f"{result['rate']:g}/s"


def remarks(data: JsonMapping) -> Iterator[str]:
    """Yield remarks for the reader: errors with an example, lengths that are guesses, a generator that was late."""
    for result in data["results"]:
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
    ruler = data["ruler"]
    if data["settings"]["prompt_tokens"] is not None and not ruler["measured"]:
        per_word = ruler["per_word"]
        yield f"the server does not count prompts, so their lengths are guesses: {per_word:g} tokens per word"


def _late(name: str, result: JsonMapping) -> Iterator[str]:
    first, generator = result["time_to_first_token"], result["generator"]
    lags = {each: generator[each] and generator[each]["p99"] for each in ("send_lag", "loop_lag")}
    worst = max((lag for lag in lags.values() if lag is not None), default=0.0)
    if first is not None and worst > LATE * first["p50"]:
        late = f"p99 {format_value(worst, 'ms')}, {generator['cpu_share']:.0%} of a core"
        yield f"{name}: the generator itself was late ({late}), and latencies contain that"
