"""What messages to clients may name: words that are in code's form are fields, settings or what the client sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ostinato.config import EngineConfig
from ostinato.serve.settings import ServeSettings

_IN_CODE = re.compile(
    r"(?<![\w./-])(?:"
    r"_+\w+"  # private
    r"|[A-Za-z]\w*_\w+"  # snake_case
    r"|[A-Z][a-z0-9]+(?:[A-Z]\w*)"  # CamelCase
    r"|[A-Za-z]\w*(?:Error|Exception)"
    r"|0x[0-9a-f]+"
    r"|(?:ostinato|torch|pydantic)\.\w[\w.]*"  # modules
    r"|/[\w./-]+\.\w+"  # files
    r")"
)
_OF_PROTOCOLS = frozenset({"tool_use", "tool_result"})
"""Values of OpenAI's and Anthropic's requests that stand in objects of which the document says no more."""


def public_names(document: Any) -> frozenset[str]:
    """Of settings, and of all that an OpenAPI document says of requests: fields, and values of which one is chosen."""
    return frozenset({*EngineConfig.model_fields, *ServeSettings.model_fields, *_OF_PROTOCOLS, *_named_in(document)})


def strange_words(message: str, public: frozenset[str], sent: str = "") -> list[str]:
    """What of a message looks like code, is no public name, and did not come from the client."""
    return [word for word in _IN_CODE.findall(message) if word not in public and word not in sent]


def _named_in(part: Any) -> Iterator[str]:
    if isinstance(part, list):
        for each in part:
            yield from _named_in(each)
    if not isinstance(part, dict):
        return
    for key, value in part.items():
        if key == "properties":
            yield from value
        if key in ("const", "enum", "required"):
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))
        yield from _named_in(value)
