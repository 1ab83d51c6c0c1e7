"""`GET /kv_events`: what enters and leaves the prefix cache, as server-sent events for routers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import Response

from ostinato.engine.process.cache_event_hub import (
    MAX_READERS,
    MAX_WAITING,
    CacheEventBatch,
    CacheReader,
    SlowReader,
    event_fields,
    medium_of,
)
from ostinato.json_io import JsonObject
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter
from ostinato.serve.http.streaming import EVENTS, EventStream

KEEP_ALIVE = 10.0
"""Seconds without news after which a comment is sent, so that both sides notice a connection that is gone."""


def kv_events_router(lifecycle: Lifecycle) -> ApiRouter:
    router = ApiRouter()

    @router.get("/kv_events", response_model=None)
    async def kv_events(request: Request) -> Response:
        """Return the changes of the prefix cache in vLLM's event vocabulary, after a replay of what is cached.

        403 unless the setting `kv_events` is on. The stream ends when the server drains.
        """
        if lifecycle.settings.kv_events == "off":
            message = (
                "cache events are sent only by a server that is started with --kv-events hashes; with tokens, they "
                "hold the text of all clients"
            )
            raise ApiError(403, message, code="kv_events")
        if request.state.record.method == "HEAD":
            return Response(media_type=EVENTS)  # a stream without an end has no other head
        engine = lifecycle.engine
        hub = engine.cache_events
        assert hub is not None, "made before the server is ready"
        name = f"request {request.state.request_id} of {request.state.record.client}"
        reader = hub.add_reader(name)
        if reader is None:
            message = f"there are {MAX_READERS} readers of cache events, and no more are served"
            raise ApiError(429, message, code="too_many_readers", headers={"Retry-After": "5"})
        settings = engine.plan.settings
        events = _events(reader, settings.block_size, medium_of(settings.device))
        return EventStream(events, lambda: hub.remove_reader(reader))

    return router


async def _events(reader: CacheReader, block_size: int, medium: str) -> AsyncIterator[bytes]:
    try:
        async for batch in reader.batches(KEEP_ALIVE):
            yield b": \n\n" if batch is None else encode_batch(batch, block_size, medium)
    except SlowReader:
        message = f"this reader is too slow: {MAX_WAITING} blocks and checkpoints waited for it; connect again"
        raise ApiError(429, message, code="slow_reader") from None


def encode_batch(batch: CacheEventBatch, block_size: int, medium: str) -> bytes:
    """Return a batch as a server-sent event, whose id is the batch's number."""
    body: JsonObject = {
        "seq": batch.number,
        "ts": batch.time,
        "replay_left": batch.replay_left,
        "events": [event_fields(event, block_size, medium) for event in batch.events],
    }
    return b"id: %d\ndata: %b\n\n" % (batch.number, json.dumps(body, separators=(",", ":")).encode())
