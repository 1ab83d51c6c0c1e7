"""Connection to one front, as a replica sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ostinato.replicas.published import IndexPublisher


@dataclass
class FrontConnection:
    """Messages that wait to be sent to a front, and its requests in the engine."""

    publisher: IndexPublisher = field(default_factory=IndexPublisher)
    waiting: list[Any] = field(default_factory=list)
    has_messages: asyncio.Event = field(default_factory=asyncio.Event)
    requests: set[str] = field(default_factory=set)
    acknowledged_drain: bool = False
    is_gone: bool = False
    last_message_at: float = 0.0

    def put(self, message: Any) -> None:
        self.waiting.append(message)
        self.has_messages.set()
