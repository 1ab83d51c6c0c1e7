"""The load generator's client: HTTP and events in any pieces, and its runs against a server that is told what to do."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import ConfigError
from ostinato.bench.serve.load_client import ClientConnection, EventParser, Failure, HttpClient, SseReply, check_url
from ostinato.bench.serve.load_generator import LoadRun, Target, run_load
from ostinato.bench.serve.sweep import serve_figures
from ostinato.bench.serve.workload import ScriptedConversation, ScriptedTurn
from ostinato.plan.capacity.estimate import Deadline
from tests.support.fake_openai import FakeServer, event, fake_openai
from tests.support.patience import PATIENCE

GENEROUS = float(PATIENCE)


def one_turn(count: int, tokens: int = 3, gap: float = 0.0) -> list[ScriptedConversation]:
    return [ScriptedConversation(number * gap, (ScriptedTurn(f"prompt {number}", tokens),)) for number in range(count)]


def run(
    server: FakeServer, conversations: Sequence[ScriptedConversation], concurrency: int | None = None, **more: Any
) -> LoadRun:
    target = Target(**{"base_url": server.base_url, "model": "m", "chat": False, "timeout": GENEROUS, **more})
    return asyncio.run(run_load(target, conversations, concurrency))


def in_pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


cuts = st.lists(st.integers(0, 2000), max_size=12)


# Events


@given(cuts)
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream = b': a comment\r\n\r\ndata: {"a": 1}\n\nevent: x\ndata:two\ndata: lines\r\n\r\n\ndata: [DONE]\n\n'
    parser = EventParser()
    found = [data for piece in in_pieces(stream, cuts) for data in parser.feed(piece)]
    assert found == [b'{"a": 1}', b"two\nlines", b"[DONE]"]


def reply_to(*chunks: str, status: int = 200, kind: str = "text/event-stream; charset=utf-8") -> SseReply:
    moments = iter(range(100))
    reply = SseReply(lambda: float(next(moments)))
    reply.begin(status, {"content-type": kind})
    for chunk in chunks:
        reply.feed(chunk.encode())
    return reply


def test_a_reply_counts_pieces_of_text_and_thinking_and_keeps_the_usage() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "é"}, {}]
    chunks = [event(choices=[{"delta": delta}]) for delta in deltas]
    reply = reply_to(*chunks, event(choices=[], usage={"completion_tokens": 9}), "data: [DONE]\n\n")
    reply.check_complete()
    assert (reply.text, reply.chunk_times, reply.end) == ("hmé", [1.0, 2.0], 5.0)
    assert reply.usage == {"prompt_tokens": None, "completion_tokens": 9, "cached_tokens": None}


@pytest.mark.parametrize(
    ("chunks", "options", "kind", "detail"),
    [
        ([event(choices=[{"text": "a"}])], {}, "broken_stream", "DONE"),
        ([event(error={"message": "out of slots"})], {}, "error_event", "out of slots"),
        (["data: {oops\n\n"], {}, "bad_reply", "oops"),
        (["data: 7\n\n"], {}, "bad_reply", "7"),
        ([event(choices=[7])], {}, "bad_reply", "[7]"),
        ([event(choices=[{"delta": "text"}])], {}, "bad_reply", "another form"),
        ([], {"kind": "application/json"}, "bad_reply", "application/json"),
        (['{"error": {"message":', '"too long"}}'], {"status": 400}, "http_400", "too long"),
        (['{"detail": "Not Found"}'], {"status": 404}, "http_404", "Not Found"),
        (["Bad gateway"], {"status": 502, "kind": "text/html"}, "http_502", "Bad gateway"),
    ],
)
def test_a_reply_that_is_not_whole_fails_with_its_kind(
    chunks: list[str], options: dict[str, Any], kind: str, detail: str
) -> None:
    with pytest.raises(Failure) as failed:
        reply_to(*chunks, **options).check_complete()
    assert failed.value.kind == kind
    assert detail in failed.value.detail


# HTTP


class Noted:
    """A receiver that notes what it is handed."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def feed(self, data: bytes) -> None:
        self.body += data


