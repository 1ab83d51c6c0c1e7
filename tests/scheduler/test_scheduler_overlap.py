"""One step ahead: what is scheduled before a step is over, what waits and why, and what a void row leaves behind."""

from __future__ import annotations

import random

import pytest

from ostinato.scheduler.decode import OverlapBlocker
from ostinato.scheduler.limits import SchedulerLimits, SchedulingPolicy
from ostinato.scheduler.request import FinishReason
from tests.scheduler.test_scheduler_properties import KINDS, PIECES, WINDOWS, make_harness, next_turn, random_wish
from tests.support.overlap_harness import AheadHarness
from tests.support.scheduler_harness import Sizes


def run_program(seed: int) -> AheadHarness:
    """Few requests at a time, in a cache that holds little more than them, so that steps ahead run among hits,
    checkpoints, evictions, endings and failures."""
    rng = random.Random(seed)
    policy: SchedulingPolicy = rng.choice(["fcfs", "priority"])
    limits = SchedulerLimits(rng.randint(1, 4), rng.randint(6, 16), 48, rng.random() < 0.7, policy)
    sizes = Sizes(
        rng.randint(8, 24), rng.randint(3, 12), rng.choice([1, 2, 3, 4]), rng.randint(8, 24), rng.randint(1, 12)
    )
    harness = make_harness(limits, sizes, rng.choice([*KINDS, *WINDOWS]), 0, rng.choice, make=AheadHarness)
    for _ in range(90):
        chance = rng.random()
        if harness.batch is None:
            if chance < 0.06 or not harness.followers:
                harness.arrive(random_wish(harness, rng))
            elif chance < 0.1:
                harness.arrive(next_turn(harness, rng.choice(sorted(harness.followers)), list(rng.choice(PIECES)), 6))
            elif chance < 0.13:
                harness.preempt(rng.choice(sorted(harness.followers)))
            else:
                harness.schedule()
            continue
        if harness.following is None and chance < 0.9:
            harness.follow()
        if rng.random() < 0.08:
            harness.end(rng.choice(sorted(harness.followers)), rng.choice([FinishReason.ABORT, FinishReason.STOP]))
        if rng.random() < 0.08:
            harness.arrive(random_wish(harness, rng))
        harness.early = rng.random() < 0.5
        if chance < 0.03:
            harness.fail()
        elif chance < 0.06:
            harness.update(frozenset({rng.choice(harness.batch.rows).request_id}))
        else:
            harness.update()
    harness.finish_all()
    return harness


@pytest.mark.parametrize("part", range(2))
@pytest.mark.slow
def test_programs_with_a_step_ahead_give_every_request_what_it_would_get_alone_and_leak_nothing(part: int) -> None:
    harnesses = [run_program(seed) for seed in range(100 * part, 100 * part + 100)]
    counters = [harness.scheduler.counters for harness in harnesses]
    # Else these programs would not test what they are for.
    assert sum(c.steps_ahead for c in counters) > 0.3 * sum(c.steps for c in counters)
    assert sum(c.void_rows > 0 for c in counters) >= 30
    assert sum(c.failed_steps > 0 for c in counters) >= 20
    assert sum(c.preemptions > 0 for c in counters) >= 20
    for cause in set(OverlapBlocker) - {OverlapBlocker.TOKEN}:
        assert sum(c.steps_not_ahead[cause] > 0 for c in counters) >= 10, cause
    stores = [harness.cache.store.counters for harness in harnesses]
    assert sum(s.checkpoints_taken > 0 for s in stores) >= 20
    assert sum(h.scheduler.prefix_counters.cached_tokens > 0 for h in harnesses) >= 20
