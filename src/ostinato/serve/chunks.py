"""Answers as JSON text: what does not change from chunk to chunk is serialised once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from json.encoder import encode_basestring as quoted
from typing import Any

from starlette.responses import Response

__all__ = ["Chunks", "Json", "Whole", "compact", "quoted"]


_encode = json.JSONEncoder(separators=(",", ":")).encode


def compact(value: Any) -> str:
    """JSON without white space, in ASCII: values that came from a client need not be text that can be encoded."""
    return _encode(value)


class Json(Response):
    """A response of JSON text."""

    media_type = "application/json"


class Chunks:
    """The events of one stream. `choices` are JSON texts."""

    def __init__(self, head: Mapping[str, Any], include_usage: bool) -> None:
        self._before = f'data: {compact(head)[:-1]},"choices":['
        self._after = '],"usage":null}\n\n' if include_usage else "]}\n\n"

    def event(self, choice: str) -> str:
        return f"{self._before}{choice}{self._after}"

    def usage(self, usage: Mapping[str, Any]) -> str:
        """The last event, which has no choice."""
        return f'{self._before}],"usage":{compact(usage)}}}\n\n'


class Whole:
    """The body of an answer that is not streamed."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._before = f'{compact(head)[:-1]},"choices":['

    def body(self, choices: Iterable[str], usage: Mapping[str, Any]) -> bytes:
        return f'{self._before}{",".join(choices)}],"usage":{compact(usage)}}}'.encode()
