"""Questions to all replicas, answered as one engine would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.engine.process.messages import Query, StatsSnapshot, EngineReply
from ostinato.engine.replicas.messages import ReplicaLink
from ostinato.engine.replicas.observed import merge_index_snapshots, merge_observations

PATIENCE = 1.0
"""Seconds that replicas have to give their counts; after that, their last known counts are used."""


@dataclass
class _PendingQuery:
    """A question: the replicas that have not answered, and the results of the others."""

    question: Query
    waits_for: set[str]
    found: list[Any] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class StatsFanout:
    """Unanswered questions. Each is answered once, with the replicas' counts or numbers added up.

    Without any replica a question waits for one, since silence must not look like an answer to a heartbeat.
    """

    def __init__(self, answer: Callable[[EngineReply], None], known: Callable[[], Sequence[StatsSnapshot]]) -> None:
        """Create an empty table.

        `answer` is called with the replies. `known` gives each replica's last known counts.
        """
        self._answer, self._known = answer, known
        self._asked: dict[str, _PendingQuery] = {}

    def ask(self, question: Query, links: Mapping[str, ReplicaLink]) -> None:
        """Ask all replicas."""
        asked = self._asked[question.call_id] = _PendingQuery(question, set(links))
        for link in links.values():
            link.send(question)
        if question.question == "observe":
            loop = asyncio.get_running_loop()
            asked.timer = loop.call_later(PATIENCE, self.stop_waiting, question.call_id)

    def ask_again(self, links: Mapping[str, ReplicaLink]) -> None:
        """Ask changed replicas the questions that no replica was there to answer."""
        for asked in list(self._asked.values()):
            if not asked.waits_for and not asked.found:
                self._forget(asked)
                self.ask(asked.question, links)

    def take(self, name: str, reply: EngineReply) -> None:
        """Handle a replica's answer. Answers to questions that are over are dropped."""
        asked = self._asked.get(reply.call_id)
        if asked is None or name not in asked.waits_for:
            return
        asked.waits_for.discard(name)
        if reply.error is not None:
            self._forget(asked)
            self._answer(EngineReply(reply.call_id, error=reply.error))
            return
        asked.found.append(reply.result)
        self._conclude(asked)

    def lose(self, name: str) -> None:
        """Stop waiting for a replica that is gone."""
        for asked in list(self._asked.values()):
            asked.waits_for.discard(name)
            self._conclude(asked)

    def stop_waiting(self, call_id: str) -> None:
        """Stop waiting for the replicas that have not answered a question in time."""
        asked = self._asked[call_id]
        asked.timer = None
        self._conclude(asked)

    def end(self) -> None:
        """Drop all questions."""
        for asked in list(self._asked.values()):
            self._forget(asked)

    def _conclude(self, asked: _PendingQuery) -> None:
        """Answer a question once all replicas have answered, or at least one has and the others take too long."""
        if not asked.found or (asked.waits_for and asked.timer is not None):
            return
        if asked.question.question == "observe":
            self._forget(asked)
            self._answer(EngineReply(asked.question.call_id, merge_observations(self._known())))
        elif not asked.waits_for:
            self._forget(asked)
            together = merge_index_snapshots if asked.question.question == "prefixes" else sum
            self._answer(EngineReply(asked.question.call_id, together(asked.found)))

    def _forget(self, asked: _PendingQuery) -> None:
        del self._asked[asked.question.call_id]
        if asked.timer is not None:
            asked.timer.cancel()
