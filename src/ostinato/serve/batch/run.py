"""Answers of a batch: each body takes the same steps as in the server, without HTTP."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ostinato.config import EngineConfig
from ostinato.errors import EngineFailed
from ostinato.json_io import JsonObject
from ostinato.observe.counts import ProgressFn
from ostinato.observe.request_record import RequestRecord, ResponseCounts
from ostinato.serve.app import make_api
from ostinato.serve.batch.files import AnswerFile, BatchLine, read_bodies
from ostinato.serve.http.api_errors import ApiError, as_api_error
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import JsonPostMiddleware, check_size
from ostinato.serve.http.streaming import body_of, log_failure, side_by_side
from ostinato.serve.settings import ServeSettings, UnknownFields

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Endpoints that a batch may use; all speak OpenAI's dialect."""
_AHEAD = 64
"""Requests that are prepared while others run, so that the engine finds the next one at once."""
_PAUSE = 0.05
"""Seconds before a request for which there was no room is tried again."""
_EVER = 1e9
"""Seconds that a request may take unless it sets a timeout: no client waits for it."""


def batch_settings(served_model_name: Sequence[str], unknown_fields: UnknownFields = "error") -> ServeSettings:
    """Return the server's settings, without limits on one client's share."""
    return ServeSettings(
        served_model_name=tuple(served_model_name),
        unknown_fields=unknown_fields,
        request_timeout=_EVER,
        client_seconds=_EVER,
        client_pixels=2**62,
        client_backlog=2**62,
    )


@dataclass
class _Asked:
    """A request without HTTP."""

    url: str
    record: RequestRecord = field(init=False)

    def __post_init__(self) -> None:
        self.record = RequestRecord(uuid.uuid4().hex, "POST", self.url)

    def request(self) -> Request:
        state = {"request_id": self.record.request_id, "record": self.record, "client": "batch"}
        scope = {"type": "http", "method": "POST", "path": self.url, "headers": [], "state": state}
        return Request(scope, _stays)


async def _stays() -> Any:
    """Wait forever, like a client that sends nothing while it waits for the answer."""
    await asyncio.Event().wait()


async def run_batch(
    config: EngineConfig,
    settings: ServeSettings,
    source: Path,
    lines: Sequence[BatchLine],
    answers: AnswerFile,
    loading: ProgressFn,
    on_ready: Callable[[], None],
    on_answer: Callable[[int], None],
) -> None:
    """Add the answers to `lines` of the file `source`, in the order in which they end.

    `on_answer` receives an answer's number of tokens. Raises what keeps the engine from starting, and EngineFailed if
    it ends; answers up to then are written. Cancelled, it ends the same way.
    """
    lifecycle = Lifecycle(config, settings, loading)
    api = make_api(lifecycle, ResponseCounts())
    endpoints = JsonPostMiddleware(api.app, api.with_bodies, lifecycle, lambda: api.served_model().context)
    lifecycle.start()
    try:
        await lifecycle.started()
        lifecycle.engine.final_only = True
        on_ready()
        bodies = read_bodies(source, lines)
        count = min(len(lines), lifecycle.engine.plan.settings.max_num_seqs + _AHEAD)

        async def take_turns(bodies: Iterator[tuple[BatchLine, dict[str, object]]]) -> None:
            for line, body in bodies:
                response, record = await _answered(endpoints, settings, line.url, body)
                answers.write(line.custom_id, response.status_code, record.request_id, await body_of(response))
                on_answer(record.figures().get("completion_tokens", 0))

        await side_by_side(take_turns(bodies) for _ in range(count))
    finally:
        await lifecycle.stop()


async def _answered(
    endpoints: JsonPostMiddleware, settings: ServeSettings, url: str, body: JsonObject
) -> tuple[Response, RequestRecord]:
    sent = json.dumps(body).encode()
    while True:
        asked = _Asked(url)
        try:
            if body.get("stream"):
                raise ApiError(400, "stream: the answers of a batch are whole; leave it out", param="stream")
            check_size(len(sent), settings.max_body)
            response = await endpoints.answer(url, sent, asked.request())
        except Exception as error:
            answer = as_api_error(error)
            if answer.status == 503:
                raise EngineFailed(answer.message) from error
            if answer.status >= 500:
                log_failure(asked.record.request_id, error)
            response = answer.response()
        if response.status_code != 429:
            return response, asked.record
        await asyncio.sleep(_PAUSE)
