"""Answers that may be as large as what a client sent.

They are sent piece by piece, since a copy of all of it would hold the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE = 2**18
"""Bytes that are written at once."""


def chunks_of(data: bytes) -> list[bytes]:
    """Return `data` in pieces."""
    return [data[begin : begin + PIECE] for begin in range(0, len(data), PIECE)]


def coalesce(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of at most PIECE bytes; a longer part is one piece."""
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        if waiting and size + len(part) > PIECE:
            yield b"".join(waiting)
            waiting, size = [], 0
        waiting.append(part)
        size += len(part)
    if waiting:
        yield b"".join(waiting)


class ChunkedJson(Response):
    """JSON response in pieces; each is written when the client has taken the one before."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.pieces = pieces
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def body_of(response: Response) -> bytes:
    """Return the whole body, for callers that a pause does not hurt."""
    return b"".join(response.pieces) if isinstance(response, ChunkedJson) else bytes(response.body)
