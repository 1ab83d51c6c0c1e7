"""The front's side: several replicas in place of one engine's process.

A guide is compiled by the replica with the fewest compilations that it has not answered yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ostinato.engine.process.engine_messages import (
    AbortRequest,
    CompileGuide,
    DeltasHandled,
    EngineReply,
    EngineStarted,
    ExportRequest,
    ImportRequest,
    OutputDeltas,
    Query,
    RequestFailed,
    StatsSnapshot,
    SubmitRequest,
)
from ostinato.engine.process.output_deltas import OutputDelta
from ostinato.errors import ReplicaLost, RequestError
from ostinato.replicas.placement import ReplicaPlacement
from ostinato.replicas.replica_messages import (
    DrainAcknowledged,
    MovePrepared,
    ReplicaDraining,
    ReplicaLink,
    ReplicaReady,
    ReplicaStatus,
    ResendIndex,
)
from ostinato.replicas.request_mover import RequestMover
from ostinato.replicas.request_table import ReplicaState, RequestTable, TrackedRequest, agrees
from ostinato.replicas.router import ReplicaRouter, RoutingPolicy
from ostinato.replicas.stats_fanout import StatsFanout


class GuideChecks:
    """Compile calls that are not answered yet. Each goes to the replica with the fewest.

    A replica only checks whether the guide can be compiled, and does not keep it. Without any replica a call waits.
    """

    def __init__(self, taking: Callable[[], Mapping[str, ReplicaLink]], answer: Callable[[EngineReply], None]) -> None:
        """Create an empty table. `taking` gives the replicas that take new requests."""
        self._taking, self._answer = taking, answer
        self._waiting: dict[str, tuple[CompileGuide, str | None]] = {}
        """Messages by call, with the replica that each was sent to."""

    def ask(self, message: CompileGuide) -> None:
        """Send a guide to a replica to be compiled."""
        links = self._taking()
        counts = dict.fromkeys(links, 0)
        for _, name in self._waiting.values():
            if name in counts:
                counts[name] += 1
        chosen = min(counts, key=lambda name: counts[name], default=None)
        self._waiting[message.call_id] = message, chosen
        if chosen is not None:
            links[chosen].send(message)

    def take(self, reply: EngineReply) -> bool:
        """Pass on a replica's answer, and return True, if it answers one of these calls."""
        if self._waiting.pop(reply.call_id, None) is None:
            return False
        self._answer(reply)
        return True

    def ask_again(self, lost: str | None = None) -> None:
        """Send the calls of the `lost` replica to another one; with None, the calls that no replica was there for."""
        for message, where in list(self._waiting.values()):
            if where == lost:
                self.ask(message)


log = logging.getLogger("ostinato.replicas")

_SETTLE_SECONDS = 0.25
"""Seconds between two messages to a replica about the cost of its deltas here."""


