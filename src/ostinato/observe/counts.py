"""What is counted and measured, in one place: requests, steps, cached memory, drafts, images and answers. Each room
increments its own counts.

A graph's steps count beside the graphs that they name (`graphs/graphs.py`). `observe/metrics.py` gives every count its
name, and imports none of those rooms: they hand figures up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.observe.record import RequestRecord

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
TOKENS = tuple(2**power for power in range(18))


class Histogram:
    """Counts of values up to each of some bounds, and above the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[int]:
        """Values up to each bound, and all values, as Prometheus wants them."""
        sums, total = [], 0
        for count in self.counts:
            total += count
            sums.append(total)
        return sums

    def quantile(self, share: float) -> float | None:
        """The smallest bound that at least `share` of the values do not exceed. None if there are no values, or no such
        bound."""
        sums = self.cumulative()
        if not sums[-1]:
            return None
        place = bisect_left(sums, share * sums[-1])
        return self.bounds[place] if place < len(self.bounds) else None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class Meter:
    """What the engine measures of its requests. Times are in seconds, without the time that a server adds."""

    queue: Histogram = field(default_factory=_seconds)
    """From a request's arrival to its first step."""
    first_token: Histogram = field(default_factory=_seconds)
    """From the arrival to the first token of its first output."""
    inter_token: Histogram = field(default_factory=_seconds)
    """Between two tokens of an output. Tokens of one step share the time since the token before them."""
    prefill: Histogram = field(default_factory=_seconds)
    """From the first step to the first token."""
    decode: Histogram = field(default_factory=_seconds)
    """From the first token to the last."""
    whole: Histogram = field(default_factory=_seconds)
    """From the arrival to the end."""
    prompt_tokens: Histogram = field(default_factory=_tokens)
    output_tokens: Histogram = field(default_factory=_tokens)
    """Of all outputs of a request."""
    step_tokens: Histogram = field(default_factory=_tokens)
    """Tokens that a step computes, without padding."""
    step: Histogram = field(default_factory=_seconds)
    """A step with its bookkeeping."""


@dataclass(slots=True)
class EngineCounts:
    """Requests and steps of an engine; times in seconds."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, including those that a preemption made it compute again."""
    decode_rows: int = 0
    prefill_rows: int = 0
    step_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    """The part of step_seconds that the scheduler took: requests, blocks, slots, the prefix index."""

    def count_step(
        self, rows: int, decode_rows: int, computed: int, generated: int, seconds: float, bookkeeping: float
    ) -> None:
        """Adds a step: its rows, the tokens that it computed and generated, and its seconds."""
        self.generated_tokens += generated
        self.computed_tokens += computed
        self.decode_rows += decode_rows
        self.prefill_rows += rows - decode_rows
        self.step_seconds += seconds
        self.bookkeeping_seconds += bookkeeping


@dataclass(slots=True)
class SchedulerCounts:
    """What happened since the scheduler was made."""

    finished: dict[str, int]
    """Reason (a FinishReason) -> outputs that ended for it."""
    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Computed tokens that preemptions threw away."""
    cut_recomputations: int = 0
    """Without chunked prefill: preempted requests that were computed again in more than one step."""
    steps_ahead: int = 0
    """The part of `steps` that were scheduled before the step in front of them was over."""
    void_rows: int = 0
    """Rows of steps ahead whose request had ended: they computed nothing that anybody wants."""
    steps_not_ahead: dict[str, int] = field(default_factory=dict)
    """Cause (a WaitCause) -> steps that had to wait, though steps may be scheduled ahead."""


@dataclass(slots=True)
class PrefixCounts:
    """Sums over the prompts that were admitted, one for each of n samples. They add up to the prompts' tokens."""

    misses: dict[str, int]
    """Cause (a MissCause) -> tokens that were computed for it."""
    cached_tokens: int = 0
    restored_tokens: int = 0
    """Tokens that preempted requests found again in the cache."""
    file_tokens: int = 0
    """Of the cached tokens, those that files brought back."""

    def count(self, cached_tokens: int, misses: Mapping[str, int], from_files: int = 0) -> None:
        """Adds one prompt's report."""
        self.cached_tokens += cached_tokens
        self.file_tokens += from_files
        for cause, tokens in misses.items():
            self.misses[cause] += tokens


