"""Table of every metric of an engine, and its text in Prometheus' format.

A row has kind, name, help, label, and the path of the value in the statistics. Names are those of vLLM where both
engines have the metric. Counters get the format's suffix `_total`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ostinato.json_io import JsonMapping
from ostinato.observe.counts import EngineHistograms, Histogram

__all__ = ["CONTENT_TYPE_LATEST", "LabelledValues", "family", "histogram", "merge_metrics", "render_metrics"]


LabelledValues = list[tuple[dict[str, str], float]]
"""(labels, value) of each sample."""


def family(kind: str, name: str, text: str, rows: LabelledValues, labels: Mapping[str, str]) -> Metric:
    """Return a counter or gauge, according to `kind`; every sample gets `labels` in addition to its own."""
    is_counter = kind == "counter"
    metric: Metric = CounterMetricFamily(name, text) if is_counter else GaugeMetricFamily(name, text)
    for row_labels, value in rows:
        metric.add_sample(metric.name + ("_total" if is_counter else ""), {**labels, **row_labels}, value)
    return metric


def histogram(name: str, text: str, counts: Histogram, labels: Mapping[str, str]) -> Metric:
    """Return the counts of histogram `counts` as a metric."""
    metric = HistogramMetricFamily(name, text, labels=list(labels))
    bounds = [*(str(float(bound)) for bound in counts.bounds), "+Inf"]
    buckets = list(zip(bounds, map(float, counts.cumulative()), strict=True))
    metric.add_metric(list(labels.values()), buckets, counts.total)
    return metric


def merge_metrics(of_engines: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Merge the metrics of several engines: one metric per name, with the samples of all."""
    merged: dict[str, Metric] = {}
    for metrics in of_engines:
        for metric in metrics:
            if metric.name in merged:
                merged[metric.name].samples += metric.samples
            else:
                merged[metric.name] = metric
    return list(merged.values())


def render_metrics(metrics: Iterable[Metric]) -> bytes:
    """Render metrics in Prometheus' text format."""
    return generate_latest(_Collected(metrics))  # type: ignore[arg-type]


