"""Random programs of requests on tiny caches: nothing leaks, nobody waits for ever, every output is right.

The programs come from two sources: from hypothesis, which finds corners and shrinks what fails, and from
seeds, which crowd the cache far more.
"""

from __future__ import annotations

import random

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

from ostinato.schedule.limits import Policy, SchedulerLimits
from ostinato.schedule.request import FinishReason, StopConditions
from tests.fake_runner import VOCABULARY
from tests.scheduler_harness import Harness, Wish

KINDS = ["hybrid", "hybrid", "attention", "state"]

tokens = st.integers(0, VOCABULARY - 1)
stop_conditions = st.builds(
    StopConditions,
    max_tokens=st.integers(1, 20),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.frozensets(tokens, max_size=1),
    eos_token_ids=st.frozensets(tokens, max_size=2),
    ignore_eos=st.booleans(),
)
wishes = st.builds(
    Wish,
    prompt=st.lists(tokens, max_size=12),
    stop=stop_conditions,
    priority=st.integers(0, 2),
    prompt_logprobs=st.booleans(),
)


class Program(RuleBasedStateMachine):
    """Arrive, step, fail a step, finish and abort between steps and in flight; after each, all is checked."""

    @initialize(
        limits=st.builds(
            SchedulerLimits,
            max_num_seqs=st.integers(1, 4),
            max_num_batched_tokens=st.integers(1, 12),
            max_model_len=st.integers(4, 40),
            enable_chunked_prefill=st.booleans(),
            policy=st.sampled_from(["fcfs", "priority"]),
        ),
        num_blocks=st.integers(3, 12),
        num_slots=st.integers(2, 5),
        block_size=st.sampled_from([1, 2, 4]),
        kind=st.sampled_from(KINDS),
    )
    def start(self, limits: SchedulerLimits, num_blocks: int, num_slots: int, block_size: int, kind: str) -> None:
        self.harness = make_harness(limits, num_blocks, num_slots, block_size, kind)

    @rule(wishes=st.lists(wishes, min_size=1, max_size=4))
    def arrive(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            self.harness.arrive(wish)

    @precondition(lambda self: self.harness.batch is None)
    @rule()
    def schedule(self) -> None:
        self.harness.schedule()

    @precondition(lambda self: self.harness.batch is not None)
    @rule()
    def update(self) -> None:
        self.harness.update()

    @precondition(lambda self: self.harness.batch is not None)
    @rule()
    def fail(self) -> None:
        self.harness.fail()

    @precondition(lambda self: self.harness.batch is None)
    @rule(count=st.integers(1, 10))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.harness.followers)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        self.harness.end(data.draw(st.sampled_from(sorted(self.harness.followers))), reason)

    @precondition(lambda self: self.harness.followers and self.harness.batch is None)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.harness.preempt(data.draw(st.sampled_from(sorted(self.harness.followers))))

    @invariant()
    def everything_is_sound(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.finish_all()


def make_harness(limits: SchedulerLimits, num_blocks: int, num_slots: int, block_size: int, kind: str) -> Harness:
    return Harness(limits, 0 if kind == "state" else num_blocks, 0 if kind == "attention" else num_slots, block_size)


def run_crowded_program(seed: int) -> Harness:
    """Requests arrive faster than they are served, and most could fill the cache alone."""
    rng = random.Random(seed)
    policy: Policy = rng.choice(["fcfs", "priority"])
    limits = SchedulerLimits(rng.randint(2, 6), rng.randint(3, 16), 40, rng.random() < 0.7, policy)
    harness = make_harness(limits, rng.randint(6, 12), rng.randint(3, 7), rng.choice([2, 4]), rng.choice(KINDS))
    for _ in range(60):
        chance = rng.random()
        if harness.batch is not None:
            harness.fail() if chance < 0.04 else harness.update()
        elif chance < 0.75:
            harness.schedule()
        else:
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))]
            most = max(1, min(harness.capacity, 40) - len(prompt))
            stop = StopConditions(rng.randint(1, most), eos_token_ids=frozenset({rng.randrange(200)}))
            harness.arrive(Wish(prompt, stop, rng.randrange(3), rng.random() < 0.3))
        if harness.followers and rng.random() < 0.06:
            reason = rng.choice([FinishReason.ABORT, FinishReason.STOP])
            harness.end(rng.choice(sorted(harness.followers)), reason)
        harness.scheduler.check_integrity()
    harness.finish_all()
    return harness


@pytest.mark.parametrize("part", range(4))
def test_crowded_programs_preempt_often_and_still_give_every_request_what_it_would_get_alone(
    part: int,
) -> None:
    harnesses = [run_crowded_program(seed) for seed in range(part * 100, part * 100 + 100)]
    counters = [harness.scheduler.counters for harness in harnesses]
    # Else these programs would not test what they are for.
    assert sum(c.preemptions > 0 for c in counters) >= 30
    assert sum(c.cut_recomputations for c in counters) >= 1
    assert sum(c.failed_steps for c in counters) >= 30


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
