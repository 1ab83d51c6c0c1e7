"""An engine's counts as Prometheus metrics, named as vLLM names what both have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ostinato.observe.meter import Histogram, Meter

__all__ = ["CONTENT_TYPE_LATEST", "answers", "exposition", "families"]

_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first_token", "From a request's arrival to its first token"),
    ("inter_token_latency_seconds", "inter_token", "Between two tokens of an output"),
    ("e2e_request_latency_seconds", "whole", "From a request's arrival to its end"),
    ("request_queue_time_seconds", "queue", "From a request's arrival to its first step"),
    ("request_prefill_time_seconds", "prefill", "From a request's first step to its first token"),
    ("request_decode_time_seconds", "decode", "From a request's first token to its last"),
    ("request_prompt_tokens", "prompt_tokens", "Tokens of a prompt"),
    ("request_generation_tokens", "output_tokens", "Tokens of a request's outputs"),
    ("iteration_tokens_total", "step_tokens", "Tokens that a step computes, without padding"),
    ("step_duration_seconds", "step", "A step, with its bookkeeping"),
)
"""(name, attribute of Meter, help)"""


_ENCODER = (
    ("encoder_packs", "packs", "Packs of images that the vision encoder took together, eager ones with the reason"),
    ("encoder_items", "items", "Images that were encoded"),
    ("encoder_tokens", "tokens", "Output tokens of the vision encoder, padding aside"),
    ("encoder_padding_tokens", "padding", "Padding that the graphs of the vision encoder computed"),
    ("encoder_seconds", "seconds", "Time in the vision encoder"),
)
"""(name, key of a pack's counts, help)"""


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' text format."""
    return generate_latest(_Fixed(metrics))  # type: ignore[arg-type]


def families(
    stats: Mapping[str, Any], meter: Meter, memory: Mapping[str, int], prefix: str, labels: Mapping[str, str]
) -> Iterator[Metric]:
    """The metrics of one engine.

    `stats` is `Engine.stats()`, `memory` the plan's memory in bytes by part (`weights`, `graphs`, ...). Names begin
    with `prefix`, such as `ostinato:`, and every sample bears `labels`.
    """
    make = _Maker(prefix, labels)
    yield from _of_requests(make, stats)
    yield from _of_cache(make, stats)
    yield from _of_steps(make, stats)
    if stats["speculation"] is not None:
        yield from _of_drafts(make, stats["speculation"])
    if stats["encoder"] is not None:
        yield from _of_encoder(make, stats["encoder"]["graphs"])
        yield from _of_encoder_cache(make, stats["encoder"]["cache"])
    for name, attribute, text in _HISTOGRAMS:
        yield make.histogram(name, text, getattr(meter, attribute))
    parts: tuple[str, ...] = ("weights", "activations", "graphs", "cache")
    observed = {"graphs": stats["graphs"]["observed_bytes"]}
    if stats["encoder"] is not None:
        parts += ("encoder_graphs", "encoder_cache")
        observed["encoder_graphs"] = stats["encoder"]["graphs"]["observed_bytes"]
    yield make.gauge(
        "planned_memory_bytes",
        "Memory that the plan gives to each part",
        [({"part": part}, memory[part]) for part in parts],
    )
    yield make.gauge(
        "observed_memory_bytes", "Memory that a part was seen to take", [({"part": p}, b) for p, b in observed.items()]
    )


def answers(rows: list[tuple[dict[str, str], float]], labels: Mapping[str, str]) -> Metric:
    """Answers of HTTP as (labels, count), under the name and labels that dashboards of web servers know, vLLM's among
    them: so without a prefix."""
    text = "Requests that were answered, by status; 499: the client left before the end"
    return _Maker("", labels).counter("http_requests", text, rows)


def _of_requests(make: _Maker, stats: Mapping[str, Any]) -> Iterator[Metric]:
    yield make.gauge("num_requests_running", "Outputs that are being computed", stats["running"])
    yield make.gauge("num_requests_waiting", "Outputs that wait for their first step, or again", stats["waiting"])
    yield make.counter("prompt_tokens", "Tokens of the prompts that came", stats["prompt_tokens"])
    yield make.counter("generation_tokens", "Tokens that were generated", stats["generated_tokens"])
    yield make.counter(
        "request_success",
        "Outputs that ended, by reason",
        [({"finished_reason": reason}, count) for reason, count in stats["finished"].items()],
    )
    yield make.counter(
        "num_preemptions", "Outputs that lost their memory and were computed again", stats["preemptions"]
    )
    yield make.counter("recomputed_tokens", "Tokens that preemptions threw away", stats["recomputed_tokens"])


def _of_cache(make: _Maker, stats: Mapping[str, Any]) -> Iterator[Metric]:
    usage, prefixes = stats["cache"], stats["prefix_cache"]
    yield make.gauge(
        "kv_cache_usage_perc",
        "Share of the blocks that requests hold, 0 to 1",
        usage["blocks_used"] / usage["blocks_total"] if usage["blocks_total"] else 0.0,
    )
    for kind, held in (("blocks", "blocks"), ("slots", "state slots")):
        yield make.gauge(
            f"cache_{kind}",
            f"The cache's {held}: held by requests, kept for prefixes alone, free",
            [
                ({"state": "used"}, usage[f"{kind}_used"]),
                ({"state": "cached"}, usage[f"{kind}_cached"]),
                ({"state": "free"}, usage[f"{kind}_total"] - usage[f"{kind}_used"] - usage[f"{kind}_cached"]),
            ],
        )
    missed = sum(prefixes["misses"].values())
    yield make.counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", prefixes["cached_tokens"] + missed
    )
    yield make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", prefixes["cached_tokens"])
    yield make.counter(
        "prefix_cache_misses",
        "Prompt tokens that were computed, by cause",
        [({"cause": cause}, tokens) for cause, tokens in prefixes["misses"].items()],
    )
    yield make.counter(
        "checkpoints",
        "State checkpoints: taken, wanted but not taken for want of slots, evicted",
        [
            ({"event": "taken"}, prefixes["checkpoints_taken"]),
            ({"event": "not_taken"}, prefixes["checkpoints_not_taken"]),
            ({"event": "evicted"}, prefixes["evicted_checkpoints"]),
        ],
    )
    yield make.counter("evicted_blocks", "Blocks that left the prefix index", prefixes["evicted_blocks"])


