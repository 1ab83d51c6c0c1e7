"""Choice of a replica for one prompt: the one that computes it soonest, with hit and queue counted in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Literal

from ostinato.cache.eviction import EvictionCosts

MAX_LOAD_SHARE = 1.25
"""Largest ratio of a busy replica's work to the mean work. A busy replica above it gets no further request."""


class ChoiceReason(StrEnum):
    """Reason why a replica was chosen."""

    LONGEST_HIT = "longest_hit"
    """No other replica has more of the prompt cached, and this one has a part."""
    SHORTER_QUEUE = "shorter_queue"
    """Another replica has more of the prompt, but waiting in its queue would cost more time than that saves."""
    LESS_LOADED = "less_loaded"
    """Another replica would be sooner, but was given more than its share of the work."""
    NOTHING_CACHED = "nothing_cached"
    """No replica has any of the prompt cached."""
    TWO_CHOICES = "two_choices"
    """The replica had fewer requests than another one, both drawn at random."""


RoutingPolicy = Literal["prefix", "two_choices"]
"""Rule for choosing a replica.

`prefix` chooses by the cached prefix (`choose`). `two_choices` takes the less busy of two random replicas
(`less_busy_of_two`), and serves as a baseline.
"""


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Estimate of prompt times: the FLOPs of a prompt at a constant rate, in FLOPs per second."""

    costs: EvictionCosts
    flops_per_second: float

    @classmethod
    def of_step(cls, costs: EvictionCosts, num_tokens: int, seconds: float) -> PromptTimes:
        """Return times at the rate of a planned step, which computes a prompt of `num_tokens` tokens in `seconds`."""
        return cls(costs, costs.flops(0, num_tokens) / seconds)

    def seconds(self, hit: int, num_tokens: int) -> float:
        """Return the time of a prompt of `num_tokens` tokens, the first `hit` of them cached."""
        return self.costs.flops(hit, num_tokens) / self.flops_per_second


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may get the request. Times are in seconds."""

    name: str
    hit: int = 0
    """Tokens of the prompt that it has cached, up to a checkpoint."""
    queue: float = 0.0
    """Work that it has to do before the request."""
    recent: float = 0.0
    """Work that it was given lately."""
    is_own: bool = False
    """True if the request's session was here last."""
    num_requests: int = 0
    """Number of its unfinished requests."""


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """A replica's `name`, the `hit` expected there, in tokens, and the `reason`."""

    name: str
    hit: int
    reason: ChoiceReason


def choose_replica(candidates: Sequence[Candidate], num_tokens: int, times: PromptTimes) -> ReplicaChoice:
    """Choose the replica that finishes a prompt of `num_tokens` tokens first, after its queue.

    Among equals: the session's own, then the longest hit, the one given the least work, the first by name. The order of
    `candidates` does not matter; there is at least one.
    """
    assert candidates, "a request needs a replica to go to"
    mean = sum(each.recent for each in candidates) / len(candidates)
    fair = [each for each in candidates if each.queue <= 0 or each.recent <= MAX_LOAD_SHARE * mean] or list(candidates)

    def rank(each: Candidate) -> tuple[float, bool, int, float, str]:
        return each.queue + times.seconds(each.hit, num_tokens), not each.is_own, -each.hit, each.recent, each.name

    best, soonest = min(fair, key=rank), min(candidates, key=rank)
    longest = max(each.hit for each in candidates)
    if longest == 0:
        reason = ChoiceReason.NOTHING_CACHED
    elif best.hit == longest:
        reason = ChoiceReason.LONGEST_HIT
    else:
        reason = ChoiceReason.SHORTER_QUEUE if best is soonest else ChoiceReason.LESS_LOADED
    return ReplicaChoice(best.name, best.hit, reason)


def less_busy_of_two(candidates: Sequence[Candidate], draws: Random) -> ReplicaChoice:
    """Choose the replica with fewer requests of two that `draws` picks, whatever they have cached."""
    pair = draws.sample(list(candidates), min(2, len(candidates)))
    best = min(pair, key=lambda each: each.num_requests)
    return ReplicaChoice(best.name, best.hit, ChoiceReason.TWO_CHOICES)
