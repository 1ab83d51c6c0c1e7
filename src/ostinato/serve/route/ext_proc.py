"""Endpoint picker for Envoy's gateways: its external processing, by the endpoint picker protocol 1.0.0.

The protocol is that of the Gateway API Inference Extension, which llm-d's gateways speak. Requests go from Envoy to the
servers; the router sees their headers and bodies, and answers with the address of a server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from ostinato.engine.process.engine_messages import SubmitRequest
from ostinato.errors import ConfigError, Remedy
from ostinato.os_support import extra_command
from ostinato.serve.http.addresses import is_loopback, join_host_port, split_host_port
from ostinato.serve.route.backends import BackendPool
from ostinato.serve.route.exchange import Exchange
from ostinato.serve.route.upstream import BackendAddress
from ostinato.serve.settings import ServeSettings

if TYPE_CHECKING:
    import grpc.aio

log = logging.getLogger("ostinato.serve")

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
PIECE = 62_000
"""Bytes of a body in one message to Envoy, which takes messages of 64 KiB."""
AROUND_BODY = 2**16
"""Bytes of a message from Envoy besides a body."""
GRACE = 1.0
"""Seconds that streams have to end with the router."""
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""Answers of the gRPC health service."""


class Picker(Protocol):
    """Parts of the router's lifecycle that the picker needs."""

    settings: ServeSettings

    @property
    def status(self) -> str: ...

    def fail(self, error: ConfigError) -> None: ...

    async def read_prompt(self, path: str, sent: bytes, client: str, request_id: str) -> SubmitRequest | None: ...


