"""Random programs of requests with images, on a tiny cache and a tiny encoder cache: nobody waits for ever, nothing
leaks, and every token that stands for an image gets what the encoder made of that very one."""

from __future__ import annotations

import random

import pytest

from ostinato.scheduler.limits import SchedulerLimits, SchedulingPolicy
from ostinato.scheduler.request import FinishReason, StopConditions
from tests.scheduler.test_scheduler_properties import KINDS, PIECES, SALTS, WINDOWS, crowd, make_harness, next_turn
from tests.support.fake_runner import FIRST_PART, VOCABULARY
from tests.support.scheduler_harness import Harness, Sizes, Wish

SIZES = (1, 2, 3, 3, 5, 5, 6, 9)
"""Tokens of each image that there is. Not all of them can be served in every program."""


def image(number: int) -> list[int]:
    return [FIRST_PART * (1 + number) + part for part in range(SIZES[number])]


def random_wish(harness: Harness, rng: random.Random) -> Wish:
    prompt: list[int] = []
    for _ in range(rng.randint(1, 4)):
        prompt += image(rng.randrange(len(SIZES))) if rng.random() < 0.6 else rng.choice(PIECES)
    prompt += [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 1, 1, 1, 3]))]
    most = max(1, min(harness.capacity, 48) - len(prompt))
    stop = StopConditions(rng.randint(1, min(most, 10)), eos_token_ids=frozenset({rng.randrange(200)}))
    return Wish(prompt, stop, rng.randrange(3), rng.random() < 0.1, rng.choice(SALTS))


def run_program(seed: int, k: int) -> Harness:
    """Requests arrive faster than they are served, and most could fill both caches alone."""
    rng = random.Random(seed)
    policy: SchedulingPolicy = rng.choice(["fcfs", "priority"])
    most = rng.randint(3, 14)
    limits = SchedulerLimits(rng.randint(2, 6), most, 48, rng.random() < 0.75, policy, max_item_tokens=most)
    sizes = Sizes(rng.randint(9, 14), rng.randint(3, 9), rng.choice([2, 3, 4]), rng.randint(9, 14), rng.randint(1, 12))
    harness = make_harness(
        limits, sizes, rng.choice([*KINDS, *WINDOWS]), k, rng.choice, num_cells=1 + rng.randint(5, 11)
    )
    for _ in range(70):
        chance = rng.random()
        if harness.batch is not None:
            crowd(harness, rng, chance)
        elif chance < 0.65:
            harness.num_drafts = 0 if chance < 0.15 else k
            harness.schedule()
        elif chance < 0.72 and harness.followers:
            text = [*rng.choice(PIECES), *image(rng.randrange(3)), 3] if rng.random() < 0.5 else [3]
            harness.arrive(next_turn(harness, rng.choice(sorted(harness.followers)), text, rng.randint(1, 6)))
        elif chance < 0.76 and harness.followers:
            harness.preempt(rng.choice(sorted(harness.followers)))
        else:
            harness.arrive(random_wish(harness, rng))
        if harness.followers and rng.random() < 0.04:
            harness.end(rng.choice(sorted(harness.followers)), rng.choice([FinishReason.ABORT, FinishReason.STOP]))
    harness.finish_all()
    return harness


@pytest.mark.parametrize("part", range(6))
def test_crowded_programs_with_images_give_every_request_what_it_would_get_alone(part: int) -> None:
    k = (0, 0, 0, 0, 2, 3)[part]
    harnesses = [run_program(seed, k) for seed in range(part * 60, part * 60 + 60)]
    counters = [harness.scheduler.counters for harness in harnesses]
    caches = [harness.encoder_cache.counters for harness in harnesses if harness.encoder_cache is not None]
    # Else these programs would not test what they are for.
    assert sum(c.preemptions > 0 for c in counters) >= 10
    assert sum(c.failed_steps > 0 for c in counters) >= 15
    assert sum(c.hits > 0 for c in caches) >= 20
    assert sum(c.evicted_items > 0 for c in caches) >= 30
    assert sum(harness.scheduler.prefix_counters.cached_tokens > 0 for harness in harnesses) >= 10
