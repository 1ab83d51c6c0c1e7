"""Deadlines: the latency that users expect of a server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ostinato.errors import ConfigError


@dataclass(frozen=True)
class Deadline:
    """Seconds to the first token, and mean seconds between tokens."""

    first_token: float
    between_tokens: float

    def is_met(self, first_token: float, between_tokens: float | None) -> bool:
        """Return whether a request with these times meets it; `between_tokens` is None without a second token."""
        return first_token <= self.first_token and (between_tokens is None or between_tokens <= self.between_tokens)


def parse_deadline(text: str) -> Deadline:
    """Parse `TTFT:ITL`, both in milliseconds; ConfigError for any other text."""
    try:
        first, between = (float(part) for part in text.split(":"))
    except ValueError:
        first = between = 0.0
    if not (0 < first < math.inf and 0 < between < math.inf):
        raise ConfigError(
            f"--deadline {text!r} should be two times in milliseconds, to the first token and between tokens, 500:50"
        )
    return Deadline(first / 1e3, between / 1e3)
