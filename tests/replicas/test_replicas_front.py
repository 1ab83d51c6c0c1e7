"""What becomes of messages where several replicas take the place of one engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.process.engine_messages import (
    AbortRequest,
    CompileGuide,
    DeltasHandled,
    EngineReply,
    OutputDeltas,
    Query,
    RequestFailed,
)
from ostinato.errors import ReplicaLost, RequestError
from ostinato.replicas.front import ReplicaSet
from ostinato.replicas.index_sync import IndexChanges
from ostinato.replicas.placement import hash_prompt
from ostinato.replicas.replica_messages import (
    CancelMove,
    DrainAcknowledged,
    ReplicaDraining,
    ReplicaStatus,
    ResendIndex,
)
from ostinato.sampling.guide import Guide
from tests.support.fake_replicas import FakeLink, MovingLink, observation, submit
from tests.support.on_loop import on_loop

GUIDE = Guide(choice=("yes", "no"))


class Front:
    """Replicas behind fake links, and what they said."""

    def __init__(self, *names: str) -> None:
        self.replicas = ReplicaSet()
        self.heard: list[Any] = []
        self.replicas.on_message = self.heard.append
        self.links = {name: self.join(name) for name in names}

    def join(self, name: str, **settings: Any) -> FakeLink:
        link = FakeLink(name)
        self.replicas.add(link)
        link.hello(**settings)
        return link

    def send(self, message: Any) -> None:
        self.replicas.send(message)
        self.replicas.check_integrity()

    def where(self, request_id: str) -> str:
        [name] = [name for name, link in self.links.items() if request_id in link.requests]
        return name

    def ended(self) -> dict[str, Exception]:
        return {message.request_id: message.error for message in self.heard if isinstance(message, RequestFailed)}


@on_loop
def test_a_request_goes_to_one_replica_and_comes_back_as_from_one_engine() -> None:
    front = Front("a", "b")
    front.send(submit("1"))
    link = front.links[front.where("1")]
    link.add("1")
    link.gain("1", 5)
    link.gain("1", 6, end=True)
    assert [type(message) for message in front.heard] == [EngineReply, OutputDeltas, OutputDeltas]
    front.replicas.check_integrity()
    assert front.replicas._requests == {}


@on_loop
def test_requests_of_a_lost_replica_that_had_not_begun_are_served_elsewhere_and_the_others_end() -> None:
    front = Front("a", "b")
    for number in range(8):
        # Texts of their own, so that both replicas get some.
        front.send(submit(str(number), range(number, number + 40)))
    lost, other = front.links["a"], front.links["b"]
    mine = lost.requests
    assert len(mine) >= 3
    begun, added, untouched = mine[0], mine[1], mine[2:]
    for request_id in (begun, added):
        lost.add(request_id)
    lost.gain(begun)
    lost.on_lost()
    assert set(front.ended()) == {begun}
    assert isinstance(front.ended()[begun], ReplicaLost)
    assert {added, *untouched} <= set(other.requests)
    assert begun not in other.requests
    # What the lost one still said is not heard.
    before = len(front.heard)
    lost.gain(added)
    assert len(front.heard) == before
    front.replicas.check_integrity()


@on_loop
def test_requests_wait_where_no_replica_is_left_and_begin_with_the_next() -> None:
    front = Front("a")
    front.send(submit("1"))
    front.send(CompileGuide("guide", GUIDE))
    front.links["a"].on_lost()
    front.send(submit("2"))
    front.send(submit("gone"))
    front.send(AbortRequest("gone"))
    assert front.ended() == {}
    link = front.join("b")
    assert link.requests == ["1", "2"]
    assert link.asked(CompileGuide) == ["guide"]
    link.say(EngineReply("guide"))
    assert front.heard == [EngineReply("guide")]


@on_loop
def test_a_replica_that_drains_gets_nothing_new_and_ends_what_it_has() -> None:
    front = Front("a", "b")
    front.send(submit("1"))
    name = front.where("1")
    draining = front.links[name]
    draining.add("1")
    draining.gain("1")
    front.send(submit("waits", range(100)))
    before = front.replicas.max_running
    draining.say(ReplicaDraining())
    assert DrainAcknowledged() in draining.sent
    assert front.replicas.max_running == before // 2
    for number in range(2, 8):
        front.send(submit(str(number)))
    assert draining.requests == ["1"], "what had not begun goes elsewhere"
    assert front.where("waits") != name
    draining.gain("1", end=True)
    draining.on_lost()
    assert front.ended() == {}


@on_loop
def test_the_last_replica_that_drains_ends_all_that_it_has() -> None:
    front = Front("a")
    front.send(submit("1"))
    front.links["a"].say(ReplicaDraining())
    front.send(submit("2"))
    assert front.links["a"].requests == ["1"]
    assert front.join("b").requests == ["2"]


@on_loop
def test_a_request_that_the_second_replica_refuses_ends_with_that_error_once() -> None:
    front = Front("a", "b")
    front.send(submit("1"))
    first = front.where("1")
    front.links[first].add("1")
    front.links[first].on_lost()
    second = front.links["b" if first == "a" else "a"]
    second.say(EngineReply("1", error=RequestError("no")))
    assert [type(message) for message in front.heard] == [EngineReply, RequestFailed]
    assert front.replicas._requests == {}


@on_loop
def test_counts_are_those_of_all_and_one_that_does_not_answer_does_not_hold_them_up() -> None:
    front = Front("a", "b")
    front.send(Query("question", "observe"))
    for name, count in (("a", 3), ("b", 4)):
        front.links[name].say(EngineReply("question", observation(running=count)))
    [reply] = front.heard
    assert reply.result.stats == {"running": 7}
    front.send(Query("later", "observe"))
    front.links["a"].say(EngineReply("later", observation(running=10)))
    assert len(front.heard) == 1
    front.replicas._questions.stop_waiting("later")  # as the loop does in a second
    assert front.heard[1].result.stats == {"running": 14}
    assert {name: each.stats["running"] for name, each in front.replicas.observations.items()} == {"a": 10, "b": 4}


@on_loop
def test_no_replica_is_no_sign_of_life() -> None:
    front = Front("a")
    front.links["a"].on_lost()
    front.send(Query("question", "observe"))
    front.replicas._questions.stop_waiting("question")
    assert front.heard == []
    link = front.join("b")
    link.say(EngineReply("question", observation(running=1)))
    assert [reply.call_id for reply in front.heard] == ["question"]


@on_loop
def test_a_replica_whose_news_are_missing_is_asked_for_everything() -> None:
    front = Front("a")
    link = front.links["a"]
    link.say(ReplicaStatus(observation(), IndexChanges(0, (1,), is_whole=True)))
    assert ResendIndex() not in link.sent
    link.say(ReplicaStatus(observation(), IndexChanges(2, (2,))))
    assert ResendIndex() in link.sent


@on_loop
def test_a_prompt_goes_where_its_beginning_was_published_and_not_for_another_salt() -> None:
    front = Front("a", "b", "c")
    prompt = list(range(64))
    keys = tuple(hash_prompt(prompt, 16, "one").keys)
    front.links["b"].say(ReplicaStatus(observation(), IndexChanges(0, keys, is_whole=True)))
    router = front.replicas.router
    assert router is not None
    front.send(submit("1", prompt, "one"))
    assert front.where("1") == "b"
    assert router.reasons["longest_hit"] == 1
    front.send(submit("2", prompt, "two"))
    assert router.reasons["nothing_cached"] == 1


@on_loop
def test_a_conversation_stays_where_it_was_before_anything_is_published() -> None:
    front = Front("a", "b")
    words = list(range(100))
    front.send(submit("1", words))
    home = front.where("1")
    front.links[home].add("1")
    front.links[home].gain("1", end=True)
    front.send(submit("2", [*words, *range(200, 240)]))
    assert front.where("2") == home


@on_loop
def test_a_replica_with_another_plan_is_turned_away() -> None:
    front = Front("a")
    other = front.join("b", max_model_len=512)
    assert other.is_closed
    front.send(submit("1"))
    assert front.where("1") == "a"


@on_loop
def test_what_gains_cost_is_told_to_their_replica_seldom_and_for_all_replicas() -> None:
    front = Front("a", "b")
    for number in range(4):
        front.send(submit(str(number), range(number, number + 40)))
    name = front.where("0")
    for _ in range(3):
        front.links[name].gain("0")
        front.send(DeltasHandled(0.5))
    assert [message for message in front.links[name].sent if isinstance(message, DeltasHandled)] == [DeltasHandled(1.0)]


def test_a_failure_of_all_reaches_who_waits_for_the_first_and_who_serves() -> None:
    async def run() -> None:
        front = Front()
        waiting = asyncio.ensure_future(front.replicas.wait_started())
        await asyncio.sleep(0)
        front.replicas.fail(RuntimeError("nothing works"))
        with pytest.raises(RuntimeError, match="nothing works"):
            await waiting
        serving, ends = Front("a"), []
        serving.replicas.on_end = ends.append
        serving.replicas.fail(RuntimeError("gone"))
        serving.replicas.fail(RuntimeError("again"))
        assert [str(error) for error in ends] == ["gone"]

    asyncio.run(run())


STEPS = st.lists(
    st.tuples(st.sampled_from("sssggggwwwwwwwwwwweajjlddo"), st.integers(0, 7)),
    min_size=30,
    max_size=100,
)


@settings(max_examples=300)
@given(STEPS)
@pytest.mark.slow
def test_every_request_ends_once_with_its_own_tokens_whatever_replicas_do(steps: list[tuple[str, int]]) -> None:
    """s: a request is sent, g: one gains, e: one ends, a: one is aborted, w: a replica does what it was told next, and
    may refuse, j: one joins, l: one is lost, d: one drains, by moving, o: an old message of a lost one comes late."""

    async def run() -> None:
        tokens: dict[str, int] = {}
        links: dict[str, MovingLink] = {}
        front = Front()

        def join() -> MovingLink:
            name = f"r{len(links)}"
            link = links[name] = MovingLink(name, tokens, links)
            front.replicas.add(link)
            link.hello()
            return link

        def live() -> list[MovingLink]:
            return [link for link in links.values() if not link.is_gone]

        join()
        sent = [f"q{number}" for number in range(3)]
        for place, request_id in enumerate(sent):
            front.replicas.send(submit(request_id, range(place, place + 33)))
            links["r0"].work()
            links["r0"].advance(request_id)
        join()
        aborted: set[str] = set()
        ends: Counter[str] = Counter()
        num_lost = num_refused = 0
        for kind, number in steps:
            unfinished = [each for each in sent if each not in aborted and not ends[each]]
            chosen = unfinished[number % len(unfinished)] if unfinished else None
            link = live()[number % len(live())] if live() else None
            if kind == "s":
                sent.append(f"q{len(sent)}")
                front.replicas.send(submit(sent[-1], range(number, number + 33)))
            elif kind in "ge" and chosen is not None:
                for each in links.values():
                    each.advance(chosen, end=kind == "e")
            elif kind == "a" and chosen is not None:
                aborted.add(chosen)
                front.replicas.send(AbortRequest(chosen))
            elif kind == "j" and len(live()) < 4:
                join()
            elif kind == "w" and link is not None:
                num_refused += bool(link.inbox) and isinstance(link.inbox[0], CancelMove) and number == 7
                link.work(number)
            elif kind == "l" and link is not None:
                link.lose()
                num_lost += 1
            elif kind == "d" and link is not None:
                link.say(ReplicaDraining(number == 0))
            elif kind == "o" and sent:
                for each in links.values():
                    if each.is_gone:
                        each.gain(sent[number % len(sent)], 99)
            front.replicas.check_integrity()
            ends = ends_of(front)
        join()
        while any(link.inbox for link in live()):
            for link in live():
                link.work()
                front.replicas.check_integrity()
        ends = ends_of(front)
        errors = front.ended()
        for request_id in sent:
            heard = tokens_of(front, request_id)
            assert heard == list(range(len(heard))), "each token once, in their order"
            assert ends[request_id] <= 1
            holders = [link.name for link in live() if request_id in link.running]
            if request_id in aborted or ends[request_id]:
                assert not holders, f"{request_id} is over, and with {holders}"
            else:
                assert len(holders) == 1, f"{request_id} is with {holders}"
                assert links[holders[0]].running[request_id] == len(heard), "what it gained was heard"
            assert not any(request_id in link.kept for link in live()), "nothing is kept of what does not move"
            if request_id in errors:
                assert isinstance(errors[request_id], ReplicaLost)
                assert heard, "one that had not begun goes elsewhere"
        assert len(errors) == 0 or num_lost + num_refused, "a drain alone ends nothing"

    asyncio.run(run())


def ends_of(front: Front) -> Counter[str]:
    """How often each request has ended, in whatever way."""
    gained = [each for message in front.heard if isinstance(message, OutputDeltas) for each in message.deltas]
    return Counter([*front.ended(), *(each.request_id for each in gained if each.output is not None)])


def tokens_of(front: Front, request_id: str) -> list[int]:
    gained = [each for message in front.heard if isinstance(message, OutputDeltas) for each in message.deltas]
    return [token for each in gained if each.request_id == request_id for token in each.samples[0].token_ids]
