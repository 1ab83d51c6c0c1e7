"""Metrics of the server before an engine: connections, answers, the event loop, keys, draining replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client.core import Metric

from ostinato.observe.counts import Histogram
from ostinato.observe.metrics import LabelledValues, family, histogram


def heartbeat(age: float, prefix: str, labels: Mapping[str, str]) -> Metric:
    """Return the seconds since the engine's last sign of life as a metric."""
    text = "Seconds since the engine's last sign of life"
    return family("gauge", f"{prefix}engine_heartbeat_age_seconds", text, [({}, age)], labels)


def connections(open_now: int, refused: int, prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metrics of client connections."""
    yield family("gauge", f"{prefix}connections", "Connections that are open", [({}, open_now)], labels)
    text = "Connections that were turned away because there were too many"
    yield family("counter", f"{prefix}connections_refused", text, [({}, refused)], labels)


def unread_answers(num_bytes: int, prefix: str, labels: Mapping[str, str]) -> Metric:
    """Return the bytes of answers that clients have not taken as a metric."""
    text = "Bytes of answers that wait for their clients, of all of them"
    return family("gauge", f"{prefix}unread_answer_bytes", text, [({}, num_bytes)], labels)


def refusals(counts: Mapping[str, int], prefix: str, labels: Mapping[str, str]) -> Metric:
    """Return the requests and connections that were refused below the application, by the error's code."""
    text = "Requests and connections that were refused before they were read, by reason"
    rows = [({"reason": reason}, float(count)) for reason, count in sorted(counts.items())]
    return family("counter", f"{prefix}requests_refused", text, rows, labels)


def dropped_lines(count: int, prefix: str, labels: Mapping[str, str]) -> Metric:
    """Return the lines of output that were dropped."""
    text = "Lines of the log and other output that were dropped, since nobody read standard output or error"
    return family("counter", f"{prefix}log_lines_dropped", text, [({}, count)], labels)


def drains(moved: int, stayed: Mapping[str, int], prefix: str, labels: Mapping[str, str]) -> Metric:
    """Return the outcomes of requests that were running on draining replicas."""
    text = "Requests that a replica had begun when it was to end, by what became of them, and why they stayed"
    rows: LabelledValues = [({"result": "moved", "reason": ""}, float(moved))]
    rows += [({"result": "stayed", "reason": reason}, float(count)) for reason, count in sorted(stayed.items())]
    return family("counter", f"{prefix}drained_requests", text, rows, labels)


def answers(rows: LabelledValues, labels: Mapping[str, str]) -> Metric:
    """Return HTTP answers as (labels, count).

    The name has no prefix, since dashboards of web servers and vLLM use it.
    """
    text = "Requests that were answered, by status; 499: the client left before the end"
    return family("counter", "http_requests", text, rows, labels)


def loop_delay(delay: Histogram, stalls: int, prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the delay of the server's event loop in seconds, and the number of delays that count as stalls."""
    text = "How late the server's event loop is, looked at every 50 ms"
    yield histogram(f"{prefix}event_loop_delay_seconds", text, delay, labels)
    text = "Looks at the event loop that came more than 20 ms late"
    yield family("counter", f"{prefix}event_loop_stalls", text, [({}, stalls)], labels)


def workers(done: int, ended_early: int, running: int, prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metrics of the processes that read large bodies and images."""
    rows: LabelledValues = [({"end": "done"}, done), ({"end": "early"}, ended_early)]
    text = "Large bodies that were read, and those given up: the client left, it took too long, or the process ended"
    yield family("counter", f"{prefix}body_reads", text, rows, labels)
    text = "Large bodies that are being read"
    yield family("gauge", f"{prefix}body_reads_running", text, [({}, running)], labels)


_OF_KEYS = (
    ("requests", "key_requests", "Requests of each key, by its name"),
    ("refused", "key_refused_requests", "Those that got status 429"),
    ("prompt_tokens", "key_prompt_tokens", "Tokens of their prompts"),
    ("completion_tokens", "key_generation_tokens", "Tokens that were generated for them"),
)


def key_metrics(
    rows: Callable[[str], LabelledValues],
    weights: Mapping[str, int],
    seen: Collection[str],
    prefix: str,
    labels: Mapping[str, str],
) -> Iterator[Metric]:
    """Yield the weights of the keys `seen`, and the usage of their clients; `rows` is `ResponseCounts.key_rows`."""
    text = "Turns that a key's client gets for one of a key of weight 1"
    weighted = [({"key": name}, float(weight)) for name, weight in sorted(weights.items()) if name in seen]
    yield family("gauge", prefix + "key_weight", text, weighted, labels)
    for kind, name, text in _OF_KEYS:
        seen_rows = [row for row in rows(kind) if row[0]["key"] in seen]
        yield family("counter", prefix + name, text, seen_rows, labels)
