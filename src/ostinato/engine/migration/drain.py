"""Migration of all requests of an engine, one after the other, without an end for the readers of their streams."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from ostinato.engine.process.request_streams import RequestStream
from ostinato.errors import RequestError

_GLANCE = 0.005
"""Seconds between looks whether the entering requests have begun."""

log = logging.getLogger("ostinato.engine")


class MigratableEngine(Protocol):
    """Part of an `AsyncEngine` that migration needs, on either side."""

    def streams(self) -> list[RequestStream]: ...
    def is_pending(self, stream: RequestStream) -> bool: ...
    async def export(self, request_id: str) -> bytes | None: ...
    async def import_(self, exported: bytes, *, stream: RequestStream | None = None) -> RequestStream: ...
    async def take_back(self, exported: bytes, stream: RequestStream) -> None: ...


@dataclass(frozen=True)
class DrainResult:
    """Numbers of an engine's requests that were moved and kept, besides those that ended meanwhile."""

    moved: int
    kept: int
    """Requests that the other engine refused, and that are computed to their end where they were."""
    num_bytes: int


async def drain(engine: MigratableEngine, to: MigratableEngine | None) -> DrainResult:
    """Migrate all requests of `engine`; see `AsyncEngine.drain`."""
    num_moved, num_stayed = 0, 0
    num_bytes = 0
    seen: set[RequestStream] = set()
    while waiting := [stream for stream in engine.streams() if stream not in seen]:
        begun = [stream for stream in waiting if not engine.is_pending(stream)]
        for stream in begun:
            seen.add(stream)
            size, is_kept = await (_export(engine, stream) if to is None else _move(engine, stream, to))
            num_moved, num_stayed, num_bytes = num_moved + (size > 0), num_stayed + is_kept, num_bytes + size
        if not begun:
            await asyncio.sleep(_GLANCE)
    return DrainResult(num_moved, num_stayed, num_bytes)


async def _export(engine: MigratableEngine, stream: RequestStream) -> tuple[int, bool]:
    """Export a request, and return (bytes, False) once its stream has ended; 0 bytes if it has ended by itself."""
    exported = None if stream.ended else await engine.export(stream.request_id)
    await stream.wait_ended()
    return len(exported or b""), False


async def _move(engine: MigratableEngine, stream: RequestStream, to: MigratableEngine) -> tuple[int, bool]:
    """Move a request to another engine, and return (bytes that the engine imported, whether the request is kept)."""
    if stream.ended:  # it ended while others were moved
        return 0, False
    stream.handover = asyncio.get_running_loop().create_future()
    try:
        exported = await engine.export(stream.request_id)
        # The other engine's deltas must not come before the last ones of this engine.
        passes = await stream.handover
    finally:
        stream.handover = None
    if not passes or exported is None:
        return 0, False
    try:
        await to.import_(exported, stream=stream)
    except Exception as refused:
        if not isinstance(refused, RequestError):
            log.error("a request could not be moved to another engine", exc_info=refused)
        try:
            await engine.take_back(exported, stream)
        except Exception as error:
            stream.end(error)
            raise
        return 0, True
    return len(exported), False
