"""Placement of requests on replicas: the router's inputs are made here.

They are the block hashes of a request's prompt, its conversation, and the expected answer length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from ostinato.engine.process.engine_messages import SubmitRequest
from ostinato.kv_cache.eviction import EvictionCosts
from ostinato.kv_cache.prefix_index import BlockHashes, MediaSpan, whole_prompt_span
from ostinato.plan.plan import Plan
from ostinato.replicas.router import MAX_SESSIONS, PromptTimes, ReplicaChoice, ReplicaRouter, RoutingPolicy

FADING = 0.02
"""Weight of one answer's length in the running mean."""


def predict_times(plan: Plan) -> tuple[PromptTimes, float]:
    """Return the plan's predictions of prompt times, and of a replica's seconds per token of an answer.

    Without predictions, FLOPs take the place of both: seconds are then those of a machine with one FLOP per second.
    """
    flops = plan.state_cache.prefill_flops
    costs = EvictionCosts(
        flops.per_token, flops.per_pair, plan.memory.kv_block + plan.memory.window_block, plan.memory.state_slot
    )
    prompts = [step for step in plan.prediction.steps if step.tokens_per_row > 1]
    decodes = [step for step in plan.prediction.steps if step.tokens_per_row == 1]
    if not prompts or not decodes:
        return PromptTimes(costs, 1.0), costs.flops(0, 1)
    fullest = max(decodes, key=lambda step: step.rows)
    times = PromptTimes.of_step(costs, prompts[0].tokens_per_row, prompts[0].seconds)
    return times, fullest.seconds / fullest.rows


def hash_prompt(
    token_ids: Sequence[int], block_size: int, salt: str | None, media: Iterable[MediaSpan] = ()
) -> BlockHashes:
    """Return the block hashes of a prompt's full blocks, as in the replicas' index."""
    block_hashes = BlockHashes(block_size, salt, tuple(media))
    block_hashes.extend(lambda start, end: tuple(token_ids[start:end]), len(token_ids))
    return block_hashes


class ConversationTracker:
    """Recognizes conversations: the prompt of a turn begins with the prompt of the turn before.

    Clients need not name them. A block hash includes the salt, so conversations of two salts differ.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._of_key: OrderedDict[int, str] = OrderedDict()
        self._num_made = 0

    def session(self, block_hashes: BlockHashes) -> str:
        """Return the conversation whose last prompt begins this one, or a new one; this one is now its last."""
        known_key = next((key for key in reversed(block_hashes.keys) if key in self._of_key), None)
        if known_key is None:
            self._num_made += 1
            session = f"conversation-{self._num_made}"
        elif known_key == block_hashes.keys[-1]:
            session = self._of_key[known_key]
        else:
            session = self._of_key.pop(known_key)
        if block_hashes.keys:
            self._of_key[block_hashes.keys[-1]] = session
            self._of_key.move_to_end(block_hashes.keys[-1])
            if len(self._of_key) > self._max_sessions:
                self._of_key.popitem(last=False)
        return session


class AnswerLengths:
    """Mean length of answers, in which recent ones count more."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def note(self, num_tokens: int) -> None:
        """Count an answer that has ended."""
        self._mean = num_tokens if self._mean is None else self._mean + FADING * (num_tokens - self._mean)

    def expected(self, max_tokens: int | None) -> int:
        """Return the expected length of an answer that may have `max_tokens` tokens; 0 before any has ended."""
        mean = round(self._mean or 0)
        return mean if max_tokens is None else min(mean, max_tokens)


class ReplicaPlacement:
    """Chooses replicas for requests by their prompts, their conversations, and the lengths of answers so far."""

    def __init__(self, plan: Plan, policy: RoutingPolicy, clock: Callable[[], float]) -> None:
        """Create the router from the first replica's plan."""
        self.plan = plan
        times, seconds_per_output = predict_times(plan)
        self.router = ReplicaRouter(plan.settings.block_size, times, seconds_per_output, policy)
        self.answers = AnswerLengths()
        self._conversations, self._clock = ConversationTracker(), clock

    def choose(
        self, request_id: str, request: SubmitRequest, among: Collection[str] | None = None
    ) -> ReplicaChoice | None:
        """Choose a replica of `among` (None: all) and count the request as sent there; None if none takes requests."""
        router = self.router
        media = [] if request.media is None else request.media.in_chain(request.cache_salt)
        if self.plan.model.is_prefix_lm:
            media = [whole_prompt_span(request.prompt_token_ids)]
        block_hashes = hash_prompt(request.prompt_token_ids, router.block_size, request.cache_salt, media)
        expected = self.answers.expected(request.params.max_tokens) * request.params.n
        session = self._conversations.session(block_hashes)
        now = self._clock()
        return router.route(request_id, block_hashes, len(request.prompt_token_ids), now, expected, session, among)
