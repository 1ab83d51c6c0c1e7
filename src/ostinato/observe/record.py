"""The record of one HTTP request for its log line and its trace. It never holds the content."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival to the last byte of the answer; times in seconds of a monotonic clock."""

    request_id: str
    method: str
    path: str
    begun: float = field(default_factory=time.monotonic)
    ended: float | None = None
    status: int | None = None
    """The answer's status, or 499; None if the request ended before its answer began."""
    client: str | None = None
    """The client's address; `unix` on a Unix socket."""
    sent_bytes: int = 0
    """Bytes of the answer's body that were sent."""
    key: str | None = None
    """The name of the client's key."""
    error: str | None = None
    """Reason why a stream ended early, after its status was sent."""
    figures: Callable[[], dict[str, Any]] = dict
    """Function that returns the engine's measurements of the request, as far as they are known.

    Keys: prompt_tokens, completion_tokens, cached_tokens; the moments scheduled, first_token and last_token; finish,
    the reasons why its outputs ended. Empty if the request never reached the engine.
    """

    def end(self) -> None:
        self.ended = time.monotonic()