@dataclass(slots=True)
class MoveCounts:
    """Requests that went to other engines and came from them, since the start. Those that came are not counted among
    `EngineCounts.requests`."""

    exported: int = 0
    exported_bytes: int = 0
    imported: int = 0
    imported_bytes: int = 0
    refused: int = 0
    """Exports of others that could not be taken in."""
    carried_tokens: int = 0
    """Tokens, of all outputs, that were computed elsewhere and are not computed again."""
    carried_bytes: int = 0
    """Blocks and states that came with them."""
    recomputed_tokens: int = 0
    """Tokens that were computed elsewhere and are computed again, since they came without blocks and state."""


@dataclass(slots=True)
class StoreCounts:
    """What happened to cached memory since the start."""

    checkpoints_taken: int = 0
    checkpoints_not_taken: int = 0
    """For want of a slot that was free or evictable; those lost again at once to their own request included."""
    evicted_blocks: int = 0
    evicted_checkpoints: int = 0
    evicted_panes: int = 0
    shared_blocks: int = 0
    """Computed blocks that were given up for an equal one in the index."""


@dataclass(slots=True)
class FileCounts:
    """What happened to the cache's files since the start."""

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    dropped: int = 0
    """Not written, since too much waited to be written already, or a write had failed shortly before."""
    failed: int = 0
    """Writes that failed."""
    damaged: int = 0
    removed: int = 0
    """To keep within cache_offload."""


@dataclass(slots=True)
class SpeculationCounts:
    """Drafts of decode rows. A row that ended with an error counts nowhere.

    Tokens count as they were verified: also those after an output's end, which are dropped.
    """

    num_speculative_tokens: int
    draft_numbers: tuple[int, ...]
    """The numbers of drafts that a step may have."""
    steps: dict[int, int] = field(init=False)
    """Number of drafts per row, as it was run -> steps with decode rows."""
    steps_without_draft: int = 0
    """Steps that asked for drafts and ran with 0, because no row had one."""
    rows_with_drafts: int = 0
    rows_without_draft: int = 0
    """Rows without a draft in steps that asked for drafts."""
    tokens: int = 0
    """Tokens that decode rows gained."""
    tokens_with_drafts: int = 0
    """The part of `tokens` that rows with drafts gained: the accepted drafts, and one more token for each row."""
    proposed: list[int] = field(init=False)
    """For each position 1 to k: rows that had a draft there."""
    reached: list[int] = field(init=False)
    """The part of `proposed` whose earlier drafts were all accepted."""
    accepted: list[int] = field(init=False)
    """The part of `reached` whose draft there was accepted too."""

    def __post_init__(self) -> None:
        self.steps = dict.fromkeys(self.draft_numbers, 0)
        self.proposed, self.reached, self.accepted = ([0] * self.num_speculative_tokens for _ in range(3))

    def count(self, num_drafts: int, rows: Sequence[tuple[int, int]]) -> None:
        """Adds a step that succeeded and asked for `num_drafts`. `rows`: the (drafts, tokens gained) of each decode row
        without an error."""
        if not rows:
            return
        drafts_run = num_drafts if any(drafts for drafts, _ in rows) else 0
        self.steps[drafts_run] += 1
        self.steps_without_draft += drafts_run < num_drafts
        for drafts, tokens in rows:
            self.tokens += tokens
            if drafts:
                self._count_drafts(drafts, tokens)
            elif num_drafts:
                self.rows_without_draft += 1

    def to_json(self) -> dict[str, Any]:
        """As plain data, with the rates that follow; a rate of nothing is None."""
        proposed, accepted = sum(self.proposed), sum(self.accepted)
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "steps": {str(num_drafts): steps for num_drafts, steps in self.steps.items()},
            "steps_without_draft": self.steps_without_draft,
            "rows_with_drafts": self.rows_with_drafts,
            "rows_without_draft": self.rows_without_draft,
            "tokens": self.tokens,
            "drafts_proposed": proposed,
            "drafts_accepted": accepted,
            "acceptance": _share(accepted, proposed),
            "tokens_per_row_with_drafts": _share(self.tokens_with_drafts, self.rows_with_drafts),
            "positions": [
                {"proposed": of_all, "reached": reached, "accepted": right, "acceptance": _share(right, reached)}
                for of_all, reached, right in zip(self.proposed, self.reached, self.accepted, strict=True)
            ],
        }

    def _count_drafts(self, num_drafts: int, num_tokens: int) -> None:
        """Adds a row with drafts. All but the last of its `num_tokens` tokens are accepted drafts."""
        self.rows_with_drafts += 1
        self.tokens_with_drafts += num_tokens
        num_accepted = num_tokens - 1
        for index in range(num_drafts):
            self.proposed[index] += 1
            self.reached[index] += index <= num_accepted
            self.accepted[index] += index < num_accepted


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


