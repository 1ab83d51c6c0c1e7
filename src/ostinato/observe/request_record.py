"""Record of an HTTP request, without its content, for its log line and its trace; and counts of the answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.json_io import JsonObject


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
    code: str | None = None
    """The `code` of the error that the request was answered with, if it has one."""
    param: str | None = None
    """The field that the error names, in printable ASCII."""
    figures: Callable[[], JsonObject] = dict
    """Function that returns the engine's measurements of the request, as far as they are known.

    Keys: prompt_tokens, completion_tokens, cached_tokens; the moments scheduled, first_token and last_token; finish,
    the reasons why its outputs ended. Empty if the request never reached the engine.
    """

    def end(self) -> None:
        self.ended = time.monotonic()


METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
UNKNOWN = "none"
"""The label of every path and method that is not served."""


class ResponseCounts:
    """HTTP answers by endpoint, method and status. The number of labels is bounded, whatever paths clients request."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        """The endpoints, each counted by its path."""
        self.families: dict[str, str] = {}
        """Start of a path -> name under which all paths with this start are counted."""
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._by_key: dict[str, Counter[str]] = {}

    def count(self, method: str, path: str, status: int | None) -> None:
        """Count a request that ended. A request without a status ended before its answer and is not counted."""
        if status is not None:
            self._counts[self._handler(path), method if method in METHODS else UNKNOWN, status] += 1

    def count_client(self, record: RequestRecord) -> None:
        """Count a request that ended under its client's key, if it had one. There are few key names."""
        if record.key is None or record.status is None:
            return
        counts = self._by_key.setdefault(record.key, Counter())
        counts["requests"] += 1
        counts["refused"] += record.status == 429
        figures = record.figures()
        for name in ("prompt_tokens", "completion_tokens"):
            counts[name] += figures.get(name, 0)

    def key_rows(self, what: str) -> list[tuple[dict[str, str], float]]:
        """Return (labels, count) for each key.

        `what` is `requests`, `refused` (status 429), `prompt_tokens` or `completion_tokens`.
        """
        return [({"key": key}, float(counts[what])) for key, counts in sorted(self._by_key.items())]

    def rows(self) -> list[tuple[dict[str, str], float]]:
        """Return (labels, count) of all answers; `status` is the class, such as 4xx, and `code` the status itself."""
        return [
            ({"handler": handler, "method": method, "status": f"{code // 100}xx", "code": str(code)}, float(count))
            for (handler, method, code), count in sorted(self._counts.items())
        ]

    def _handler(self, path: str) -> str:
        if path in self.paths:
            return path
        return next((name for begin, name in self.families.items() if path.startswith(begin)), UNKNOWN)
