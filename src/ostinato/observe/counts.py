"""Counts of requests, steps, cached memory, encoded images and drafts; histograms; progress and times of a start.

The engine and the scheduler increment their own. Counts of HTTP answers are in `request_record.py`, and the steps of
each graph are counted in `graphs/step_graphs.py`. `observe/metrics.py` names every count. This package imports none of
those that count: they pass their statistics to it. The phases of a start follow one another, so that they add up to the
whole start.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.json_io import JsonObject


@dataclass(slots=True)
class EngineCounts:
    """Requests and steps of an engine; times in seconds."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, including those recomputed after a preemption."""
    decode_rows: int = 0
    prefill_rows: int = 0
    step_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    """The scheduler's part of step_seconds: requests, blocks, slots and the prefix index."""

    def count_step(
        self, rows: int, decode_rows: int, computed: int, generated: int, seconds: float, bookkeeping: float
    ) -> None:
        """Add a step: its rows, its computed and generated tokens, and its seconds."""
        self.generated_tokens += generated
        self.computed_tokens += computed
        self.decode_rows += decode_rows
        self.prefill_rows += rows - decode_rows
        self.step_seconds += seconds
        self.bookkeeping_seconds += bookkeeping


@dataclass(slots=True)
class SchedulerCounts:
    """Events of the scheduler since it was made."""

    finished: dict[str, int]
    """Reason (a FinishReason) -> outputs that ended for it."""
    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    yielded_rows: int = 0
    """The part of `preemptions` for the share of another client."""
    recomputed_tokens: int = 0
    """Computed tokens that preemptions discarded."""
    cut_recomputations: int = 0
    """Preempted requests that took more than one step to recompute, without chunked prefill."""
    steps_ahead: int = 0
    """The part of `steps` that was scheduled before the preceding step was over."""
    void_rows: int = 0
    """Rows of overlapped steps whose request had already ended, so that their result was discarded."""
    steps_not_ahead: dict[str, int] = field(default_factory=dict)
    """Cause (an OverlapBlocker) -> steps that had to wait for the preceding step although overlap is on."""


@dataclass(slots=True)
class PrefixCounts:
    """Sums over the admitted prompts, one for each of n samples. They add up to the prompts' tokens."""

    misses: dict[str, int]
    """Cause (a MissCause) -> tokens that were computed for it."""
    cached_tokens: int = 0
    restored_tokens: int = 0
    """Tokens that preempted requests found again in the cache."""
    file_tokens: int = 0
    """The part of `cached_tokens` that was read from files."""

    def count(self, cached_tokens: int, misses: Mapping[str, int], from_files: int = 0) -> None:
        """Add one prompt's report."""
        self.cached_tokens += cached_tokens
        self.file_tokens += from_files
        for cause, tokens in misses.items():
            self.misses[cause] += tokens


@dataclass(slots=True)
class MigrationCounts:
    """Requests exported to and imported from other engines; `EngineCounts.requests` does not count imported ones."""

    exported: int = 0
    exported_bytes: int = 0
    imported: int = 0
    imported_bytes: int = 0
    refused: int = 0
    """Exports of other engines that could not be imported."""
    carried_tokens: int = 0
    """Tokens of all outputs that were computed elsewhere and are not computed again."""
    carried_bytes: int = 0
    """Bytes of the imported blocks and states."""
    recomputed_tokens: int = 0
    """Tokens computed elsewhere that are computed again, because they came without blocks and state."""


@dataclass(slots=True)
class StoreCounts:
    """Events of the block and slot pools since the start."""

    checkpoints_taken: int = 0
    checkpoints_not_taken: int = 0
    """Checkpoints not taken because no slot was free or evictable, or lost at once to their own request."""
    evicted_blocks: int = 0
    evicted_checkpoints: int = 0
    packed_checkpoints: int = 0
    """Checkpoints that were packed because their slots were needed."""
    unpacked_checkpoints: int = 0
    """Hits at packed checkpoints."""
    evicted_window_blocks: int = 0
    shared_blocks: int = 0
    """Computed blocks that were replaced by an equal block in the index."""
    pins_taken: int = 0
    """Checkpoints pinned at marks of applications."""
    pins_expired: int = 0
    pins_displaced: int = 0
    """Pins that ended early, because their client had more than its share."""
    pins_refused: int = 0
    """Marks that got no pin, because others had the whole room and no more than their share."""
    pins_lost: int = 0
    """Pins that ended early, because running requests needed the memory or the cache was reset."""


