"""Placement of requests on replicas: the router's inputs are made here."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ostinato.engine.process.messages import EngineStarted, SubmitRequest
from ostinato.replicas.choice import RoutingPolicy
from ostinato.replicas.prompts import AnswerLengths, ConversationTracker, hash_prompt, predict_times
from ostinato.replicas.router import ReplicaRouter


class ReplicaPlacement:
    """Chooses replicas for requests by their prompts, their conversations, and the lengths of answers so far."""

    def __init__(self, started: EngineStarted, policy: RoutingPolicy, clock: Callable[[], float]) -> None:
        """Create the router from `started`, the first replica's report."""
        self.plan = started.plan
        times, seconds_per_output = predict_times(started.plan)
        self.router = ReplicaRouter(started.plan.settings.block_size, times, seconds_per_output, policy)
        self.answers = AnswerLengths()
        self._conversations, self._clock = ConversationTracker(), clock

    def choose(self, request_id: str, asked: SubmitRequest, among: Collection[str] | None = None) -> str | None:
        """Choose a replica of `among` (None: of all) for a request, and count the request as sent there.

        None if no such replica takes new requests.
        """
        router = self.router
        media = () if asked.media is None else asked.media.in_chain(asked.cache_salt)
        chain = hash_prompt(asked.prompt_token_ids, router.block_size, asked.cache_salt, media)
        expected = self.answers.expected(asked.params.max_tokens) * asked.params.n
        session = self._conversations.session(chain)
        now = self._clock()
        choice = router.route(request_id, chain, len(asked.prompt_token_ids), now, expected, session, among)
        return None if choice is None else choice.name
