"""A request at a backend, from its choice to its end."""

from __future__ import annotations

import re

from ostinato.engine.process.engine_messages import SubmitRequest
from ostinato.replicas.router import ReplicaChoice
from ostinato.serve.route.backends import Backend, BackendPool
from ostinato.serve.route.upstream import UpstreamReply

USAGE = 4096
"""Bytes at the end of an answer in which its usage stands."""
_USAGE = re.compile(rb'"usage"\s*:\s*(?:null|\{(?:[^{}]|\{[^{}]*\})*\})')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,9})\b')


class Exchange:
    """A request at a backend, counted from its choice to its end."""

    def __init__(
        self, pool: BackendPool, backend: Backend, request_id: str, choice: ReplicaChoice, prompt: SubmitRequest | None
    ) -> None:
        self._pool, self._request_id = pool, request_id
        self.backend, self.choice = backend, choice
        self._reply: UpstreamReply | None = None
        self._is_open, self._has_begun = True, False
        self._end = b""
        self._most_hit_tokens = 10**9 if prompt is None else len(prompt.prompt_token_ids)
        backend.num_running += 1
        backend.counts.num_sent += 1
        backend.counts.prompt_tokens += 0 if prompt is None else len(prompt.prompt_token_ids)

    def note_connection(self, reply: UpstreamReply) -> None:
        """Note the reply that is to come, so that a backend that is lost ends it."""
        self._reply = reply
        self.backend.replies.add(reply)

    def note_piece(self, piece: bytes) -> None:
        """Note a piece of the answer."""
        if not self._has_begun:
            self._has_begun = True
            self._pool.note_first_byte(self._request_id)
        self._end = (self._end + piece[-USAGE:])[-USAGE:]

    def note_answer(self, num_tokens: int) -> None:
        if self._pool.placement is not None:
            self._pool.placement.answers.note(num_tokens)

    def note_hit(self) -> None:
        """Count the cached tokens that the usage of an answer says, once it is whole, beside those expected."""
        usages = _USAGE.findall(self._end)  # those before the last may be what a client said, echoed
        cached = _CACHED.search(usages[-1]) if usages else None
        if cached is not None:
            self.backend.counts.expected_hit_tokens += self.choice.hit
            self.backend.counts.reported_hit_tokens += min(int(cached[1]), self._most_hit_tokens)

    def note_failure(self) -> None:
        self.backend.counts.num_failed += 1

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.backend.num_running -= 1
            if self._reply is not None:
                self.backend.replies.discard(self._reply)
            self._pool.note_end(self._request_id)