@dataclass(slots=True)
class FileCounts:
    """Events of the cache's files since the start."""

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    dropped: int = 0
    """Files not written, because too many writes were pending or a write had failed shortly before."""
    failed: int = 0
    """Writes that failed."""
    damaged: int = 0
    removed: int = 0
    """Files removed to stay within `cache_offload`."""


@dataclass(slots=True)
class RecordCounts:
    """Counts of a recorder. `lost` are events that were left out, `failed` is 1 if its files cannot be written."""

    requests: int = 0
    steps: int = 0
    segments: int = 0
    bytes: int = 0
    gaps: int = 0
    lost: int = 0
    failed: int = 0


@dataclass(slots=True)
class EncoderCacheCounts:
    """Sums over the images that requests took from the encoder cache.

    An image is a hit if its cells exist, or if the same step writes them for another request; else it is a miss and is
    encoded. An image that a preempted request takes again counts again.
    """

    hits: int = 0
    hit_tokens: int = 0
    misses: int = 0
    encoded_tokens: int = 0
    evicted_items: int = 0
    evicted_tokens: int = 0


@dataclass(slots=True)
class EncoderPackCounts:
    """Packs of images that the vision encoder encoded together, all by one graph or for one reason without a graph."""

    packs: int = 0
    items: int = 0
    tokens: int = 0
    """Output tokens, without padding."""
    padding: int = 0
    seconds: float = 0.0
    """Wall time on the host."""

    def add(self, items: int, tokens: int, padding: int, seconds: float) -> None:
        """Add one pack."""
        self.packs += 1
        self.items += items
        self.tokens += tokens
        self.padding += padding
        self.seconds += seconds

    def to_json(self) -> JsonObject:
        return {name: getattr(self, name) for name in ("packs", "items", "tokens", "seconds", "padding")}


@dataclass(slots=True)
class EncoderCounts:
    """Packs of images, by the graph that encoded them or by the reason why none did."""

    by_budget: dict[int, EncoderPackCounts] = field(default_factory=dict)
    """Token budget of the graph -> its packs."""
    eager: dict[str, EncoderPackCounts] = field(default_factory=dict)
    """Reason -> packs without a graph."""

    def count_replay(self, budget: int, items: int, tokens: int, seconds: float) -> None:
        self.by_budget.setdefault(budget, EncoderPackCounts()).add(items, tokens, budget - tokens, seconds)

    def count_eager(self, reason: str, items: int, tokens: int, seconds: float) -> None:
        self.eager.setdefault(reason, EncoderPackCounts()).add(items, tokens, 0, seconds)

    def clear(self) -> None:
        self.by_budget.clear()
        self.eager.clear()

    def to_json(self) -> JsonObject:
        """Return the counts as plain data.

        `hits` are images that a graph encoded, `misses` those that ran eagerly. Tokens, padding and seconds are sums
        over all. The packs are listed by budget and by reason.
        """
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
class SpeculationCounts:
    """Counts of the drafts of decode rows. A row that ended with an error is not counted.

    Tokens count as they were verified, including those after an output's end, which are dropped.
    """

    num_speculative_tokens: int
    draft_numbers: tuple[int, ...]
    """The numbers of drafts that a step may have."""
    steps: dict[int, int] = field(init=False)
    """Number of drafts per row that ran -> steps with decode rows."""
    steps_without_draft: int = 0
    """Steps that asked for drafts and ran with 0, because no row had one."""
    rows_with_drafts: int = 0
    rows_without_draft: int = 0
    """Rows without a draft in steps that asked for drafts."""
    tokens: int = 0
    """New tokens of decode rows."""
    tokens_with_drafts: int = 0
    """The part of `tokens` from rows with drafts: the accepted drafts, and one more token for each row."""
    proposed: list[int] = field(init=False)
    """Rows that had a draft at each position 1 to k."""
    reached: list[int] = field(init=False)
    """The part of `proposed` whose earlier drafts were all accepted."""
    accepted: list[int] = field(init=False)
    """The part of `reached` whose draft at that position was accepted too."""

    def __post_init__(self) -> None:
        self.steps = dict.fromkeys(self.draft_numbers, 0)
        self.proposed, self.reached, self.accepted = ([0] * self.num_speculative_tokens for _ in range(3))

    def count(self, num_drafts: int, rows: Sequence[tuple[int, int]]) -> None:
        """Add a successful step that asked for `num_drafts`; `rows`: (drafts, new tokens) of rows without error."""
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

    def to_json(self) -> JsonObject:
        """Return the counts and the rates that follow from them as plain data; a rate without a denominator is None."""
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
        """Add a row with drafts. All but the last of its `num_tokens` tokens are accepted drafts."""
        self.rows_with_drafts += 1
        self.tokens_with_drafts += num_tokens
        num_accepted = num_tokens - 1
        for index in range(num_drafts):
            self.proposed[index] += 1
            self.reached[index] += index <= num_accepted
            self.accepted[index] += index < num_accepted


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


