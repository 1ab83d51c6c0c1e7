"""Which replica gets a request: what the router is told of it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ostinato.engine.process.messages import Started, Submit
from ostinato.replicas.choice import Policy
from ostinato.replicas.prompts import AnswerLengths, Conversations, chain_of, times_of
from ostinato.replicas.router import Router


class Placement:
    """Chooses replicas for requests by their prompts, the conversations that these go on with, and how long answers
    have been."""

    def __init__(self, started: Started, policy: Policy, clock: Callable[[], float]) -> None:
        """`started` is what the first replica has reported."""
        self.plan = started.plan
        times, seconds_per_output = times_of(started.plan)
        self.router = Router(started.plan.settings.block_size, times, seconds_per_output, policy)
        self.answers = AnswerLengths()
        self._conversations, self._clock = Conversations(), clock

    def choose(self, request_id: str, asked: Submit, among: Collection[str] | None = None) -> str | None:
        """The replica for a request, which counts as sent there; None if none takes new ones. `among`: those that it
        may be; None for all."""
        router = self.router
        media = () if asked.media is None else asked.media.in_chain(asked.cache_salt)
        chain = chain_of(asked.prompt_token_ids, router.block_size, asked.cache_salt, media)
        expected = self.answers.expected(asked.params.max_tokens) * asked.params.n
        session = self._conversations.session(chain)
        now = self._clock()
        choice = router.route(request_id, chain, len(asked.prompt_token_ids), now, expected, session, among)
        return None if choice is None else choice.name
