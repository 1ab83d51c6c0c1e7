"""Counts of HTTP answers."""

from __future__ import annotations

from collections import Counter

from ostinato.observe.record import RequestRecord

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