class Wire(asyncio.Transport):
    """A transport that sends nothing."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        pass


def exchange(pieces: Sequence[bytes], ends: bool = False) -> tuple[Noted, ClientConnection]:
    """One exchange whose reply arrives in `pieces`, after which the server hangs up if it `ends`."""
    noted, connection = Noted(), ClientConnection()

    async def go() -> None:
        connection.connection_made(Wire())
        exchanged = asyncio.create_task(connection.exchange(b"POST", noted))
        await asyncio.sleep(0)
        for piece in pieces:
            connection.data_received(piece)
        if ends:
            connection.connection_lost(None)
        await asyncio.wait_for(exchanged, GENEROUS)

    asyncio.run(go())
    return noted, connection


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nb;x=y\r\n, \r\n\r\nworld\r\n0\r\nT: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 429 Too Many\r\ncontent-length: 14\r\n\r\nhello, \r\n\r\nyou"


@given(cuts)
def test_a_body_is_the_same_however_it_arrives(cuts: list[int]) -> None:
    noted, connection = exchange(in_pieces(CHUNKED, cuts))
    assert (noted.status, noted.body, connection.reusable) == (200, b"hello, \r\n\r\nworld", True)
    noted, connection = exchange(in_pieces(SIZED, cuts))
    assert (noted.status, noted.body, connection.reusable) == (429, b"hello, \r\n\r\nyou", True)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    noted, connection = exchange([b"HTTP/1.0 200 OK\r\n\r\nall ", b"of it"], ends=True)
    assert (noted.body, connection.reusable) == (b"all of it", False)


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([CHUNKED[:60]], "broken_stream"),
        ([SIZED[:-1]], "broken_stream"),
        ([], "broken_stream"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "bad_reply"),
        ([CHUNKED.replace(b"5\r\nhello", b"five\r\nhello")], "bad_reply"),
    ],
)
def test_a_connection_that_breaks_or_speaks_another_language_is_a_failure(pieces: list[bytes], kind: str) -> None:
    with pytest.raises(Failure) as failed:
        exchange(pieces, ends=True)
    assert failed.value.kind == kind


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"{}")
        writer.write(SIZED)
        # Only when it is asked again does the client learn that nobody is there.
        await reader.readuntil(b"{}")
        writer.close()

    async def go() -> list[bytes]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions")
        bodies = []
        for _ in range(3):
            noted = Noted()
            await client.post(b"{}", noted, GENEROUS)
            bodies.append(noted.body)
        client.close()
        server.close()
        return bodies

    assert asyncio.run(go()) == [b"hello, \r\n\r\nyou"] * 3
    assert connections == 3


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host/v1", "http://", "http://host:port/v1", "http://[::1"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="should be a URL"):
        check_url(url)


def test_a_key_that_would_break_a_header_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError) as refused:
        HttpClient("http://127.0.0.1/v1", "secret\r\nX: y")
    assert "secret" not in refused.value.message


# Runs


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with fake_openai(gather=12) as server:
        seen = run(server, one_turn(12, gap=0.001))
    assert [outcome.error for outcome in seen.outcomes] == [None] * 12
    assert [outcome.due for outcome in seen.outcomes] == [0.001 * number for number in range(12)]
    assert all(outcome.sent >= outcome.due for outcome in seen.outcomes)


def test_a_closed_loop_has_so_many_under_way_and_no_more() -> None:
    with fake_openai(gather=3, token_delay=0.01) as server:
        seen = run(server, one_turn(10), concurrency=3)
    assert server.most_running == 3
    assert len(seen.outcomes) == len(server.bodies) == 10
    figures = serve_figures(seen, None)
    assert (figures["complete"], figures["errors"], figures["at_once"]["most"]) == (10, {}, 3)


def test_figures_show_the_delays_that_the_server_has() -> None:
    for delay in (0.1, 1.0, 10.0):  # until the client is not so busy that it reads most pieces together
        with fake_openai(first_delay=2 * delay, token_delay=delay) as server:
            figures = serve_figures(run(server, one_turn(4, tokens=5)), Deadline(GENEROUS, GENEROUS))
        if figures["time_per_output_token"]["mean"] >= delay / 5:
            break
    assert figures["complete"] == figures["met_deadline"] == 4
    assert 2 * delay <= figures["time_to_first_token"]["p50"] < GENEROUS
    assert delay / 5 <= figures["time_per_output_token"]["mean"] < GENEROUS
    assert 5.5 * delay <= figures["end_to_end"]["p50"] < GENEROUS
    assert figures["goodput"] == figures["requests_per_second"] == 4 / figures["seconds"]
    assert figures["output_tokens_per_second"] == 20 / figures["seconds"]
    assert (figures["tokens"]["output"], figures["tokens"]["cached"], figures["tokens"]["uncounted"]) == (20, 12, 0)
    assert figures["tokens"]["prompt"] == 4 * 9


def test_every_kind_of_failure_is_counted_and_the_others_go_on() -> None:
    faults = ["429", "broken", None, "event", "json", "429", "empty", None]
    by_prompt = {f"prompt {number}": fault for number, fault in enumerate(faults)}
    with fake_openai(fault=lambda number, body: by_prompt[body["prompt"]]) as server:
        figures = serve_figures(run(server, one_turn(8)), Deadline(GENEROUS, GENEROUS))
    assert figures["errors"] == {"http_429": 2, "broken_stream": 1, "error_event": 1, "bad_reply": 1}
    assert figures["error_details"]["http_429"] == "the queue is full"
    assert (figures["requests"], figures["complete"], figures["empty"], figures["met_deadline"]) == (8, 3, 1, 2)


def test_a_request_without_an_end_is_given_up() -> None:
    with fake_openai(fault=lambda number, body: "silent" if number == 0 else None) as server:
        seen = run(server, one_turn(3), concurrency=1, timeout=1.0)
    assert seen.outcomes[0].error == "timeout"
    assert len(seen.outcomes) == 3


def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody listens
        server = FakeServer(base_url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        assert [outcome.error for outcome in run(server, one_turn(2)).outcomes] == ["connect", "connect"]


def test_replies_without_usage_are_counted_by_pieces_of_text() -> None:
    with fake_openai(counts_usage=False) as server:
        tokens = serve_figures(run(server, one_turn(2, tokens=4)), None)["tokens"]
    assert tokens == {"prompt": 0, "cached": None, "output": 8, "chunks": 8, "uncounted": 2}


@pytest.mark.parametrize("chat", [True, False])
def test_a_turn_sends_what_was_said_and_the_answers_that_came(chat: bool) -> None:
    conversation = ScriptedConversation(
        0.0, (ScriptedTurn("one", 2), ScriptedTurn("two", 1, think_seconds=0.01), ScriptedTurn("three", 1))
    )
    with fake_openai() as server:
        seen = run(server, [conversation], chat=chat, ignore_eos=True)
    last = server.bodies[-1]
    if chat:
        said = ["one", " t0 t1", "two", " t0", "three"]
        roles = ["user", "assistant", "user", "assistant", "user"]
        assert last["messages"] == [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    else:
        assert last["prompt"] == "one t0 t1\ntwo t0\nthree"
    assert last["ignore_eos"] is True
    assert (last["model"], last["temperature"], last["max_tokens"]) == ("m", 0, 1)
    first, second, third = seen.outcomes
    assert second.due == first.end + 0.01
    assert third.due == second.end


def test_plain_servers_are_sent_no_parameter_that_openai_does_not_know() -> None:
    body = json.loads(Target("http://x/v1", "m", chat=True).body(["a"], 5))
    assert body.keys() == {"model", "max_tokens", "temperature", "stream", "stream_options", "messages"}


def test_turns_after_one_that_failed_are_not_sent() -> None:
    turns = (ScriptedTurn("one", 1), ScriptedTurn("two", 1), ScriptedTurn("three", 1), ScriptedTurn("four", 1))
    with fake_openai(fault=lambda number, body: "429" if "two" in body["prompt"] else None) as server:
        seen = run(server, [ScriptedConversation(0.0, turns)])
    assert [outcome.error for outcome in seen.outcomes] == [None, "http_429"]
    assert seen.not_sent == 2
    assert len(server.bodies) == 2


def test_the_key_is_sent_as_bearer_token() -> None:
    with fake_openai() as server:
        run(server, one_turn(1), api_key="k-1")
        run(server, one_turn(1))
    assert server.keys == ["Bearer k-1", None]
