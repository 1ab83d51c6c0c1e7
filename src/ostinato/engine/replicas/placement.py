"""Placement of requests on replicas: the router's inputs are made here."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ostinato.engine.process.messages import Started, Submit
from ostinato.replicas.choice import Policy
from ostinato.replicas.prompts import AnswerLengths, Conversations, chain_of, times_of
from ostinato.replicas.router import Router


class Placement:
    """Chooses replicas for requests by their prompts, their conversations, and the lengths of answers so far."""

    def __init__(self, started: Started, policy: Policy, clock: Callable[[], float]) -> None:
        """Create the router from `started`, the first replica's report."""
        self.plan = started.plan
        times, seconds_per_output = times_of(started.plan)
        self.router = Router(started.plan.settings.block_size, times, seconds_per_output, policy)
        self.answers = AnswerLengths()
        self._conversations, self._clock = Conversations(), clock

    def choose(self, request_id: str, asked: Submit, among: Collection[str] | None = None) -> str | None:
        """Choose a replica of `among` (None: of all) for a request, and count the request as sent there.

        None if no such replica takes new requests.
        """
        router = self.router
        media = () if asked.media is None else asked.media.in_chain(asked.cache_salt)
        chain = chain_of(asked.prompt_token_ids, router.block_size, asked.cache_salt, media)
        expected = self.answers.expected(asked.params.max_tokens) * asked.params.n
        session = self._conversations.session(chain)
        now = self._clock()
        choice = router.route(request_id, chain, len(asked.prompt_token_ids), now, expected, session, among)
        return None if choice is None else choice.name