class ReplicaSet:
    """Connection of an AsyncEngine to several replicas, in place of one engine's process.

    It sends each request to the replica that the router chooses, and passes on the replicas' messages. A lost replica
    ends the requests that had begun with ReplicaLost; the others go to another one, or wait until there is one. Used on
    one event loop.
    """

    started: EngineStarted
    """First report of the first replica. Others must have the same plan."""

    def __init__(self, policy: RoutingPolicy = "prefix", on_close: Callable[[], Any] = lambda: None) -> None:
        """Create a front without replicas.

        `on_close` is called at the end, once all links are closed; a coroutine that it returns is awaited.
        """
        self.on_message: Callable[[object], None] = lambda message: None
        self.on_end: Callable[[Exception], None] = lambda error: None
        self.on_change: Callable[[], None] = lambda: None
        """Callback for a change in the number of replicas that take new requests."""
        self._policy: RoutingPolicy = policy
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._table = RequestTable()
        self._replicas, self._requests = self._table.replicas, self._table.requests
        self.moving = RequestMover(self._table, self._lose_request)
        """Migration of requests from replicas that drain."""
        self._compiles = GuideChecks(lambda: self._table.taking, lambda reply: self.on_message(reply))
        self._questions = StatsFanout(lambda reply: self.on_message(reply), lambda: list(self.observations.values()))
        self._delivered: deque[str] = deque()
        """Replicas whose deltas wait for a DeltasHandled, in order of delivery."""
        self._failed: Exception | None = None
        self._first: asyncio.Future[None] = self._loop.create_future()

    async def wait_started(self) -> None:
        """Wait for the first replica. Raises the error of `fail`."""
        await asyncio.shield(self._first)

    @property
    def max_running(self) -> int:
        """Outputs that may run at once on all replicas that take new ones; on one, if there is none."""
        taking = [each.max_num_seqs for each in self._replicas.values() if each.accepts_requests]
        return sum(taking) or self.started.plan.settings.max_num_seqs

    @property
    def router(self) -> ReplicaRouter | None:
        """The router; None until the first replica has joined."""
        return None if self._table.placement is None else self._table.router

    @property
    def observations(self) -> dict[str, StatsSnapshot]:
        """Last counts of each replica, by name."""
        return {name: each.observation for name, each in self._replicas.items() if each.observation is not None}

    @property
    def states(self) -> dict[str, str]:
        """State of each replica: `ready` or `draining`."""
        return {name: "ready" if each.accepts_requests else "draining" for name, each in self._replicas.items()}

    def add(self, link: ReplicaLink) -> None:
        """Connect a replica that was found. It takes part from its Hello on."""
        link.on_messages = lambda messages: self._take(link, messages)
        link.on_lost = lambda: self._lose(link.name)

    def fail(self, error: Exception) -> None:
        """Note that there will be no replicas any more."""
        if self._failed is None:
            self._failed = error
            if not self._first.done():
                self._first.set_exception(error)
            else:
                self.on_end(error)

    # Messages of the AsyncEngine.

    def send(self, message: object) -> None:
        match message:
            case SubmitRequest(request_id):
                self._requests[request_id] = TrackedRequest(message)
                self._assign(request_id)
            case AbortRequest(request_id):
                self._drop(request_id)
            case CompileGuide():
                self._compiles.ask(message)
            case Query(call_id, "close"):
                self.on_message(EngineReply(call_id))  # a replica saves its cache itself when it ends
            case Query():
                self._questions.ask(message, self._links())
            case DeltasHandled(cost):
                self._settle(cost)
            case ImportRequest() | ExportRequest():
                raise RequestError("requests do not move between the replicas of a server; drain a replica instead")
            case _:
                raise TypeError(f"no such message: {message!r}")

    async def end(self) -> None:
        for each in list(self._replicas.values()):
            each.link.close()
        self._replicas.clear()
        self._questions.end()
        found = self._on_close()
        if asyncio.iscoroutine(found):
            await found

    def _assign(self, request_id: str) -> None:
        request = self._requests[request_id]
        choice = self._table.placed.choose(request_id, request.submitted)
        request.replica = None if choice is None else choice.name
        if request.replica is not None:
            self._replicas[request.replica].link.send(request.submitted)

    def _drop(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._table.router.note_end(request_id)
            if request.replica is not None:
                self._replicas[request.replica].link.send(AbortRequest(request_id))
            self.moving.drop(request_id, request)

    def _settle(self, cost: float) -> None:
        if not self._delivered:
            return
        name = self._delivered.popleft()
        replica, now = self._replicas.get(name), self._loop.time()
        if replica is not None and now >= replica.last_settled + _SETTLE_SECONDS:
            replica.last_settled = now
            # Each replica limits its rate separately, and all of them together must leave the loop its time.
            replica.link.send(DeltasHandled(cost * len(self._replicas)))

    # Messages of replicas.

    def _take(self, link: ReplicaLink, messages: Sequence[object]) -> None:
        for message in messages:
            match message:
                case ReplicaReady(started):
                    self._add_replica(link, started)
                case _ if link.name not in self._replicas:
                    return
                case OutputDeltas(deltas):
                    self._gain(link.name, deltas)
                case EngineReply():
                    self._answer(link.name, message)
                case ReplicaStatus(observation, changes):
                    self._replicas[link.name].observation = observation
                    if changes is not None and not self._table.router.apply(link.name, changes):
                        link.send(ResendIndex())
                    self.moving.look()
                case ReplicaDraining(is_short_of_time):
                    self._drain(link, is_short_of_time)
                case MovePrepared():
                    self.moving.take_left(link.name, message)
                case _:
                    raise TypeError(f"no such message: {message!r}")

    def _add_replica(self, link: ReplicaLink, started: EngineStarted) -> None:
        if self._table.placement is None:
            self.started = started
            self._table.placement = ReplicaPlacement(started.plan, self._policy, self._loop.time)
        elif not agrees(started, self.started):
            log.error("replica %s has another model or other settings than the first, and gets no requests", link.name)
            link.close()
            return
        self._replicas[link.name] = ReplicaState(link, started.plan.settings.max_num_seqs)
        self._table.router.add(link.name)
        log.info("replica %s is ready; there are %d", link.name, len(self._replicas))
        if not self._first.done():
            self._first.set_result(None)
        self._change()

    def _gain(self, name: str, deltas: Iterable[OutputDelta]) -> None:
        router, own = self._table.router, []
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None or request.replica != name:
                continue  # dropped meanwhile
            if self.moving.is_last(delta.request_id, delta):
                gained = self.moving.take_last(delta.request_id, delta)
                own += [] if gained is None else [gained]
                continue
            own.append(delta)
            request.num_gained += sum([len(each.token_ids) for each in delta.samples])
            if not request.has_begun:
                request.has_begun = True
                router.note_first_token(delta.request_id)
            if delta.output is not None:
                for output in delta.output.outputs:
                    self._table.placed.answers.note(len(output.token_ids))
                router.note_end(delta.request_id)
                self.moving.note_end(request)
                del self._requests[delta.request_id]
        if own:
            self._delivered.append(name)
            self.on_message(OutputDeltas(own))

    def _answer(self, name: str, reply: EngineReply) -> None:
        call_id = reply.call_id
        if self.moving.take_reply(name, reply):
            return
        if (request := self._requests.get(call_id)) is not None:
            was_added, request.is_added = request.is_added, True
            if reply.error is not None:
                del self._requests[call_id]
                self._table.router.note_end(call_id)
                if was_added:  # a replica that was lost since had added it
                    self.on_message(RequestFailed(call_id, reply.error))
                    return
            self.on_message(reply)
        elif not self._compiles.take(reply):
            if isinstance(reply.result, StatsSnapshot):
                self._replicas[name].observation = reply.result
            self._questions.take(name, reply)

    def _drain(self, link: ReplicaLink, is_short_of_time: bool) -> None:
        replica, router = self._replicas[link.name], self._table.router
        replica.is_deadline_near = is_short_of_time
        if not replica.accepts_requests:
            self.moving.drain(link.name)
            return
        replica.accepts_requests = False
        router.drain(link.name)
        for request_id, request in list(self._requests.items()):
            # Requests that have not begun may begin elsewhere.
            if request.replica == link.name and not request.has_begun and self._table.taking:
                link.send(AbortRequest(request_id))
                router.note_end(request_id)
                self._assign(request_id)
        link.send(DrainAcknowledged())
        log.info("replica %s drains; %d take new requests", link.name, len(self._table.taking))
        self._change()
        self.moving.drain(link.name)

    def _lose(self, name: str) -> None:
        if self._replicas.pop(name, None) is None:
            return
        self._table.router.remove(name)
        self.moving.lose(name)
        lost = [request_id for request_id, request in self._requests.items() if request.replica == name]
        ended = [request_id for request_id in lost if self._requests[request_id].has_begun]
        for request_id in lost:
            if request_id not in ended:
                self._assign(request_id)
        for request_id in ended:
            self._lose_request(request_id)
        self._compiles.ask_again(name)
        self._questions.lose(name)
        if lost:
            again = len(lost) - len(ended)
            log.warning("replica %s is gone: %d requests ended, %d are served elsewhere", name, len(ended), again)
        else:
            log.info("replica %s is gone, and had no requests", name)
        self._change()

    def _lose_request(self, request_id: str) -> None:
        """End a request that had begun, and that no replica has any more."""
        del self._requests[request_id]
        self._table.router.note_end(request_id)
        message = (
            "the replica that computed the request was lost; the server keeps running, and the request may be repeated"
        )
        self.on_message(RequestFailed(request_id, ReplicaLost(message)))

    def _change(self) -> None:
        """Send waiting requests and calls to the replicas, which have changed."""
        if self._table.taking:
            for request_id in [each for each, request in self._requests.items() if request.replica is None]:
                self._assign(request_id)
            self._compiles.ask_again()
        self._questions.ask_again(self._links())
        self.moving.look()
        self.on_change()

    def _links(self) -> dict[str, ReplicaLink]:
        return {name: replica.link for name, replica in self._replicas.items()}

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tables agree with each other."""
        self._table.router.check_integrity()
        self.moving.check_integrity()
        for request_id, request in self._requests.items():
            assert request.replica is None or request.replica in self._replicas, f"{request_id} is nowhere"
            assert request.replica is not None or not self._table.taking, f"{request_id} waits for nothing"
