"""ServeSettings: the settings of the server. Those of its engine are in EngineConfig."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    AnyHttpUrl,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ostinato.child_process import SECRET_VARIABLES
from ostinato.errors import ConfigError, Remedy
from ostinato.files import is_directory
from ostinato.json_io import DuplicateMemberError, JsonObject, parse_json
from ostinato.observe.logs import AccessLog, LogFormat, LogLevel
from ostinato.replicas.router import RoutingPolicy
from ostinato.serve.chat.tool_calls.formats import PARSERS
from ostinato.serve.http.addresses import TrustedProxies, address_in, is_loopback
from ostinato.serve.http.api_key_file import ApiKey, named_keys
from ostinato.setting_names import plain_words, validation_problem
from ostinato.units import read_size

_URL = TypeAdapter(AnyHttpUrl)

UnknownFields = Literal["error", "warn", "ignore"]

FORMS = {
    "uds_mode": ("three digits from 0 to 7, as chmod has them", "660"),
    "root_path": ("a path that begins with / and does not end with one, such as /llm", "/llm"),
    "endpoint": ("tcp://HOST:PORT or ipc://PATH", "tcp://*:5557"),
    "replay_endpoint": ("tcp://HOST:PORT or ipc://PATH", "tcp://*:5558"),
    "metrics_prefix": ("letters, digits, _ and :, with no digit at the beginning", "ostinato:"),
}
"""Setting with a pattern -> description of the pattern in words, and an example."""
ZMQ_ENDPOINT = r"^(tcp://[^ /]+:[0-9*]+|ipc://.+)$"
BYTE_SETTINGS = ("client_backlog", "max_body", "worker_memory")
"""Settings that are bytes, and can be given as 16MiB."""


class KvEventsConfig(BaseModel):
    """Publication of cache events over ZeroMQ, under vLLM's names. `checkpoints` has no counterpart there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = Field("tcp://*:5557", pattern=ZMQ_ENDPOINT)
    replay_endpoint: str | None = Field(None, pattern=ZMQ_ENDPOINT)
    buffer_steps: int = Field(10_000, ge=1)
    hwm: int = Field(100_000, ge=1)
    topic: str = ""
    checkpoints: bool = True
    """Publish checkpoints too, which decoders that take vLLM's kinds alone refuse."""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def binds(self) -> bool:
        """True if the server opens the endpoint, by vLLM's rule; else it connects to a router's."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")

    @property
    def open_endpoint(self) -> str | None:
        """An endpoint that the server opens and other machines reach, if there is one."""
        opened = [self.endpoint] if self.binds else []
        opened += [] if self.replay_endpoint is None else [self.replay_endpoint]
        local = ("ipc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:")
        return next((each for each in opened if not each.startswith(local)), None)


class ServeSettings(BaseModel):
    """Settings of the server: addresses, keys and limits. ConfigError for an illegal value."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs an api_key, or insecure."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0: a free one, which is printed."""
    uds: Path | None = None
    """A Unix socket to listen on instead, which only this machine reaches.

    A file that an earlier server left there is replaced.
    """
    uds_mode: str = Field("660", pattern=r"^0?[0-7]{3}$")
    """Permissions of the Unix socket's file, in chmod's digits: by default for user and group."""
    ssl_certfile: Path | None = None
    """The server's certificate in PEM, followed by those that lead to its authority.

    The server then speaks TLS, 1.2 or newer. SIGHUP makes it read certificate and key again.
    """
    ssl_keyfile: Path | None = None
    """The certificate's private key in PEM (in ssl_certfile)."""
    ssl_keyfile_password: str | None = Field(None, repr=False)
    """Password of the private key. Other users of the machine see flags, but not the environment."""
    root_path: str = Field("", pattern=r"^(/[A-Za-z0-9_.~-]+)*$")
    """A path such as /llm under which all endpoints are served.

    They answer without it too.
    """
    api_key: tuple[str, ...] = Field((), repr=False)
    """A key that clients must send as `Authorization: Bearer KEY`; several may be given.

    Other users of the machine see flags, but neither the environment nor an api_key_file.
    """
    api_key_file: Path | None = None
    """A file with further keys, one a line.

    A line is a key, or a name for logs and metrics and a key, and perhaps a weight of its client's turns and share
    (`NAME KEY weight=4`). SIGHUP makes the server read it again.
    """
    insecure: bool = False
    """Listen on an address that other machines reach though there is no api_key."""
    cors_origin: tuple[str, ...] = ()
    """An origin whose web pages may use the server from a browser, or * for all; several may be given."""
    served_model_name: tuple[str, ...] = ()
    """The model's name in requests and answers (that of the checkpoint).

    Of several, requests may use any; answers have the first.
    """
    tool_call_parser: str | None = None
    """The form of the model's tool calls, such as hermes or generic (what chat template or vocabulary show)."""
    max_waiting: int = Field(256, ge=0)
    """Outputs that may wait besides those that run; more requests get status 429."""
    max_requests_per_client: int | None = Field(None, ge=1)
    """Outputs of one client that may be unfinished; more get status 429.

    A client is a key, or an address without keys (a quarter of those that may run and wait, and at least max_n; without
    keys on a loopback address, all of them).
    """
    client_backlog: int = Field(64 * 2**20, ge=2**16)
    """Bytes of answers that one client may leave unread, whole answers until they are sent.

    Beyond it, the largest ends with the error `client_backlog`.
    """
    max_body: int = Field(16 * 2**20, ge=1024)
    """Bytes of a request's body, its images included."""
    max_images: int = Field(16, ge=0)
    """Images of a request, frames of videos included."""
    max_image_pixels: int = Field(2**25, ge=1)
    """Pixels of an image before it is resized."""
    max_request_pixels: int = Field(2**27, ge=1)
    """Pixels of all images of a request together, before they are resized."""
    max_keys: int = Field(2**16, ge=1)
    """Members of all objects in a request's body together."""
    max_values: int = Field(2**19, ge=1)
    """Values in a request's body, such as token ids, list items and members of objects."""
    max_messages: int = Field(4096, ge=1)
    """Messages, or items of input, of a request."""
    max_parts: int = Field(4096, ge=1)
    """Parts of all messages of a request together."""
    max_tools: int = Field(256, ge=0)
    """Tools of a request."""
    max_stop: int = Field(16, ge=0)
    """Stop strings of a request."""
    max_stop_length: int = Field(256, ge=1)
    """Characters of a stop string."""
    max_logit_bias: int = Field(1024, ge=0)
    """Tokens with a logit_bias, and stop_token_ids, of a request."""
    max_n: int = Field(16, ge=1)
    """Outputs of a request: prompts times n."""
    max_inputs: int = Field(1024, ge=1)
    """Inputs of a request for embeddings."""
    allow_cache_reset: bool = False
    """Serve `POST /reset_prefix_cache`, which drops all clients' prefixes that no request uses."""
    kv_events: Literal["off", "hashes", "tokens"] = "off"
    """Serve `GET /kv_events`, changes of the prefix cache, to routers; tokens are all clients' text."""
    kv_events_config: KvEventsConfig | None = None
    """Publish them over ZeroMQ too: JSON as for vLLM's flag. Needs `ostinato[zmq]`."""
    unknown_fields: UnknownFields = "error"
    """Unknown fields of a request: an error, ignored with a log line and the header x-ignored-fields, or ignored."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds after which a request is ended; a request may ask for less with `timeout`."""
    body_workers: int = Field(2, ge=1)
    """Processes that read large bodies and images, and try guides, one request each at a time.

    They start with the first one.
    """
    worker_seconds: float = Field(20.0, gt=0)
    """Seconds that such a process may take to read one request."""
    worker_memory: int = Field(2**30, ge=2**26)
    """Bytes that such a process may take to read one request."""
    client_seconds: float = Field(60.0, gt=0)
    """Seconds that such processes may work for one client per minute; then it gets status 429."""
    client_pixels: int = Field(2**30, ge=1)
    """Pixels of images that one client may have decoded per minute; then it gets status 429."""
    engine_timeout: float = Field(120.0, gt=0)
    """Seconds without a sign of life from the engine after which it counts as stalled: /health is 503.

    It gives one between steps, so this is more than the longest step.
    """
    verify_rate: float = Field(0.0, ge=0, le=1)
    """Share of requests to compute again, when the engine is idle, on the plain path, and compare."""
    on_stall: Literal["report", "exit"] = "report"
    """Reaction to a stalled engine: report it until it recovers, or exit, so that a supervisor starts the server anew.
    """
    replicas: int | None = Field(None, ge=1)
    """Engines of the model behind this server, on Ray Serve.

    On one machine they share its cores and memory, or have tensor_parallel_size GPUs each. Needs the extra `ray`.
    """
    max_replicas: int | None = Field(None, ge=1)
    """Largest number of replicas that Ray Serve may start when they are busy (open: no more than replicas)."""
    ray_address: str | None = None
    """A running Ray, as HOST:PORT of its head or auto, from one of its nodes.

    Open: a Ray of this server, on this machine, that ends with it.
    """
    routing: RoutingPolicy = "prefix"
    """Choice of the replica: by cached prefix; or between two random ones, or in turns."""
    header_timeout: float = Field(15.0, gt=0)
    """Seconds that a request's headers may take to arrive."""
    keep_alive_timeout: float = Field(30.0, gt=0)
    """Seconds that a connection may wait for its next request."""
    max_connections: int = Field(0, ge=0)
    """Connections at once; 0: as many as the process has file descriptors for, less 64.

    A further one gets status 503.
    """
    max_connections_per_address: int = Field(256, ge=0)
    """Connections at once of one address; 0: any number.

    Those of this machine and a trusted_proxy do not count.
    """
    drain_timeout: float = Field(30.0, ge=0)
    """Seconds that running requests have to end after SIGTERM."""
    metrics_prefix: str = Field("ostinato:", pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")
    """Prefix of the names of metrics; with vllm: dashboards made for vLLM show the common ones.

    http_requests_total has none, as everywhere.
    """

    log_level: LogLevel = "info"
    """Level of the log: a line per request at info; at debug, those of pages and probes too."""
    log_format: LogFormat = "text"
    """Format of the log: for people, or as JSON, an object a line."""
    trusted_proxy: tuple[str, ...] = ()
    """An address or a network (10.0.0.0/8) of trusted proxies, or unix for those on the Unix socket.

    Their X-Forwarded-For gives the client's address, for logs and shares; several may be given.
    """
    access_log: AccessLog | None = None
    """Format of the requests' lines: for people, as JSON, or none at all (as log_format)."""
    otlp_endpoint: str | None = None
    """Address of an OpenTelemetry collector that receives a trace of each request.

    The protocol is OTLP over HTTP.
    """

    _keys: dict[str, ApiKey] = PrivateAttr(default_factory=dict)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            found = [_validation_text(dict(each)) for each in error.errors()]
            problems, remedies = zip(*map(validation_problem, found), strict=True)
            raise ConfigError("; ".join(problems), chain.from_iterable(remedies)) from None

    @field_validator(*BYTE_SETTINGS, mode="before")
    @classmethod
    def _accept_a_size(cls, value: object) -> object:
        return read_size(value)

    @field_validator("kv_events_config", mode="before")
    @classmethod
    def _accept_json(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return parse_json(value)
        except DuplicateMemberError as error:
            raise _wrong("kv_events_config", str(error), []) from None
        except ValueError:
            message = 'it should be a JSON object, such as {"endpoint": "tcp://*:5557"}'
            raise _wrong("kv_events_config", message, []) from None

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _are_names(cls, value: Any) -> Any:
        names = (value,) if isinstance(value, str) else () if value is None else value
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise ValueError("it should be a name, or a list of names")
        if "" in names:
            raise ValueError("a name has at least 1 character")
        return tuple(dict.fromkeys(names))

    @field_validator("host")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        nearest = address_in(value)
        if nearest != value:
            message = "it should be an address or a name alone, without scheme, port and brackets"
            raise PydanticCustomError("host", "{message}", {"message": message, "nearest": nearest})
        return value

    @field_validator("cors_origin")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if each not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", each):
                message = f"{each!r} is no origin, such as https://example.org, without a path, nor is it *"
                raise _wrong("cors_origin", message, [])
        return value

    @field_validator("tool_call_parser")
    @classmethod
    def _is_a_form(cls, value: str | None) -> str | None:
        if value is not None and value not in PARSERS:
            nearest = get_close_matches(value.replace("_", "-"), PARSERS, n=1, cutoff=0.4)
            message = f"{value!r} is no known form of tool calls; known are {', '.join(PARSERS)}"
            raise _wrong("tool_call_parser", message, [Remedy("tool_call_parser", name) for name in nearest])
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                _URL.validate_python(value)
            except ValidationError:
                message = "it should be the address of a collector, such as http://localhost:4318"
                raise _wrong("otlp_endpoint", message, []) from None
        return value

    @model_validator(mode="after")
    def _guarded(self) -> ServeSettings:
        self._keys = named_keys(self.api_key, self.api_key_file)
        if any(not key.strip() or not key.isascii() for key in self.api_key):
            raise ValueError("an api_key is ASCII text that is not empty")
        given = self.model_fields_set
        if self.uds is not None and given & {"host", "port"}:
            raise ValueError("the server listens on uds or on host and port; give one of them")
        if self.uds is None and "uds_mode" in given:
            raise ValueError("uds_mode is for a Unix socket: give uds too")
        try:
            TrustedProxies(self.trusted_proxy)
        except ValueError as error:
            raise ValueError(f"trusted_proxy: {error}, nor is it unix") from None
        if self.ssl_certfile is None and given & {"ssl_keyfile", "ssl_keyfile_password"}:
            raise ValueError("ssl_keyfile and ssl_keyfile_password need an ssl_certfile")
        self._check_replicas()
        self._check_events()
        if not (self._keys or self.insecure or self.is_local):
            message = (
                f"host {self.host} can be reached from other machines, and there is no api_key: give one "
                f"(api_key_file, or the variable {SECRET_VARIABLES['api_key']}), listen on 127.0.0.1, or set insecure"
            )
            remedies = [Remedy("host", "127.0.0.1"), Remedy("insecure", True)]
            raise PydanticCustomError("host", "{message}", {"message": message, "remedies": remedies})
        return self

    def _check_replicas(self) -> None:
        if self.replicas is None and self.ray_address is None:
            for name in ("max_replicas", "routing"):
                if name in self.model_fields_set:
                    raise _wrong(name, f"{name} is for several engines: give replicas too", [Remedy("replicas", 2)])
        elif self.verify_rate:
            message = "verify_rate is for one engine in this server's place: leave out replicas"
            raise _wrong("verify_rate", message, [Remedy("verify_rate", 0.0)])
        elif self.kv_events != "off":
            message = "kv_events are of one engine: leave out replicas, which this server routes to by itself"
            raise _wrong("kv_events", message, [Remedy("kv_events", "off")])
        if self.max_replicas is not None and self.max_replicas < (self.replicas or 1):
            message = f"max_replicas {self.max_replicas} is less than replicas {self.replicas}"
            raise _wrong("max_replicas", message, [Remedy("max_replicas", self.replicas), Remedy("max_replicas", None)])
        if self.ray_address is not None and "://" in self.ray_address:
            message = (
                f"ray_address {self.ray_address}: the server runs on a node of the Ray, not as its client; start it "
                "there with auto"
            )
            raise _wrong("ray_address", message, [Remedy("ray_address", "auto")])

    def _check_events(self) -> None:
        if not self.publishes_events:
            return
        assert self.kv_events_config is not None, "it publishes"
        if self.kv_events == "off":
            message = "kv_events_config says where, and kv_events what: hashes, or tokens, which are clients' text"
            raise _wrong("kv_events", message, [Remedy("kv_events", "hashes")])
        if not self.kv_events_config.binds and self.kv_events_config.endpoint.startswith(
            ("tcp://0.0.0.0:", "tcp://0:")
        ):
            # vLLM's rule takes it for another's address, and connecting to it publishes to nobody.
            port = self.kv_events_config.endpoint.rpartition(":")[2]
            message = (
                f"kv_events_config: endpoint {self.kv_events_config.endpoint} is opened nowhere: write tcp://*:{port}"
            )
            raise _wrong("kv_events_config", message, [])
        endpoint = self.kv_events_config.open_endpoint
        if endpoint is not None and not self.insecure:
            message = (
                f"kv_events_config opens {endpoint}, which other machines reach, and ZeroMQ has no keys: open "
                "ipc://PATH or tcp://[::1]:PORT, connect to a router's tcp://HOST:PORT, or set insecure"
            )
            raise _wrong("kv_events_config", message, [Remedy("insecure", True)])

    @property
    def publishes_events(self) -> bool:
        """True if cache events are published over ZeroMQ."""
        return self.kv_events_config is not None and self.kv_events_config.publishes

    def name_of(self, model: str) -> str:
        """Return the clients' name of `model`: the given name, else the checkpoint's without its directory."""
        path = Path(model)
        return next(iter(self.served_model_name), path.resolve().name if is_directory(path) else model)

    @property
    def is_replicated(self) -> bool:
        """True if engines run on Ray."""
        return self.replicas is not None or self.ray_address is not None

    @property
    def most_replicas(self) -> int:
        """Largest number of engines at a time."""
        return max(self.replicas or 1, self.max_replicas or 1)

    def without_keys(self) -> ServeSettings:
        """Return the settings without keys, for processes that need none, such as those that read what clients send."""
        copy = self.model_copy(update={"api_key": (), "api_key_file": None, "ssl_keyfile_password": None})
        copy._keys = {}
        return copy

    def client_share(self, max_num_seqs: int) -> int | None:
        """Return the number of one client's outputs that may be unfinished, if `max_num_seqs` may run.

        None means as many as of all clients.
        """
        if self.max_requests_per_client is not None:
            return self.max_requests_per_client
        if self.is_local and not self._keys:
            return None  # all clients are on this machine
        return max((max_num_seqs + self.max_waiting) // 4, self.max_n)

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return self.uds is not None or is_loopback(self.host)

    @property
    def keys(self) -> dict[str, ApiKey]:
        """All keys by name: given as settings and read from the file."""
        return self._keys


def _validation_text(found: JsonObject) -> JsonObject:
    """Return pydantic's problem without a key, which must not be printed, and in words if it is about a pattern."""
    secret = next((name for name in SECRET_VARIABLES if name in found["loc"]), None)
    if secret is not None:
        return {"type": secret, "loc": (), "msg": f"{secret}: {plain_words(found)}"}
    if found["type"] == "string_pattern_mismatch":
        form, nearest = FORMS[str(found["loc"][-1])]
        return found | {"type": "form", "msg": f"it should be {form}", "ctx": {"nearest": nearest}}
    return found


def _wrong(name: str, message: str, remedies: Sequence[Remedy]) -> PydanticCustomError:
    return PydanticCustomError(name, "{message}", {"message": message, "remedies": list(remedies)})
