"""The endpoint picker, asked as Envoy asks: headers and bodies in every mode, and the header that names a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx2
import pytest

from ostinato.errors import ConfigError
from ostinato.serve.route import envoy_messages as messages
from ostinato.serve.route import ext_proc
from ostinato.serve.route.ext_proc import DESTINATION, SERVICE, SUBSET
from ostinato.serve.route.proxy import RouteLifecycle, RouteSettings
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE
from tests.support.serving import Routed, Served, routing, serving

grpc = pytest.importorskip("grpc")
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Served]]:
    settings: dict[str, Any] = {"graph_mode": "none", "max_model_len": 512, "max_num_seqs": 4}
    with serving({"kv_events": "hashes"}, **settings) as one, serving({"kv_events": "hashes"}, **settings) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def routed(servers: list[Served]) -> Iterator[Routed]:
    with routing([served.url for served in servers], ext_proc="127.0.0.1:0", max_body=2**20) as routed:
        routed.until(lambda: routed.lifecycle._ext_proc is not None and routed.lifecycle._ext_proc.port)
        yield routed


@pytest.fixture(scope="module")
def channel(routed: Routed) -> Iterator[Any]:
    assert routed.lifecycle._ext_proc is not None
    with grpc.insecure_channel(f"127.0.0.1:{routed.lifecycle._ext_proc.port}") as channel:
        yield channel


def prompt_of(seed: int, length: int = 100) -> list[int]:
    return [7 + Random(f"{seed} {place}").randrange(200) for place in range(length)]


def headers(
    mode: int | None = messages.FULL_DUPLEX_STREAMED, *, ends: bool = False, subset: Any = None, path: str = PATH
) -> Any:
    request = messages.ProcessingRequest()
    for key, value in ((":method", "POST"), (":path", path), ("content-type", "application/json")):
        request.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    request.request_headers.end_of_stream = ends
    if mode is not None:
        request.protocol_config.request_body_mode = mode
        request.protocol_config.response_body_mode = mode
    if subset is not None:
        request.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: subset})
    return request


def body(data: bytes, *, ends: bool = True, of: str = "request_body") -> Any:
    return messages.ProcessingRequest(**{of: {"body": data, "end_of_stream": ends}})


def ask(channel: Any, *requests: Any) -> list[Any]:
    process = channel.stream_stream(
        f"/{SERVICE}/Process",
        request_serializer=messages.ProcessingRequest.SerializeToString,
        response_deserializer=messages.ProcessingResponse.FromString,
    )
    return list(process(iter(requests), timeout=PATIENCE))


def destination(response: Any, kind: str = "request_headers") -> str:
    """The server that a response names, in the header and in the metadata alike."""
    common = getattr(response, kind).response
    [option] = common.header_mutation.set_headers
    assert option.header.key == DESTINATION
    endpoint: str = option.header.raw_value.decode()
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == endpoint
    assert common.clear_route_cache
    return endpoint


def endpoint(served: Served) -> str:
    return served.url.removeprefix("http://")


def warmed(routed: Routed, served: Served, seed: int) -> list[int]:
    """A prompt whose beginning one server has cached, and has told the router so."""
    pool = routed.lifecycle.pool
    assert pool.placement is not None
    before, prompt = pool.placement.router.num_known(served.url), prompt_of(seed)
    answer = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    httpx2.post(f"{served.url}{PATH}", json=answer, timeout=PATIENCE).raise_for_status()
    routed.until(lambda: pool.placement.router.num_known(served.url) > before)
    return [*prompt, *prompt_of(seed + 1000, 20)]


def test_a_body_in_full_duplex_names_the_server_with_the_prefix_and_comes_back_whole(
    routed: Routed, servers: list[Served], channel: Any
) -> None:
    for number, served in enumerate(servers):
        sent = json.dumps({"prompt": warmed(routed, served, number), "user": "x" * 150_000}).encode()
        parts = [body(sent[start : start + 50_000], ends=False) for start in range(0, len(sent), 50_000)]
        parts[-1].request_body.end_of_stream = True
        first, *rest = ask(channel, headers(), *parts)
        assert destination(first) == endpoint(served)
        streamed = [each.request_body.response.body_mutation.streamed_response for each in rest]
        assert b"".join(each.body for each in streamed) == sent
        assert [each.end_of_stream for each in streamed] == [*[False] * (len(streamed) - 1), True]
        assert max(len(each.SerializeToString()) for each in rest) < 2**16
    routed.until(lambda: sum(backend["running"] for backend in routed.backends()) == 0)


def test_a_buffered_body_is_answered_after_its_headers(routed: Routed, servers: list[Served], channel: Any) -> None:
    sent = json.dumps({"prompt": warmed(routed, servers[1], 20)}).encode()
    first, second = ask(channel, headers(messages.BUFFERED), body(sent))
    assert first.WhichOneof("response") == "request_headers"
    assert not first.request_headers.response.header_mutation.set_headers
    assert destination(second, "request_body") == endpoint(servers[1])


def test_answers_pass_through_and_their_usage_is_counted(routed: Routed, servers: list[Served], channel: Any) -> None:
    sent = json.dumps({"prompt": warmed(routed, servers[0], 30)}).encode()
    usage = b'{"usage": {"prompt_tokens_details": {"cached_tokens": 64}}}'
    counts = routed.lifecycle.pool.backends[servers[0].url].counts
    before = counts.reported_hit_tokens
    answers = messages.ProcessingRequest(response_headers={})
    trailers = messages.ProcessingRequest(response_trailers={})
    found = ask(
        channel, headers(), body(sent), answers, body(usage[:20], ends=False, of="response_body"),
        body(usage[20:], of="response_body"), trailers,
    )  # fmt: skip
    kinds = [each.WhichOneof("response") for each in found]
    assert kinds == ["request_headers", "request_body", "response_headers", *["response_body"] * 2, "response_trailers"]
    streamed = [each.response_body.response.body_mutation.streamed_response.body for each in found[3:5]]
    assert b"".join(streamed) == usage
    assert counts.reported_hit_tokens == before + 64


def test_only_servers_of_a_subset_are_named_and_none_of_an_empty_one(
    routed: Routed, servers: list[Served], channel: Any
) -> None:
    sent = json.dumps({"prompt": warmed(routed, servers[0], 40)}).encode()
    found = ask(channel, headers(subset=[endpoint(servers[1]), "10.0.0.1:80"]), body(sent))
    assert destination(found[0]) == endpoint(servers[1])
    for subset in ([], ["10.0.0.1:80"]):
        [refused] = ask(channel, headers(subset=subset), body(sent))
        assert refused.immediate_response.status.code == 503


@pytest.mark.parametrize("mode", [None, messages.NONE, messages.STREAMED, messages.FULL_DUPLEX_STREAMED])
def test_a_request_whose_body_is_not_shown_gets_a_server_by_its_headers(
    servers: list[Served], channel: Any, mode: int | None
) -> None:
    [found] = ask(channel, headers(mode, ends=True))
    assert destination(found) in {endpoint(served) for served in servers}
    if mode == messages.STREAMED:
        first, second = ask(channel, headers(mode), body(b"{}"))
        assert destination(first) in {endpoint(served) for served in servers}
        assert second.WhichOneof("response") == "request_body"


def test_a_body_that_is_wrong_or_ends_with_trailers_gets_a_server_and_one_too_large_none(
    servers: list[Served], channel: Any
) -> None:
    named = {endpoint(served) for served in servers}
    assert destination(ask(channel, headers(), body(b"{"))[0]) in named
    assert destination(ask(channel, headers(path="/elsewhere?x=1"), body(b""))[0]) in named
    trailers = messages.ProcessingRequest(request_trailers={})
    first, echoed, last = ask(channel, headers(), body(b'{"prompt": "a"}', ends=False), trailers)
    assert destination(first) in named
    assert not echoed.request_body.response.body_mutation.streamed_response.end_of_stream
    assert last.WhichOneof("response") == "request_trailers"
    [*_, refused] = ask(channel, headers(), body(b"x" * (2**20 + 1)))
    assert refused.immediate_response.status.code == 413


def test_a_body_of_up_to_max_body_comes_in_one_message(servers: list[Served]) -> None:
    with routing([servers[0].url], ext_proc="127.0.0.1:0", max_body=2**24 + 2**10) as routed:
        served = routed.lifecycle._ext_proc
        assert served is not None
        routed.until(lambda: served.port)
        with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            _, named = ask(channel, headers(messages.BUFFERED), body(b"x" * (2**24 + 2**10)))
            assert destination(named, "request_body") == endpoint(servers[0])


@pytest.mark.parametrize("error", [RuntimeError("no port"), OSError(24, "Too many open files")])
def test_a_server_that_cannot_start_ends_the_router_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(**_: Any) -> Any:
        raise error

    async def work() -> RouteLifecycle:
        lifecycle = RouteLifecycle(ServeSettings(), RouteSettings(("http://127.0.0.1:1",), ext_proc="127.0.0.1:0"))
        lifecycle.start()
        assert lifecycle._ext_proc is not None
        await lifecycle._ext_proc.stop()
        await lifecycle.stop()
        return lifecycle

    monkeypatch.setattr(grpc.aio, "server", fails)
    with pytest.raises(ConfigError, match=r"ext_proc 127.0.0.1:0 cannot be opened: .*(no port|Too many)"):
        asyncio.run(work()).exit_status()


def test_the_router_stops_its_other_parts_after_one_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise RuntimeError("stuck")

    async def work() -> None:
        lifecycle = RouteLifecycle(ServeSettings(), RouteSettings(("http://127.0.0.1:1",)))
        lifecycle.start()
        await lifecycle.loop_delay.stop()
        lifecycle.loop_delay.stop = fails  # type: ignore[method-assign]
        await lifecycle.stop()
        assert all(task.done() for task in lifecycle.pool._tasks)

    asyncio.run(work())
    assert "stuck" in caplog.text


def test_health_is_that_of_the_router(routed: Routed, channel: Any) -> None:
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    for service in ("", "liveness", "readiness", SERVICE):
        assert check(b"\x0a" + bytes([len(service)]) + service.encode(), timeout=PATIENCE) == b"\x08\x01"
    with pytest.raises(grpc.RpcError) as error:
        check(b"\x0a\x01x", timeout=PATIENCE)
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    routed.lifecycle.draining = True
    try:
        assert check(b"\x0a\x09readiness", timeout=PATIENCE) == b"\x08\x02"
        assert check(b"\x0a\x08liveness", timeout=PATIENCE) == b"\x08\x01"
        [refused] = ask(channel, headers(ends=True))
        assert refused.immediate_response.status.code == 503
    finally:
        routed.lifecycle.draining = False


@pytest.mark.parametrize(
    ("address", "urls", "message"),
    [
        ("9002", ["http://127.0.0.1:1"], "HOST:PORT"),
        ("0.0.0.0:9002", ["http://127.0.0.1:1"], "no keys"),
        ("127.0.0.1:9002", ["http://server:1"], "has a name"),
    ],
)
def test_what_cannot_be_served_is_refused(address: str, urls: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouteLifecycle(ServeSettings(), RouteSettings(tuple(urls), ext_proc=address))


def test_a_server_that_is_named_twice_is_one() -> None:
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:1/", "HTTP://127.0.0.1:1", "http://127.0.0.1:1/path")
    lifecycle = RouteLifecycle(ServeSettings(), RouteSettings(urls))
    assert len(lifecycle._addresses) == 2


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ext_proc, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs grpcio and protobuf: pip install 'ostinato\[extproc\]'"):
        RouteLifecycle(ServeSettings(), RouteSettings(("http://127.0.0.1:1",), ext_proc="127.0.0.1:0"))


ENVOYS = (
    "12260a220a180a053a706174681a0f2f76312f636f6d706c6574696f6e730a060a0161120162180142560a540a14656e766f792e6c622e73756273"
    "65745f68696e74123c0a3a0a25782d676174657761792d64657374696e6174696f6e2d656e64706f696e742d7375627365741211320f0a0d1a0b31"
    "302e302e302e313a38305a0408041002",
    "22070a0378797a1001",
    "2a070a0378797a1001",
    "1a00",
    "3200",
    "3a00",
)
"""Requests as the messages of xds-protos 1.85, which are generated from Envoy's, serialise them."""
OURS = (
    "0a390a3712330a310a2d0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741a0b31302e302e302e313a383018022801"
    "42410a3f0a08656e766f792e6c6212332a310a2f0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e74120d1a0b31302e"
    "302e302e313a3830",
    "1a0d0a0b1a091a070a0378797a1001",
    "220d0a0b1a091a070a0378797a1001",
    "1200",
    "2a00",
    "3200",
    "3a090a0308f7031a026e6f",
)
"""Responses, as those."""


