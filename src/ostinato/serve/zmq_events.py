"""Cache events over ZeroMQ in vLLM's form, which llm-d, Dynamo and others read; see docs/kv-events.md."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.engine.process.cache_event_hub import CacheEventHub, SlowReader, event_fields
from ostinato.errors import ConfigError, Remedy
from ostinato.files import is_directory
from ostinato.kv_cache.cache_events import BlockStored, CacheEvent, CheckpointRemoved, CheckpointStored
from ostinato.os_support import extra_command
from ostinato.serve.settings import KvEventsConfig

if TYPE_CHECKING:
    from zmq.asyncio import Socket

log = logging.getLogger("ostinato.serve")

END = (2**64 - 1).to_bytes(8, "big")
"""Number of the message that ends a replay: -1."""
MAX_REPLAY = 2**26
"""Bytes of past messages that are kept for replays."""
LINGER = 200
"""Milliseconds that subscribers have to take the last messages."""
RANK = 0
"""Data-parallel rank of every message: each server is an engine of its own."""
PAUSE = 0.5
"""Seconds before the events are read again after too many waited, and before a part that failed begins again."""


def check_installed() -> None:
    """Raise ConfigError unless pyzmq and msgpack are installed."""
    missing = [package for package, module in (("pyzmq", "zmq"), ("msgpack", "msgpack")) if find_spec(module) is None]
    if missing:
        message = f"kv_events_config needs {' and '.join(missing)}: {extra_command('zmq')}, or leave it out"
        raise ConfigError(message, [Remedy("kv_events_config", None)])


class ZmqPublisher:
    """Publisher of an engine's cache events: a PUB socket with numbered messages, and a ROUTER that replays them.

    A reader that asks for messages which are not kept any more gets one with all that is cached in their place. It is
    sent again, with the messages after it, as long as these are kept.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        """Open the sockets. ConfigError if that fails, or if a package is missing."""
        check_installed()
        import zmq
        from zmq.asyncio import Context

        self._config = config
        # Numbers grow over restarts: there is at most a message in 20 ms. A subscriber sees a gap then, and asks.
        self._number = int(time.time() * 1000)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._snapshot: tuple[int, bytes] | None = None
        """Message with all that was cached at a number."""
        self._block_size, self._medium = 0, ""
        self._tasks: list[asyncio.Task[None]] = []
        self._has_stopped = False
        self._replay: Socket | None = None
        self._context = Context()
        try:
            self._pub = self._socket(zmq.PUB, config.endpoint, binds=config.binds)
            if config.replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, config.replay_endpoint, binds=True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def start(self, hub: CacheEventHub, block_size: int, medium: str) -> None:
        """Publish the events of `hub` on the running loop, unless it was stopped before."""
        if self._has_stopped:
            return
        self._block_size, self._medium = block_size, medium
        parts = [partial(self._publish, hub)]
        if self._replay is not None:
            parts.append(partial(self._serve_replays, hub, self._replay))
        self._tasks = [asyncio.create_task(_go_on(part)) for part in parts]

    async def stop(self) -> None:
        """Close the sockets. What subscribers have not taken within a moment is lost."""
        self._has_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=LINGER)  # on the loop, whose socket it is
        await asyncio.to_thread(self._context.term)

    def _socket(self, kind: int, endpoint: str, *, binds: bool) -> Socket:
        import zmq

        folder = Path(endpoint.removeprefix("ipc://")).parent
        is_path = endpoint.startswith("ipc://") and not endpoint.startswith("ipc://@")  # a name without a file
        if is_path and binds and not is_directory(folder):
            raise ConfigError(f"kv_events_config: {endpoint} cannot be opened: there is no directory {folder}")
        socket = self._context.socket(kind)
        socket.set_hwm(self._config.hwm)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            message = f"kv_events_config: {endpoint} cannot be {'opened' if binds else 'reached'}: {error}"
            raise ConfigError(message) from None
        log.info("kv_events_config: %s is %s", endpoint, "opened" if binds else "connected to")
        return socket

    async def _publish(self, hub: CacheEventHub) -> None:
        while True:
            reader = hub.add_reader("the ZeroMQ publisher")
            if reader is None:
                await asyncio.sleep(PAUSE)  # as many clients of /kv_events as may be
                continue
            try:
                async for batch in reader.batches(None):
                    if batch is not None and (events := self._wanted(batch.events)):
                        self._number += 1
                        data = self._encode(batch.time, events)
                        self._keep(data)
                        # A subscriber that is too slow misses it, and sees that by the number.
                        await self._pub.send_multipart([self._config.topic.encode(), self._number_bytes(), data])
                        await asyncio.sleep(0)  # sending waits for nobody, and there may be many
                return
            except SlowReader:
                await asyncio.sleep(PAUSE)  # a new reader begins with all that is cached
            finally:
                hub.remove_reader(reader)

    async def _serve_replays(self, hub: CacheEventHub, socket: Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            client = frames[0]
            if len(frames) == 3 and len(frames[2]) == 8:
                for number, data in await self._replay_from(hub, int.from_bytes(frames[2], "big")):
                    await socket.send_multipart([client, b"", number.to_bytes(8, "big"), data])
                    await asyncio.sleep(0)
            else:
                log.debug("a replay was asked for with %d frames, not with a number in 8 bytes", len(frames))
            await socket.send_multipart([client, b"", END, b""])

    async def _replay_from(self, hub: CacheEventHub, first: int) -> Sequence[tuple[int, bytes]]:
        """Return the messages from number `first` on, or one with all that is cached and those after it."""
        if first > self._number:
            return []
        if self._has(first):
            return self._from(first)
        if self._snapshot is None or not self._has(self._snapshot[0] + 1):
            # The hub may be ahead of what was published; messages that are applied a second time change nothing.
            number, events = self._number, hub.replay()
            self._snapshot = number, await asyncio.to_thread(self._encode_all, events)
        return [self._snapshot, *self._from(self._snapshot[0] + 1)]

    def _has(self, first: int) -> bool:
        """Return whether all messages from number `first` on are kept, if there are any."""
        return first > self._number or (bool(self._kept) and self._kept[0][0] <= first)

    def _from(self, first: int) -> Sequence[tuple[int, bytes]]:
        """Return the messages from number `first` on; none if one of them is not kept any more."""
        return [message for message in self._kept if message[0] >= first] if self._has(first) else []

    def _encode_all(self, events: Iterable[CacheEvent]) -> bytes:
        return self._encode(time.time(), self._wanted(events))

    def _wanted(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        kinds = () if self._config.checkpoints else (CheckpointStored, CheckpointRemoved)
        return [event for event in events if not isinstance(event, kinds)]

    def _encode(self, when: float, events: Iterable[CacheEvent]) -> bytes:
        import msgpack

        plain = [event_fields(event, self._block_size, self._medium) for event in events]
        for fields in plain:
            if fields["type"] == BlockStored.__name__:
                fields["lora_name"] = None
        packed: bytes = msgpack.packb([when, plain, RANK])
        return packed

    def _number_bytes(self) -> bytes:
        return self._number.to_bytes(8, "big")

    def _keep(self, data: bytes) -> None:
        self._kept.append((self._number, data))
        self._kept_bytes += len(data)
        while len(self._kept) > self._config.buffer_steps or (self._kept_bytes > MAX_REPLAY and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])


async def _go_on(work: Callable[[], Awaitable[None]]) -> None:
    """Do a part of the publisher's work until it ends, and again after an error."""
    while True:
        try:
            return await work()
        except Exception:
            log.exception("the ZeroMQ publisher failed, and begins again")
            await asyncio.sleep(PAUSE)