def is_there(module: str) -> bool:
    """Return whether a module is installed."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is its package
        return False


def check_ext_proc(address: str, backends: Sequence[BackendAddress], is_insecure: bool) -> None:
    """Raise ConfigError unless external processing can be served at `address` for these backends."""
    missing = [name for name, module in (("grpcio", "grpc"), ("protobuf", "google.protobuf")) if not is_there(module)]
    if missing:
        message = f"ext_proc needs {' and '.join(missing)}: {extra_command('extproc')}, or leave ext_proc out"
        raise ConfigError(message, [Remedy("ext_proc", None)])
    host, port = split_host_port(address)
    if not address.startswith("unix:") and not (host and port.isdecimal()):
        raise ConfigError(f"ext_proc {address!r} should be HOST:PORT, such as 127.0.0.1:9002, or unix:PATH")
    if not (address.startswith("unix:") or is_loopback(host) or is_insecure):
        message = (
            f"ext_proc {address} can be reached from other machines, and the protocol has no keys: serve it at "
            "127.0.0.1, or set insecure"
        )
        raise ConfigError(message, [Remedy("insecure", True)])
    for each in backends:
        try:
            ip_address(each.host)
        except ValueError:
            message = f"ext_proc tells Envoy IP addresses of servers, and {each.url} has a name"
            raise ConfigError(message) from None


class ExtProcServer:
    """Server of external processing, on the router's event loop."""

    def __init__(self, address: str, pool: BackendPool, picker: Picker) -> None:
        self._address, self._pool, self._picker = address, pool, picker
        self._server: grpc.aio.Server | None = None
        self.port = 0
        """Port that it listens on."""
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start on the running loop. The router ends if it cannot listen."""
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            await self._serve()
        except Exception as error:
            log.debug("external processing cannot start", exc_info=True)
            self._picker.fail(ConfigError(f"ext_proc {self._address} cannot be opened: {str(error) or repr(error)}"))

    async def _serve(self) -> None:
        import grpc

        from ostinato.serve.route import envoy_messages as messages

        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=messages.ProcessingRequest.FromString,
            response_serializer=messages.ProcessingResponse.SerializeToString,
        )
        check = grpc.unary_unary_rpc_method_handler(self._check)
        longest = min(self._picker.settings.max_body + AROUND_BODY, 2**31 - 1)
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", longest), ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
            )
        )
        self.port = server.add_insecure_port(self._address)
        await server.start()
        self._server = server
        log.info("external processing at %s", self._address)

    async def stop(self) -> None:
        """End all streams within a moment."""
        if self._starting is not None:
            await self._starting
        if self._server is not None:
            await self._server.stop(GRACE)

    async def _check(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """Answer the gRPC health protocol: the request has the service's name as its only field."""
        import grpc

        service = request[2:].decode(errors="replace")
        if service not in ("", "liveness", "readiness", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _SERVING if service == "liveness" or self._picker.status == "ready" else _NOT_SERVING

    async def _process(self, requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        stream = _Stream(self._pool, self._picker)
        try:
            async for request in requests:
                async for response in stream.handle(request):
                    yield response
        finally:
            stream.close()


class _Stream:
    """One HTTP request, as Envoy tells of it."""

    def __init__(self, pool: BackendPool, picker: Picker) -> None:
        self._pool, self._picker = pool, picker
        self._headers: Mapping[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._waits_for_body = self._is_duplex = self._echoes_answer = self._has_picked = False
        self._exchange: Exchange | None = None

    async def handle(self, request: Any) -> AsyncIterator[Any]:
        """Yield the responses to one message of Envoy's."""
        from ostinato.serve.route import envoy_messages as messages

        match request.WhichOneof("request"):
            case "request_headers":
                self._begin(request)
                if not self._waits_for_body:
                    yield await self._pick(messages, "request_headers")
                elif not self._is_duplex:
                    yield messages.ProcessingResponse(request_headers=messages.HeadersResponse())
            case "request_body":
                self._body += request.request_body.body
                if len(self._body) > self._picker.settings.max_body:
                    most = self._picker.settings.max_body
                    yield _refusal(messages, 413, f"the body is larger than max_body, {most} bytes")
                elif self._is_duplex:
                    if request.request_body.end_of_stream:
                        yield await self._pick(messages, "request_headers")
                        for response in self._echo(messages, ends=True):
                            yield response
                elif self._has_picked:
                    yield messages.ProcessingResponse(request_body=messages.BodyResponse())
                else:
                    yield await self._pick(messages, "request_body")
            case "request_trailers":
                if not self._has_picked and self._is_duplex:
                    yield await self._pick(messages, "request_headers")
                    for response in self._echo(messages, ends=False):
                        yield response
                yield messages.ProcessingResponse(request_trailers=messages.TrailersResponse())
            case "response_headers":
                yield messages.ProcessingResponse(response_headers=messages.HeadersResponse())
            case "response_body":
                body = request.response_body
                if self._exchange is not None:
                    self._exchange.note_piece(body.body)
                    if body.end_of_stream:
                        self._exchange.note_hit()
                response = messages.BodyResponse()
                if self._echoes_answer:
                    streamed = response.response.body_mutation.streamed_response
                    streamed.body, streamed.end_of_stream = body.body, body.end_of_stream
                yield messages.ProcessingResponse(response_body=response)
            case "response_trailers":
                yield messages.ProcessingResponse(response_trailers=messages.TrailersResponse())

    def close(self) -> None:
        """Note the request's end, or at least that of what Envoy tells of it."""
        if self._exchange is not None:
            self._exchange.close()

    def _begin(self, request: Any) -> None:
        from ostinato.serve.route import envoy_messages as modes

        headers, config = request.request_headers, request.protocol_config
        self._headers = {
            each.key.lower(): (each.raw_value.decode("latin-1") or each.value) for each in headers.headers.headers
        }
        metadata = request.metadata_context.filter_metadata
        hint = metadata.get("envoy.lb.subset_hint")
        if hint is not None and SUBSET in hint.fields:
            value = hint.fields[SUBSET]
            listed = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
            self._subset = frozenset(each.strip() for each in listed)
        # An Envoy that does not say its modes is one whose bodies the protocol wants in full duplex.
        mode = config.request_body_mode if request.HasField("protocol_config") else modes.FULL_DUPLEX_STREAMED
        self._is_duplex = mode == modes.FULL_DUPLEX_STREAMED
        self._waits_for_body = not headers.end_of_stream and (
            self._is_duplex or mode in (modes.BUFFERED, modes.BUFFERED_PARTIAL)
        )
        answers = config.response_body_mode if request.HasField("protocol_config") else modes.FULL_DUPLEX_STREAMED
        self._echoes_answer = answers == modes.FULL_DUPLEX_STREAMED

    async def _pick(self, messages: Any, kind: str) -> Any:
        """Choose a server, and return the response of the given kind that names it, or a refusal."""
        self._has_picked = True
        request_id = f"envoy-{uuid4().hex}"
        path = self._headers.get(":path", "").partition("?")[0]
        client = self._headers.get("x-forwarded-for", "envoy").rpartition(",")[2].strip()
        prompt = await self._picker.read_prompt(path, bytes(self._body), client, request_id) if self._body else None
        addresses = {name: self._pool.backends[name].address for name in self._pool.ready}
        endpoints = {name: join_host_port(each.host, each.port) for name, each in addresses.items()}
        able = [name for name, endpoint in endpoints.items() if self._subset is None or endpoint in self._subset]
        choice = None
        if self._picker.status != "draining":
            choice = self._pool.choose(request_id, prompt, able)
        if choice is None:
            return _refusal(messages, 503, "no server takes the request")
        self._exchange = Exchange(self._pool, self._pool.backends[choice.name], request_id, choice, prompt)
        response = messages.ProcessingResponse()
        common = getattr(response, kind).response
        common.clear_route_cache = True
        option = common.header_mutation.set_headers.add()
        option.header.key, option.header.raw_value = DESTINATION, endpoints[choice.name].encode()
        option.append_action = messages.OVERWRITE_IF_EXISTS_OR_ADD
        response.dynamic_metadata.update({"envoy.lb": {DESTINATION: endpoints[choice.name]}})
        return response

    def _echo(self, messages: Any, ends: bool) -> Iterator[Any]:
        """Yield the body in pieces, as full duplex wants it back; none after a refusal."""
        if self._exchange is None:
            return
        body = bytes(self._body)
        self._body.clear()
        for start in range(0, max(len(body), 1), PIECE):
            response = messages.ProcessingResponse()
            streamed = response.request_body.response.body_mutation.streamed_response
            streamed.body = body[start : start + PIECE]
            streamed.end_of_stream = ends and start + PIECE >= len(body)
            yield response


def _refusal(messages: Any, status: int, text: str) -> Any:
    response = messages.ProcessingResponse()
    response.immediate_response.status.code = status
    response.immediate_response.body = text.encode()
    return response
