"""Bodies made to hold up a server, and large answers: none takes its event loop for longer than 20 ms."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import tracemalloc

import httpx2
import pytest

from ostinato.serve.http.lifecycle import STALL, EventLoopLag
from ostinato.serve.http.streaming import LoopSlices
from tests.support.patience import PATIENCE
from tests.support.serving import serving
from tests.support.stalls import watched


@pytest.fixture(scope="module")
def served():
    with serving({"max_messages": 2000}, max_num_seqs=2, graph_mode="none") as served:
        yield served


@pytest.fixture(scope="module")
def longest(served):
    async def thread():
        return threading.get_ident()

    with watched(served.on_loop(thread())) as longest:
        yield longest


def chat(**more):
    return json.dumps({"messages": [{"role": "user", "content": "2 + 2 ="}], "max_tokens": 2, **more}).encode()


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


TALK = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20}]
ATTACKS = {
    "keys": (lambda: chat(chat_template_kwargs={f"key{i:06}": "x" * 6 for i in range(600_000)}), "max_keys"),
    "unknown fields": (lambda: chat(**{f"u{i}": 0 for i in range(900_000)}), "max_keys"),
    "tools": (lambda: chat(tools=[tool(f"f{i}") for i in range(100_000)]), "max_keys"),
    "messages": (lambda: json.dumps({"messages": TALK * 16_000}).encode(), "max_keys"),
    "biases": (lambda: chat(logit_bias={str(i): 1.0 for i in range(1_000_000)}), "max_keys"),
    "values": (lambda: chat(stop=["a"] * 1_000_000), "max_values"),
    "nesting": (lambda: b'{"messages":' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"}", "200 deep"),
    "few tools too many": (lambda: chat(tools=[tool(f"f{i}") for i in range(300)]), "max_tools"),
    "few messages too many": (
        lambda: json.dumps({"messages": [{"role": "user", "content": "a"}] * 2001}).encode(),
        "max_messages",
    ),
    "parts": (
        lambda: json.dumps({"messages": [{**TALK[0], "content": TALK[0]["content"] * 300}]}).encode(),
        "max_parts",
    ),
    "stop strings": (lambda: chat(stop=["a"] * 5000), "stop"),
    "biased tokens": (lambda: chat(logit_bias={str(i): 1.0 for i in range(5000)}), "logit_bias"),
    "a long prompt": (
        lambda: chat(messages=[{"role": "user", "content": "ab " * 4_000_000}]),
        "maximum context length",
    ),
}
"""Makes the body, and what its refusal names."""


def post(served, body, path="/v1/chat/completions"):
    return httpx2.post(
        f"{served.url}{path}", content=body, headers={"Content-Type": "application/json"}, timeout=PATIENCE
    )


def without_stall(served, longest, body, path="/v1/chat/completions"):
    """The answer to a body. What holds the loop for another reason, such as Python's collection of garbage, does not do
    so in every one of some tries."""
    for _ in range(4):
        longest.reset()
        answer = post(served, body, path)
        served.on_loop(asyncio.sleep(0))  # the callback that answered is over
        if longest.seconds <= STALL:
            return answer
    pytest.fail(f"the loop was held for {1000 * longest.seconds:.0f} ms by {longest.what}")


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.slow
def test_a_body_holds_the_loop_no_longer_than_20_ms_and_is_refused_by_the_name_of_a_limit(served, longest, name):
    make, told = ATTACKS[name]
    post(served, chat())
    answer = without_stall(served, longest, make())
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_a_large_body_within_the_limits_is_served_without_a_stall(served, longest):
    body = chat(metadata={f"key{i:06}": "x" * 150 for i in range(60_000)})
    assert without_stall(served, longest, body).status_code == 200


def test_small_bodies_that_are_as_bad_as_they_can_be_do_not_stall_the_loop_either(served, longest):
    bodies = [
        chat(**{f"u{i}": 0 for i in range(1000)}),
        json.dumps({"messages": [{"role": "user", "content": "a"}] * 330}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "word, " * 1000}]}).encode(),
    ]
    for body in bodies:
        without_stall(served, longest, body)


@pytest.mark.slow
def test_nothing_of_a_refused_body_is_kept(served):
    body = ATTACKS["keys"][0]()
    post(served, body)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            post(served, body)
        # The last one is let go a moment after its answer.
        served.until(lambda: tracemalloc.get_traced_memory()[0] - before < 2**20)
    finally:
        tracemalloc.stop()
    assert served.lifecycle.workers.num_running == 0


def test_stalls_of_the_loop_are_counted():
    delay = EventLoopLag()

    async def main():
        delay.start()
        await asyncio.sleep(0.12)
        quiet = delay.seconds.cumulative()[-1]
        time.sleep(0.2)  # which is what is looked for
        await asyncio.sleep(0.06)
        await delay.stop()
        return quiet

    assert asyncio.run(main()) >= 1
    assert delay.num_stalls >= 1
    assert delay.longest > 0.1


def test_the_metrics_show_the_loop_and_the_workers(served):
    post(served, chat(user="x" * 20_000))
    text = httpx2.get(f"{served.url}/metrics", timeout=PATIENCE).text
    assert "ostinato:event_loop_delay_seconds_count" in text
    assert "ostinato:event_loop_stalls_total" in text
    [line] = [each for each in text.splitlines() if each.startswith("ostinato:body_reads_total") and 'done"' in each]
    assert float(line.split()[-1]) >= 1


def scored(stream, **more):
    """A small body whose answer is large: 20 log-probabilities at each of 2,000 places."""
    ids = [5 + i * 7 % 90 for i in range(2000)]
    return {"prompt": ids, "echo": True, "logprobs": 20, "max_tokens": 0, "stream": stream, **more}


ANSWERS = {
    "completions": ("/v1/completions", scored(False)),
    "completions, streamed": ("/v1/completions", scored(True)),
    "chat": (
        "/v1/chat/completions",
        {"messages": TALK, "logprobs": True, "top_logprobs": 20, "n": 2, "max_tokens": 300, "ignore_eos": True},
    ),
    "responses, streamed": (
        "/v1/responses",
        {
            "input": "Count.",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 20,
            "max_output_tokens": 300,
            "ignore_eos": True,
            "stream": True,
        },
    ),
    "embeddings": ("/v1/embeddings", {"input": [[5 + i, 6, 7] for i in range(64)]}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_large_answer_is_made_without_a_stall(served, longest, name):
    path, body = ANSWERS[name]
    answer = without_stall(served, longest, json.dumps(body).encode(), path)
    assert answer.status_code == 200
    if not body.get("stream"):
        answer.json()
    assert len(answer.content) > 50_000
    served.until(lambda: not served.engine.backlog.held_bytes)


def test_long_answers_take_turns_on_the_loop_and_are_made_only_as_they_are_read():
    made = []

    def parts(name):
        for _ in range(3000):
            made.append(name)
            yield "x" * 100

    async def answer(slices, name):
        return b"".join([piece async for piece in slices.pieces(parts(name))])

    async def main():
        slices = LoopSlices()
        answers = [asyncio.create_task(answer(slices, name)) for name in range(3)]
        most = 0
        await asyncio.sleep(0)  # the short beginning of each needs no slice
        while not all(task.done() for task in answers):
            before = len(made)
            await asyncio.sleep(0)
            most = max(most, len(made) - before)
        assert all(len(task.result()) == 300_000 for task in answers)
        unread = slices.pieces(parts("unread"))
        await anext(unread)
        await unread.aclose()
        return most

    assert asyncio.run(main()) <= 2**13 / 100 + 1
    assert made.count("unread") * 100 < 2**18 + 2**15
    changes = sum(made[i] != made[i - 1] for i in range(1, 9000))
    assert changes > 40, "one answer did not wait for another to end"


@pytest.mark.slow
def test_what_one_client_leaves_unread_is_bounded_and_given_back(served):
    """A client asks for much and reads nothing: its answer is cut, with an event that says why."""
    backlog = served.engine.backlog
    before, backlog.max_bytes = backlog.max_bytes, 2**18
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({**scored(True), "n": 2, "max_tokens": 1500, "ignore_eos": True}).encode()
    try:
        with socket.create_connection((host, int(port))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            served.until(lambda: served.engine.num_unfinished)
            served.until(lambda: not served.engine.num_unfinished)
            assert sum(backlog.held_bytes.values()) <= backlog.max_bytes
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += client.recv(2**16)
        assert b'"code": "client_backlog"' in received
        answer = post(served, json.dumps(scored(False)).encode(), "/v1/completions")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "client_backlog")
    finally:
        backlog.max_bytes = before
    served.until(lambda: not backlog.held_bytes)
    assert post(served, json.dumps(scored(False)).encode(), "/v1/completions").status_code == 200
