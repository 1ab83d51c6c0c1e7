"""The replica's side: one engine in a separate process, and the fronts that it computes for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from ostinato.config import EngineConfig
from ostinato.engine.process.engine_messages import (
    AbortRequest,
    CompileGuide,
    DeltasHandled,
    EngineReply,
    EngineStart,
    MakeEngine,
    OutputDeltas,
    Query,
    QueryKind,
    StatsSnapshot,
    SubmitRequest,
)
from ostinato.engine.process.engine_process import EngineProcess, make_engine
from ostinato.engine.process.output_deltas import OutputDelta
from ostinato.engine.process.pending_calls import Heartbeat, PendingCalls
from ostinato.errors import EngineFailed
from ostinato.kv_cache.offload.save_restore import SAVE_PATIENCE
from ostinato.observe.counts import ProgressFn, no_progress
from ostinato.replicas.host_migration import HostMigration
from ostinato.replicas.replica_messages import (
    AcceptMove,
    CancelMove,
    CommitMove,
    DrainAcknowledged,
    FrontConnection,
    PrepareMove,
    ReplicaDraining,
    ReplicaReady,
    ReplicaStatus,
    ResendIndex,
)

STATUS_SECONDS = 1.0
"""Seconds between two looks at the engine's counts and index."""
FRONT_PATIENCE = 30.0
"""Seconds after which a silent front counts as gone. Each front sends something every few seconds."""
SHORT_OF_TIME = 0.8
"""Fraction of its time after which a draining replica also moves requests to replicas where they have to wait."""


