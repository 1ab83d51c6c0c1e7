"""An AsyncEngine over several replicas. Endpoints cannot tell it from one over a single engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ostinato.config import EngineConfig
from ostinato.engine.process.async_engine import AsyncEngine, EngineTransport
from ostinato.engine.process.engine_messages import StatsSnapshot
from ostinato.engine.process.request_streams import RequestStream
from ostinato.ops.seeds import seed_of_request
from ostinato.replicas.front import ReplicaSet
from ostinato.sampling.params import SamplingParams


class ReplicatedEngine(AsyncEngine):
    """Serves requests on the replicas of `replicas`. The number that may run is the sum over all of them.

    A request without a seed gets the one here that a single engine would give it, so that its tokens do not depend on
    the replica.
    """

    def __init__(self, process: EngineTransport, *args: Any, **more: Any) -> None:
        assert isinstance(process, ReplicaSet), "made by `over`"
        super().__init__(process, *args, **more)
        self.replicas = process
        self._seed = self.plan.settings.seed
        self._num_submitted = 1  # an engine's own first request, at its start, has number 0
        process.on_change = self._resize
        self._resize()

    @classmethod
    async def over(
        cls,
        replicas: ReplicaSet,
        config: EngineConfig,
        *,
        max_waiting: int = 1024,
        max_per_client: Callable[[int], int | None] = lambda max_num_seqs: None,
        seed: int | None = None,
    ) -> ReplicatedEngine:
        """Wait for the first replica, and return an engine over all of them.

        `config` is that of the replicas. `seed` replaces its seed: each of several fronts needs a different one. Raises
        the error of `ReplicaSet.fail`. See `AsyncEngine.start` for the rest.
        """
        try:
            await replicas.wait_started()
        except BaseException:
            await replicas.end()
            raise
        engine = await cls.connect(replicas, config, max_waiting, max_per_client)
        engine._seed = engine._seed if seed is None else seed
        return engine

    async def submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> RequestStream:
        params = params or self.default_params
        if params.seed is None:
            params = params.replace(seed=seed_of_request(self._seed, self._num_submitted))
        self._num_submitted += 1
        # A replica may be on another machine, whose monotonic clock counts from another moment.
        return await super().submit(prompt, params, **{**options, "arrival": None})

    async def observe(self) -> StatsSnapshot:
        """Return the counts of all replicas together, and those of migrations from draining replicas."""
        seen = await super().observe()
        return StatsSnapshot({**seen.stats, "drains": self.replicas.moving.counts.to_json()}, seen.meter)

    async def all_observations(self) -> dict[str, StatsSnapshot]:
        await self.latest_observation()
        return self.replicas.observations

    def _resize(self) -> None:
        self.queue_limit.max_running = self.replicas.max_running
