"""Replicas for tests without a cluster: links of which a test says what they say, and links to real engines in this
process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ostinato.config import EngineConfig
from ostinato.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from ostinato.engine.process.engine_messages import (
    AbortRequest,
    CompileGuide,
    EngineReply,
    EngineStarted,
    OutputDeltas,
    Query,
    StatsSnapshot,
    SubmitRequest,
)
from ostinato.engine.process.output_deltas import OutputDelta, SampleDelta
from ostinato.errors import ForeignExport
from ostinato.models.checkpoint import load_spec
from ostinato.observe.counts import EngineHistograms
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import make_plan
from ostinato.replicas.host import ReplicaHost
from ostinato.replicas.replica_messages import (
    AcceptMove,
    CancelMove,
    CommitMove,
    MovePrepared,
    PrepareMove,
    ReplicaReady,
)
from ostinato.sampling.params import SamplingParams


@lru_cache(maxsize=4)
def started(**settings: Any) -> EngineStarted:
    """What an engine of the embedded model reports, without one."""
    config = EngineConfig(**{"model": "demo", "dtype": "float32", "threads": 1, "max_num_seqs": 4, **settings})
    spec = load_spec(config)
    plan = make_plan(config, spec, detect("cpu"))
    return EngineStarted(plan, Path("nowhere"), SamplingParams(), spec.vocab_size, None, spec.hidden_size)


def observation(**counts: int) -> StatsSnapshot:
    return StatsSnapshot(dict(counts), EngineHistograms())


def submit(request_id: str, token_ids: Sequence[int] = (1, 2, 3), salt: str | None = None, n: int = 1) -> SubmitRequest:
    return SubmitRequest(request_id, list(token_ids), SamplingParams(temperature=0, n=n), 0, salt)


def delta(request_id: str, token: int, end: bool = False) -> OutputDelta:
    """A token, and the end with it."""
    times = RequestTimes(0.0)
    sample = SampleDelta(0, "", (token,), None, "stop" if end else None, None)
    whole = RequestOutput(request_id, None, [], [CompletionOutput(0)], times) if end else None
    return OutputDelta(request_id, [sample], 0, times, whole)


def moved(request_id: str) -> OutputDelta:
    """The last gain of a replica that the request has left."""
    times = RequestTimes(0.0)
    sample = SampleDelta(0, "", (), None, "moved", None)
    whole = RequestOutput(request_id, None, [], [CompletionOutput(0, finish_reason="moved")], times)
    return OutputDelta(request_id, [sample], 0, times, whole)


class FakeLink:
    """A link of which the test says what its replica says. `sent`: what it was told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_messages: Callable[[Sequence[Any]], None] = lambda messages: None
        self.on_lost: Callable[[], None] = lambda: None
        self.sent: list[Any] = []
        self.is_closed = False

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True

    def say(self, *messages: Any) -> None:
        self.on_messages(messages)

    def hello(self, **settings: Any) -> None:
        self.say(ReplicaReady(started(**settings)))

    def add(self, request_id: str) -> None:
        """The engine has taken the request."""
        self.say(EngineReply(request_id))

    def gain(self, request_id: str, token: int = 7, end: bool = False) -> None:
        self.say(OutputDeltas([delta(request_id, token, end)]))

    @property
    def requests(self) -> list[str]:
        """Those that it was given, in their order, without those that were taken back."""
        found = []
        for message in self.sent:
            match message:
                case SubmitRequest(request_id):
                    found.append(request_id)
                case AbortRequest(request_id):
                    found.remove(request_id)
        return found

    def asked(self, kind: type[Query | CompileGuide]) -> list[str]:
        """Ids of the calls of a kind."""
        return [message.call_id for message in self.sent if isinstance(message, kind)]


class MovingLink(FakeLink):
    """A replica that does what it is told, one message at a time, when a test says so (`work`). `tokens` counts what
    each request has gained anywhere: a token is given once. What it keeps of requests is in `kept`; `others` are all
    replicas, from which requests arrive."""

    def __init__(self, name: str, tokens: dict[str, int], others: dict[str, MovingLink]) -> None:
        super().__init__(name)
        self.tokens, self.others = tokens, others
        self.inbox: list[Any] = []
        self.running: dict[str, int] = {}
        """Its requests, with the tokens that each has."""
        self.kept: dict[str, int] = {}
        self.is_gone = False

    def send(self, message: Any) -> None:
        super().send(message)
        self.inbox.append(message)

    def advance(self, request_id: str, end: bool = False) -> None:
        """The next token of a request that runs here."""
        count = self.running.get(request_id)
        if count is None or self.is_gone:
            return
        self.running[request_id] = self.tokens[request_id] = count + 1
        if end:
            del self.running[request_id]
        self.gain(request_id, count, end)

    def lose(self) -> None:
        self.is_gone = True
        self.on_lost()

    def work(self, luck: int = 0) -> None:
        """Does what it was told first. With some of `luck` it refuses what arrives."""
        if not self.inbox or self.is_gone:
            return
        match self.inbox.pop(0):
            case SubmitRequest(request_id):
                self.running[request_id] = 0
                self.add(request_id)
            case AbortRequest(request_id):
                self.running.pop(request_id, None)
                self.kept.pop(request_id, None)
            case PrepareMove(request_id) if request_id in self.running:
                self.kept[request_id] = self.running.pop(request_id)
                last = [MovePrepared(request_id, 100), OutputDeltas([moved(request_id)])]
                self.say(*(last if luck % 2 else reversed(last)))
            case PrepareMove(request_id):
                self.say(MovePrepared(request_id, None))
            case CommitMove(request_id):
                self.kept.pop(request_id, None)
            case CancelMove(request_id) if luck == 7:
                del self.kept[request_id]
                self.say(EngineReply(request_id, error=RuntimeError("it is damaged")))
            case CancelMove(request_id):
                self.running[request_id] = self.kept.pop(request_id)
                self.say(EngineReply(request_id))
            case AcceptMove(request_id, source):
                self._arrive(request_id, self.others[source], luck)

    def _arrive(self, request_id: str, source: MovingLink, luck: int) -> None:
        if luck == 1:
            self.say(EngineReply(request_id, error=ForeignExport(["the block size is 16 there and 32 here"])))
        elif luck == 2 or source.is_gone:
            self.say(EngineReply(request_id, error=RuntimeError("it could not be fetched")))
        elif request_id in source.kept:  # else nobody waits for it any more
            self.running[request_id] = source.kept[request_id]
            self.say(EngineReply(request_id))


class LocalLink:
    """A link to a host in this process, over which everything goes as it would over a network: later, and in order."""

    def __init__(self, name: str, host: ReplicaHost, front: str = "front") -> None:
        self.name, self._host, self._front = name, host, front
        self.on_messages: Callable[[Sequence[Any]], None] = lambda messages: None
        self.on_lost: Callable[[], None] = lambda: None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, message: Any) -> None:
        asyncio.get_running_loop().call_soon(self._host.take, self._front, [message])

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        try:
            async for messages in self._host.messages(self._front):
                self.on_messages(messages)
        except asyncio.CancelledError:
            raise
        except Exception:  # why, the host's own log says
            self.on_lost()
        else:
            self.on_lost()
