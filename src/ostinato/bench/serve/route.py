"""Hit rates behind the router: several servers, beside one of them with all requests, and beside turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import httpx2

from ostinato.bench.engine_driver import plan_of, rotated_order, share_cache, with_room
from ostinato.bench.report import (
    BenchReport,
    Column,
    ProgressCallback,
    Table,
    engine_facts,
    engine_lines,
    spread_columns,
)
from ostinato.bench.serve.load_generator import LoadRun, Target, run_load, run_on_loop
from ostinato.bench.serve.overhead import ostinato_command, running, server_process
from ostinato.bench.serve.sweep import find_model, load_settings, try_server
from ostinato.bench.serve.workload import LoadSpec, make_conversations
from ostinato.bench.statistics import paired_ratio, spread
from ostinato.errors import ConfigError, ModelError, RequestError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.plan.device.detect import detect
from ostinato.serve.http.listener import free_port

ONE, ROUTED, TURNS = "one server", "router", "round robin"
LAYOUTS = (ONE, ROUTED, TURNS)
POLICIES = {ROUTED: "prefix", TURNS: "round_robin"}
COLUMNS = (
    Column("requests go to", "layout"),
    Column("prompt tokens", "prompt_tokens", "count"),
    Column("cached", "cached_tokens", "count"),
    Column("hit rate", "hit_rate.median", "percent"),
    *(replace(each, heading=f"of one's: {each.heading}") for each in spread_columns("of_one", "{:.3f}")),
    Column("sent to each", lambda row: "/".join(map(str, row["sent"]))),
)


@dataclass(frozen=True)
class RouteBench:
    """The compared load: `concurrency` conversations at a time, on `num_servers` servers."""

    load: LoadSpec
    num_servers: int
    concurrency: int
    rounds: int


@dataclass(frozen=True)
class RouteRound:
    """Tokens of one layout in one round, and the requests that each server got."""

    prompt_tokens: int
    cached_tokens: int
    sent: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def route(settings: JsonObject, bench: RouteBench, say: ProgressCallback) -> BenchReport:
    """Measure the share of prompt tokens that caches have, for all layouts in turns.

    All layouts use the same servers and send the same conversations. Salts keep their prefixes apart. Raises
    RequestError if any request fails.
    """
    config = with_room(settings, max_num_seqs=bench.concurrency)
    shared = share_cache(dict.fromkeys(range(bench.num_servers), config))[0]
    more: JsonObject = {"model": config.model, "max_num_seqs": shared.max_num_seqs, "kv_events": "hashes"}
    if shared.cache_memory is not None:
        more["cache_memory"] = shared.cache_memory
    if config.threads is None:
        more["threads"] = max(1, detect("cpu").cores // bench.num_servers)
    rounds: dict[str, list[RouteRound]] = {layout: [] for layout in LAYOUTS}
    with ExitStack() as stack:
        servers = []
        for number in range(bench.num_servers):
            say(f"starting server {number + 1} of {bench.num_servers}")
            servers.append(stack.enter_context(server_process({**settings, **more})).removesuffix("/v1"))
        say("starting the routers")
        urls = {ONE: servers[0]}
        for layout, policy in POLICIES.items():
            port = free_port()
            flags = ["--backends", ",".join(servers), "--routing", policy]
            urls[layout] = stack.enter_context(running(ostinato_command("route", port, flags), port))
        for url in (urls[ROUTED], urls[TURNS]):
            wait_for_backends(url, bench.num_servers)
        model = find_model(f"{servers[0]}/v1", None)
        targets = {name: Target(f"{url}/v1", model, chat=False, ignore_eos=True) for name, url in urls.items()}
        ruler, _ = try_server(targets[ONE], bench.load)
        for number in range(bench.rounds):
            conversations = make_conversations(bench.load, ruler, chat=False, number=number)
            for layout in rotated_order(LAYOUTS, number):
                say(f"round {number + 1}: {layout}")
                before = num_sent(urls[layout])
                target = replace(targets[layout], cache_salt=f"{layout} {number}")
                run = run_on_loop(run_load(target, conversations, bench.concurrency))
                after = num_sent(urls[layout])
                sent = tuple(late - soon for late, soon in zip(after, before, strict=True)) or (len(run.outcomes),)
                rounds[layout].append(round_of(run, sent))
    data = engine_facts("route", shared, plan_of(shared), num_servers=bench.num_servers, rounds=bench.rounds)
    data["settings"] |= {**load_settings(targets[ONE], bench.load), "concurrency": bench.concurrency}
    data["results"] = route_figures(rounds)
    text = "{num_servers} servers, {requests} conversations of {turns} turns, {concurrency} at a time"
    return BenchReport(data, engine_lines(data, text), [Table(COLUMNS, data["results"])])


def round_of(run: LoadRun, sent: tuple[int, ...]) -> RouteRound:
    """Return the tokens of a run. RequestError if a request failed, or its tokens were not counted."""
    failed = next((each for each in run.outcomes if each.error is not None), None)
    if failed is not None:
        raise RequestError(f"a request failed: {failed.error}, {failed.detail}")
    if any(each.prompt_tokens is None or each.cached_tokens is None for each in run.outcomes):
        raise RequestError("an answer does not say how many tokens of its prompt were cached")
    prompt = sum(each.prompt_tokens or 0 for each in run.outcomes)
    return RouteRound(prompt, sum(each.cached_tokens or 0 for each in run.outcomes), sent)


def route_figures(rounds: JsonMapping) -> list[JsonObject]:
    """Return for each layout the tokens of all rounds, the hit rate, and its ratio to that of one server."""
    results: list[JsonObject] = []
    alone = [each.hit_rate for each in rounds[ONE]]
    if not all(alone):
        raise ConfigError("nothing is cached on one server: ask for more turns, or a longer shared prefix")
    for layout, measured in rounds.items():
        rates = [each.hit_rate for each in measured]
        results.append(
            {
                "layout": layout,
                "prompt_tokens": sum(each.prompt_tokens for each in measured),
                "cached_tokens": sum(each.cached_tokens for each in measured),
                "hit_rate": spread(rates),
                "of_one": paired_ratio(rates, alone),
                "sent": [sum(counts) for counts in zip(*(each.sent for each in measured), strict=True)],
            }
        )
    return results


def num_sent(url: str) -> Sequence[int]:
    """Return the requests that a router has sent to each server; none for a server."""
    answer = httpx2.get(f"{url}/backends", timeout=30, trust_env=False)
    return [each["sent"] for each in answer.json()["backends"]] if answer.status_code == 200 else []


def wait_for_backends(url: str, count: int, ready_within: float = 120.0) -> None:
    """Wait until a router has `count` backends that tell what they have cached.

    ModelError if one is lost, the router does not answer, or `ready_within` seconds are over.
    """
    import time

    deadline = time.monotonic() + ready_within
    while True:
        try:
            found = httpx2.get(f"{url}/backends", timeout=30, trust_env=False).json()["backends"]
        except httpx2.HTTPError as error:
            raise ModelError(f"the router at {url} does not answer: {error!r}") from None
        if sum(each["state"] == "ready" and each["kv_events"] for each in found) == count:
            return
        if any(each["state"] == "foreign" for each in found):
            raise ConfigError("the servers differ in what they serve")
        states = ", ".join(f"{each['url']} is {each['state']} ({each['reason']})" for each in found)
        if any(each["state"] == "down" for each in found):
            raise ModelError(f"the router has lost a server: {states}")
        if time.monotonic() > deadline:
            raise ModelError(f"the router does not know what its servers cache after {ready_within:g} s: {states}")
        time.sleep(0.1)
