"""A subscriber of cache events over ZeroMQ, as a router would have one."""

from __future__ import annotations

from collections import Counter

import msgpack
import zmq
from zmq.asyncio import Context

from ostinato.kv_cache.cache_events import CacheContents
from tests.support.cache_events import event_of


class Subscriber:
    """Follows a publisher; what it misses, it sees by the numbers, and asks for."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.contents = CacheContents()
        self.kinds = Counter[str]()
        self.num_gaps = self.num_replayed = 0
        self.last = self._last_sent = -1
        self._context = Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint

    async def receive(self, *, loses: bool = False) -> None:
        """Take one message, or lose it."""
        _, number, data = await self._sub.recv_multipart()
        if loses:
            return
        seq = int.from_bytes(number, "big")
        if seq <= self._last_sent:  # the publisher was started anew, on a clock that was set back
            self.last, self.contents = -1, CacheContents()
        self._last_sent = seq
        if seq > self.last + 1:
            self.num_gaps += 1
            await self.replay()
        if seq == self.last + 1:
            self._apply(seq, data)

    async def replay(self) -> None:
        """Ask for all messages that are missing."""
        with self._context.socket(zmq.DEALER) as socket:  # a REQ would take one message of the answer
            socket.linger = 0
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
            while True:
                _, number, data = await socket.recv_multipart()
                if not data:
                    assert number == b"\xff" * 8
                    return
                self.num_replayed += 1
                self._apply(int.from_bytes(number, "big"), data)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _apply(self, seq: int, data: bytes) -> None:
        _, events, _ = msgpack.unpackb(data)
        for fields in events:
            self.kinds[fields["type"]] += 1
            self.contents.apply(event_of(fields))
        self.last = seq
