"""The router in front of two real servers: where requests go, what comes back, and what ends how."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import httpx2
import pytest

from tests.support.patience import PATIENCE
from tests.support.serving import Routed, Served, events, routing, serving

SERVER: dict[str, Any] = {"graph_mode": "none", "max_model_len": 512, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Served]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving({"kv_events": "hashes"}, **SERVER)) for _ in range(2)]


@pytest.fixture
def routed(servers: list[Served]) -> Iterator[Routed]:
    with routing([served.url for served in servers]) as routed:
        yield routed


def complete(url: str, prompt: Any, max_tokens: int = 2, **more: Any) -> httpx2.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer


def cached(answer: httpx2.Response) -> int:
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def prompt_of(seed: int, length: int = 100) -> list[int]:
    return [7 + Random(f"{seed} {place}").randrange(200) for place in range(length)]


def num_known(routed: Routed, served: Served) -> int:
    """At how many places a prompt may hit a server, as far as it has told the router."""
    placement = routed.lifecycle.pool.placement
    assert placement is not None
    return placement.router.num_known(served.url)


def pick(routed: Routed, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx2.post(f"{routed.url}/pick?path={path}", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def conversations(seed: int, count: int = 8, turns: int = 4) -> list[list[int]]:
    """Prompts of conversations with one system prompt; each turn begins with the turn before."""
    asked = []
    texts = [prompt_of(seed, 64) for _ in range(count)]
    for turn in range(turns):
        for number in range(count):
            texts[number] = [*texts[number], *prompt_of(seed * 1000 + number * 10 + turn, 40)]
            asked.append(texts[number])
    return asked


@pytest.mark.slow
def test_a_workload_of_shared_prefixes_hits_nearly_as_often_as_on_one_server(
    routed: Routed, servers: list[Served]
) -> None:
    def hits(url: str) -> int:
        """Tokens that are cached of one and the same workload, with a salt for each way of sending it."""
        return sum(cached(complete(url, prompt, cache_salt=f"through {url}")) for prompt in conversations(1))

    alone = hits(servers[0].url)
    before = [backend["sent"] for backend in routed.backends()]
    both = hits(routed.url)
    assert both >= 0.9 * alone > 0
    sent = [backend["sent"] - first for backend, first in zip(routed.backends(), before, strict=True)]
    assert sum(sent) == len(conversations(1))
    assert min(sent) > 0
    with routing([served.url for served in servers], policy="round_robin") as turns:
        assert hits(turns.url) < both
        sent = [backend["sent"] for backend in turns.backends()]
        assert sent == [len(conversations(1)) / 2] * 2


def test_a_prompt_goes_where_its_prefix_is_checkpointed_also_if_another_router_sent_it(
    routed: Routed, servers: list[Served]
) -> None:
    for number, served in enumerate(servers):
        prompt, before = prompt_of(30 + number), num_known(routed, served)
        complete(served.url, prompt)
        routed.until(lambda served=served, before=before: num_known(routed, served) > before)
        longer = [*prompt, *prompt_of(40 + number, 30)]
        found = pick(routed, "/v1/completions", {"prompt": longer})
        assert (found["backend"], found["reason"]) == (served.url, "longest_hit")
        assert found["prompt_tokens"] == len(longer)
        elsewhere = pick(routed, f"/v1/completions&among={servers[1 - number].url}/", {"prompt": longer})
        assert (elsewhere["backend"], elsewhere["hit"]) == (servers[1 - number].url, 0)
        answer = complete(routed.url, [*prompt, *prompt_of(50 + number, 30)])
        assert answer.headers["x-ostinato-backend"] == str(number)
        assert int(answer.headers["x-ostinato-hit"]) == cached(answer) > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_conversations_of_every_api_are_read_as_the_servers_read_them(
    routed: Routed, servers: list[Served], path: str
) -> None:
    question = f"Nora has 12 shells and finds 9 more, says {path}. " * 6 + "How many has she?"
    messages = [{"role": "user", "content": question}]
    body: dict[str, Any] = {"model": servers[0].lifecycle.model_name, "messages": messages, "max_tokens": 4}
    if path == "/v1/responses":
        body = {"model": body["model"], "input": question, "max_output_tokens": 4}
    if path == "/api/chat":
        body = {"model": body["model"], "messages": messages, "stream": False}
    before = num_known(routed, servers[1])
    assert httpx2.post(f"{servers[1].url}{path}", json=body, timeout=PATIENCE).status_code == 200
    routed.until(lambda: num_known(routed, servers[1]) > before)
    found = pick(routed, path, body)
    assert found["backend"] == servers[1].url
    assert found["hit"] > 0
    answer = httpx2.post(f"{routed.url}{path}", json=body, timeout=PATIENCE)
    assert (answer.status_code, answer.headers["x-ostinato-backend"]) == (200, "1")


def test_a_stream_passes_through_as_it_comes_and_a_client_that_leaves_ends_its_request(
    routed: Routed, servers: list[Served]
) -> None:
    body = {"prompt": prompt_of(50), "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    for served in servers:  # so that the stream does not end before it is left
        served.probe.delay = 0.1
    with httpx2.stream("POST", f"{routed.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        number = int(response.headers["x-ostinato-backend"])
        lines = response.iter_lines()  # kept, since a generator that is dropped closes the response
        next(lines)
        assert servers[number].engine.num_unfinished == 1
    for served in servers:
        served.probe.delay = 0.0
    servers[number].until(lambda: servers[number].engine.num_unfinished == 0)
    routed.until(lambda: sum(backend["running"] for backend in routed.backends()) == 0)
    short = {**body, "max_tokens": 5}
    with httpx2.stream("POST", f"{routed.url}/v1/completions", json=short, timeout=PATIENCE) as response:
        found = events(response)
    assert found[-1] == "[DONE]"
    assert json.loads(found[0])["object"] == "text_completion"
    servers[number].until(lambda: servers[number].num_kept() == 0)
    placement = routed.lifecycle.pool.placement
    assert placement is not None
    placement.router.check_integrity()


def test_large_bodies_are_read_in_workers_and_wrong_ones_are_answered_by_a_server(routed: Routed) -> None:
    large = complete(routed.url, "I have 3 apples. " * 30, user="x" * 20_000)
    assert large.json()["usage"]["prompt_tokens"] > 0
    for body, status in ((b"{", 400), (b'{"prompt": 5}', 400), (b'{"model": "other", "prompt": "a"}', 404)):
        headers = {"content-type": "application/json"}
        answer = httpx2.post(f"{routed.url}/v1/completions", content=body, headers=headers, timeout=PATIENCE)
        assert answer.status_code == status
        assert "x-ostinato-backend" in answer.headers


def test_only_known_endpoints_are_passed_on(routed: Routed) -> None:
    assert httpx2.get(f"{routed.url}/v1/models", timeout=PATIENCE).json()["data"]
    for method, path in (
        ("POST", "/reset_prefix_cache"), ("GET", "/live"), ("GET", "/kv_events"), ("GET", "/plan"),
        ("GET", "/v1/models/%2e%2e/%2e%2e/metrics"), ("DELETE", "/v1/completions"),
    ):  # fmt: skip
        assert httpx2.request(method, f"{routed.url}{path}", timeout=PATIENCE).status_code == 404, path
    wrong = httpx2.post(f"{routed.url}/pick?path=/metrics", json={}, timeout=PATIENCE)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "path")


def test_a_lost_connection_costs_its_streams_alone_and_the_server_comes_back(
    routed: Routed, servers: list[Served]
) -> None:
    goes, ends, begun = servers[0], list[list[str]](), threading.Event()
    prompt, before = prompt_of(60), num_known(routed, goes)
    complete(goes.url, prompt)
    routed.until(lambda: num_known(routed, goes) > before)
    goes.probe.delay = 0.05

    def stream() -> None:
        body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
        with httpx2.stream("POST", f"{routed.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            assert response.headers["x-ostinato-backend"] == "0"
            lines = response.iter_lines()
            first = next(lines)
            begun.set()
            ends.append([line.removeprefix("data: ") for line in (first, *lines) if line])

    reader = threading.Thread(target=stream)
    reader.start()
    try:
        assert begun.wait(PATIENCE)
        for connection in list(goes.server.server_state.connections):
            goes.loop.call_soon_threadsafe(connection._transport.abort)  # type: ignore[union-attr]
        reader.join(PATIENCE)
    finally:
        goes.probe.delay = 0.0
    *_, error, end = ends[0]
    assert (json.loads(error)["error"]["code"], end) == ("backend_lost", "[DONE]")
    goes.until(lambda: goes.engine.num_unfinished == 0)
    routed.until(lambda: all(each["state"] == "ready" and each["kv_events"] for each in routed.backends()))
    assert num_known(routed, goes) > 0


@pytest.mark.slow
def test_a_server_that_drains_gets_nothing_new_until_it_is_back(routed: Routed, servers: list[Served]) -> None:
    servers[0].lifecycle.draining = True
    try:
        routed.until(lambda: routed.backends()[0]["state"] == "draining")
        for seed in range(3):
            assert complete(routed.url, prompt_of(80 + seed)).headers["x-ostinato-backend"] == "1"
    finally:
        servers[0].lifecycle.draining = False
    routed.until(lambda: routed.backends()[0]["state"] == "ready")


def test_without_servers_a_request_is_refused_with_their_states_and_without_addresses() -> None:
    with routing(["http://127.0.0.1:9"], num_ready=0) as routed:
        routed.until(lambda: routed.backends()[0]["state"] == "down")
        answer = httpx2.post(f"{routed.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_backend")
        assert "0 is down" in answer.json()["error"]["message"]
        assert "127.0.0.1" not in answer.text
        assert httpx2.get(f"{routed.url}/health", timeout=PATIENCE).json()["status"] == "starting"


@pytest.mark.slow
def test_keys_guard_the_router_and_its_own_key_replaces_those_of_clients() -> None:
    settings = {"kv_events": "hashes", "api_key": ("of the servers",)}
    with (
        serving(settings, **SERVER) as served,
        routing([served.url], key="of the servers", api_key=("mine",)) as routed,
    ):
        refused = httpx2.post(f"{routed.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE)
        assert refused.status_code == 401
        for path in ("/backends", "/v1/models"):
            assert httpx2.get(f"{routed.url}{path}", timeout=PATIENCE).status_code == 401
        mine = {"authorization": "Bearer mine"}
        answer = httpx2.post(f"{routed.url}/v1/completions", json={"prompt": "a"}, headers=mine, timeout=PATIENCE)
        assert answer.status_code == 200
        served.server.should_exit = True
        served.until(lambda: not served.server.servers[0].is_serving())
        lost = httpx2.post(f"{routed.url}/v1/completions", json={"prompt": "a"}, headers=mine, timeout=PATIENCE)
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "no_backend")
