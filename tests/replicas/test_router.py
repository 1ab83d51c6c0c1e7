"""What the router remembers: queues, sessions, replicas that come and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kv_cache.eviction import EvictionCosts
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.replicas.index_sync import IndexChanges
from ostinato.replicas.router import HALF_LIFE, UNPUBLISHED_SECONDS, ChoiceReason, PromptTimes, ReplicaRouter
from tests.support.scheduler_steps import BLOCK, text

TIMES = PromptTimes(EvictionCosts(), 100.0)


def chain_of(tokens: tuple[int, ...], salt: str | None = None) -> BlockHashes:
    chain = BlockHashes(BLOCK, salt)
    chain.extend(lambda start, end: tokens[start:end], len(tokens))
    return chain


def router_of(*names: str) -> ReplicaRouter:
    router = ReplicaRouter(BLOCK, TIMES, seconds_per_output=0.01)
    for name in names:
        router.add(name)
    return router


def send(
    router: ReplicaRouter,
    request_id: str,
    tokens: tuple[int, ...],
    now: float = 0.0,
    session: str | None = None,
    salt: str | None = None,
) -> tuple[str, int]:
    """-> (where it goes, the hit expected there)"""
    choice = router.route(request_id, chain_of(tokens, salt), len(tokens), now, 10, session)
    router.check_integrity()
    assert choice is not None
    return choice.name, choice.hit


def test_a_prompt_goes_where_its_beginning_is_published() -> None:
    router = router_of("a", "b")
    keys = chain_of(text(40)).keys
    assert router.apply("b", IndexChanges(0, (keys[2], keys[5]), is_whole=True))
    assert send(router, "1", text(40)) == ("b", 6 * BLOCK)
    assert router.reasons == {ChoiceReason.LONGEST_HIT.value: 1}


def test_a_hit_ends_before_the_last_token() -> None:
    router = router_of("a")
    router.apply("a", IndexChanges(0, tuple(chain_of(text(8)).keys), is_whole=True))
    assert send(router, "1", text(8)) == ("a", 8 - BLOCK)
    assert send(router, "2", text(9)) == ("a", 8)


def test_a_salt_finds_only_what_was_published_with_it() -> None:
    router = router_of("a", "b")
    router.apply("b", IndexChanges(0, tuple(chain_of(text(40), "one").keys), is_whole=True))
    assert send(router, "1", text(40), salt="two") == ("a", 0)
    assert send(router, "2", text(40), salt="one") == ("b", 36)


def test_a_session_returns_before_its_replica_has_told_and_a_session_of_another_salt_is_another() -> None:
    router = router_of("a", "b")
    assert send(router, "1", text(20), session="s") == ("a", 0)
    router.note_end("1")
    assert send(router, "2", text(40), 1.0, "s") == ("a", 16)
    router.note_end("2")
    assert send(router, "3", text(60), 2.0, "s", salt="other") == ("b", 0)


def test_turns_go_round_whatever_is_cached_and_pass_over_replicas_that_take_nothing() -> None:
    router = ReplicaRouter(BLOCK, TIMES, policy="round_robin")
    for name in "abc":
        router.add(name)
    router.apply("c", IndexChanges(0, tuple(chain_of(text(40)).keys), is_whole=True))
    assert [send(router, str(number), text(40)) for number in range(4)] == [("a", 0), ("b", 0), ("c", 36), ("a", 0)]
    router.drain("b")
    assert {send(router, f"later {number}", text(40))[0] for number in range(2)} == {"a", "c"}
    assert router.reasons == {ChoiceReason.ROUND_ROBIN.value: 6}


@pytest.mark.parametrize("tokens", [text(12), text(40, 1)], ids=["shorter", "another text"])
def test_a_session_that_does_not_go_on_from_its_last_prompt_expects_nothing_of_it(tokens: tuple[int, ...]) -> None:
    router = router_of("a")
    send(router, "1", text(20), session="s")
    assert send(router, "2", tokens, session="s") == ("a", 0)


def test_what_a_session_sent_is_expected_for_a_while_only() -> None:
    router = router_of("a")
    send(router, "1", text(20), session="s")
    assert send(router, "2", text(40), UNPUBLISHED_SECONDS + 1, "s") == ("a", 0)


def test_a_prompt_is_work_until_its_first_token_and_its_answer_until_it_ends() -> None:
    router = router_of("a", "b")
    assert send(router, "1", text(20)) == ("a", 0)
    router.apply("a", IndexChanges(0, tuple(chain_of(text(30, 1)).keys), is_whole=True))
    # 20 tokens and an answer are before it: 0.3 seconds. The hit saves 0.28.
    assert send(router, "2", text(30, 1)) == ("b", 0)
    router.note_end("2")
    router.note_first_token("1")
    assert send(router, "3", text(30, 1)) == ("a", 28)


def test_a_replica_that_drains_gets_nothing_new_and_none_left_is_told() -> None:
    router = router_of("a", "b")
    router.apply("a", IndexChanges(0, tuple(chain_of(text(40)).keys), is_whole=True))
    router.drain("a")
    assert send(router, "1", text(40)) == ("b", 0)
    router.drain("b")
    assert router.route("2", chain_of(text(40)), 40, 0.0) is None


def test_a_replica_that_is_lost_names_its_requests_and_comes_back_empty() -> None:
    router = router_of("a")
    router.apply("a", IndexChanges(0, tuple(chain_of(text(40)).keys), is_whole=True))
    send(router, "1", text(40), session="s")
    assert router.remove("a") == ["1"]
    router.note_end("1")
    router.note_first_token("1")
    router.check_integrity()
    router.add("a")
    assert send(router, "1", text(40), session="s") == ("a", 0)
    # Messages of the one that was lost ask for everything anew.
    assert not router.apply("a", IndexChanges(1, (1,)))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 30), st.integers(0, 3)),
        st.tuples(st.sampled_from(["begun", "ended"]), st.integers(0, 30), st.just(0)),
        st.tuples(st.sampled_from(["add", "remove", "drain", "publish"]), st.integers(0, 3), st.integers(0, 3)),
    )
)


@given(STEPS)
def test_random_programs_keep_the_books_right(steps: list[tuple[str, int, int]]) -> None:
    router = router_of("0", "1")
    alive, taking, unfinished = {"0", "1"}, {"0", "1"}, {}
    for now, (what, first, second) in enumerate(steps):
        name = str(first)
        if what == "send" and name not in unfinished:
            tokens = text(4 + first, second)
            choice = router.route(name, chain_of(tokens), len(tokens), now, first, f"session {second}")
            assert (choice is None) == (not taking)
            if choice is not None:
                assert choice.name in taking
                unfinished[name] = choice.name
        elif what == "begun":
            router.note_first_token(name)
        elif what == "ended":
            router.note_end(name)
            unfinished.pop(name, None)
        elif what in ("add", "remove"):
            lost = set(router.remove(name))
            assert lost == {each for each, where in unfinished.items() if where == name}
            unfinished = {each: where for each, where in unfinished.items() if where != name}
            if what == "add":
                router.add(name)
            for names in (alive, taking):
                names.discard(name)
                names |= {name} if what == "add" else set()
        elif what == "drain" and name in alive:
            router.drain(name)
            taking.discard(name)
        elif what == "publish" and name in alive:
            assert router.apply(name, IndexChanges(now, tuple(chain_of(text(30, second)).keys), is_whole=True))
        router.check_integrity()


def test_work_that_was_given_long_ago_counts_less_than_work_of_now() -> None:
    router = router_of("a", "b")
    assert send(router, "1", text(100)) == ("a", 0)
    router.note_end("1")
    later = 10 * HALF_LIFE
    assert send(router, "2", text(30, 1), later) == ("b", 0)
    router.note_end("2")
    assert send(router, "3", text(30, 2), later) == ("a", 0)


def test_so_many_sessions_are_remembered_at_most_and_those_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.replicas.router.MAX_SESSIONS", 2)
    router = router_of("a")
    for name in ("x", "y", "x", "z"):
        send(router, f"{name} {router.reasons.total()}", text(20), session=name)
    assert [send(router, name, text(40), session=name)[1] for name in "xzy"] == [16, 16, 0]
