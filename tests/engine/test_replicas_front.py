"""What becomes of messages where several replicas take the place of one engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine.process.failures import ReplicaLost
from ostinato.engine.process.messages import Abort, Ask, Compile, Ended, Gained, Reply, Settled
from ostinato.engine.replicas.front import Replicas
from ostinato.engine.replicas.messages import Draining, Parted, Retell, Told
from ostinato.errors import RequestError
from ostinato.replicas.prompts import chain_of
from ostinato.replicas.published import Changes
from ostinato.sample.guide import Guide
from tests.support.fake_replicas import FakeLink, observation, submit

GUIDE = Guide(choice=("yes", "no"))


class Front:
    """Replicas behind fake links, and what they said."""

    def __init__(self, *names: str) -> None:
        self.replicas = Replicas()
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
        return {message.request_id: message.error for message in self.heard if isinstance(message, Ended)}


def on_loop(test: Callable[..., Any]) -> Callable[[], None]:
    async def run() -> None:
        test()

    def runs() -> None:
        asyncio.run(run())

    runs.__name__ = test.__name__
    return runs


@on_loop
def test_a_request_goes_to_one_replica_and_comes_back_as_from_one_engine() -> None:
    front = Front("a", "b")
    front.send(submit("1"))
    link = front.links[front.where("1")]
    link.add("1")
    link.gain("1", 5)
    link.gain("1", 6, end=True)
    assert [type(message) for message in front.heard] == [Reply, Gained, Gained]
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
    front.send(Compile("guide", GUIDE))
    front.links["a"].on_lost()
    front.send(submit("2"))
    front.send(submit("gone"))
    front.send(Abort("gone"))
    assert front.ended() == {}
    link = front.join("b")
    assert link.requests == ["1", "2"]
    assert link.asked(Compile) == ["guide"]
    link.say(Reply("guide"))
    assert front.heard == [Reply("guide")]


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
    draining.say(Draining())
    assert Parted() in draining.sent
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
    front.links["a"].say(Draining())
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
    second.say(Reply("1", error=RequestError("no")))
    assert [type(message) for message in front.heard] == [Reply, Ended]
    assert front.replicas._requests == {}


@on_loop
def test_counts_are_those_of_all_and_one_that_does_not_answer_does_not_hold_them_up() -> None:
    front = Front("a", "b")
    front.send(Ask("question", "observe"))
    for name, count in (("a", 3), ("b", 4)):
        front.links[name].say(Reply("question", observation(running=count)))
    [reply] = front.heard
    assert reply.result.stats == {"running": 7}
    front.send(Ask("later", "observe"))
    front.links["a"].say(Reply("later", observation(running=10)))
    assert len(front.heard) == 1
    front.replicas._questions.stop_waiting("later")  # as the loop does in a second
    assert front.heard[1].result.stats == {"running": 14}
    assert {name: each.stats["running"] for name, each in front.replicas.observations.items()} == {"a": 10, "b": 4}


@on_loop
def test_no_replica_is_no_sign_of_life() -> None:
    front = Front("a")
    front.links["a"].on_lost()
    front.send(Ask("question", "observe"))
    front.replicas._questions.stop_waiting("question")
    assert front.heard == []
    link = front.join("b")
    link.say(Reply("question", observation(running=1)))
    assert [reply.call_id for reply in front.heard] == ["question"]


@on_loop
def test_a_replica_whose_news_are_missing_is_asked_for_everything() -> None:
    front = Front("a")
    link = front.links["a"]
    link.say(Told(observation(), Changes(0, (1,), is_whole=True)))
    assert Retell() not in link.sent
    link.say(Told(observation(), Changes(2, (2,))))
    assert Retell() in link.sent


@on_loop
def test_a_prompt_goes_where_its_beginning_was_published_and_not_for_another_salt() -> None:
    front = Front("a", "b", "c")
    prompt = list(range(64))
    keys = tuple(chain_of(prompt, 16, "one").keys)
    front.links["b"].say(Told(observation(), Changes(0, keys, is_whole=True)))
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
        front.send(Settled(0.5))
    assert [message for message in front.links[name].sent if isinstance(message, Settled)] == [Settled(1.0)]


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
    st.tuples(st.sampled_from("ssssgggggeajldo"), st.integers(0, 7)),
    max_size=60,
)


@given(STEPS)
def test_every_request_ends_once_whatever_replicas_do(steps: list[tuple[str, int]]) -> None:
    """s: a request is sent, g: one gains, e: one ends, a: one is aborted, j: a replica joins, l: one is lost, d: one
    drains, o: an old message of a lost one comes late."""

    async def run() -> None:
        front = Front("r0")
        live, gone = dict(front.links), {}
        sent: list[str] = []
        tokens: Counter[str] = Counter()
        aborted: set[str] = set()
        ends: Counter[str] = Counter()

        def serves(request_id: str) -> FakeLink | None:
            return next((link for link in live.values() if request_id in link.requests), None)

        for kind, number in steps:
            unfinished = [each for each in sent if each not in aborted and not ends[each]]
            chosen = unfinished[number % len(unfinished)] if unfinished else None
            link = None if chosen is None else serves(chosen)
            if kind == "s":
                sent.append(f"q{len(sent)}")
                front.replicas.send(submit(sent[-1], range(number, number + 33)))
            elif kind in "ge" and chosen is not None and link is not None:
                link.gain(chosen, tokens[chosen], end=kind == "e")
                tokens[chosen] += 1
            elif kind == "a" and chosen is not None:
                aborted.add(chosen)
                front.replicas.send(Abort(chosen))
            elif kind == "j" and len(live) < 4:
                name = f"r{len(live) + len(gone)}"
                live[name] = front.join(name)
            elif kind in "ld" and live:
                name = sorted(live)[number % len(live)]
                if kind == "d":
                    live[name].say(Draining())
                else:
                    gone[name] = live.pop(name)
                    gone[name].on_lost()
            elif kind == "o" and gone and sent:
                gone[sorted(gone)[number % len(gone)]].gain(sent[number % len(sent)], 99)
            front.replicas.check_integrity()
            ends = Counter(
                [message.request_id for message in front.heard if isinstance(message, Ended)]
                + [
                    each.request_id
                    for message in front.heard
                    if isinstance(message, Gained)
                    for each in message.deltas
                    if each.output is not None
                ]
            )
        live["last"] = front.join("last")
        heard: dict[str, list[int]] = {}
        for message in front.heard:
            if isinstance(message, Gained):
                for each in message.deltas:
                    heard.setdefault(each.request_id, []).extend(each.samples[0].token_ids)
        for request_id in sent:
            assert ends[request_id] <= 1
            assert heard.get(request_id, []) == list(range(tokens[request_id])), "its own tokens, in their order"
            if request_id not in aborted and not ends[request_id]:
                holders = [name for name, link in live.items() if request_id in link.requests]
                assert len(holders) == 1, f"{request_id} is with {holders}"
        for request_id, error in front.ended().items():
            assert isinstance(error, ReplicaLost)
            assert tokens[request_id], "one that had not begun goes elsewhere"

    asyncio.run(run())
