"""One streamed reply of an OpenAI-compatible server, parsed as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ostinato.bench.serve.http_client import Failure

MAX_DETAIL = 300
"""Characters of a server's error message that are kept."""
_HINTS = ("Retry-After", "Location")
"""Headers of a refusal that say what to do about it."""
DONE = b"[DONE]"


class EventParser:
    """Parser of the `data` of server-sent events, from bytes that come in any pieces.

    It leaves out comments, other fields, and events without data, which only keep a connection alive.

    Raises Failure `error_event` for an event named `error`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._is_error = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"
            elif not line and (self._data or self._is_error):
                data, self._data = b"\n".join(self._data), []
                if self._is_error:
                    raise Failure("error_event", _error_text(data))
                if data:
                    yield data

    def finish(self) -> Iterator[bytes]:
        """Yield the rest at the end of a stream: some servers leave out its last line breaks."""
        yield from self.feed(b"\n\n")


class SseReply:
    """Receiver of one reply. `clock` returns the time, in seconds, at which a piece of text arrived."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.chunk_times: list[float] = []
        """Times at which each piece that is not empty arrived."""
        self.end: float | None = None
        """Time at which the reply said that it was done."""
        self.pieces: list[str] = []
        self.usage: Mapping[str, int | None] = {}
        """Counts `prompt_tokens`, `completion_tokens` and `cached_tokens`, as far as the server reports them."""
        self._clock = clock
        self._events = EventParser()
        self._status = 0
        self._hints = ""
        self._error_body = b""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._hints = ", ".join(f"{name}: {headers[name.lower()]}" for name in _HINTS if name.lower() in headers)
        kind = headers.get("content-type", "none")
        if status == 200 and not kind.lower().startswith("text/event-stream"):
            raise Failure("bad_reply", f"the reply is no stream of events, its content type is {kind}")

    def feed(self, data: bytes) -> None:
        if self._status != 200:
            self._error_body += data[:100_000]
            return
        self._take_all(self._events.feed(data))

    def check_complete(self) -> None:
        """Check the reply when nothing more comes.

        Raises Failure `http_<status>` if the server refused, `broken_stream` if the stream broke off.
        """
        if self._status != 200:
            said = _error_text(self._error_body)
            raise Failure(f"http_{self._status}", f"{said} ({self._hints})" if self._hints else said)
        if self.end is None:
            self._take_all(self._events.finish())
        if self.end is None:
            raise Failure("broken_stream", "the stream ended without data: [DONE]")

    def _take_all(self, events: Iterator[bytes]) -> None:
        now = self._clock()
        for event in events:
            if event == DONE:
                self.end = now
            else:
                try:
                    self._take(_parsed(event), now)
                except (AttributeError, TypeError):
                    raise Failure("bad_reply", f"an event has another form: {event[:MAX_DETAIL]!r}") from None

    def _take(self, chunk: Any, now: float) -> None:
        if not isinstance(chunk, dict):
            raise Failure("bad_reply", f"an event is no JSON object: {str(chunk)[:MAX_DETAIL]}")
        if chunk.get("error") or chunk.get("object") == "error":
            raise Failure("error_event", str(_message(chunk))[:MAX_DETAIL])
        if chunk.get("usage"):
            self.usage = _usage(chunk["usage"])
        for choice in chunk.get("choices") or ():
            piece = _piece(choice)
            if piece:
                if not isinstance(piece, str):
                    raise TypeError
                self.chunk_times.append(now)
                self.pieces.append(piece)


def _piece(choice: Mapping[str, Any]) -> str:
    """Return the text of a completion, or of a chat's answer and the thinking before it, which has two names."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _usage(said: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the token counts; None for those that the server does not report."""
    details = said.get("prompt_tokens_details") or {}
    counts = {name: said.get(name) for name in ("prompt_tokens", "completion_tokens")}
    counts["cached_tokens"] = details.get("cached_tokens")
    if any(not isinstance(count, int | None) for count in counts.values()):
        raise TypeError
    return counts


def _parsed(event: bytes) -> Any:
    try:
        return json.loads(event)
    except ValueError:
        raise Failure("bad_reply", f"an event is no JSON: {event[:MAX_DETAIL]!r}") from None


def _error_text(body: bytes) -> str:
    """Return the message of an error in OpenAI's form, or else the beginning of the body."""
    try:
        return str(_message(json.loads(body)))[:MAX_DETAIL]
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:MAX_DETAIL]


def _message(answer: Mapping[str, Any]) -> Any:
    error = answer.get("error", answer.get("detail", answer))
    return error.get("message", error) if isinstance(error, Mapping) else error