def _of_steps(make: _Maker, stats: Mapping[str, Any]) -> Iterator[Metric]:
    graphs = stats["graphs"]
    replayed = [({"mode": mode, "reason": ""}, graphs["steps"][mode]) for mode in ("full", "piecewise")]
    eager = [({"mode": "eager", "reason": reason}, count) for reason, count in graphs["eager_reasons"].items()]
    yield make.counter("steps", "Steps by mode, eager ones with the reason", replayed + eager)
    yield make.counter("unplanned_eager_steps", "Eager steps for which the plan has a graph", graphs["unplanned"])
    yield make.counter("failed_steps", "Steps that raised", stats["failed_steps"])
    yield make.counter("computed_tokens", "Tokens that went through the model, padding aside", stats["computed_tokens"])
    yield make.counter("padding_tokens", "Padding that graphs computed", graphs["padding"])
    yield make.counter(
        "step_rows",
        "Rows of steps",
        [({"kind": "decode"}, stats["decode_rows"]), ({"kind": "prefill"}, stats["prefill_rows"])],
    )
    yield make.counter("step_seconds", "Time in steps", stats["step_seconds"])
    yield make.counter("bookkeeping_seconds", "Of it, in the scheduler and the cache", stats["bookkeeping_seconds"])


def _of_drafts(make: _Maker, speculation: Mapping[str, Any]) -> Iterator[Metric]:
    yield make.counter("spec_decode_num_drafts", "Rows that had drafts", speculation["rows_with_drafts"])
    yield make.counter("spec_decode_num_draft_tokens", "Drafts", speculation["drafts_proposed"])
    yield make.counter("spec_decode_num_accepted_tokens", "Drafts that were right", speculation["drafts_accepted"])
    yield make.counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were right, by their place",
        [({"position": str(i)}, each["accepted"]) for i, each in enumerate(speculation["positions"])],
    )
    yield make.counter(
        "speculation_steps",
        "Decode steps by the number of drafts that the controller chose",
        [({"drafts": drafts}, count) for drafts, count in speculation["steps"].items()],
    )


def _of_encoder(make: _Maker, encoder: Mapping[str, Any]) -> Iterator[Metric]:
    """Images, by what served them: the graph of a budget, or none for a reason."""
    served = [({"budget": str(one["budget"]), "reason": ""}, one) for one in encoder["budgets"]]
    served += [({"budget": "", "reason": one["reason"]}, one) for one in encoder["eager"]]
    for name, key, text in _ENCODER:
        yield make.counter(name, text, [(labels, one[key]) for labels, one in served])


def _of_encoder_cache(make: _Maker, cache: Mapping[str, Any]) -> Iterator[Metric]:
    yield make.counter(
        "encoder_cache_images",
        "Images that requests took from the encoder cache (hit), or had to have encoded (miss)",
        [({"result": "hit"}, cache["hits"]), ({"result": "miss"}, cache["misses"])],
    )
    yield make.counter(
        "encoder_cache_evicted_images", "Images that made room in the encoder cache", cache["evicted_items"]
    )
    uses = ("used", "cached", "total")
    yield make.gauge(
        "encoder_cache_cells",
        "Cells of the encoder cache, one for each token of an image: of images that requests hold, of others, and all",
        [({"use": use}, cache[f"cells_{use}"]) for use in uses],
    )


Values = float | list[tuple[dict[str, str], float]]
"""One value, or (labels, value) for several."""


class _Maker:
    """Makes families whose names have one prefix and whose samples have some labels."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix, self._labels = prefix, dict(labels)

    def gauge(self, name: str, text: str, values: Values) -> Metric:
        return self._fill(GaugeMetricFamily(self._prefix + name, text), "", values)

    def counter(self, name: str, text: str, values: Values) -> Metric:
        return self._fill(CounterMetricFamily(self._prefix + name, text), "_total", values)

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=list(self._labels))
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, histogram.cumulative()), strict=True))
        family.add_metric(list(self._labels.values()), buckets, histogram.total)
        return family

    def _fill(self, family: Metric, suffix: str, values: Values) -> Metric:
        for labels, value in values if isinstance(values, list) else [({}, values)]:
            family.add_sample(family.name + suffix, {**self._labels, **labels}, value)
        return family


class _Fixed:
    """What generate_latest reads: metrics that were collected before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics
