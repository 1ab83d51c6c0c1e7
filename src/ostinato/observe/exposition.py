"""Metrics in Prometheus' text format. Counters get its suffix `_total`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ostinato.observe.histograms import Histogram

__all__ = ["CONTENT_TYPE_LATEST", "LabelledValues", "render_metrics", "family", "histogram", "merge_metrics"]

LabelledValues = list[tuple[dict[str, str], float]]
"""(labels, value) of each sample."""


def family(kind: str, name: str, text: str, rows: LabelledValues, labels: Mapping[str, str]) -> Metric:
    """Return a counter or gauge, according to `kind`; every sample gets `labels` in addition to its own."""
    is_counter = kind == "counter"
    found: Metric = CounterMetricFamily(name, text) if is_counter else GaugeMetricFamily(name, text)
    for own, value in rows:
        found.add_sample(found.name + ("_total" if is_counter else ""), {**labels, **own}, value)
    return found


def histogram(name: str, text: str, of: Histogram, labels: Mapping[str, str]) -> Metric:
    """Return the counts of histogram `of` as a metric."""
    found = HistogramMetricFamily(name, text, labels=list(labels))
    bounds = [*(str(float(bound)) for bound in of.bounds), "+Inf"]
    buckets = list(zip(bounds, map(float, of.cumulative()), strict=True))
    found.add_metric(list(labels.values()), buckets, of.total)
    return found


def merge_metrics(of_engines: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Merge the metrics of several engines: one metric per name, with the samples of all."""
    found: dict[str, Metric] = {}
    for metrics in of_engines:
        for metric in metrics:
            if metric.name in found:
                found[metric.name].samples += metric.samples
            else:
                found[metric.name] = metric
    return list(found.values())


def render_metrics(metrics: Iterable[Metric]) -> bytes:
    """Render metrics in Prometheus' text format."""
    return generate_latest(_Collected(metrics))  # type: ignore[arg-type]


class _Collected:
    """Collector for `generate_latest` that returns metrics collected before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics
