"""Images of requests, prepared apart from steps and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from ostinato.media.input import MediaInput
from ostinato.media.load import Sources
from ostinato.serve.http.errors import ApiError

T = TypeVar("T")

MOST_WAITING = 64
"""Requests that wait for their images. More are told to come later."""


class Seeing:
    """Loads and prepares the images of two requests at a time, on threads of its own: a large one takes some hundred
    megabytes while it is decoded, and one from elsewhere its time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "images")
        self._num_waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. ApiError 429 if too many wait."""
        if self._num_waiting >= MOST_WAITING:
            message = f"{self._num_waiting} requests wait for their images to be prepared already"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_waiting -= 1


def for_clients(media: MediaInput | None, max_images: int) -> MediaInput | None:
    """How a server takes in images: no client has a file of this machine read."""
    if media is None:
        return None
    return replace(media, sources=Sources(files=False, remote=media.sources.remote), max_images=max_images)
