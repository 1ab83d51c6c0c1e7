"""Backends of the router: each is watched, and what it has cached is known from its `/kv_events`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from pydantic import ValidationError

from ostinato.engine.process.engine_messages import SubmitRequest
from ostinato.errors import ConfigError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.plan.plan import Plan
from ostinato.replicas.index_sync import IndexChanges
from ostinato.replicas.placement import ReplicaPlacement
from ostinato.replicas.router import ReplicaChoice, RoutingPolicy
from ostinato.serve.http.streaming import side_by_side
from ostinato.serve.route.upstream import (
    BackendAddress,
    HeaderList,
    OutOfResources,
    Refused,
    Silent,
    UpstreamError,
    UpstreamReply,
    open_reply,
)

log = logging.getLogger("ostinato.serve")

BackendState = Literal["connecting", "ready", "draining", "down", "foreign"]

PERIOD = 1.0
"""Seconds between two looks at a backend's health, and before it is asked again after it was lost."""
PATIENCE = 20.0
"""Seconds that a backend may take to answer a question about itself."""
SILENCE = 40.0
"""Seconds without an event or a comment after which the stream of events counts as broken."""
MAX_EVENT = 2**26
"""Bytes of one event."""


MAX_KEYS = 2**20
"""Places of one backend at which a prompt may hit. A server has one for each block or checkpoint that it caches."""


class WrongEvents(Exception):
    """Raised for events that do not tell what a backend has cached. It is served without them."""


class IndexReader:
    """Changes of the blocks at which a prompt may hit, from a backend's batches of events."""

    def __init__(self, has_state: bool) -> None:
        self.num_lost = 0
        """Batches that were missed."""
        self._is_whole = True
        self._number = 0
        self._last: int | None = None
        self._stored, self._removed = (
            ("CheckpointStored", "CheckpointRemoved") if has_state else ("BlockStored", "BlockRemoved")
        )

    def changes(self, batch: JsonMapping) -> IndexChanges:
        """Return what a batch of events changes. WrongEvents if earlier batches are missing or its form is wrong."""
        try:
            if "error" in batch:
                raise WrongEvents(str(batch["error"]["message"])[:200])
            self._check_number(int(batch["seq"]), batch["replay_left"] is not None)
            return self._merge(batch["events"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise WrongEvents("its events have another form") from None

    def _check_number(self, number: int, is_replay: bool) -> None:
        last, self._last = self._last, number
        expected = number if last is None else last + (not is_replay)
        if number != expected:
            self.num_lost += max(0, number - expected)
            raise WrongEvents(f"its event {number} came after {last}")

    def _merge(self, events: Sequence[JsonMapping]) -> IndexChanges:
        added, removed = dict[int, None](), dict[int, None]()
        is_whole, self._is_whole = self._is_whole, False
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                added, removed, is_whole = {}, {}, True
            if kind not in (self._stored, self._removed):
                continue
            keys = event["block_hashes"] if "block_hashes" in event else [event["block_hash"]]
            into, out_of = (added, removed) if kind == self._stored else (removed, added)
            for key in keys:
                if type(key) is not int or not 0 <= key < 2**64:
                    raise ValueError("a hash is a number of 64 bits")
                into[key] = None
                out_of.pop(key, None)
        self._number += 1
        return IndexChanges(self._number, tuple(added), tuple(removed), is_whole)


@dataclass
class BackendCounts:
    """Counts of one backend since the router's start."""

    num_sent: int = 0
    num_failed: int = 0
    """Requests without an answer, or whose answer broke off."""
    prompt_tokens: int = 0
    """Tokens of the prompts that the router has read."""
    expected_hit_tokens: int = 0
    """Tokens that the router expected to be cached, of the answers that say how many were."""
    reported_hit_tokens: int = 0
    num_events: int = 0
    num_lost_events: int = 0


@dataclass
class Backend:
    """A server behind the router, and what is known of it."""

    address: BackendAddress
    number: int
    """Position among the backends, from 0."""
    state: BackendState = "connecting"
    reason: str = ""
    """Reason why it gets no requests."""
    has_events: bool = False
    """True if its cache is known from its events."""
    num_running: int = 0
    counts: BackendCounts = field(default_factory=BackendCounts)
    replies: set[UpstreamReply] = field(default_factory=set)
    """Answers that are under way."""
    started: JsonObject | None = None
    """List of its models, with the time of its start, when it joined."""

    @property
    def name(self) -> str:
        return self.address.url

    def end_requests(self) -> None:
        """End its requests: their answers break off now rather than never."""
        for reply in self.replies:
            reply.close()

    def to_json(self) -> JsonObject:
        return {
            "url": self.name,
            "state": self.state,
            "reason": self.reason or None,
            "kv_events": self.has_events,
            "running": self.num_running,
            "sent": self.counts.num_sent,
        }


class BackendPool:
    """Backends, and the policy that chooses among those that take requests. Used on one event loop."""

    def __init__(self, addresses: Sequence[BackendAddress], policy: RoutingPolicy, key: str | None) -> None:
        """Create the pool. `key` is sent to backends in place of the clients' own."""
        self.backends = {each.url: Backend(each, number) for number, each in enumerate(addresses)}
        self.placement: ReplicaPlacement | None = None
        """The policy; None until the first backend is ready."""
        self.on_first: Callable[[Plan, tuple[str, ...]], None] = lambda plan, names: None
        """Function called with the first backend's plan and served names. Its ConfigError ends the router."""
        self.on_failure: Callable[[ConfigError], None] = lambda error: None
        self.key_headers: HeaderList = () if key is None else ((b"authorization", b"Bearer " + key.encode()),)
        self._policy: RoutingPolicy = policy
        self._facts: tuple[object, ...] = ()
        self._joining = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_running(self) -> int:
        return sum(backend.num_running for backend in self.backends.values())

    @property
    def ready(self) -> list[str]:
        """Names of the backends that take requests."""
        return [name for name, backend in self.backends.items() if backend.state == "ready"]

    def start(self) -> None:
        """Watch all backends on the running loop."""
        self._tasks = [asyncio.create_task(self._watch(backend)) for backend in self.backends.values()]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def choose(self, request_id: str, prompt: SubmitRequest | None, among: Collection[str]) -> ReplicaChoice | None:
        """Choose a backend and count the request as sent there; None if there is none. `note_end` must follow.

        Without a prompt, it is the backend with the least work.
        """
        if self.placement is None:
            return None
        if prompt is not None:
            return self.placement.choose(request_id, prompt, among)
        router, now = self.placement.router, asyncio.get_running_loop().time()
        return router.route(request_id, BlockHashes(router.block_size), 1, now, among=among)

    def note_first_byte(self, request_id: str) -> None:
        assert self.placement is not None, "a request was sent"
        self.placement.router.note_first_token(request_id)

    def note_end(self, request_id: str) -> None:
        assert self.placement is not None, "a request was sent"
        self.placement.router.note_end(request_id)

    def lose(self, name: str, reason: str) -> None:
        """Send nothing to a backend until it answers again: it cannot be reached, or says that it takes nothing."""
        backend = self.backends[name]
        if backend.state in ("ready", "draining"):
            log.warning("backend %s gets no requests: %s", name, reason)
            if self.placement is not None:
                self.placement.router.remove(name)
        if backend.state != "foreign":
            backend.state = "down"
        backend.reason, backend.has_events = reason, False

    async def _watch(self, backend: Backend) -> None:
        while True:
            try:
                await self._check_health(backend)
                if await self._join(backend):
                    await side_by_side([self._follow(backend), self._poll(backend)])
            except UpstreamError as error:
                self.lose(backend.name, str(error))
                if isinstance(error, Refused | Silent):  # others may be the network's or a name server's
                    backend.end_requests()
            except ConfigError as error:
                self.on_failure(error)
                return
            except Exception as error:  # whatever one backend says, the others are served
                log.exception("backend %s answers in a way that the router does not know", backend.name)
                self.lose(backend.name, f"unexpected: {type(error).__name__}")
            await asyncio.sleep(PERIOD if backend.state != "foreign" else 10 * PERIOD)

    async def _poll(self, backend: Backend) -> None:
        for number in count(1):
            await asyncio.sleep(PERIOD)
            if backend.state == "down":  # a request has found out
                raise UpstreamError(backend.reason)
            try:
                await self._check_health(backend)
                # The end of its events shows it too, if there are any.
                is_due = number % 10 == 0 and not backend.has_events
                if is_due and await self._models(backend) != backend.started:
                    raise UpstreamError("it was started anew")
            except OutOfResources as error:
                log.warning("backend %s cannot be looked at: %s", backend.name, error)

    async def _check_health(self, backend: Backend) -> None:
        """Note a backend that drains. UpstreamError if it is not ready."""
        async with self._asking(backend, "/health") as reply:
            status = str((await reply.json()).get("status"))
        if status == "ready":
            if backend.state == "draining":
                raise UpstreamError("it was started anew")
            return
        if status == "draining" and backend.state in ("ready", "draining"):
            if backend.state == "ready":
                log.info("backend %s drains", backend.name)
                if self.placement is not None:
                    self.placement.router.drain(backend.name)
            backend.state, backend.reason = "draining", "it drains"
            return
        raise UpstreamError(f"it is {status[:40]}")

    async def _join(self, backend: Backend) -> bool:
        """Take in a backend that is ready. Return False, with the reason in the backend, if it serves something else.

        UpstreamError if it does not say what it serves.
        """
        async with self._asking(backend, "/plan") as reply:
            try:
                plan = Plan.from_json(await reply.json())
            except (ValidationError, ValueError, KeyError, TypeError):
                raise UpstreamError("its /plan is that of another version of ostinato") from None
        backend.started = await self._models(backend)
        listed = backend.started.get("data")
        models = listed if isinstance(listed, list) else []
        names = tuple(sorted(str(model["id"]) for model in models if isinstance(model, dict) and "id" in model))
        if not names:
            raise UpstreamError("its /v1/models has no names")
        settings = plan.settings
        facts = names, plan.model, settings.block_size, settings.max_model_len, plan.memory.num_slots > 0
        async with self._joining:
            if self.placement is None:
                await asyncio.to_thread(self.on_first, plan, names)
                self.placement = ReplicaPlacement(plan, self._policy, asyncio.get_running_loop().time)
                self._facts = facts
        if facts != self._facts:
            reason = "its model, names, block_size or max_model_len differ from those of the first backend"
            if backend.state != "foreign":
                log.error("backend %s gets no requests: %s", backend.name, reason)
            backend.state, backend.reason = "foreign", reason
            return False
        self.placement.router.add(backend.name)
        backend.state, backend.reason = "ready", ""
        log.info("backend %s is ready; there are %d", backend.name, len(self.ready))
        return True

    async def _models(self, backend: Backend) -> JsonObject:
        async with self._asking(backend, "/v1/models") as reply:
            return await reply.json()

    async def _follow(self, backend: Backend) -> None:
        """Follow a backend's events until they end, which is an UpstreamError; return if it sends none.

        After events that are lost, wrong or too many they begin anew: meanwhile only what the router sends is known.
        """
        router, said, pause = self._ready_placement.router, "", PERIOD
        while True:
            try:
                await self._read_events(backend)
                return
            except (WrongEvents, OutOfResources) as error:
                log.log(
                    logging.DEBUG if str(error) == said else logging.WARNING,
                    "backend %s: %s; they begin anew", backend.name, error,
                )  # fmt: skip
                said = str(error)
            pause = PERIOD if backend.has_events else min(2 * pause, 30 * PERIOD)
            backend.has_events = False
            if backend.state in ("ready", "draining"):
                router.apply(backend.name, IndexChanges(0, is_whole=True))
            await asyncio.sleep(pause)

    async def _read_events(self, backend: Backend) -> None:
        placement = self._ready_placement
        reply = await open_reply(backend.address, "GET", b"/kv_events", self.key_headers)
        with contextlib.closing(reply):
            if reply.status in (403, 404):
                log.warning(
                    "backend %s does not tell what it has cached (start it with --kv-events hashes): the router knows "
                    "only what it has sent there itself",
                    backend.name,
                )
                return
            if reply.status == 429:
                raise WrongEvents("it has as many readers of its events as it serves")
            _check_status(reply, "/kv_events")
            index, buffer = IndexReader(placement.plan.memory.num_slots > 0), bytearray()
            pieces = reply.pieces()
            while True:
                try:
                    async with asyncio.timeout(SILENCE):
                        piece = await anext(pieces, None)
                except TimeoutError:
                    raise UpstreamError(f"its events are silent for {SILENCE:g} s") from None
                if piece is None:
                    await self._check_health(backend)  # perhaps it drains
                    if backend.state == "draining":
                        return
                    raise UpstreamError("its events ended")
                buffer += piece
                *events, rest = buffer.split(b"\n\n")
                buffer = bytearray(rest)
                if len(buffer) > MAX_EVENT:
                    raise WrongEvents(f"one of its events is larger than {MAX_EVENT} bytes")
                for event in events:
                    self._apply(placement, backend, index, bytes(event))
                    await asyncio.sleep(0)

    def _apply(self, placement: ReplicaPlacement, backend: Backend, index: IndexReader, event: bytes) -> None:
        data = b"".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
        if not data or backend.state not in ("ready", "draining"):
            return
        backend.counts.num_events += 1
        try:
            batch = json.loads(data)
        except (ValueError, RecursionError):
            raise WrongEvents("its events are no JSON") from None
        try:
            changes = index.changes(batch)
        finally:
            backend.counts.num_lost_events += index.num_lost
        placement.router.apply(backend.name, changes)
        if placement.router.num_known(backend.name) > MAX_KEYS:
            raise WrongEvents(f"it claims to have more than {MAX_KEYS} blocks or checkpoints")
        backend.has_events = backend.has_events or batch.get("replay_left") == 0

    @property
    def _ready_placement(self) -> ReplicaPlacement:
        assert self.placement is not None, "the backend has joined"
        return self.placement

    @contextlib.asynccontextmanager
    async def _asking(self, backend: Backend, path: str) -> AsyncIterator[UpstreamReply]:
        """Ask a backend about itself, and close its reply. UpstreamError if it takes too long, or refuses."""
        try:
            async with asyncio.timeout(PATIENCE):
                # Without a connection for so long, it counts as silent too.
                opening = open_reply(
                    backend.address, "GET", path.encode(), self.key_headers, connect_seconds=2 * PATIENCE
                )
                with contextlib.closing(await opening) as reply:
                    if path != "/health":
                        _check_status(reply, path)
                    yield reply
        except TimeoutError:
            raise Silent(f"{path} took longer than {PATIENCE:g} s") from None


def _check_status(reply: UpstreamReply, path: str) -> None:
    if reply.status in (401, 403):
        raise UpstreamError(f"{path} has status {reply.status}: the router needs a key, as backend_key")
    if reply.status != 200:
        raise UpstreamError(f"{path} has status {reply.status}")
