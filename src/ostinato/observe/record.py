"""What is noted of one HTTP request, for its line in the log and its trace. Never what it says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.engine.process.stream import Stream


@dataclass(slots=True)
class RequestRecord:
    """From the arrival to the last byte of the answer; times in seconds of a monotonic clock."""

    request_id: str
    method: str
    path: str
    begun: float = field(default_factory=time.monotonic)
    ended: float | None = None
    status: int | None = None
    """Of the answer, or 499; None if it was ended before it began."""
    error: str | None = None
    """What ended a stream early, whose status had been sent."""
    streams: Sequence[Stream] = ()
    """What the engine computed for it."""

    def end(self) -> None:
        self.ended = time.monotonic()

    def figures(self) -> dict[str, Any]:
        """Tokens, moments (`scheduled`, `first_token`, `last_token`) and finish reasons, as far as there are any."""
        streams = self.streams
        if not streams:
            return {}
        times = [stream.times for stream in streams if stream.times is not None]
        cached = [stream.num_cached_tokens for stream in streams if stream.num_cached_tokens is not None]
        reasons = dict.fromkeys(reason for stream in streams for reason in stream.finish_reasons)
        return {
            "prompt_tokens": sum(len(stream.prompt_token_ids) for stream in streams),
            "completion_tokens": sum(stream.num_output_tokens for stream in streams),
            "cached_tokens": sum(cached),
            "scheduled": min((each.scheduled for each in times if each.scheduled is not None), default=None),
            "first_token": min((each.first_token for each in times if each.first_token is not None), default=None),
            "last_token": max((each.last_token for each in times if each.last_token is not None), default=None),
            "finish": ",".join(reasons) or None,
        }
