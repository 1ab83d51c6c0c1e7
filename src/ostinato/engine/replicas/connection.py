"""Connection to one front, as a replica sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ostinato.replicas.published import Publisher


@dataclass
class FrontConnection:
    """Messages that wait to be sent to a front, and its requests in the engine."""

    publisher: Publisher = field(default_factory=Publisher)
    waiting: list[Any] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    requests: set[str] = field(default_factory=set)
    knows_of_end: bool = False
    is_gone: bool = False
    heard_at: float = 0.0

    def put(self, message: Any) -> None:
        self.waiting.append(message)
        self.news.set()
