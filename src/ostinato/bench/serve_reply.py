"""One streamed reply of an OpenAI-compatible server, taken in as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ostinato.bench.serve_http import Failure

MOST_DETAIL = 300
"""Characters that are kept of what a server says of an error."""


class EventParser:
    """The `data` of server-sent events, from bytes that come in any pieces; comments and other fields are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


class Reply:
    """A receiver. `clock` is asked for the moment, in seconds, in which a piece of text arrived."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.chunk_times: list[float] = []
        """When each piece that is not empty arrived."""
        self.end: float | None = None
        """When the reply said that it was done."""
        self.pieces: list[str] = []
        self.usage: Mapping[str, Any] = {}
        self._clock = clock
        self._events = EventParser()
        self._status = 0
        self._error_body = b""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        kind = headers.get("content-type", "none")
        if status == 200 and not kind.startswith("text/event-stream"):
            raise Failure("bad_reply", f"the reply is no stream of events, its content type is {kind}")

    def feed(self, data: bytes) -> None:
        if self._status != 200:
            self._error_body += data[:100_000]
            return
        now = self._clock()
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self.end = now
            else:
                try:
                    self._take(_parsed(event), now)
                except (AttributeError, TypeError):
                    raise Failure("bad_reply", f"an event has another form: {event[:MOST_DETAIL]!r}") from None

    def check_complete(self) -> None:
        """Failure if the server refused, `http_<status>`, or the stream ended without saying so, `broken_stream`."""
        if self._status != 200:
            raise Failure(f"http_{self._status}", _error_text(self._error_body))
        if self.end is None:
            raise Failure("broken_stream", "the stream ended without data: [DONE]")

    def _take(self, chunk: Any, now: float) -> None:
        if not isinstance(chunk, dict):
            raise Failure("bad_reply", f"an event is no JSON object: {str(chunk)[:MOST_DETAIL]}")
        if chunk.get("error"):
            raise Failure("error_event", str(_message(chunk))[:MOST_DETAIL])
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            piece = _piece(choice)
            if piece:
                self.chunk_times.append(now)
                self.pieces.append(piece)


def _piece(choice: Mapping[str, Any]) -> str:
    """The text of a completion, or of a chat's answer and the thinking before it, which servers name in two ways."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _parsed(event: bytes) -> Any:
    try:
        return json.loads(event)
    except ValueError:
        raise Failure("bad_reply", f"an event is no JSON: {event[:MOST_DETAIL]!r}") from None


def _error_text(body: bytes) -> str:
    """The message of an error in OpenAI's form, or what else there is."""
    try:
        return str(_message(json.loads(body)))[:MOST_DETAIL]
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:MOST_DETAIL]


def _message(answer: Mapping[str, Any]) -> Any:
    error = answer.get("error", answer.get("detail", answer))
    return error.get("message", error) if isinstance(error, Mapping) else error
