"""A server under load: any that speaks OpenAI's protocol, at several rates or numbers of requests at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ostinato.bench.serve_figures import Deadline, serve_figures
from ostinato.bench.serve_http import check_url
from ostinato.bench.serve_run import Run, Target, run_load, run_on_loop
from ostinato.bench.serve_workload import Conversation, Load, Ruler, Turn, make_conversations, make_ruler, say
from ostinato.errors import ConfigError, RequestError

FEW_WORDS = 4
"""In the shortest of the prompts that tell how many tokens a word has."""
ASSUMED_RULER = Ruler(per_word=1.2)
"""For servers that do not say how many tokens a prompt had."""


@dataclass(frozen=True)
class ServeBench:
    """What is measured: `load` at each of `rates` (per second, infinity for all at once), arrivals not waiting for
    answers; or with each of `concurrencies` under way at a time. One of both is empty."""

    load: Load
    rates: tuple[float, ...] = ()
    concurrencies: tuple[int, ...] = ()
    deadline: Deadline | None = None


def serve(target: Target, bench: ServeBench, report: Callable[[str], None]) -> dict[str, Any]:
    """The report: figures for each rate or concurrency, in turn, each with prompts of its own.

    Before, up to three requests that are not counted try the server and tell how many tokens its words have.
    RequestError if it refuses them.
    """
    report("trying the server")
    ruler, is_measured = try_server(target, bench.load)
    results = []
    points: list[tuple[float | None, int | None]] = [(rate, None) for rate in bench.rates]
    points += [(None, concurrency) for concurrency in bench.concurrencies]
    for number, (rate, concurrency) in enumerate(points):
        report(f"{rate:g} per second" if rate is not None else f"{concurrency} at a time")
        conversations = make_conversations(bench.load, ruler, chat=target.chat, rate=rate, number=number)
        run = run_on_loop(run_load(target, conversations, concurrency))
        # JSON has no infinity.
        shown = "inf" if rate is not None and math.isinf(rate) else rate
        results.append({"rate": shown, "concurrency": concurrency, **serve_figures(run, bench.deadline)})
    return {
        "command": "serve",
        "server": {"base_url": target.base_url, "model": target.model},
        "settings": load_settings(target, bench.load) | {"deadline": bench.deadline and asdict(bench.deadline)},
        "ruler": {**asdict(ruler), "measured": is_measured},
        "results": results,
    }


def load_settings(target: Target, load: Load) -> dict[str, Any]:
    """What was asked, as plain data; without the API key."""
    lengths = {name: getattr(load, name) for name in ("prompt_tokens", "output_tokens")}
    return {
        **asdict(load),
        **{name: None if each is None else str(each) for name, each in lengths.items()},
        "endpoint": "chat" if target.chat else "completions",
        "ignore_eos": target.ignore_eos,
        "timeout": target.timeout,
    }


def find_model(base_url: str, api_key: str | None) -> str:
    """The first model that the server offers. ConfigError if there is no server, or it offers none."""
    import httpx2  # here, as every start of the command line comes by

    check_url(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        # As the load itself: straight to the server, whatever the environment says of proxies.
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


def try_server(target: Target, load: Load) -> tuple[Ruler, bool]:
    """How long a word is for this server, and whether it said so itself."""
    if load.prompt_tokens is None:
        # Of another seed, so that no prompt that counts is in the server's cache.
        alone = replace(load, requests=1, turns=1, seed=-1 - load.seed)
        run_on_loop(_asked(target, make_conversations(alone, Ruler(1.0), chat=target.chat)))
        return Ruler(1.0), False
    rng = random.Random(f"{load.seed} trial")

    def tokens_of(words: int) -> int | None:
        run = run_on_loop(_asked(target, [Conversation(0.0, (Turn(say(rng, words), 1),))]))
        return run.outcomes[0].prompt_tokens

    few_tokens = tokens_of(FEW_WORDS)
    if few_tokens is None:
        return ASSUMED_RULER, False
    # As long as the prompts are to be, since a few words say little about the others; and hardly longer, as the model
    # may be able to do no more. What a template adds is in the first guess, so that it is too short.
    wanted = load.prompt_tokens.first + load.prefix_tokens
    ruler = Ruler(few_tokens / FEW_WORDS)
    for _ in range(2):
        words = max(2 * FEW_WORDS, ruler.words(wanted, opening=True))
        tokens = tokens_of(words)
        if tokens is None:
            return ASSUMED_RULER, False
        ruler = make_ruler([(FEW_WORDS, few_tokens), (words, tokens)])
    return ruler, True


async def _asked(target: Target, conversations: Sequence[Conversation]) -> Run:
    run = await run_load(target, conversations, concurrency=1)
    failed = next((outcome for outcome in run.outcomes if outcome.error is not None), None)
    if failed is not None:
        raise RequestError(f"{target.url} does not answer a first request: {failed.error}, {failed.detail}")
    return run
