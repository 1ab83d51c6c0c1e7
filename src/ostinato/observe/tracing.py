"""Traces of requests for OpenTelemetry: one span per request, with child spans for queue, prefill and decode."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject
from ostinato.observe.request_record import RequestRecord
from ostinato.os_support import extra_command


class Tracing:
    """Creator of the spans of requests that have ended; they go to `exporter`, an OpenTelemetry span exporter."""

    def __init__(self, exporter: Any, model_name: str, *, batched: bool = True) -> None:
        """Set up the tracer, exporting each span at once unless `batched`. ConfigError without OpenTelemetry."""
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise _not_installed() from None
        self._api, self._propagator = trace, TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "ostinato"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter) if batched else SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ostinato")
        self._model_name = model_name

    def trace(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """Create the spans of a request that has ended, as children of the client's span if `traceparent` names one."""
        figures = record.figures()
        if not figures or record.ended is None:
            return
        # A record's clock is monotonic and has no date. The wall clock may be set meanwhile, so it is read once.
        offset = time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return int((moment + offset) * 1e9)

        span = self._tracer.start_span(
            f"{record.method} {record.path}",
            context=self._propagator.extract(dict(headers)),
            kind=self._api.SpanKind.SERVER,
            start_time=nanoseconds(record.begun),
            attributes=_attributes(record, figures, self._model_name),
        )
        if record.error is not None or record.status is None or record.status >= 500:
            span.set_status(self._api.StatusCode.ERROR, record.error)
        inside = self._api.set_span_in_context(span)
        scheduled, first, last = (figures[name] for name in ("scheduled", "first_token", "last_token"))
        parts = (("queue", record.begun, scheduled), ("prefill", scheduled, first), ("decode", first, last))
        for name, begin, end in parts:
            if begin is not None and end is not None:
                child = self._tracer.start_span(name, context=inside, start_time=nanoseconds(begin))
                child.end(nanoseconds(end))
        span.end(nanoseconds(record.ended))

    def end(self) -> None:
        """Export the remaining spans. This may take long, so call it from a separate thread."""
        self._provider.shutdown()


def make_tracing(endpoint: str, model_name: str) -> Tracing:
    """Return the tracing for an OTLP/HTTP collector at `endpoint`. ConfigError if OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise _not_installed() from None
    path = "/v1/traces"
    return Tracing(OTLPSpanExporter(endpoint if endpoint.endswith(path) else endpoint.rstrip("/") + path), model_name)


def _attributes(record: RequestRecord, figures: Mapping[str, object], model_name: str) -> JsonObject:
    attributes = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "ostinato.request_id": record.request_id,
        "gen_ai.request.model": model_name,
        "gen_ai.usage.input_tokens": figures["prompt_tokens"],
        "gen_ai.usage.output_tokens": figures["completion_tokens"],
        "ostinato.cached_tokens": figures["cached_tokens"],
        "ostinato.finish": figures["finish"],
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _not_installed() -> ConfigError:
    return ConfigError(f"otlp_endpoint needs OpenTelemetry: {extra_command('trace')}, or leave otlp_endpoint out")
