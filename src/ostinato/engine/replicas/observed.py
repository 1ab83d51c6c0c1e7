"""The counts of several engines, added up as those of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ostinato.engine.process.messages import StatsSnapshot
from ostinato.observe.histograms import Histogram, EngineHistograms

_RATES: dict[str, Callable[[Mapping[str, Any]], tuple[float, float] | None]] = {
    "acceptance": lambda of: _accepted(of),
    "tokens_per_row_with_drafts": lambda of: None,
}
"""Ratios -> their (part, whole), to compute them again from summed counts.

None if counts do not give the ratio, so that it is unknown.
"""

_SIZES = frozenset({"num_speculative_tokens", "budget"})
"""Numbers that are not counts, and are the same in all engines."""


def _accepted(of: Mapping[str, Any]) -> tuple[float, float]:
    if "reached" in of:
        return of["accepted"], of["reached"]
    return of["drafts_accepted"], of["drafts_proposed"]


def merge_observations(observations: Sequence[StatsSnapshot]) -> StatsSnapshot:
    """Add up all counts of at least one observation."""
    return StatsSnapshot(
        merge_stats([each.stats for each in observations]), merge_histograms([each.meter for each in observations])
    )


def merge_stats(found: Sequence[Any]) -> Any:
    """Add counts, mappings by key, lists of equal length by position. Anything else is that of the first."""
    present = [each for each in found if each is not None]
    if not present:
        return None
    first = present[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for each in present for key in each)
        whole = {key: merge_stats([each[key] for each in present if key in each]) for key in keys}
        whole |= {key: next(each[key] for each in present if key in each) for key in whole.keys() & _SIZES}
        for name, parts in _RATES.items():
            if name in whole and len(present) > 1:
                share = parts(whole)
                whole[name] = None if share is None or not share[1] else round(share[0] / share[1], 4)
        return whole
    if isinstance(first, bool) or not isinstance(first, int | float | list | tuple):
        return first
    if isinstance(first, list | tuple):
        same = all(len(each) == len(first) for each in present)
        return [merge_stats(column) for column in zip(*present, strict=True)] if same else list(first)
    return sum(present)


def merge_index_snapshots(pictures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the pictures of several prefix indices (`cache.picture.picture`) into one, branches after branches."""
    branches: list[dict[str, Any]] = []
    for each in pictures:
        before = len(branches)
        for branch in each["branches"]:
            parent = branch["parent"]
            branches.append({**branch, "parent": None if parent is None else before + parent})
    counts = {name: sum(each[name] for each in pictures) for name in ("texts", "blocks", "checkpoints")}
    return {**counts, "branches": branches}


def merge_histograms(meters: Sequence[EngineHistograms]) -> EngineHistograms:
    """Add up all histograms."""
    whole = EngineHistograms()
    for each in fields(EngineHistograms):
        histogram: Histogram = getattr(whole, each.name)
        for meter in meters:
            other: Histogram = getattr(meter, each.name)
            histogram.counts = [a + b for a, b in zip(histogram.counts, other.counts, strict=True)]
            histogram.total += other.total
    return whole