class ReplicaHost:
    """Passes messages between several fronts and one engine. Used on one event loop.

    Request ids are local to a front. In the engine they begin with the front's name.
    """

    def __init__(self, process: EngineProcess, engine_timeout: float, send_cost: float = 0.0) -> None:
        """Serve the engine in `process`.

        `engine_timeout` is the number of seconds after which an engine that does not answer counts as stalled.
        `send_cost` is the processor time in seconds for sending a delta, besides the time that is measured here.
        """
        self.failure: Exception | None = None
        """Error that ended the engine, if one did."""
        self.on_failure: Callable[[], None] = lambda: None
        self.last: StatsSnapshot | None = None
        """The engine's counts at the last look."""
        self._process, self._send_cost = process, send_cost
        self._loop = asyncio.get_running_loop()
        self._fronts: dict[str, FrontConnection] = {}
        self._calls = PendingCalls(process.send)
        self._keys: frozenset[int] = frozenset()
        self._front_cost = 0.0
        self._draining = self._has_ended = False
        self._changed = asyncio.Event()
        """Event for a request that has ended, or a front that has parted."""
        self.moves = HostMigration(process.send, self._fronts, self._changed.set)
        process.on_message, process.on_end = self._take_from_engine, self._fail
        self._heartbeat = Heartbeat(self._observe, engine_timeout, lambda is_stalled: None)
        self._telling = self._loop.create_task(self._tell())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        log_level: int,
        engine_timeout: float,
        *,
        progress: ProgressFn = no_progress,
        make: MakeEngine = make_engine,
        send_cost: float = 0.0,
    ) -> ReplicaHost:
        """Load the model in a separate process. Raises the errors of `AsyncEngine.start`."""
        if config.capture == "auto":
            config = config.with_settings(capture="startup")
        return cls(await EngineProcess.start(EngineStart(config, make, log_level), progress), engine_timeout, send_cost)

    @property
    def num_unfinished(self) -> int:
        """Number of requests of all fronts that have not ended, and have not moved to another replica."""
        return sum(len(front.requests) for front in self._fronts.values()) + self.moves.departures.num_kept

    @property
    def is_stalled(self) -> bool:
        """True if the engine does not answer."""
        return self._heartbeat.is_stalled

    @property
    def pid(self) -> int:
        """Id of the engine's process."""
        return self._process.pid

    def load(self) -> dict[str, float]:
        """Return how full the engine is, as fractions; 0 before the first look.

        `requests` is running and waiting outputs by those that may run at once, and may be above 1. `slots` is the used
        fraction of blocks, of window blocks or of slots, whichever is largest.
        """
        if self.last is None:
            return {"requests": 0.0, "slots": 0.0}
        stats, cache = self.last.stats, self.last.stats["cache"]
        kinds = [kind for kind in ("blocks", "window_blocks", "slots") if cache[f"{kind}_total"]]
        shares = [cache[f"{kind}_used"] / cache[f"{kind}_total"] for kind in kinds]
        max_num_seqs = self._process.started.plan.settings.max_num_seqs
        return {"requests": (stats["running"] + stats["waiting"]) / max_num_seqs, "slots": max(shares, default=0.0)}

    async def messages(self, name: str) -> AsyncIterator[list[Any]]:
        """Yield the messages to the front `name` as they come, from Hello on.

        When this is left, its requests are dropped.

        Raises the error that ended the engine; ends with `end`.
        """
        assert name not in self._fronts, "a front has one connection"
        front = self._fronts[name] = FrontConnection(last_message_at=self._loop.time())
        front.put(ReplicaReady(self._process.started))
        if self._draining:
            front.put(ReplicaDraining())
        elif self.last is not None:
            front.put(ReplicaStatus(self.last, front.publisher.changes(self._keys)))
        try:
            while True:
                await front.has_messages.wait()
                front.has_messages.clear()
                waiting, front.waiting = front.waiting, []
                if waiting:
                    yield waiting
                if self.failure is not None:
                    raise EngineFailed(str(self.failure))
                if self._has_ended or front.is_gone:
                    return
        finally:
            del self._fronts[name]
            for request_id in front.requests:
                self._process.send(AbortRequest(f"{name}/{request_id}"))
            self.moves.departures.drop_all(f"{name}/")
            self._changed.set()

    def take(self, name: str, messages: Iterable[object]) -> None:
        """Handle messages of the front `name`. Those of a front that is gone are dropped."""
        front = self._fronts.get(name)
        if front is None:
            return
        front.last_message_at = self._loop.time()
        for message in messages:
            match message:
                case SubmitRequest(request_id):
                    front.requests.add(request_id)
                    self._process.send(message._replace(request_id=f"{name}/{request_id}"))
                case AbortRequest(request_id):
                    front.requests.discard(request_id)
                    self._process.send(AbortRequest(f"{name}/{request_id}"))
                    self.moves.drop(f"{name}/{request_id}")
                    self._changed.set()
                case PrepareMove() | CommitMove() | CancelMove() | AcceptMove():
                    self.moves.take(name, front, message)
                case CompileGuide(call_id) | Query(call_id):
                    self._process.send(message._replace(call_id=f"{name}/{call_id}"))
                case DeltasHandled(cost):
                    self._front_cost = cost
                case ResendIndex():
                    front.put(ReplicaStatus(self._known(), front.publisher.changes(self._keys, whole=True)))
                case DrainAcknowledged():
                    front.acknowledged_drain = True
                    self._changed.set()
                case _:
                    raise TypeError(f"no such message: {message!r}")

    def leave(self, name: str) -> None:
        """End the connection of the front `name`, which is gone, and drop its requests."""
        front = self._fronts.get(name)
        if front is not None:
            front.is_gone = True
            front.has_messages.set()

    async def drain(self, patience: float) -> None:
        """Have the fronts send no new requests and move those that they have, and wait until the replica is empty.

        Waits at most `patience` seconds. When most of them are over, the fronts are warned.
        """
        self._draining = True
        begin = self._loop.time()
        for until, is_short_of_time in ((begin + SHORT_OF_TIME * patience, False), (begin + patience, True)):
            for front in self._fronts.values():
                front.put(ReplicaDraining(is_short_of_time))
            if await self._empty(until):
                return

    async def _empty(self, until: float) -> bool:
        """Return whether all requests end and all fronts part before `until`, or the engine fails."""
        while self.failure is None and (
            self.num_unfinished or any(not front.acknowledged_drain for front in self._fronts.values())
        ):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), until - self._loop.time())
            except TimeoutError:
                return False
        return True

    async def end(self) -> None:
        """End the engine's process, and all connections. Save its prefix cache to files, if the plan says so."""
        self._telling.cancel()
        self._heartbeat.stop()
        self.moves.end()
        if self._process.started.plan.cache_files is not None and self.failure is None:
            try:
                await asyncio.wait_for(self._ask("close"), SAVE_PATIENCE)
            except Exception:  # the process ends in any case
                self._has_ended = True
        self._has_ended = True
        for front in self._fronts.values():
            front.has_messages.set()
        await self._process.end()

    async def _tell(self) -> None:
        while True:
            keys = await self._ask("hits")
            if keys is not None:
                self._keys = keys
            observation = self.last = await self._observe()
            self._heartbeat.record(observation)
            for name, front in self._fronts.items():
                front.put(ReplicaStatus(observation, front.publisher.changes(self._keys)))
                if self._loop.time() > front.last_message_at + FRONT_PATIENCE:
                    self.leave(name)
            await asyncio.sleep(STATUS_SECONDS)

    def _known(self) -> StatsSnapshot:
        assert self.last is not None, "a front that has missed a message was reported"
        return self.last

    async def _observe(self) -> StatsSnapshot:
        return await self._ask("observe")

    def _ask(self, question: QueryKind) -> asyncio.Future[Any]:
        answer = self._calls.ask(question)
        if self.failure is not None:
            self._calls.fail_all(EngineFailed(str(self.failure)))
        return answer

    def _take_from_engine(self, message: object) -> None:
        match message:
            case OutputDeltas(deltas):
                self._hand_over(deltas)
            case _ if self.moves.take_from_engine(message):
                pass
            case EngineReply(call_id, result, error):
                name, is_of_front, request_id = call_id.partition("/")
                if not is_of_front:
                    self._calls.resolve(call_id, result, error)
                elif (front := self._fronts.get(name)) is not None:
                    if error is not None:
                        front.requests.discard(request_id)  # a refused request, or no request
                        self._changed.set()
                    front.put(message._replace(call_id=request_id))

    def _hand_over(self, deltas: Iterable[OutputDelta]) -> None:
        begin = time.thread_time()
        by_front: dict[str, list[OutputDelta]] = {}
        for delta in deltas:
            name, _, request_id = delta.request_id.partition("/")
            front = self._fronts.get(name)
            if front is None or request_id not in front.requests:
                continue  # dropped meanwhile
            by_front.setdefault(name, []).append(delta._replace(request_id=request_id))
            if delta.output is not None:
                front.requests.discard(request_id)
                self._changed.set()
        for name, of_one in by_front.items():
            self._fronts[name].put(OutputDeltas(of_one))
        # No front reports the arrival of these deltas, so the fronts' last cost is used.
        cost = time.thread_time() - begin + len(by_front) * self._send_cost + self._front_cost
        self._process.send(DeltasHandled(cost))

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._telling.cancel()
        self._heartbeat.stop()
        self._calls.fail_all(EngineFailed(str(error)))
        for front in self._fronts.values():
            front.has_messages.set()
        self._changed.set()
        self.on_failure()
