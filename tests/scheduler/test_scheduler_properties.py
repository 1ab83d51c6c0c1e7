"""Random programs of requests on tiny caches: nothing leaks, nobody waits for ever, every output is right.

Prompts are put together from a few pieces and from what earlier requests had and got, so that they share
beginnings all the time. The programs come from two sources: from hypothesis, which finds corners and shrinks what
fails, and from seeds, which crowd the cache far more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ostinato.kv_cache.checkpoints import PrefixCachePolicy, StateCacheMode
from ostinato.kv_cache.eviction import EvictionCosts, EvictionPolicy
from ostinato.kv_cache.marks import Mark
from ostinato.kv_cache.store import StoreCounts
from ostinato.scheduler.limits import SchedulerLimits, SchedulingPolicy
from ostinato.scheduler.request import FinishReason, StopConditions
from tests.support.fake_files import ForgetfulDirectory, fake_tier
from tests.support.fake_runner import VOCABULARY
from tests.support.scheduler_harness import Harness, Sizes, Wish

KINDS = ["hybrid", "hybrid", "attention", "state"]
WINDOWS = ["windows", "windows alone", "windows and state"]
DRAFTS = [0, 0, 0, 1, 2, 3, 4, 6]
SALTS = [None, None, None, "one", "two"]
PIECES = [tuple((number * 7 + index * 3) % VOCABULARY for index in range(n)) for number, n in enumerate((8, 4, 3, 1))]

T = TypeVar("T")
H = TypeVar("H", bound=Harness)


class Choose(Protocol):
    def __call__(self, values: Sequence[T]) -> T: ...


tokens = st.integers(0, VOCABULARY - 1)
stop_conditions = st.builds(
    StopConditions,
    max_tokens=st.integers(1, 20),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.frozensets(tokens, max_size=1),
    eos_token_ids=st.frozensets(tokens, max_size=2),
    ignore_eos=st.booleans(),
)
texts = st.lists(st.sampled_from(PIECES), max_size=3).map(lambda pieces: [token for piece in pieces for token in piece])
wishes = st.builds(
    Wish,
    prompt=texts | st.lists(tokens, max_size=12),
    stop=stop_conditions,
    priority=st.integers(0, 2),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
    salt=st.sampled_from(SALTS),
    client=st.sampled_from(["one", "two"]),
    marks=st.lists(st.builds(Mark, st.integers(0, 24), st.sampled_from([1.0, 5.0, 50.0])), max_size=3).map(tuple),
).map(lambda wish: replace(wish, marks=tuple(mark for mark in wish.marks if mark.position <= len(wish.prompt))))


class Program(RuleBasedStateMachine):
    """Arrive, step, fail a step or a row, finish, abort and forget, between steps and in flight; after each, all is
    checked."""

    @initialize(
        limits=st.builds(
            SchedulerLimits,
            max_num_seqs=st.integers(1, 4),
            max_num_batched_tokens=st.integers(1, 16),
            max_model_len=st.integers(4, 60),
            enable_chunked_prefill=st.booleans(),
            policy=st.sampled_from(["fcfs", "priority"]),
        ),
        num_blocks=st.integers(3, 14),
        num_slots=st.integers(2, 9),
        num_window_blocks=st.integers(3, 14),
        window=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 4]),
        kind=st.sampled_from([*KINDS, *WINDOWS]),
        k=st.sampled_from(DRAFTS),
        data=st.data(),
    )
    def start(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        num_slots: int,
        num_window_blocks: int,
        window: int,
        block_size: int,
        kind: str,
        k: int,
        data: st.DataObject,
    ) -> None:
        def choose(values: Sequence[T]) -> T:
            return data.draw(st.sampled_from(values))

        self.harness = make_harness(
            limits, Sizes(num_blocks, num_slots, block_size, num_window_blocks, window), kind, k, choose
        )

    @rule(wishes=st.lists(wishes, min_size=1, max_size=4))
    def arrive(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            self.harness.arrive(wish)

    @precondition(lambda self: self.harness.followers)
    @rule(data=st.data(), text=texts, max_tokens=st.integers(1, 8))
    def go_on(self, data: st.DataObject, text: list[int], max_tokens: int) -> None:
        """The next turn of a conversation, whose last one may still be running."""
        name = data.draw(st.sampled_from(sorted(self.harness.followers)))
        self.harness.arrive(next_turn(self.harness, name, text, max_tokens))

    @precondition(lambda self: self.harness.batch is None)
    @rule(speculates=st.booleans())
    def schedule(self, speculates: bool) -> None:
        self.harness.num_drafts = speculates * self.harness.k
        self.harness.schedule()

    @precondition(lambda self: self.harness.batch is not None)
    @rule()
    def update(self) -> None:
        self.harness.update()

    @precondition(lambda self: self.harness.batch is not None)
    @rule(data=st.data())
    def break_a_row(self, data: st.DataObject) -> None:
        rows = self.harness.batch.rows
        self.harness.update(frozenset({data.draw(st.sampled_from([row.request_id for row in rows]))}))

    @precondition(lambda self: self.harness.batch is not None)
    @rule()
    def fail(self) -> None:
        self.harness.fail()

    @precondition(lambda self: self.harness.batch is None)
    @rule(speculates=st.lists(st.booleans(), min_size=1, max_size=10))
    def steps(self, speculates: list[bool]) -> None:
        for each in speculates:
            self.harness.num_drafts = each * self.harness.k
            self.harness.step()

    @precondition(lambda self: self.harness.followers)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        self.harness.end(data.draw(st.sampled_from(sorted(self.harness.followers))), reason)

    @precondition(lambda self: self.harness.followers and self.harness.batch is None)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.harness.preempt(data.draw(st.sampled_from(sorted(self.harness.followers))))

    @rule()
    def forget(self) -> None:
        self.harness.forget()

    @invariant()
    def everything_is_sound(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.finish_all()


def make_harness(
    limits: SchedulerLimits,
    sizes: Sizes,
    kind: str,
    k: int,
    choose: Choose,
    num_cells: int = 0,
    make: type[H] = Harness,  # type: ignore[assignment]
) -> H:
    """A harness for a kind of model, whose policies are chosen among those that a plan may come to. `sizes` are for
    requests without drafts; of the slots for drafts there are some for all requests, and some for one alone."""
    num_blocks = 0 if kind in ("state", "windows alone") else sizes.num_blocks
    num_slots = 0 if kind in ("attention", "windows", "windows alone") else sizes.num_slots
    num_window_blocks = sizes.num_window_blocks if "windows" in kind else 0
    # With a window of 1, window blocks alone tell a row nothing of the text before it.
    window = max(2, sizes.window) if kind == "windows alone" else sizes.window
    if k > 0:
        least = limits.max_num_seqs * (1 + k) + sizes.block_size
        limits = replace(limits, max_num_batched_tokens=max(limits.max_num_batched_tokens, least))
        num_slots += k * choose([1, 2, limits.max_num_seqs]) if num_slots else 0
    is_on = choose([True] * 7 + [False])
    modes: list[StateCacheMode] = ["none"]
    if is_on and num_slots:
        modes += ["all", "all", *(["align", "align"] if limits.enable_chunked_prefill else [])]
    spacing = choose([1, 2, 3, 4]) * sizes.block_size
    policy = PrefixCachePolicy(is_on, choose(modes), spacing, branches=choose([True, True, False]))
    eviction: EvictionPolicy = choose(["marconi", "lru"])
    costs = EvictionCosts(
        choose([1.0, 5.0]),
        choose([0.0, 0.1]),
        choose([1, 10]),
        choose([1, 100]),
        choose([1, 10]) if num_window_blocks else 0,
    )
    num_hashes = choose([None, None, None, None, 20, 3])
    num_packed = choose([0, 1, 3, 8]) if num_slots else 0
    sizes = Sizes(num_blocks, num_slots, sizes.block_size, num_window_blocks, window, num_packed)
    pins = (choose([1, 2, 2, 3]), choose([2, 3, 5]))
    harness = make(limits, sizes, policy, eviction, costs, num_hashes, k, num_cells, *pins)
    if choose([False, True]):
        directory = ForgetfulDirectory(choose(range(8)))
        harness.cache.store.files = fake_tier(harness.runner, directory, choose([1e12, 1e12, 0.5]))
    return harness


def next_turn(harness: Harness, name: str, text: list[int], max_tokens: int) -> Wish:
    follower = harness.followers[name]
    return Wish([*follower.known, *text], StopConditions(max_tokens), salt=follower.request.cache_salt)


def run_crowded_program(seed: int, k: int) -> Harness:
    """Requests arrive faster than they are served, and most could fill the cache alone."""
    rng = random.Random(seed)
    policy: SchedulingPolicy = rng.choice(["fcfs", "priority"])
    limits = SchedulerLimits(
        rng.randint(2, 6), rng.randint(3, 14), 48, rng.random() < 0.7, policy, scored_tokens=(2, 2**63)[seed % 2]
    )
    sizes = Sizes(rng.randint(6, 12), rng.randint(3, 9), rng.choice([2, 3, 4]), rng.randint(6, 12), rng.randint(1, 12))
    harness = make_harness(limits, sizes, rng.choice([*KINDS, *WINDOWS]), k, rng.choice)
    for _ in range(70):
        chance = rng.random()
        if harness.batch is not None:
            crowd(harness, rng, chance)
        elif chance < 0.65:
            harness.num_drafts = 0 if chance < 0.15 else k
            harness.schedule()
        elif chance < 0.75 and harness.followers:
            text = list(rng.choice(PIECES))
            harness.arrive(next_turn(harness, rng.choice(sorted(harness.followers)), text, rng.randint(1, 6)))
        else:
            harness.arrive(random_wish(harness, rng))
        if harness.followers and rng.random() < 0.04:
            reason = rng.choice([FinishReason.ABORT, FinishReason.STOP])
            harness.end(rng.choice(sorted(harness.followers)), reason)
    harness.finish_all()
    return harness


def crowd(harness: Harness, rng: random.Random, chance: float) -> None:
    assert harness.batch is not None
    if chance < 0.04:
        harness.fail()
    elif chance < 0.06:
        harness.update(frozenset({rng.choice(harness.batch.rows).request_id}))
    else:
        harness.update()


def random_wish(harness: Harness, rng: random.Random) -> Wish:
    prompt = [token for _ in range(rng.randint(0, 2)) for token in rng.choice(PIECES)]
    prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randint(0 if prompt else 1, 6))]
    most = max(1, min(harness.capacity, 48) - len(prompt))
    stop = StopConditions(rng.randint(1, most), eos_token_ids=frozenset({rng.randrange(200)}))
    salt, wants_scores = rng.choice(SALTS), rng.random() < 0.15
    marks = [Mark(rng.randint(0, len(prompt)), rng.choice([1.0, 5.0, 50.0])) for _ in range(rng.choice([0, 1, 2, 3]))]
    return Wish(prompt, stop, rng.randrange(3), wants_scores, salt, rng.choice(["one", "two"]), tuple(marks))


@pytest.mark.parametrize("part", range(8))
@pytest.mark.slow
def test_crowded_programs_preempt_and_evict_often_and_still_give_every_request_what_it_would_get_alone(
    part: int,
) -> None:
    k = (0, 0, 0, 0, 1, 2, 3, 6)[part]
    harnesses = [run_crowded_program(seed, k) for seed in range(part * 70, part * 70 + 70)]
    counters = [harness.scheduler.counters for harness in harnesses]
    stores = [harness.cache.store.counters for harness in harnesses]
    prefixes = [harness.scheduler.prefix_counters for harness in harnesses]
    # Else these programs would not test what they are for.
    assert sum(c.preemptions > 0 for c in counters) >= 15
    assert k > 0 or sum(c.cut_recomputations for c in counters) >= 1  # steps with room for drafts are longer
    assert sum(c.failed_steps for c in counters) >= 20
    assert sum(p.cached_tokens > 0 for p in prefixes) >= 15
    assert sum(p.restored_tokens > 0 for p in prefixes) >= 6
    # Damage is rare, and no test of its own.
    assert all(any(p.misses[cause] for p in prefixes) for cause in prefixes[0].misses if cause != "damaged")
    assert sum(p.file_tokens > 0 for p in prefixes) >= 1
    verified = Counter(each for harness in harnesses for each in harness.verified.elements())
    if k > 0:
        assert all(verified[k, k, num_accepted] >= 5 for num_accepted in range(k + 1))
        assert all(verified[most, most, most] >= 3 for most in range(k))
        assert sum(count for (most, given, _), count in verified.items() if given < most) >= 20
    names = [name for name in StoreCounts.__slots__ if "packed" not in name]
    assert all(sum(getattr(s, name) > 0 for s in stores) >= 5 for name in names)


@pytest.mark.parametrize("mode", ["all", "align"])
def test_programs_whose_checkpoints_are_packed_hit_them_and_give_every_request_what_it_would_get_alone(
    mode: StateCacheMode,
) -> None:
    counts = Counter[str]()
    for seed in range(30):
        rng = random.Random(seed)
        k = rng.choice([0, 0, 2])
        limits = SchedulerLimits(rng.randint(1, 3), rng.randint(6, 14) + 9 * (k > 0), 48, True, "fcfs")
        sizes = Sizes(rng.choice([0, 30]), rng.randint(3, 6) + 2 * k, 2, num_packed=rng.choice([1, 4, 12]))
        policy = PrefixCachePolicy(True, mode, rng.choice([2, 4, 8]))
        harness = Harness(limits, sizes, policy, rng.choice(["marconi", "lru"]), k=k, max_pins=2, max_pinned_blocks=5)
        if rng.random() < 0.5:
            harness.cache.store.files = fake_tier(harness.runner, ForgetfulDirectory(seed))
        for _ in range(60):
            if harness.batch is not None:
                crowd(harness, rng, rng.random())
            elif rng.random() < 0.7:
                harness.schedule()
            elif rng.random() < 0.6 and harness.followers:
                name = rng.choice(sorted(harness.followers))
                harness.arrive(next_turn(harness, name, list(rng.choice(PIECES)), rng.randint(1, 6)))
            else:
                harness.arrive(random_wish(harness, rng))
        harness.finish_all()
        counters = harness.cache.store.counters
        counts.update({name: getattr(counters, name) for name in ("packed_checkpoints", "unpacked_checkpoints")})
        usage = harness.cache.usage()
        assert usage.slots_total == sizes.num_slots - 1 + sizes.num_packed
        harness.forget()
    assert counts["packed_checkpoints"] >= 100
    assert counts["unpacked_checkpoints"] >= 20


def test_programs_of_requests_keep_the_cache_sound_and_give_every_request_what_it_would_get_alone() -> None:
    run_state_machine_as_test(
        Program,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
