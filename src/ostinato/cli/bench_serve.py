"""`ostinato bench serve`: latency of a server under a load that does not wait for it; and the cost of serving."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ostinato.bench.serve.load_client import check_url
from ostinato.bench.serve.load_generator import Target
from ostinato.bench.serve.overhead import OverheadBench, overhead
from ostinato.bench.serve.route import RouteBench, route
from ostinato.bench.serve.sweep import ServeBench, find_model, serve
from ostinato.bench.serve.workload import FORMS, Lengths, LoadSpec, parse_lengths
from ostinato.cli.bench_common import Measure, sizes
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject
from ostinato.plan.capacity.estimate import parse_deadline


class Endpoint(StrEnum):
    chat = "chat"
    completions = "completions"


class Kind(StrEnum):
    words = "words"
    problems = "problems"


PROMPT_TOKENS = "128"
PromptTokens = Annotated[
    str | None,
    typer.Option(metavar="LENGTH", help=f"Of words, about: {FORMS}. [default: {PROMPT_TOKENS}]", show_default=False),
]


def serve_command(
    base_url: Annotated[str, typer.Option(help="Of the server, with /v1.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None, typer.Option(help="[default: the first that the server offers]", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as bearer token, shown nowhere.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="R[,R...]", help="Requests per second, arriving at random (Poisson); inf: all at once."),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Instead of --rate: always so many at a time, the next when one ends."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many; with --turns, conversations.")] = 100,
    workload: Annotated[
        Kind, typer.Option(help="Random words; or word problems, which the embedded model answers.")
    ] = Kind.words,
    prompt_tokens: PromptTokens = None,
    output_tokens: Annotated[str, typer.Option(metavar="LENGTH", help="Sent as max_tokens, in the same forms.")] = "64",
    shared_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS[:GROUPS]",
            help="What prompts begin with, before --prompt-tokens: one text, or one for each of several groups.",
        ),
    ] = None,
    turns: Annotated[
        int, typer.Option(min=1, help="Requests of a conversation, each with all that was said, answers included.")
    ] = 1,
    think_time: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Between answer and next turn, at random, in the mean.")
    ] = 1.0,
    endpoint: Annotated[Endpoint, typer.Option(help="Which of the two protocols.")] = Endpoint.completions,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TTFT:ITL",
            help="Milliseconds to the first token and, in the mean, between tokens; goodput counts what meets both.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Ask for outputs of full length. Ostinato and vLLM know this, other servers refuse."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="For each request, from sending it.")
    ] = 600,
    seed: Annotated[
        int,
        typer.Option(help="Of texts, lengths and arrivals. The same again finds the prompts in the server's cache."),
    ] = 0,
) -> Measure:
    """Measure the latency of any server with OpenAI's protocol, at given request rates.

    With --rate the load is open: requests arrive whether or not the server keeps up, and every latency counts from the
    arrival, so time in any queue is part of it. With --concurrency it is closed. Several values make a sweep.
    Throughput and goodput count complete requests, over the time from the first arrival to the last end.

    "First token" is the first piece of text; "per token" the mean after it, one value for each request, by the server's
    own count (usage); "chunk gap" each time between two pieces of text, which may hold several tokens. Sampling is
    greedy. "late p99" is how late the generator itself was; if that is much, run it on another machine.

    Example: ostinato bench serve --rate 1,2,4,8 --deadline 500:50

    Example: ostinato bench serve --base-url http://127.0.0.1:8001/v1 --concurrency 64 --prompt-tokens lognormal:256:0.6
    --output-tokens uniform:32:128
    """
    check_url(base_url)
    prefix_tokens, prefix_groups = _prefix(shared_prefix)
    bench = ServeBench(
        load=LoadSpec(
            requests=requests,
            output_tokens=parse_lengths("--output-tokens", output_tokens),
            prompt_tokens=_prompt_tokens(workload, prompt_tokens, shared_prefix),
            prefix_tokens=prefix_tokens,
            prefix_groups=prefix_groups,
            turns=turns,
            think_seconds=think_time if turns > 1 else 0.0,
            seed=seed,
        ),
        rates=_rates(rate, concurrency),
        concurrencies=() if concurrency is None else sizes(concurrency, "--concurrency", "1,8,64"),
        deadline=None if deadline is None else parse_deadline(deadline),
    )
    target = Target(
        base_url=base_url,
        model=model or find_model(base_url, api_key),
        chat=endpoint is Endpoint.chat,
        ignore_eos=ignore_eos,
        timeout=timeout,
        api_key=api_key,
    )
    return lambda say: serve(target, bench, say)


def overhead_command(
    settings: JsonObject,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time in the server.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Of each round.")] = 256,
    workload: Annotated[
        Kind | None, typer.Option(help="[default: problems for the embedded model, else words]", show_default=False)
    ] = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="Most tokens of each, in the same forms.")
    ] = "64",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to full length.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with prompts of its own.")] = 3,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also tell what of the processor each part takes for a token.")
    ] = False,
) -> Measure:
    """Measure the cost of serving: tokens per second of `ostinato serve` over those of LLM.generate.

    Both have the same prompts and settings, and count output tokens. In every round the server is started, the load
    generator of `bench serve` keeps --concurrency requests in it, and it is stopped; then LLM.generate gets all prompts
    at once, in another process. Both warm up first. The generator runs on the same cores as the server, and its share
    is shown.

    Example: ostinato bench serve-overhead demo --concurrency 64
    """
    if workload is None:
        workload = Kind.problems if EngineConfig(**settings).model == "demo" else Kind.words
    load = LoadSpec(
        requests=requests,
        output_tokens=parse_lengths("--output-tokens", output_tokens),
        prompt_tokens=_prompt_tokens(workload, prompt_tokens, None),
    )
    bench = OverheadBench(load, concurrency, rounds, ignore_eos, profile)
    return lambda say: overhead(settings, bench, say)


def route_command(
    settings: dict[str, object],
    servers: Annotated[int, typer.Option(min=2, help="Servers behind the router.")] = 2,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations of a round.")] = 16,
    turns: Annotated[int, typer.Option(min=2, help="Requests of a conversation.")] = 4,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens that all conversations begin with.")] = 128,
    prompt_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help="Tokens that a turn adds.")] = "uniform:16:48",
    output_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help="Tokens of each answer.")] = "16",
    concurrency: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with other texts.")] = 3,
) -> Measure:
    """Compare hit rates of the prefix cache: several servers behind `ostinato route`, one server, and turns.

    The same conversations go to one server, to all servers through the router, and to all in turns (--routing
    round_robin). Salts keep the three apart in the servers' caches. A hit rate is the share of all prompt tokens that
    are cached; "of one's" is its ratio to that of one server in the same round.

    Example: ostinato bench route demo --rounds 1 --conversations 8
    """
    load = LoadSpec(
        requests=conversations,
        output_tokens=parse_lengths("--output-tokens", output_tokens),
        prompt_tokens=parse_lengths("--prompt-tokens", prompt_tokens),
        prefix_tokens=shared_prefix,
        turns=turns,
    )
    return lambda say: route(settings, RouteBench(load, servers, concurrency, rounds), say)


def _prompt_tokens(workload: Kind, text: str | None, shared_prefix: str | None) -> Lengths | None:
    if workload is Kind.words:
        return parse_lengths("--prompt-tokens", text or PROMPT_TOKENS)
    for option, given in (("--prompt-tokens", text), ("--shared-prefix", shared_prefix)):
        if given is not None:
            raise ConfigError(f"{option} is for --workload words; word problems are as they are")
    return None


def _prefix(text: str | None) -> tuple[int, int]:
    """Return (tokens, groups) of `--shared-prefix`; (0, 1) without it. ConfigError for malformed text."""
    if text is None:
        return 0, 1
    try:
        tokens, groups = (int(part) for part in (text if ":" in text else f"{text}:1").split(":"))
    except ValueError:
        tokens = groups = 0
    if tokens < 1 or groups < 1:
        raise ConfigError(f"--shared-prefix {text!r} should be tokens, or tokens and groups, such as 512 or 512:4")
    return tokens, groups


def _rates(rate: str | None, concurrency: str | None) -> tuple[float, ...]:
    """Return the rates of `--rate`, or none if `--concurrency` sets the load.

    ConfigError unless exactly one of both is given.
    """
    if (rate is None) == (concurrency is None):
        raise ConfigError("give either --rate, such as 1,2,4 or inf, or --concurrency, such as 1,8,64")
    if rate is None:
        return ()
    try:
        rates = tuple(float(part) for part in rate.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(each > 0 for each in rates):
        raise ConfigError(f"--rate {rate!r} should be requests per second, such as 0.5,1,2 or inf")
    return rates