class _Collected:
    """Collector for `generate_latest` that returns metrics collected before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics


@dataclass(frozen=True)
class _Spec:
    """One metric. `kind` is counter or gauge.

    `source` is a path into `EngineCore.stats()`, such as `cache.blocks_used`. With a `label`, the path leads to a
    mapping {value of the label: number}, or `source` is a mapping {value of the label: path}. Else it is a function.
    """

    kind: str
    name: str
    text: str
    source: str | Mapping[str, str] | Callable[[JsonMapping], LabelledValues]
    label: str = ""

    def rows(self, stats: Mapping[str, object]) -> LabelledValues:
        if isinstance(self.source, Mapping):
            return [({self.label: value}, _at(stats, path)) for value, path in self.source.items()]
        if isinstance(self.source, str):
            value_at = _at(stats, self.source)
            return (
                [({self.label: value}, count) for value, count in value_at.items()] if self.label else [({}, value_at)]
            )
        return self.source(stats)


def _at(stats: JsonMapping, path: str) -> Any:
    return reduce(lambda node, name: node[name], path.split("."), stats)


def _cache_share(stats: JsonMapping) -> LabelledValues:
    usage = stats["cache"]
    shares = [
        usage[f"{kind}_used"] / usage[f"{kind}_total"] for kind in ("blocks", "window_blocks") if usage[f"{kind}_total"]
    ]
    return [({}, max(shares, default=0.0))]


def _cache_states(kind: str) -> Callable[[JsonMapping], LabelledValues]:
    def rows(stats: JsonMapping) -> LabelledValues:
        usage = stats["cache"]
        used, cached, total = (usage[f"{kind}_{what}"] for what in ("used", "cached", "total"))
        return [({"state": "used"}, used), ({"state": "cached"}, cached), ({"state": "free"}, total - used - cached)]

    return rows


def _looked_up(stats: JsonMapping) -> LabelledValues:
    return [({}, stats["prefix_cache"]["cached_tokens"] + sum(stats["prefix_cache"]["misses"].values()))]


FILE_EVENTS = ("written", "read", "dropped", "failed", "damaged", "removed")


def _file_events(stats: JsonMapping) -> LabelledValues:
    files = stats["cache_files"]
    return [] if files is None else [({"event": event}, files[event]) for event in FILE_EVENTS]


def _file_bytes(stats: JsonMapping) -> LabelledValues:
    files = stats["cache_files"]
    return [] if files is None else [({"event": event}, files[f"{event}_bytes"]) for event in ("written", "read")]


def _file_use(stats: JsonMapping) -> LabelledValues:
    files = stats["cache_files"]
    return [] if files is None else [({}, files["bytes"])]


def _steps(stats: JsonMapping) -> LabelledValues:
    graphs = stats["graphs"]
    replayed: LabelledValues = [({"mode": mode, "reason": ""}, graphs["steps"][mode]) for mode in ("full", "piecewise")]
    return replayed + [({"mode": "eager", "reason": reason}, n) for reason, n in graphs["eager_reasons"].items()]


def _accepted_by_position(stats: JsonMapping) -> LabelledValues:
    return [({"position": str(i)}, counts["accepted"]) for i, counts in enumerate(stats["speculation"]["positions"])]


def _packs(key: str) -> Callable[[JsonMapping], LabelledValues]:
    """Return a function that lists the packs by budget of the graph, or by reason without one.

    `key` names the value.
    """

    def rows(stats: JsonMapping) -> LabelledValues:
        counts = stats["encoder"]["graphs"]
        replayed: LabelledValues = [
            ({"budget": str(one["budget"]), "reason": ""}, one[key]) for one in counts["budgets"]
        ]
        return replayed + [({"budget": "", "reason": one["reason"]}, one[key]) for one in counts["eager"]]

    return rows


_RECORD_EVENTS = ("requests", "steps", "segments", "bytes", "gaps", "lost", "failed")


def _record_events(stats: JsonMapping) -> LabelledValues:
    record = stats["record"]
    return [] if record is None else [({"event": event}, record[event]) for event in _RECORD_EVENTS]


def _verify_count(name: str) -> Callable[[JsonMapping], LabelledValues]:
    return lambda stats: [] if stats["verify"] is None else [({}, stats["verify"][name])]


_ENGINE = (
    _Spec("gauge", "num_requests_running", "Outputs that are being computed", "running"),
    _Spec("gauge", "num_requests_waiting", "Outputs that wait for their first step, or to be resumed", "waiting"),
    _Spec("counter", "prompt_tokens", "Tokens of the prompts that came", "prompt_tokens"),
    _Spec("counter", "generation_tokens", "Tokens that were generated", "generated_tokens"),
    _Spec("counter", "request_success", "Outputs that ended, by reason", "finished", "finished_reason"),
    _Spec("counter", "num_preemptions", "Outputs that lost their memory and were computed again", "preemptions"),
    _Spec("counter", "yielded_rows", "Outputs preempted for a client below its share", "yielded_rows"),
    _Spec("counter", "recomputed_tokens", "Tokens that preemptions threw away", "recomputed_tokens"),
    _Spec(
        "counter",
        "moved_requests",
        "Requests that went to other engines, came from them, or came and were refused",
        {"exported": "moves.exported", "imported": "moves.imported", "refused": "moves.refused"},
        "event",
    ),
    _Spec(
        "counter",
        "moved_request_bytes",
        "Bytes of requests that went to other engines and came from them",
        {"exported": "moves.exported_bytes", "imported": "moves.imported_bytes"},
        "event",
    ),
    _Spec(
        "counter",
        "moved_tokens",
        "Tokens of requests that came from other engines: with what was computed of them, or computed again",
        {"carried": "moves.carried_tokens", "recomputed": "moves.recomputed_tokens"},
        "how",
    ),
    _Spec(
        "gauge",
        "kv_cache_usage_perc",
        "Share of the blocks, or of the window blocks, that requests hold, 0 to 1",
        _cache_share,
    ),
    _Spec("gauge", "cache_blocks", "Blocks: used by requests, cached for prefixes only, free", _cache_states("blocks")),
    _Spec(
        "gauge",
        "cache_window_blocks",
        "Window blocks: used by requests, cached for prefixes only, free",
        _cache_states("window_blocks"),
    ),
    _Spec("gauge", "cache_slots", "Slots: used by requests, cached for prefixes only, free", _cache_states("slots")),
    _Spec("counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", _looked_up),
    _Spec("counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_cache.cached_tokens"),
    _Spec(
        "counter", "prefix_cache_misses", "Prompt tokens that were computed, by cause", "prefix_cache.misses", "cause"
    ),
    _Spec(
        "counter",
        "checkpoints",
        "State checkpoints: taken, wanted but not taken for lack of slots, packed in 8 bits, evicted",
        {
            "taken": "prefix_cache.checkpoints_taken",
            "not_taken": "prefix_cache.checkpoints_not_taken",
            "packed": "prefix_cache.packed_checkpoints",
            "evicted": "prefix_cache.evicted_checkpoints",
        },
        "event",
    ),
    _Spec("gauge", "pinned_checkpoints", "Checkpoints pinned by marks", "prefix_cache.pinned_checkpoints"),
    _Spec(
        "counter",
        "checkpoint_pins",
        "Pins of checkpoints: taken, expired, displaced by other clients, refused, lost to running requests",
        {event: f"prefix_cache.pins_{event}" for event in ("taken", "expired", "displaced", "refused", "lost")},
        "event",
    ),
    _Spec(
        "counter",
        "prefix_cache_file_hits",
        "Of the prompt tokens found, those that files had",
        "prefix_cache.file_tokens",
    ),
    _Spec("counter", "cache_files", "Files of the prefix cache by what happened to them", _file_events),
    _Spec("counter", "cache_file_bytes", "Bytes written to files of the prefix cache, and read", _file_bytes),
    _Spec("gauge", "cache_file_use_bytes", "Bytes that files of the prefix cache take", _file_use),
    _Spec("counter", "verify_checked", "Finished requests that were computed again", _verify_count("checked")),
    _Spec("counter", "verify_different", "Those whose tokens the plain path does not give", _verify_count("different")),
    _Spec("counter", "verify_ties", "Tokens of theirs that rounding decides", _verify_count("ties")),
    _Spec("counter", "verify_failed", "Errors of these checks: after one, nothing is checked", _verify_count("failed")),
    _Spec("counter", "verify_left_out", "Requests chosen for it that were not", _verify_count("left_out")),
    _Spec("counter", "verify_interrupted", "Times that a request interrupted it", _verify_count("interrupted")),
    _Spec("counter", "record_events", "What the recorder wrote, left out, and whether it has failed", _record_events),
    _Spec("counter", "evicted_blocks", "Blocks that left the prefix index", "prefix_cache.evicted_blocks"),
    _Spec(
        "counter",
        "evicted_window_blocks",
        "Window blocks that left the prefix index",
        "prefix_cache.evicted_window_blocks",
    ),
    _Spec("counter", "steps", "Steps by mode, eager ones with the reason", _steps),
    _Spec("counter", "unplanned_eager_steps", "Eager steps for which the plan has a graph", "graphs.unplanned"),
    _Spec("counter", "failed_steps", "Steps that raised an error", "failed_steps"),
    _Spec("counter", "steps_ahead", "Steps scheduled before the step in front of them was over", "steps_ahead"),
    _Spec("counter", "steps_not_ahead", "Steps that had to wait for it, by cause", "steps_not_ahead", "cause"),
    _Spec("counter", "void_rows", "Rows of steps ahead whose request had ended", "void_rows"),
    _Spec("counter", "computed_tokens", "Tokens that went through the model, without padding", "computed_tokens"),
    _Spec("counter", "padding_tokens", "Padding that graphs computed", "graphs.padding"),
    _Spec("counter", "step_rows", "Rows of steps", {"decode": "decode_rows", "prefill": "prefill_rows"}, "kind"),
    _Spec("counter", "step_seconds", "Time in steps", "step_seconds"),
    _Spec("counter", "bookkeeping_seconds", "The part of it in scheduler and cache", "bookkeeping_seconds"),
    _Spec("gauge", "planned_memory_bytes", "Memory that the plan gives to each part", "memory.planned", "part"),
    _Spec("gauge", "observed_memory_bytes", "Memory that a part was seen to take", "memory.observed", "part"),
)
_SPECULATION = (
    _Spec("counter", "spec_decode_num_drafts", "Rows that had drafts", "speculation.rows_with_drafts"),
    _Spec("counter", "spec_decode_num_draft_tokens", "Drafts", "speculation.drafts_proposed"),
    _Spec("counter", "spec_decode_num_accepted_tokens", "Drafts that were accepted", "speculation.drafts_accepted"),
    _Spec(
        "counter",
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were accepted, by position",
        _accepted_by_position,
    ),
    _Spec("counter", "speculation_steps", "Decode steps by drafts per row", "speculation.steps", "drafts"),
)
_ENCODER = (
    _Spec("counter", "encoder_packs", "Packs of images encoded together, eager ones with the reason", _packs("packs")),
    _Spec("counter", "encoder_items", "Images that were encoded", _packs("items")),
    _Spec("counter", "encoder_tokens", "Output tokens of the vision encoder, without padding", _packs("tokens")),
    _Spec("counter", "encoder_padding_tokens", "Padding that the encoder's graphs computed", _packs("padding")),
    _Spec("counter", "encoder_seconds", "Time in the vision encoder", _packs("seconds")),
    _Spec(
        "counter",
        "encoder_cache_images",
        "Images that requests found in the encoder cache (hit) or had encoded (miss)",
        {"hit": "encoder.cache.hits", "miss": "encoder.cache.misses"},
        "result",
    ),
    _Spec(
        "counter",
        "encoder_cache_evicted_images",
        "Images that made room in the encoder cache",
        "encoder.cache.evicted_items",
    ),
    _Spec(
        "gauge",
        "encoder_cache_cells",
        "Cells of the encoder cache, one per token of an image: of images that requests hold, of other images, all",
        {use: f"encoder.cache.cells_{use}" for use in ("used", "cached", "total")},
        "use",
    ),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From a request's arrival to its first token", "first_token"),
    ("inter_token_latency_seconds", "Between two tokens of an output", "inter_token"),
    ("e2e_request_latency_seconds", "From a request's arrival to its end", "whole"),
    ("request_queue_time_seconds", "From a request's arrival to its first step", "queue"),
    ("request_prefill_time_seconds", "From a request's first step to its first token", "prefill"),
    ("request_decode_time_seconds", "From a request's first token to its last", "decode"),
    ("request_prompt_tokens", "Tokens of a prompt", "prompt_tokens"),
    ("request_generation_tokens", "Tokens of a request's outputs", "output_tokens"),
    ("iteration_tokens_total", "Tokens that a step computes, without padding", "step_tokens"),
    ("step_duration_seconds", "A step with its bookkeeping", "step"),
)
"""Rows of (name, help, attribute of EngineHistograms)."""


def families(
    stats: JsonMapping, meter: EngineHistograms, memory: Mapping[str, int], prefix: str, labels: Mapping[str, str]
) -> Iterator[Metric]:
    """Yield the metrics of one engine.

    `stats` is `EngineCore.stats()`, `memory` the plan's memory in bytes by part (`weights`, `graphs`, ...). Names begin
    with `prefix`, such as `ostinato:`, and every sample has `labels`.
    """
    specs = [*_ENGINE]
    parts = ["weights", "activations", "graphs", "cache"]
    observed = {"graphs": stats["graphs"]["observed_bytes"]}
    if stats["speculation"] is not None:
        specs += _SPECULATION
    if stats["encoder"] is not None:
        specs += _ENCODER
        parts += ["encoder_graphs", "encoder_cache"]
        observed["encoder_graphs"] = stats["encoder"]["graphs"]["observed_bytes"]
    figures = {**stats, "memory": {"planned": {part: memory[part] for part in parts}, "observed": observed}}
    for spec in specs:
        yield family(spec.kind, prefix + spec.name, spec.text, spec.rows(figures), labels)
    for name, text, attribute in _HISTOGRAMS:
        yield histogram(prefix + name, text, getattr(meter, attribute), labels)