SECONDS = (*(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5), *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0))
TOKENS = tuple(2**power for power in range(18))


class Histogram:
    """Counts of values in buckets: one up to each bound, and one above the last."""

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
        """Return the number of values up to each bound, then of all values, as Prometheus expects."""
        sums, total = [], 0
        for count in self.counts:
            total += count
            sums.append(total)
        return sums

    def quantile(self, share: float) -> float | None:
        """Return the smallest bound that at least `share` of the values do not exceed; None without values or bound."""
        sums = self.cumulative()
        if not sums[-1]:
            return None
        index = bisect_left(sums, share * sums[-1])
        return self.bounds[index] if index < len(self.bounds) else None

    def to_json(self) -> JsonObject:
        """Return the histogram as plain data."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class EngineHistograms:
    """Histograms of an engine's requests and steps. Times are in seconds.

    A request arrives when it is added, or at the server in front of the engine if that is on this machine.
    """

    queue: Histogram = field(default_factory=_seconds)
    """Time from a request's arrival to its first step."""
    first_token: Histogram = field(default_factory=_seconds)
    """Time from the arrival to the first token of the first output."""
    inter_token: Histogram = field(default_factory=_seconds)
    """Time between two tokens of an output. Tokens of one step share the time since the token before them."""
    prefill: Histogram = field(default_factory=_seconds)
    """Time from the first step to the first token."""
    decode: Histogram = field(default_factory=_seconds)
    """Time from the first token to the last."""
    whole: Histogram = field(default_factory=_seconds)
    """Time from the arrival to the end."""
    prompt_tokens: Histogram = field(default_factory=_tokens)
    output_tokens: Histogram = field(default_factory=_tokens)
    """Tokens of all outputs of a request."""
    step_tokens: Histogram = field(default_factory=_tokens)
    """Tokens that a step computes, without padding."""
    step: Histogram = field(default_factory=_seconds)
    """Time of a step, its bookkeeping included."""


ProgressFn = Callable[[str, int, int], None]
"""Function of (what is being done, how much of it is done, how much it is in all)."""


def no_progress(_what: str, _done: int, _total: int) -> None:
    """Show no progress."""


class StartupTimer:
    """Seconds of each phase since `begin`, in the order in which they first ended."""

    def __init__(self, begin: float | None = None) -> None:
        """Start at `begin`, a moment of `time.monotonic`; without it, now."""
        self.seconds: dict[str, float] = {}
        self._end = time.monotonic() if begin is None else begin

    def end(self, name: str, ended_at: float | None = None) -> None:
        """Add the time since the last call, up to the moment `ended_at` or now, to phase `name`."""
        now = time.monotonic() if ended_at is None else ended_at
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._end
        self._end = now
