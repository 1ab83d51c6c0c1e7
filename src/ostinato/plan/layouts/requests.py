"""Lengths of requests, as an engine counted them or a user wrote them down."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ostinato.errors import ConfigError
from ostinato.plan.counts_json import json_object, read_counts, with_string_keys

FIELDS = ("prompt_tokens", "output_tokens", "cached_tokens")


@dataclass
class RequestLengths:
    """`prompt_tokens` and `output_tokens` are {length: requests}; of all prompts' tokens together, `cached_tokens` were
    found in the prefix cache."""

    prompt_tokens: Counter[int] = field(default_factory=Counter)
    output_tokens: Counter[int] = field(default_factory=Counter)
    cached_tokens: int = 0

    def count(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
        """Adds a request that has ended. One without output is not counted: it was aborted in its prompt."""
        if output_tokens:
            self.prompt_tokens[prompt_tokens] += 1
            self.output_tokens[output_tokens] += 1
            self.cached_tokens += cached_tokens

    @property
    def num_requests(self) -> int:
        return self.output_tokens.total()

    @property
    def mean_prompt(self) -> float:
        return mean(self.prompt_tokens)

    @property
    def mean_output(self) -> float:
        return mean(self.output_tokens)

    @property
    def output_beside(self) -> float:
        """Mean length of the outputs that are being computed at a moment: long ones are met longer, so each counts as
        often as it has tokens. E[n^2] / E[n]"""
        squares = sum(length * length * count for length, count in self.output_tokens.items())
        return squares / sum(length * count for length, count in self.output_tokens.items())

    @property
    def cached_share(self) -> float:
        """Of the prompts' tokens, those that need not be computed."""
        return self.cached_tokens / sum(length * count for length, count in self.prompt_tokens.items())

    def to_json(self) -> dict[str, Any]:
        """`{"prompt_tokens": {length: requests}, "output_tokens": {length: requests}, "cached_tokens": n}`, keys
        ascending, as strings."""
        return {
            "prompt_tokens": with_string_keys(self.prompt_tokens),
            "output_tokens": with_string_keys(self.output_tokens),
            "cached_tokens": self.cached_tokens,
        }

    @classmethod
    def from_json(cls, data: Any) -> RequestLengths:
        """What `to_json` gave; `cached_tokens` may be missing. ConfigError that names the field if the data has another
        form, or holds no request."""
        fields = json_object("requests", data)
        if not {"prompt_tokens", "output_tokens"} <= fields.keys() <= set(FIELDS):
            names = ", ".join(repr(name) for name in fields) or "nothing"
            raise ConfigError(f"requests has {names}; its fields are {', '.join(FIELDS)}, the last one if you like")
        prompts, outputs = (read_counts(f"requests.{name}", fields[name]) for name in FIELDS[:2])
        for name, counts in (("prompt_tokens", prompts), ("output_tokens", outputs)):
            if not counts.total():
                raise ConfigError(f'requests.{name} counts no request; write {{"128": 1}} for prompts of 128 tokens')
        cached, most = fields.get("cached_tokens", 0), sum(length * count for length, count in prompts.items())
        if not isinstance(cached, int) or isinstance(cached, bool) or not 0 <= cached <= most:
            raise ConfigError(f"requests.cached_tokens = {cached!r}: it is at most what all prompts have, {most:,}")
        return cls(prompts, outputs, cached)


def mean(counts: Counter[int]) -> float:
    """Of the keys, each as often as it was counted; not a number without any."""
    return sum(value * count for value, count in counts.items()) / counts.total() if counts.total() else math.nan
