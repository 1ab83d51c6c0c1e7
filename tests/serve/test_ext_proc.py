"""The endpoint picker, asked as Envoy asks: headers and bodies in every mode, and the header that names a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx2
import pytest

from ostinato.errors import ConfigError
from ostinato.serve.route import ext_proc
from ostinato.serve.route.ext_proc import DESTINATION, SERVICE, SUBSET
from ostinato.serve.route.proxy import RouteLifecycle, RouteSettings
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE
from tests.support.serving import Routed, Served, routing, serving

grpc = pytest.importorskip("grpc")
messages: Any = pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2")
services: Any = pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2_grpc")
modes: Any = pytest.importorskip("envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2")

MODES = modes.ProcessingMode.BodySendMode
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
    mode: int | None = MODES.FULL_DUPLEX_STREAMED, *, ends: bool = False, subset: Any = None, path: str = PATH
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
    return messages.ProcessingRequest(**{of: messages.HttpBody(body=data, end_of_stream=ends)})


def ask(channel: Any, *requests: Any) -> list[Any]:
    return list(services.ExternalProcessorStub(channel).Process(iter(requests), timeout=PATIENCE))


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
    first, second = ask(channel, headers(MODES.BUFFERED), body(sent))
    assert first.WhichOneof("response") == "request_headers"
    assert not first.request_headers.response.header_mutation.set_headers
    assert destination(second, "request_body") == endpoint(servers[1])


def test_answers_pass_through_and_their_usage_is_counted(routed: Routed, servers: list[Served], channel: Any) -> None:
    sent = json.dumps({"prompt": warmed(routed, servers[0], 30)}).encode()
    usage = b'{"usage": {"prompt_tokens_details": {"cached_tokens": 64}}}'
    counts = routed.lifecycle.pool.backends[servers[0].url].counts
    before = counts.reported_hit_tokens
    answers = messages.ProcessingRequest(response_headers=messages.HttpHeaders())
    trailers = messages.ProcessingRequest(response_trailers=messages.HttpTrailers())
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


@pytest.mark.parametrize("mode", [None, MODES.NONE, MODES.STREAMED, MODES.FULL_DUPLEX_STREAMED])
def test_a_request_whose_body_is_not_shown_gets_a_server_by_its_headers(
    servers: list[Served], channel: Any, mode: int | None
) -> None:
    [found] = ask(channel, headers(mode, ends=True))
    assert destination(found) in {endpoint(served) for served in servers}
    if mode == MODES.STREAMED:
        first, second = ask(channel, headers(mode), body(b"{}"))
        assert destination(first) in {endpoint(served) for served in servers}
        assert second.WhichOneof("response") == "request_body"


def test_a_body_that_is_wrong_or_ends_with_trailers_gets_a_server_and_one_too_large_none(
    servers: list[Served], channel: Any
) -> None:
    named = {endpoint(served) for served in servers}
    assert destination(ask(channel, headers(), body(b"{"))[0]) in named
    assert destination(ask(channel, headers(path="/elsewhere?x=1"), body(b""))[0]) in named
    trailers = messages.ProcessingRequest(request_trailers=messages.HttpTrailers())
    first, echoed, last = ask(channel, headers(), body(b'{"prompt": "a"}', ends=False), trailers)
    assert destination(first) in named
    assert not echoed.request_body.response.body_mutation.streamed_response.end_of_stream
    assert last.WhichOneof("response") == "request_trailers"
    [*_, refused] = ask(channel, headers(), body(b"x" * (2**20 + 1)))
    assert refused.immediate_response.status.code == 413


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


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ext_proc, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs grpcio and xds-protos: pip install 'ostinato\[ext-proc\]'"):
        RouteLifecycle(ServeSettings(), RouteSettings(("http://127.0.0.1:1",), ext_proc="127.0.0.1:0"))
