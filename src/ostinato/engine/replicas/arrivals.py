"""Requests that a replica imports from another one, which keeps their bytes until they are here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ostinato.engine.process.failures import picklable_error

FETCH_SECONDS = 30.0
"""Seconds in which the other replica has to give each piece."""

Fetch = Callable[[str, str, int], Awaitable[bytes]]
"""Function (replica, request, offset) -> some bytes of the export that the replica keeps, from the offset on."""


class MoveTarget:
    """Fetches requests one after the other, so that the bytes of only one are held until the engine has imported it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def fetch(
        self,
        source: str,
        request_id: str,
        size: int,
        is_wanted: Callable[[], bool],
        take: Callable[[bytes], None],
        refuse: Callable[[Exception], None],
    ) -> None:
        """Call `take` with the bytes of a request, or `refuse` with the error that prevents it.

        Neither is called once the request is not wanted any more.
        """

        async def run() -> None:
            try:
                async with self._turn:
                    exported = await self._whole(source, request_id, size, is_wanted)
            except Exception as error:
                if is_wanted():
                    refuse(picklable_error(error))
            else:
                if is_wanted():
                    take(exported)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        """Cancel all fetches."""
        for task in self._tasks:
            task.cancel()

    async def _whole(self, source: str, request_id: str, size: int, is_wanted: Callable[[], bool]) -> bytes:
        found = bytearray()
        while len(found) < size and is_wanted():
            piece = await asyncio.wait_for(self._fetch(source, request_id, len(found)), FETCH_SECONDS)
            if not piece:
                raise EOFError(f"replica {source} has {len(found)} bytes of a request, and said {size}")
            found += piece
        return bytes(found)
