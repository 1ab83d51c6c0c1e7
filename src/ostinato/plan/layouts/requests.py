"""Lengths of requests, as counted by an engine or given by a user."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ostinato.errors import ConfigError
from ostinato.plan.counts_json import json_object, read_counts, with_string_keys

LENGTH_FIELDS = ("prompt_tokens", "output_tokens", "cached_tokens")


@dataclass
class RequestLengths:
    """Counts of request lengths.

    `prompt_tokens` and `output_tokens` are {length: requests}; `cached_tokens` of all prompts' tokens were found in the
    prefix cache.
    """

    prompt_tokens: Counter[int] = field(default_factory=Counter)
    output_tokens: Counter[int] = field(default_factory=Counter)
    cached_tokens: int = 0

    def count(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
        """Add a request that has ended. One without output is not counted: it was aborted in its prompt."""
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
        """Mean length of the outputs that are being computed at a moment: E[n^2] / E[n].

        Long outputs are in more steps, so each counts as often as it has tokens.
        """
        squares = sum(length * length * count for length, count in self.output_tokens.items())
        return squares / sum(length * count for length, count in self.output_tokens.items())

    @property
    def cached_share(self) -> float:
        """Share of the prompts' tokens that need not be computed."""
        return self.cached_tokens / sum(length * count for length, count in self.prompt_tokens.items())

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain data, keys ascending, as strings.

        The form is `{"prompt_tokens": {length: requests}, "output_tokens": {length: requests}, "cached_tokens": n}`.
        """
        return {
            "prompt_tokens": with_string_keys(self.prompt_tokens),
            "output_tokens": with_string_keys(self.output_tokens),
            "cached_tokens": self.cached_tokens,
        }

    @classmethod
    def from_json(cls, data: Any) -> RequestLengths:
        """Return the counts from the result of `to_json`; `cached_tokens` may be missing.

        ConfigError that names the field if the data has another form, or contains no request.
        """
        fields = json_object("requests", data)
        if not {"prompt_tokens", "output_tokens"} <= fields.keys() <= set(LENGTH_FIELDS):
            names = ", ".join(repr(name) for name in fields) or "nothing"
            raise ConfigError(f"requests has {names}; its fields are {', '.join(LENGTH_FIELDS)}, the last one if you like")
        prompts, outputs = (read_counts(f"requests.{name}", fields[name]) for name in LENGTH_FIELDS[:2])
        for name, counts in (("prompt_tokens", prompts), ("output_tokens", outputs)):
            if not counts.total():
                raise ConfigError(f'requests.{name} counts no request; write {{"128": 1}} for prompts of 128 tokens')
        cached, most = fields.get("cached_tokens", 0), sum(length * count for length, count in prompts.items())
        if not isinstance(cached, int) or isinstance(cached, bool) or not 0 <= cached <= most:
            raise ConfigError(f"requests.cached_tokens = {cached!r}: it is at most what all prompts have, {most:,}")
        return cls(prompts, outputs, cached)


def mean(counts: Counter[int]) -> float:
    """Return the mean of the keys, each weighted by its count; NaN without any."""
    return sum(value * count for value, count in counts.items()) / counts.total() if counts.total() else math.nan
