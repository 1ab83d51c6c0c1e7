"""How many answers of HTTP there were, by method, endpoint and status, for `/metrics`."""

from __future__ import annotations

from collections import Counter

PATHS = frozenset(
    {
        "/",
        "/detokenize",
        "/health",
        "/live",
        "/metrics",
        "/openapi.json",
        "/plan",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/responses",
        "/version",
    }
)
FAMILIES = (("/v1/models/", "/v1/models/{name}"), ("/page/", "/page"))
"""(what paths begin with, the one name that they are counted under)"""
UNKNOWN = "none"
"""The name of every path that is served to nobody."""
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})


class AnswerCounts:
    """Counts answers. Whatever clients ask for, there are no more labels than endpoints, methods and statuses."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def note(self, method: str, path: str, status: int | None) -> None:
        """One request has ended; without a status it was ended before it had an answer, and is not counted."""
        if status is not None:
            self._counts[_handler(path), method if method in METHODS else UNKNOWN, status] += 1

    def rows(self) -> list[tuple[dict[str, str], float]]:
        """(labels, count): `status` is the class, such as 4xx, and `code` the status itself."""
        return [
            ({"handler": handler, "method": method, "status": f"{code // 100}xx", "code": str(code)}, float(count))
            for (handler, method, code), count in sorted(self._counts.items())
        ]


def _handler(path: str) -> str:
    if path in PATHS:
        return path
    return next((name for begin, name in FAMILIES if path.startswith(begin)), UNKNOWN)
