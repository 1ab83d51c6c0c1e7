"""ServeSettings: the settings of the server. Those of its engine are in EngineConfig."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from ostinato.errors import ConfigError, problem_of, reason
from ostinato.observe.logs import LogFormat, LogLevel


class ServeSettings(BaseModel):
    """Where the server listens, whom it serves, and how much it accepts. ConfigError for an illegal value."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs an api_key, or insecure."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0: a free one, which is printed."""
    api_key: tuple[str, ...] = Field((), repr=False)
    """A key that clients must send as `Authorization: Bearer KEY`; several may be given. Other users of the machine see
    flags, but neither the environment nor an api_key_file."""
    api_key_file: Path | None = None
    """A file with further keys, one a line."""
    insecure: bool = False
    """Listen on an address that other machines reach though there is no api_key."""
    cors_origin: tuple[str, ...] = ()
    """An origin whose web pages may use the server from a browser, or * for all; several may be given."""
    served_model_name: str | None = None
    """The model's name in requests and answers (that of the checkpoint)."""
    max_waiting: int = Field(256, ge=0)
    """Outputs that may wait besides those that run; more requests get status 429."""
    max_body: int = Field(16 * 2**20, ge=1024)
    """Bytes of a request's body, images in it among them."""
    max_images: int = Field(16, ge=0)
    """Images of a request, frames of videos among them."""
    max_stop: int = Field(16, ge=0)
    """Stop strings of a request."""
    max_stop_length: int = Field(256, ge=1)
    """Characters of a stop string."""
    max_logit_bias: int = Field(1024, ge=0)
    """Tokens with a logit_bias, and stop_token_ids, of a request."""
    max_n: int = Field(16, ge=1)
    """Outputs of a request: prompts times n."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds after which a request is ended; a request may ask for less with `timeout`."""
    engine_timeout: float = Field(120.0, gt=0)
    """Seconds without a sign of life from the engine after which it counts as stalled: /health is 503. It gives one
    between two steps, so it must be longer than the longest step."""
    on_stall: Literal["report", "exit"] = "report"
    """What to do then: report it until the engine goes on, or exit, so that a supervisor starts the server anew."""
    header_timeout: float = Field(15.0, gt=0)
    """Seconds that the headers of a request may take to arrive."""
    keep_alive_timeout: float = Field(30.0, gt=0)
    """Seconds that a connection may wait for its next request."""
    max_connections: int = Field(0, ge=0)
    """Connections at once; 0: as many as the process has file descriptors for, less 64. A further one gets status 503
    and is closed."""
    max_connections_per_address: int = Field(256, ge=0)
    """Connections at once of one address; 0: any number. Those from this machine are not counted."""
    drain_timeout: float = Field(30.0, ge=0)
    """Seconds that running requests have to end after SIGTERM."""
    metrics_prefix: str = Field("ostinato:", pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")
    """What names of metrics begin with; with vllm: dashboards made for vLLM show what both have.
    http_requests_total alone has none, as everywhere."""

    log_level: LogLevel = "info"
    """What is logged: a line per request at info; at debug, those of pages and probes too."""
    log_format: LogFormat = "text"
    """How: for people, or as JSON, an object a line."""
    otlp_endpoint: str | None = None
    """Address of an OpenTelemetry collector (OTLP over HTTP, such as http://localhost:4318) that gets a trace of each
    request."""

    _keys: tuple[str, ...] = PrivateAttr(())

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            # A key must not be printed.
            found = [
                {"loc": (), "msg": f"api_key: {each['msg']}"} if "api_key" in each["loc"] else each
                for each in error.errors()
            ]
            problems, remedies = zip(*map(problem_of, found), strict=True)
            raise ConfigError("; ".join(problems), chain.from_iterable(remedies)) from None

    @model_validator(mode="after")
    def _guarded(self) -> ServeSettings:
        self._keys = self.api_key + _keys_in(self.api_key_file)
        if any(not key.strip() or not key.isascii() for key in self._keys):
            raise ValueError("an api_key is ASCII text that is not empty")
        if not (self._keys or self.insecure or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} can be reached from other machines, and there is no api_key: give one, listen on "
                "127.0.0.1, or set insecure"
            )
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys: given as settings and read from the file."""
        return self._keys


def _keys_in(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_key_file {path} cannot be read: {reason(error)}") from None
    if not keys:
        raise ValueError(f"api_key_file {path} holds no key; write one a line")
    return keys


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
