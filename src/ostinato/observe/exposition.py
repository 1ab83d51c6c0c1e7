"""Metrics as Prometheus reads them. Counters get its suffix `_total`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ostinato.observe.histograms import Histogram

__all__ = ["CONTENT_TYPE_LATEST", "Rows", "exposition", "family", "histogram", "together"]

Rows = list[tuple[dict[str, str], float]]
"""(labels, value) of each sample."""


def family(kind: str, name: str, text: str, rows: Rows, labels: Mapping[str, str]) -> Metric:
    """A counter or gauge, as `kind` says; every sample has `labels` beside its own."""
    is_counter = kind == "counter"
    found: Metric = CounterMetricFamily(name, text) if is_counter else GaugeMetricFamily(name, text)
    for own, value in rows:
        found.add_sample(found.name + ("_total" if is_counter else ""), {**labels, **own}, value)
    return found


def histogram(name: str, text: str, of: Histogram, labels: Mapping[str, str]) -> Metric:
    """What `of` has counted."""
    found = HistogramMetricFamily(name, text, labels=list(labels))
    bounds = [*(str(float(bound)) for bound in of.bounds), "+Inf"]
    buckets = list(zip(bounds, map(float, of.cumulative()), strict=True))
    found.add_metric(list(labels.values()), buckets, of.total)
    return found


def together(of_engines: Iterable[Iterable[Metric]]) -> list[Metric]:
    """The metrics of several engines: each once, with the samples of all."""
    found: dict[str, Metric] = {}
    for metrics in of_engines:
        for metric in metrics:
            if metric.name in found:
                found[metric.name].samples += metric.samples
            else:
                found[metric.name] = metric
    return list(found.values())


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' text format."""
    return generate_latest(_Collected(metrics))  # type: ignore[arg-type]


class _Collected:
    """What `generate_latest` reads: metrics that were collected before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics
