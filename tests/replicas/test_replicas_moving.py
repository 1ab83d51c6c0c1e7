"""Requests of a replica that drains go on at others, and nobody who reads them notices."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.engine.process.engine_messages import AbortRequest, OutputDeltas, RequestFailed, StatsSnapshot
from ostinato.errors import ReplicaLost
from ostinato.observe.counts import EngineHistograms
from ostinato.replicas import request_mover
from ostinato.replicas.front import ReplicaSet
from ostinato.replicas.host import ReplicaHost
from ostinato.replicas.host_migration import MoveSource
from ostinato.replicas.replica_messages import (
    AcceptMove,
    CancelMove,
    CommitMove,
    DrainAcknowledged,
    MovePrepared,
    PrepareMove,
    ReplicaDraining,
    ReplicaStatus,
)
from tests.support.fake_replicas import MovingLink, submit
from tests.support.on_loop import on_loop


class Front:
    """Replicas that do what they are told, and what reaches the engine in front of them."""

    def __init__(self, *names: str) -> None:
        self.replicas = ReplicaSet()
        self.heard: list[Any] = []
        self.replicas.on_message = self.heard.append
        self.tokens: dict[str, int] = {}
        self.all: dict[str, MovingLink] = {}
        for name in names:
            self.join(name)

    def join(self, name: str) -> MovingLink:
        link = self.all[name] = MovingLink(name, self.tokens, self.all)
        self.replicas.add(link)
        link.hello()
        return link

    def work(self) -> None:
        """All replicas do all that they are told."""
        while any(link.inbox and not link.is_gone for link in self.all.values()):
            for link in self.all.values():
                link.work()
                self.replicas.check_integrity()

    def begin(self, name: str, count: int, n: int = 1) -> list[str]:
        """So many requests that have begun on one replica, the only one that takes any."""
        found = []
        for number in range(count):
            found.append(f"{name}{number}")
            self.replicas.send(submit(found[-1], range(number, number + 40), n=n))
            self.work()
            self.all[name].advance(found[-1])
        return found

    def heard_of(self, request_id: str) -> list[int]:
        return [
            token
            for message in self.heard
            if isinstance(message, OutputDeltas)
            for each in message.deltas
            if each.request_id == request_id
            for token in each.samples[0].token_ids
        ]

    def ends(self) -> Counter[str]:
        """How often each request has ended, in whatever way."""
        errors = [message.request_id for message in self.heard if isinstance(message, RequestFailed)]
        gained = [each for message in self.heard if isinstance(message, OutputDeltas) for each in message.deltas]
        return Counter(errors + [each.request_id for each in gained if each.output is not None])

    def errors(self) -> dict[str, Exception]:
        return {message.request_id: message.error for message in self.heard if isinstance(message, RequestFailed)}

    def finish(self, request_id: str) -> None:
        for link in self.all.values():
            if request_id in link.running:
                link.advance(request_id, end=True)

    @property
    def counts(self) -> request_mover.DrainCounts:
        return self.replicas.moving.counts


@on_loop
def test_what_has_begun_goes_on_elsewhere_with_its_next_token() -> None:
    front = Front("a")
    ids = front.begin("a", 3)
    front.join("b")
    front.all["a"].say(ReplicaDraining())
    assert DrainAcknowledged() in front.all["a"].sent
    front.work()
    assert front.all["a"].running == front.all["a"].kept == {}
    for request_id in ids:
        front.all["b"].advance(request_id)
        front.finish(request_id)
        assert front.heard_of(request_id) == [0, 1, 2]
    assert front.ends() == dict.fromkeys(ids, 1)
    assert (front.counts.moved, front.counts.moved_bytes, front.counts.stayed) == (3, 300, {})
    assert front.replicas._requests == {}
    front.replicas.check_integrity()


@on_loop
def test_so_many_move_at_a_time_and_the_others_go_on_meanwhile() -> None:
    front = Front("a")
    ids = front.begin("a", request_mover.MAX_MOVES_AT_ONCE + 2)
    front.join("b")
    front.join("c")
    link = front.all["a"]
    link.say(ReplicaDraining())
    assert len([each for each in link.sent if isinstance(each, PrepareMove)]) == request_mover.MAX_MOVES_AT_ONCE
    link.advance(ids[-1])
    assert front.heard_of(ids[-1]) == [0, 1]
    front.work()
    link.say(ReplicaStatus(StatsSnapshot({}, EngineHistograms()), None))
    front.work()
    assert link.running == {}
    assert front.counts.moved == len(ids)


@on_loop
def test_without_room_elsewhere_a_request_stays_until_there_is_some_or_it_ends() -> None:
    front = Front("a")
    first, second = front.begin("a", 2, n=2)
    front.join("b")
    front.replicas.send(submit("other", range(300, 390), n=3))  # of 4 rows
    front.work()
    assert "other" in front.all["b"].running
    front.all["a"].say(ReplicaDraining())
    front.work()
    assert set(front.all["a"].running) == {first, second}
    front.finish(first)
    assert front.counts.stayed == {"no_room": 1}
    front.finish("other")
    front.all["a"].say(ReplicaStatus(StatsSnapshot({}, EngineHistograms()), None))
    front.work()
    assert set(front.all["b"].running) == {second}
    front.finish(second)
    assert front.counts.moved == 1
    assert front.errors() == {}


@on_loop
def test_what_a_replica_has_told_of_other_fronts_takes_room_too() -> None:
    front = Front("a")
    [first] = front.begin("a", 1)
    cache = {"blocks_total": 100, "blocks_used": 0, "slots_total": 100, "slots_used": 0}
    link = front.join("b")
    told = [
        {"running": 3, "waiting": 1, "cache": cache},
        {"running": 1, "waiting": 0, "cache": {**cache, "blocks_used": 99}},
        {"running": 1, "waiting": 0, "cache": {**cache, "slots_used": 100}},
    ]
    link.say(ReplicaStatus(StatsSnapshot(told[0], EngineHistograms()), None))
    front.all["a"].say(ReplicaDraining())
    for stats in told:
        link.say(ReplicaStatus(StatsSnapshot(stats, EngineHistograms()), None))
        front.work()
        assert first in front.all["a"].running, stats
    link.say(ReplicaStatus(StatsSnapshot({"running": 3, "waiting": 0, "cache": cache}, EngineHistograms()), None))
    front.work()
    assert first in link.running


def test_window_blocks_take_room_and_have_a_size() -> None:
    plan = SimpleNamespace(
        memory=SimpleNamespace(kv_block=0, window_block=1000, sliding_window=64, slots_per_request=0),
        settings=SimpleNamespace(block_size=16),
    )
    cache = {"blocks_total": 0, "blocks_used": 0, "slots_total": 0, "slots_used": 0, "window_blocks_total": 20}
    stats = {"running": 1, "waiting": 0, "cache": cache}
    replica = SimpleNamespace(observation=SimpleNamespace(stats=stats), max_num_seqs=4)
    mover = object.__new__(request_mover.RequestMover)
    mover._table = SimpleNamespace(replicas={"b": replica}, plan=plan)  # type: ignore[assignment]
    submitted = SimpleNamespace(prompt_token_ids=[1] * 500, params=SimpleNamespace(n=2))
    request: Any = SimpleNamespace(submitted=submitted, num_gained=0)
    # Each output has those of its window, and two.
    for used, has_room in ((8, True), (9, False)):
        cache["window_blocks_used"] = used
        assert mover._has_room("b", request, 1) == has_room
    assert mover._size(request) == 2 * (4 + 2) * 1000
    host = object.__new__(ReplicaHost)
    host.last = replica.observation
    host._process = SimpleNamespace(started=SimpleNamespace(plan=SimpleNamespace(settings=replica)))  # type: ignore[assignment]
    cache["window_blocks_used"] = 15
    assert host.load() == {"requests": 0.25, "slots": 0.75}


@on_loop
def test_where_time_is_short_a_request_goes_to_where_it_has_to_wait() -> None:
    front = Front("a")
    [first] = front.begin("a", 1)
    full = ReplicaStatus(StatsSnapshot({"running": 4, "waiting": 2}, EngineHistograms()), None)
    front.join("b").say(full)
    front.all["a"].say(ReplicaDraining())
    front.work()
    assert first in front.all["a"].running
    front.all["a"].say(ReplicaDraining(is_short_of_time=True))
    front.work()
    assert first in front.all["b"].running


@on_loop
def test_with_nobody_else_it_stays_and_moves_to_whoever_comes() -> None:
    front = Front("a")
    first, second = front.begin("a", 2)
    front.all["a"].say(ReplicaDraining())
    front.work()
    front.finish(first)
    assert front.counts.stayed == {"no_replica": 1}
    front.join("b")
    front.work()
    assert set(front.all["b"].running) == {second}


@on_loop
def test_one_of_another_plan_is_asked_once_and_a_third_gets_the_request() -> None:
    front = Front("a")
    ids = front.begin("a", 2)
    for name in "bc":
        front.join(name)
    front.all["a"].say(ReplicaDraining())
    while not (asked := [link for link in front.all.values() if link.inbox and isinstance(link.inbox[0], AcceptMove)]):
        front.all["a"].work()
    [foreign] = asked
    foreign.work(luck=1)
    front.replicas.check_integrity()
    front.work()
    other = front.all["b" if foreign.name == "c" else "c"]
    assert ids[0] in other.running
    assert ids[0] not in foreign.running


@on_loop
def test_what_nobody_goes_on_with_is_taken_back_and_ends_where_it_was() -> None:
    front = Front("a")
    first, second = front.begin("a", 2)
    link = front.join("b")
    front.all["a"].say(ReplicaDraining())
    while not any(isinstance(message, AcceptMove) for message in link.inbox):
        front.all["a"].work()
    while link.inbox:
        link.work(luck=1)
        front.all["a"].work()
    front.work()
    assert set(front.all["a"].running) == {first, second}
    front.all["a"].say(ReplicaStatus(StatsSnapshot({}, EngineHistograms()), None))
    assert front.all["a"].inbox == [], "it is known that b is foreign"
    for each in (first, second):
        front.all["a"].advance(each)
        front.finish(each)
        assert front.heard_of(each) == [0, 1, 2]
    assert front.counts.stayed == {"foreign": 2}
    assert front.counts.moved == 0


@on_loop
def test_a_request_that_is_too_large_stays() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_mover, "MAX_MOVE_BYTES", 1)
        front = Front("a")
        [first] = front.begin("a", 1)
        front.join("b")
        front.all["a"].say(ReplicaDraining())
        assert not any(isinstance(each, PrepareMove) for each in front.all["a"].sent)
        # One whose size was known too late is taken back.
        patch.setattr(request_mover.RequestMover, "_size", lambda self, request: 0)
        front.replicas._requests[first].must_stay = False
        front.replicas.moving.look()
        front.work()
        assert first in front.all["a"].running
        assert [type(each) for each in front.all["a"].sent[-2:]] == [PrepareMove, CancelMove]
        front.finish(first)
        assert front.counts.stayed == {"too_large": 1}


def _on_its_way(front: Front, stage: str) -> str:
    """A request that leaves a for b, or arrives there."""
    [first] = front.begin("a", 1)
    front.join("b")
    front.all["a"].say(ReplicaDraining())
    if stage == "arrives":
        front.all["a"].inbox[:] = [each for each in front.all["a"].inbox if isinstance(each, PrepareMove)]
        front.all["a"].work()
        assert isinstance(front.all["b"].inbox[-1], AcceptMove)
    return first


@pytest.mark.parametrize("stage", ["leaves", "arrives"])
@pytest.mark.parametrize("who", ["source", "target", "both"])
def test_the_end_of_a_replica_during_a_move_is_never_a_wrong_token(stage: str, who: str) -> None:
    async def run() -> None:
        front = Front("a")
        first = _on_its_way(front, stage)
        source, target = front.all["a"], front.all["b"]
        if who in ("target", "both"):
            target.lose()
        if who in ("source", "both"):
            source.lose()
        front.work()
        front.replicas.check_integrity()
        if who == "target":
            assert first in source.running, "the source still had it"
            source.advance(first)
            front.finish(first)
            assert front.heard_of(first) == [0, 1, 2]
            assert front.errors() == {}
        else:
            assert isinstance(front.errors()[first], ReplicaLost)
            assert front.ends() == {first: 1}
            assert front.replicas._requests == {}

    asyncio.run(run())


@on_loop
def test_what_cannot_be_taken_back_ends_as_lost() -> None:
    front = Front("a")
    first = _on_its_way(front, "arrives")
    front.all["b"].lose()
    front.all["a"].work(luck=7)
    front.work()
    assert isinstance(front.errors()[first], ReplicaLost)
    assert front.replicas._requests == {}
    front.replicas.check_integrity()


@on_loop
def test_a_request_that_was_fetched_in_time_outlives_its_source() -> None:
    front = Front("a")
    first = _on_its_way(front, "arrives")
    target = front.all["b"]
    target.inbox, told = [], target.inbox
    target.running[first] = front.all["a"].kept[first]
    front.all["a"].lose()
    front.replicas.check_integrity()
    assert front.errors() == {}
    target.add(first)
    target.advance(first)
    front.finish(first)
    assert front.heard_of(first) == [0, 1, 2]
    assert isinstance(told[-1], AcceptMove)


@pytest.mark.parametrize("stage", ["leaves", "arrives"])
def test_who_leaves_during_a_move_leaves_nothing_behind(stage: str) -> None:
    async def run() -> None:
        front = Front("a")
        first = _on_its_way(front, stage)
        front.replicas.send(AbortRequest(first))
        front.work()
        for link in front.all.values():
            assert link.running == link.kept == {}
        if stage == "arrives":
            assert CommitMove(first) in front.all["a"].sent
        assert front.heard_of(first) == [0]
        assert front.ends() == {}
        assert front.counts.moved == 0

    asyncio.run(run())


def test_requests_leave_in_turn_and_only_so_many_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.replicas import host_migration

    monkeypatch.setattr(host_migration, "MAX_KEPT_BYTES", 10)
    monkeypatch.setattr(host_migration, "PIECE", 4)
    sent: list[Any] = []
    told: list[MovePrepared] = []
    leaving = MoveSource(sent.append, lambda request_id, message: told.append(message))
    for name in ("f/1", "f/2", "f/3", "g/4"):
        leaving.leave(name)
    assert [each.request_id for each in sent] == ["f/1"]
    leaving.exported(b"123456789012")
    assert told == [MovePrepared("f/1", 12)]
    assert len(sent) == 1, "as much is kept as may be"
    assert [leaving.piece("f/1", offset) for offset in (0, 4, 8, 12)] == [b"1234", b"5678", b"9012", b""]
    leaving.drop("f/1")
    assert [each.request_id for each in sent] == ["f/1", "f/2"]
    with pytest.raises(LookupError, match="not kept"):
        leaving.piece("f/1", 0)
    leaving.drop_all("f/")
    leaving.exported(b"2")
    assert leaving.num_kept == 0, "nobody waits for it any more"
    assert [each.request_id for each in sent] == ["f/1", "f/2", "g/4"]
    leaving.exported(None)
    assert told == [MovePrepared("f/1", 12), MovePrepared("g/4", None)]
    leaving.leave("g/5")
    leaving.exported(b"12")
    assert leaving.take_back("g/5") == b"12"
    assert leaving.take_back("g/5") is None
