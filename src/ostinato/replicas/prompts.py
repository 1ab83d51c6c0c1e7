"""What the router is asked about a request: its prompt's chain, its conversation, and the answer to be expected."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ostinato.cache.chain import Chain, MediaSpan
from ostinato.cache.eviction import EvictionCosts
from ostinato.plan.plan import Plan
from ostinato.replicas.choice import PromptTimes
from ostinato.replicas.router import MOST_SESSIONS

FADING = 0.02
"""What the length of one answer counts in the mean of all."""


def times_of(plan: Plan) -> tuple[PromptTimes, float]:
    """How long prompts take, and what a token of an answer takes of a replica in seconds, as the plan predicts both.

    Where it predicts nothing, FLOPs stand for both: seconds are then of a machine with one FLOP per second.
    """
    flops = plan.state_cache.prefill_flops
    costs = EvictionCosts(
        flops.per_token, flops.per_pair, plan.memory.kv_block + plan.memory.pane, plan.memory.state_slot
    )
    prompts = [step for step in plan.prediction.steps if step.tokens_per_row > 1]
    decodes = [step for step in plan.prediction.steps if step.tokens_per_row == 1]
    if not prompts or not decodes:
        return PromptTimes(costs, 1.0), costs.flops(0, 1)
    fullest = max(decodes, key=lambda step: step.rows)
    times = PromptTimes.of_step(costs, prompts[0].tokens_per_row, prompts[0].seconds)
    return times, fullest.seconds / fullest.rows


def chain_of(token_ids: Sequence[int], block_size: int, salt: str | None, media: Iterable[MediaSpan] = ()) -> Chain:
    """A prompt's full blocks, as the replicas' index has them."""
    chain = Chain(block_size, salt, tuple(media))
    chain.extend(lambda start, end: tuple(token_ids[start:end]), len(token_ids))
    return chain


class Conversations:
    """Tells which prompt goes on from which: a turn of a conversation begins with the turn before it.

    No client has to say so. A chain's hash holds the salt, so conversations of two salts are two.
    """

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._of_key: OrderedDict[int, str] = OrderedDict()
        self._num_made = 0

    def session(self, chain: Chain) -> str:
        """The conversation whose last prompt this one begins with, or a new one; the prompt is its last from now on."""
        found = next((key for key in reversed(chain.keys) if key in self._of_key), None)
        if found is None:
            self._num_made += 1
            session = f"conversation-{self._num_made}"
        elif found == chain.keys[-1]:
            session = self._of_key[found]
        else:
            session = self._of_key.pop(found)
        if chain.keys:
            self._of_key[chain.keys[-1]] = session
            self._of_key.move_to_end(chain.keys[-1])
            if len(self._of_key) > self._most:
                self._of_key.popitem(last=False)
        return session


class AnswerLengths:
    """The mean length of answers, those of lately counting more."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def note(self, num_tokens: int) -> None:
        """An answer has ended."""
        self._mean = num_tokens if self._mean is None else self._mean + FADING * (num_tokens - self._mean)

    def expected(self, most: int | None) -> int:
        """Of an answer that may have `most` tokens; 0 before any has ended."""
        mean = round(self._mean or 0)
        return mean if most is None else min(mean, most)