def test_messages_are_those_of_envoys_own_definitions() -> None:
    begins = headers(ends=True, subset=["10.0.0.1:80"])
    begins.request_headers.headers.ClearField("headers")
    begins.request_headers.headers.headers.add(key=":path", raw_value=PATH.encode())
    begins.request_headers.headers.headers.add(key="a", value="b")
    begins.protocol_config.response_body_mode = messages.BUFFERED
    requests = [begins, body(b"xyz"), body(b"xyz", of="response_body")]
    requests += [
        messages.ProcessingRequest(**{kind: {}})
        for kind in ("response_headers", "request_trailers", "response_trailers")
    ]
    assert [each.SerializeToString(deterministic=True).hex() for each in requests] == list(ENVOYS)
    named = messages.ProcessingResponse.FromString(bytes.fromhex(OURS[0]))
    assert destination(named) == "10.0.0.1:80"
    [option] = named.request_headers.response.header_mutation.set_headers
    assert option.append_action == messages.OVERWRITE_IF_EXISTS_OR_ADD
    streamed = {"response": {"body_mutation": {"streamed_response": {"body": b"xyz", "end_of_stream": True}}}}
    responses = [messages.ProcessingResponse(**{kind: streamed}) for kind in ("request_body", "response_body")]
    responses += [
        messages.ProcessingResponse(**{kind: {}})
        for kind in ("response_headers", "request_trailers", "response_trailers")
    ]
    responses.append(messages.ProcessingResponse(immediate_response={"status": {"code": 503}, "body": b"no"}))
    assert [each.SerializeToString(deterministic=True).hex() for each in responses] == list(OURS[1:])
