"""The router and backends that die, come back as others, lie or hang: it serves with the rest, and never hangs."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from ostinato.serve.route import backends, proxy
from ostinato.serve.route.backends import IndexReader, WrongEvents
from tests.support.odd_backends import (
    CONTENTS,
    Answer,
    OddBackend,
    begins_and_hangs,
    events,
    hangs,
    is_rubbish,
    odd_backend,
    says,
)
from tests.support.patience import PATIENCE
from tests.support.serving import Routed, Served, routing, serving

DONE = {"choices": [], "usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 48}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server, whose plan the scripted ones claim."""
    with serving({"kv_events": "hashes"}, graph_mode="none", max_model_len=512, max_num_seqs=4) as served:
        yield served


@pytest.fixture
def answers(server: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """Answers of a backend like the server, which has nothing cached."""
    monkeypatch.setattr(backends, "PERIOD", 0.05)
    plan = httpx2.get(f"{server.url}/plan", timeout=PATIENCE).json()
    models = httpx2.get(f"{server.url}/v1/models", timeout=PATIENCE).json()
    return {
        "/health": says({"status": "ready"}),
        "/plan": says(plan),
        "/v1/models": says(models),
        "/kv_events": events(CONTENTS),
        "/v1/completions": says(DONE),
    }


def metrics(routed: Routed) -> dict[str, float]:
    text = httpx2.get(f"{routed.url}/metrics", timeout=PATIENCE).text
    lines = re.findall(r"^ostinato:router_(\S+) (\S+)$", text, re.M)
    return {name: float(value) for name, value in lines}


def ask(routed: Routed, **more: Any) -> httpx2.Response:
    body = {"prompt": list(range(7, 107)), "max_tokens": 2, **more}
    return httpx2.post(f"{routed.url}/v1/completions", json=body, timeout=PATIENCE)


def states(routed: Routed) -> list[str]:
    return [backend["state"] for backend in routed.backends()]


@pytest.mark.parametrize("way", ["hangs", "rubbish"])
def test_a_backend_whose_health_hangs_or_is_rubbish_gets_nothing_and_comes_back(
    answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(backends, "PATIENCE", 2.0)
    with (
        odd_backend(dict(answers)) as odd,
        odd_backend(dict(answers)) as good,
        routing([odd.url, good.url]) as routed,
    ):
        healthy, odd.answers["/health"] = odd.answers["/health"], hangs if way == "hangs" else is_rubbish
        routed.until(lambda: states(routed)[0] == "down")
        for _ in range(3):
            routed.until(lambda: ask(routed).headers.get("x-ostinato-backend") == "1")
        assert "/v1/completions" not in odd.asked
        found = metrics(routed)
        assert found["backends_down"] >= 1  # with such patience, the other one may be late, too
        assert found['backend_state{backend="0",state="down"}'] == 1
        odd.answers["/health"] = healthy
        routed.until(lambda: states(routed)[0] == "ready")


@pytest.mark.parametrize("answer", [hangs, begins_and_hangs], ids=["before the answer", "within the answer"])
def test_requests_of_a_backend_that_freezes_end_when_its_health_does(
    answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr(backends, "PATIENCE", 2.0)
    with (
        odd_backend({**answers, "/v1/completions": answer}) as odd,
        routing([odd.url]) as routed,
    ):
        got: list[httpx2.Response] = []
        waiting = threading.Thread(target=lambda: got.append(ask(routed, stream=answer is begins_and_hangs)))
        waiting.start()
        routed.until(lambda: odd.num_hanging == 1)
        odd.answers["/health"] = hangs
        waiting.join(PATIENCE)
        assert got[0].status_code == (200 if answer is begins_and_hangs else 502)
        assert "backend_lost" in got[0].text
        routed.until(lambda: metrics(routed)['failed_requests_total{backend="0"}'] == 1)


class Connections:
    """Connections of the router, which fail with `error` if it is set."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.num_failed = 0
        self._open: Any = asyncio.open_connection

    async def open(self, *args: Any, **options: Any) -> Any:
        if self.error is not None:
            self.num_failed += 1
            raise self.error
        return await self._open(*args, **options)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    connections = Connections()
    monkeypatch.setattr(asyncio, "open_connection", connections.open)
    return connections


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ready"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "down"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), "down"),
    ],
    ids=["the router's own", "network", "name"],
)
def test_a_look_that_fails_without_the_backends_fault_ends_no_answer(
    answers: dict[str, Answer], connections: Connections, error: OSError, state: str
) -> None:
    goes_on = threading.Event()

    async def slow(backend: OddBackend, writer: asyncio.StreamWriter) -> None:
        await events({"choices": []}, ends=True)(backend, writer)
        backend.num_hanging += 1
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        writer.write(b"data: [DONE]\n\n")

    with odd_backend({**answers, "/v1/completions": slow}) as odd, routing([odd.url]) as routed:
        got: list[httpx2.Response] = []
        waiting = threading.Thread(target=lambda: got.append(ask(routed, stream=True)))
        waiting.start()
        routed.until(lambda: odd.num_hanging == 1)
        connections.error = error
        routed.until(lambda: connections.num_failed >= 3)
        routed.until(lambda: states(routed) == [state])
        if state == "ready":
            refused = ask(routed)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_connection")
        connections.error = None
        goes_on.set()
        waiting.join(PATIENCE)
        assert got[0].text.endswith("data: [DONE]\n\n")
        routed.until(lambda: states(routed) == ["ready"])
        assert metrics(routed)['failed_requests_total{backend="0"}'] == 0


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 111] Connect call failed"),
    ],
    ids=["one address", "two"],
)
def test_requests_of_a_backend_that_refuses_connections_end(
    answers: dict[str, Answer], connections: Connections, error: OSError
) -> None:
    with odd_backend({**answers, "/v1/completions": hangs}) as odd, routing([odd.url]) as routed:
        got: list[httpx2.Response] = []
        waiting = threading.Thread(target=lambda: got.append(ask(routed)))
        waiting.start()
        routed.until(lambda: odd.num_hanging == 1)
        connections.error = error
        waiting.join(PATIENCE)
        assert got[0].json()["error"]["code"] == "backend_lost"


def test_a_backend_that_is_silent_for_longer_than_a_request_may_take_is_given_up(
    answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(proxy, "SLACK", 4.0)
    with (
        odd_backend({**answers, "/v1/completions": begins_and_hangs}) as odd,
        routing([odd.url], request_timeout=1.0) as routed,
        caplog.at_level(logging.WARNING, "ostinato.serve"),
    ):
        assert "backend_lost" in ask(routed, stream=True).text
        assert "its answer pauses for 5 s" in caplog.text
        odd.answers["/v1/completions"] = hangs
        late = ask(routed)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "backend_timeout")
        assert states(routed) == ["ready"]


@pytest.mark.parametrize("has_events", [True, False])
def test_a_backend_that_comes_back_with_another_model_gets_nothing(
    answers: dict[str, Answer], has_events: bool
) -> None:
    if not has_events:
        answers["/kv_events"] = says({}, 403)
    ending = {"/kv_events": events(CONTENTS, ends=True)} if has_events else {}  # the stream ends with the process
    with (
        odd_backend({**answers, **ending}) as odd,
        odd_backend(dict(answers)) as good,
        routing([odd.url, good.url], num_ready=0) as routed,
    ):
        routed.until(lambda: "/kv_events" in odd.asked and states(routed)[1] == "ready")
        odd.answers["/v1/models"] = says({"data": [{"id": "another", "created": 5}]})
        routed.until(lambda: states(routed) == ["foreign", "ready"])
        for _ in range(3):
            assert ask(routed).headers["x-ostinato-backend"] == "1"
        odd.answers["/v1/models"] = good.answers["/v1/models"]


WRONG: dict[str, Any] = {
    "no JSON": b"data: {nope\n\n",
    "deep": b"data: " + b"[" * 100_000 + b"\n\n",
    "another form": {"seq": 1, "replay_left": None, "events": "none"},
    "a number too large": {**CONTENTS, "events": [{"type": "CheckpointStored", "block_hash": 2**64, "position": 1}]},
    "infinity": b'data: {"seq": Infinity, "replay_left": null, "events": []}\n\n',
    "a text": {**CONTENTS, "events": [{"type": "CheckpointStored", "block_hash": "5", "position": 1}]},
    "an error": {"error": {"message": "this reader is too slow"}},
    "lost": {"seq": 7, "replay_left": None, "events": []},
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_backend_with_wrong_events_is_served_without_them(answers: dict[str, Answer], kind: str) -> None:
    with (
        odd_backend({**answers, "/kv_events": events(CONTENTS, WRONG[kind])}) as odd,
        routing([odd.url], num_ready=0) as routed,
    ):
        routed.until(lambda: odd.asked.count("/kv_events") >= 3)
        assert states(routed) == ["ready"]
        assert ask(routed).status_code == 200
        found = metrics(routed)
        assert found['events_total{backend="0",event="received"}'] >= 4
        assert (found['events_total{backend="0",event="lost"}'] > 0) == (kind == "lost")
        assert found['index_keys{backend="0"}'] == 0
        odd.answers["/kv_events"] = events(CONTENTS)
        routed.until(lambda: routed.backends()[0]["kv_events"])


def test_a_backend_that_claims_everything_is_not_believed(
    answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "MAX_KEYS", 100)
    stored = [{"type": "CheckpointStored", "block_hash": key, "position": 16} for key in range(101)]
    claims = {"seq": 1, "replay_left": None, "events": stored}
    with (
        odd_backend({**answers, "/kv_events": events(CONTENTS, claims)}) as odd,
        routing([odd.url], num_ready=0) as routed,
    ):
        routed.until(lambda: odd.asked.count("/kv_events") >= 2)
        routed.until(lambda: metrics(routed)['index_keys{backend="0"}'] == 0)
        assert states(routed) == ["ready"]


def test_hits_that_do_not_come_true_are_shown(answers: dict[str, Answer], server: Served) -> None:
    """A backend claims the checkpoints of the server, and answers with fewer cached tokens."""
    prompt = list(range(7, 107))
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    httpx2.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
    hub = server.engine.cache_events
    server.until(lambda: hub._contents.checkpoints)
    stored = [
        {"type": "CheckpointStored", "block_hash": key, "position": position}
        for key, position in hub._contents.checkpoints.items()
    ]
    claims = {"seq": 1, "replay_left": None, "events": stored}
    with (
        odd_backend({**answers, "/kv_events": events(CONTENTS, claims)}) as odd,
        routing([odd.url]) as routed,
    ):
        routed.until(lambda: metrics(routed)['index_keys{backend="0"}'] == len(stored))
        answer = ask(routed)
        expected = int(answer.headers["x-ostinato-hit"])
        assert expected > 48
        routed.until(lambda: metrics(routed)['hit_tokens_total{backend="0",kind="reported"}'] == 48)
        found = metrics(routed)
        assert found['hit_tokens_total{backend="0",kind="expected"}'] == expected
        assert found['requests_total{backend="0"}'] == 1
        assert found['prompt_tokens_total{backend="0"}'] == len(prompt)
        assert found['choices_total{reason="longest_hit"}'] == 1


def test_text_of_a_model_that_looks_like_usage_is_not_counted(answers: dict[str, Answer]) -> None:
    said = {"choices": [{"text": '"usage": {"cached_tokens": 999}'}]}
    with odd_backend({**answers, "/v1/completions": says(said)}) as odd, routing([odd.url]) as routed:
        assert ask(routed).json() == said
        routed.until(lambda: routed.backends()[0]["running"] == 0)
        assert metrics(routed)['hit_tokens_total{backend="0",kind="reported"}'] == 0


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ({"metadata": {"usage": {"cached_tokens": 99}}, "usage": {"input_tokens_details": {"cached_tokens": 48}}}, 48),
        ({"metadata": {"usage": {"cached_tokens": 99}}, "usage": None}, 0),
        ({"cached_tokens": 99, "usage": {"prompt_tokens": 100}}, 0),
        ({"usage": {"input_tokens": 4, "cache_read_input_tokens": 96}}, 96),
        ({"usage": {"cached_tokens": 999_999_999}}, 100),
    ],
)
def test_cached_tokens_are_those_of_the_last_usage_and_at_most_the_prompts(
    answers: dict[str, Answer], said: dict[str, Any], counted: int
) -> None:
    with odd_backend({**answers, "/v1/completions": says(said)}) as odd, routing([odd.url]) as routed:
        assert ask(routed).json() == said
        routed.until(lambda: routed.backends()[0]["running"] == 0)
        assert metrics(routed)['hit_tokens_total{backend="0",kind="reported"}'] == counted


def test_a_backend_that_breaks_off_costs_a_second_try_and_ends_not_all(answers: dict[str, Answer]) -> None:
    broken = {**answers, "/v1/completions": is_rubbish}
    with (
        odd_backend(dict(broken)) as first,
        odd_backend(dict(broken)) as second,
        odd_backend(dict(broken)) as third,
        routing([first.url, second.url, third.url]) as routed,
    ):
        answer = ask(routed)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "backend_lost")
        assert sum(each.asked.count("/v1/completions") for each in (first, second, third)) == proxy.MAX_BROKEN
        third.answers["/v1/completions"] = second.answers["/v1/completions"] = says(DONE)
        assert [ask(routed).status_code for _ in range(3)] == [200] * 3


def test_health_says_how_many_backends_are_in_which_state(answers: dict[str, Answer]) -> None:
    with odd_backend(answers) as odd, routing([odd.url, "http://127.0.0.1:9"], num_ready=1) as routed:
        routed.until(lambda: states(routed) == ["ready", "down"])
        health = httpx2.get(f"{routed.url}/health", timeout=PATIENCE)
        assert (health.status_code, health.json()) == (
            200, {"status": "ready", "backends": {"ready": 1, "down": 1}},
        )  # fmt: skip
        assert "127.0.0.1" not in httpx2.get(f"{routed.url}/metrics", timeout=PATIENCE).text


def test_numbers_of_batches_show_what_is_missing() -> None:
    reader = IndexReader(has_state=False)

    def batch(seq: int, left: int | None, *keys: int) -> dict[str, Any]:
        stored = {"type": "BlockStored", "block_hashes": list(keys)}
        return json.loads(json.dumps({"seq": seq, "replay_left": left, "events": [stored]}))

    assert reader.changes(batch(5, 1, 1)).is_whole
    assert reader.changes(batch(5, 0, 2)).added == (2,)
    assert reader.changes(batch(6, None, 3)).added == (3,)
    with pytest.raises(WrongEvents, match="event 9 came after 6"):
        reader.changes(batch(9, None, 4))
    assert reader.num_lost == 2