@dataclass(slots=True)
class PackCounts:
    """Packs of images that the vision encoder took together, all by one graph or for one reason without a graph."""

    packs: int = 0
    items: int = 0
    tokens: int = 0
    """Output tokens, without padding."""
    padding: int = 0
    seconds: float = 0.0
    """Time of the host."""

    def add(self, items: int, tokens: int, padding: int, seconds: float) -> None:
        """Adds one pack."""
        self.packs += 1
        self.items += items
        self.tokens += tokens
        self.padding += padding
        self.seconds += seconds

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("packs", "items", "tokens", "seconds", "padding")}


@dataclass(slots=True)
class EncoderCounts:
    """Packs of images, by what encoded them."""

    by_budget: dict[int, PackCounts] = field(default_factory=dict)
    """Token budget of the graph -> its packs."""
    eager: dict[str, PackCounts] = field(default_factory=dict)
    """Reason -> packs without a graph."""

    def count_replay(self, budget: int, items: int, tokens: int, seconds: float) -> None:
        self.by_budget.setdefault(budget, PackCounts()).add(items, tokens, budget - tokens, seconds)

    def count_eager(self, reason: str, items: int, tokens: int, seconds: float) -> None:
        self.eager.setdefault(reason, PackCounts()).add(items, tokens, 0, seconds)

    def clear(self) -> None:
        self.by_budget.clear()
        self.eager.clear()

    def to_json(self) -> dict[str, Any]:
        """As plain data: images that a graph served (`hits`) and that ran eagerly (`misses`), tokens, padding and
        seconds of all, and the packs of each budget and of each reason."""
        replayed, eager = list(self.by_budget.values()), list(self.eager.values())
        return {
            "hits": sum(one.items for one in replayed),
            "misses": sum(one.items for one in eager),
            "tokens": sum(one.tokens for one in replayed + eager),
            "padding": sum(one.padding for one in replayed),
            "seconds": sum(one.seconds for one in replayed + eager),
            "budgets": [{"budget": budget, **one.to_json()} for budget, one in sorted(self.by_budget.items())],
            "eager": [{"reason": reason, **one.to_json()} for reason, one in sorted(self.eager.items())],
        }


@dataclass(slots=True)
class EncoderCacheCounts:
    """Sums over images. One that a request takes is a hit if its cells are there, or are to be written in the same step
    for another request, and else a miss, which is encoded. One that a preempted request takes again counts again."""

    hits: int = 0
    hit_tokens: int = 0
    misses: int = 0
    encoded_tokens: int = 0
    evicted_items: int = 0
    evicted_tokens: int = 0


METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
UNKNOWN = "none"
"""The label of every path and method that is not served."""


class AnswerCounts:
    """HTTP answers, by endpoint, method and status. Whatever clients ask for, the number of labels is bounded."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        """The endpoints, each counted by its path."""
        self.families: dict[str, str] = {}
        """The beginning of paths that are counted together -> their name."""
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._by_key: dict[str, Counter[str]] = {}

    def count(self, method: str, path: str, status: int | None) -> None:
        """A request has ended. Without a status it ended before it had an answer, and is not counted."""
        if status is not None:
            self._counts[self._handler(path), method if method in METHODS else UNKNOWN, status] += 1

    def count_client(self, record: RequestRecord) -> None:
        """A request has ended, of a client with a key: names of keys are few."""
        if record.key is None or record.status is None:
            return
        counts = self._by_key.setdefault(record.key, Counter())
        counts["requests"] += 1
        counts["refused"] += record.status == 429
        figures = record.figures()
        for name in ("prompt_tokens", "completion_tokens"):
            counts[name] += figures.get(name, 0)

    def key_rows(self, what: str) -> list[tuple[dict[str, str], float]]:
        """(labels, count) by key: `requests`, those `refused` with status 429, `prompt_tokens`, `completion_tokens`."""
        return [({"key": key}, float(counts[what])) for key, counts in sorted(self._by_key.items())]

    def rows(self) -> list[tuple[dict[str, str], float]]:
        """(labels, count): `status` is the class, such as 4xx, and `code` the status itself."""
        return [
            ({"handler": handler, "method": method, "status": f"{code // 100}xx", "code": str(code)}, float(count))
            for (handler, method, code), count in sorted(self._counts.items())
        ]

    def _handler(self, path: str) -> str:
        if path in self.paths:
            return path
        return next((name for begin, name in self.families.items() if path.startswith(begin)), UNKNOWN)
