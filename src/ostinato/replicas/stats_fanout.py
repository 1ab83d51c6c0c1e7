"""Questions to all replicas, answered as one engine would: counts of several engines are added up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ostinato.engine.process.engine_messages import EngineReply, Query, StatsSnapshot
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.observe.counts import EngineHistograms, Histogram
from ostinato.replicas.replica_messages import ReplicaLink

_RATES: dict[str, Callable[[Mapping[str, object]], tuple[float, float] | None]] = {
    "acceptance": lambda of: _accepted(of),
    "tokens_per_row_with_drafts": lambda of: None,
}
"""Ratios -> their (part, whole), to compute them from summed counts; None if counts do not give them."""

_SIZES = frozenset({"num_speculative_tokens", "budget"})
"""Numbers that are not counts, and are the same in all engines."""


def _accepted(counts: JsonMapping) -> tuple[float, float]:
    if "reached" in counts:
        return counts["accepted"], counts["reached"]
    return counts["drafts_accepted"], counts["drafts_proposed"]


def merge_observations(observations: Sequence[StatsSnapshot]) -> StatsSnapshot:
    """Add up all counts of at least one observation."""
    return StatsSnapshot(
        merge_stats([observation.stats for observation in observations]),
        merge_histograms([observation.meter for observation in observations]),
    )


def merge_stats(values: Sequence[Any]) -> Any:
    """Add counts, mappings by key, lists of equal length by position. Anything else is that of the first."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    first = present[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in present for key in value)
        whole = {key: merge_stats([value[key] for value in present if key in value]) for key in keys}
        whole |= {key: next(value[key] for value in present if key in value) for key in whole.keys() & _SIZES}
        for name, parts in _RATES.items():
            if name in whole and len(present) > 1:
                share = parts(whole)
                whole[name] = None if share is None or not share[1] else round(share[0] / share[1], 4)
        return whole
    if isinstance(first, bool) or not isinstance(first, int | float | list | tuple):
        return first
    if isinstance(first, list | tuple):
        same = all(len(value) == len(first) for value in present)
        return [merge_stats(column) for column in zip(*present, strict=True)] if same else list(first)
    return sum(present)


def merge_index_snapshots(pictures: Sequence[JsonMapping]) -> JsonObject:
    """Join the pictures of several prefix indices (`cache.picture.picture`) into one, branches after branches."""
    branches: list[JsonObject] = []
    for picture in pictures:
        first_branch = len(branches)
        for branch in picture["branches"]:
            parent = branch["parent"]
            branches.append({**branch, "parent": None if parent is None else first_branch + parent})
    counts = {name: sum(picture[name] for picture in pictures) for name in ("texts", "blocks", "checkpoints")}
    return {**counts, "branches": branches}


def merge_histograms(meters: Sequence[EngineHistograms]) -> EngineHistograms:
    """Add up all histograms."""
    whole = EngineHistograms()
    for histogram_field in fields(EngineHistograms):
        histogram: Histogram = getattr(whole, histogram_field.name)
        for meter in meters:
            other: Histogram = getattr(meter, histogram_field.name)
            histogram.counts = [a + b for a, b in zip(histogram.counts, other.counts, strict=True)]
            histogram.total += other.total
    return whole


PATIENCE = 1.0
"""Seconds that replicas have to give their counts; after that, their last known counts are used."""


@dataclass
class _PendingQuery:
    """A question: the replicas that have not answered, and the results of the others."""

    question: Query
    waits_for: set[str]
    results: list[Any] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class StatsFanout:
    """Unanswered questions. Each is answered once, with the replicas' counts or numbers added up.

    Without any replica a question waits for one, since silence must not look like an answer to a heartbeat.
    """

    def __init__(
        self, answer: Callable[[EngineReply], None], observations: Callable[[], Sequence[StatsSnapshot]]
    ) -> None:
        """Create an empty table. `answer` gets the replies; `observations` has each replica's last counts."""
        self._answer, self._observations = answer, observations
        self._pending: dict[str, _PendingQuery] = {}

    def ask(self, question: Query, links: Mapping[str, ReplicaLink]) -> None:
        """Ask all replicas."""
        pending = self._pending[question.call_id] = _PendingQuery(question, set(links))
        for link in links.values():
            link.send(question)
        if question.question == "observe":
            loop = asyncio.get_running_loop()
            pending.timer = loop.call_later(PATIENCE, self.stop_waiting, question.call_id)

    def ask_again(self, links: Mapping[str, ReplicaLink]) -> None:
        """Ask changed replicas the questions that no replica was there to answer."""
        for pending in list(self._pending.values()):
            if not pending.waits_for and not pending.results:
                self._forget(pending)
                self.ask(pending.question, links)

    def take(self, name: str, reply: EngineReply) -> None:
        """Handle a replica's answer. Answers to questions that are over are dropped."""
        pending = self._pending.get(reply.call_id)
        if pending is None or name not in pending.waits_for:
            return
        pending.waits_for.discard(name)
        if reply.error is not None:
            self._forget(pending)
            self._answer(EngineReply(reply.call_id, error=reply.error))
            return
        pending.results.append(reply.result)
        self._conclude(pending)

    def lose(self, name: str) -> None:
        """Stop waiting for a replica that is gone."""
        for pending in list(self._pending.values()):
            pending.waits_for.discard(name)
            self._conclude(pending)

    def stop_waiting(self, call_id: str) -> None:
        """Stop waiting for the replicas that have not answered a question in time."""
        pending = self._pending[call_id]
        pending.timer = None
        self._conclude(pending)

    def end(self) -> None:
        """Drop all questions."""
        for pending in list(self._pending.values()):
            self._forget(pending)

    def _conclude(self, pending: _PendingQuery) -> None:
        """Answer a question once all replicas have answered, or at least one has and the others take too long."""
        if not pending.results or (pending.waits_for and pending.timer is not None):
            return
        if pending.question.question == "observe":
            self._forget(pending)
            self._answer(EngineReply(pending.question.call_id, merge_observations(self._observations())))
        elif not pending.waits_for:
            self._forget(pending)
            merge: dict[str, Callable[[list[Any]], Any]] = {"prefixes": merge_index_snapshots, "reset": all}
            merged = merge.get(pending.question.question, sum)(pending.results)
            self._answer(EngineReply(pending.question.call_id, merged))

    def _forget(self, pending: _PendingQuery) -> None:
        del self._pending[pending.question.call_id]
        if pending.timer is not None:
            pending.timer.cancel()
