"""Metrics of the router: requests, hits, events and indexes by backend, whose label is its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client.core import Metric

from ostinato.observe.metrics import LabelledValues, family
from ostinato.serve.route.backends import Backend, BackendPool, BackendState


def backend_metrics(pool: BackendPool, prefix: str) -> Iterator[Metric]:
    """Yield the metrics of all backends of `pool`, under names that begin with `prefix`."""
    backends = list(pool.backends.values())
    router = None if pool.placement is None else pool.placement.router

    def rows(value: Callable[[Backend], float], **labels: str) -> LabelledValues:
        return [({"backend": str(each.number), **labels}, value(each)) for each in backends]

    def counter(name: str, text: str, values: LabelledValues) -> Metric:
        return family("counter", f"{prefix}router_{name}", text, values, {})

    def gauge(name: str, text: str, values: LabelledValues) -> Metric:
        return family("gauge", f"{prefix}router_{name}", text, values, {})

    yield counter("requests", "Requests that were sent", rows(lambda each: each.counts.num_sent))
    text = "Requests without an answer, or whose answer broke off"
    yield counter("failed_requests", text, rows(lambda each: each.counts.num_failed))
    yield gauge("running_requests", "Requests that are under way", rows(lambda each: each.num_running))
    text = "Tokens of the prompts that were sent, as far as the router reads them"
    yield counter("prompt_tokens", text, rows(lambda each: each.counts.prompt_tokens))
    text = "Cached tokens of the answers whose usage says them: expected by the router, and reported"
    hits = rows(lambda each: each.counts.expected_hit_tokens, kind="expected")
    hits += rows(lambda each: each.counts.reported_hit_tokens, kind="reported")
    yield counter("hit_tokens", text, hits)
    reasons = {} if router is None else router.reasons
    chosen: LabelledValues = [({"reason": reason}, count) for reason, count in sorted(reasons.items())]
    yield counter("choices", "Choices by reason", chosen)
    text = "Messages of cache events, and those that were missed"
    events = rows(lambda each: each.counts.num_events, event="received")
    events += rows(lambda each: each.counts.num_lost_events, event="lost")
    yield counter("events", text, events)
    text = "Places at which a prompt may hit, as the backend tells"
    yield gauge("index_keys", text, rows(lambda each: 0 if router is None else router.num_known(each.name)))
    text = "1 if the backend tells what it has cached"
    yield gauge("backend_has_events", text, rows(lambda each: each.has_events))
    text = "1 for the state in which the backend is"
    states = [
        row
        for state in get_args(BackendState)
        for row in rows(lambda each: each.state == state, state=state)  # noqa: B023
    ]
    yield gauge("backend_state", text, states)
    down = sum(each.state not in ("ready", "draining") for each in backends)
    yield gauge("backends_down", "Backends that get no requests and do not drain", [({}, down)])
