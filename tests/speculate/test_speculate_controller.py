"""The controller asks for drafts where they give more tokens per second, and soon knows where.

The machines are cost models. Tokens and times are random as a machine's are; what is judged is expectations: the
time that the chosen steps take on average, beside the time that the better choice would take for as many tokens.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

import pytest

from ostinato.speculate.controller import Controller

K = 3


class Machine:
    """Plain steps take 1 at any number of rows, steps with drafts `ratio`, until scaled by `load`.

    The first step of each kind takes 20 times as long, and one in 100 takes 2 to 10 times as long. A draft is
    accepted, if those before it were, with probability `acceptance`; a row finds drafts with probability `found`.
    """

    def __init__(
        self,
        ratio: float,
        acceptance: float,
        *,
        seed: int = 0,
        noise: float = 0.05,
        found: float = 1.0,
        lookup: float = 0.0,
        first: float = 20.0,
        outliers: float = 0.01,
    ) -> None:
        self.random = random.Random(seed)
        self.ratio, self.acceptance, self.found, self.lookup = ratio, acceptance, found, lookup
        self.noise, self.first, self.outliers = noise, first, outliers
        self.load = 1.0
        self.seconds = self.best_seconds = 0.0
        self._seen: set[bool] = set()

    def step(self, controller: Controller, rows: int, *, is_pure_decode: bool = True) -> bool:
        """One step; whether drafts were asked for."""
        asked = controller.choose(rows) > 0
        drafted = [asked and self.random.random() < self.found for _ in range(rows)]
        tokens = sum(1 + (self._accepted() if has_drafts else 0) for has_drafts in drafted)
        seconds = self.load * ((self.ratio if any(drafted) else 1.0) + (self.lookup if asked else 0.0))
        self._judge(asked)
        noisy = seconds * self.random.lognormvariate(0, self.noise)
        if any(drafted) not in self._seen:
            self._seen.add(any(drafted))
            noisy *= self.first
        if self.random.random() < self.outliers:
            noisy *= self.random.uniform(2, 10)
        if not is_pure_decode:
            noisy *= 50
        controller.observe(rows, K if any(drafted) else 0, tokens, noisy, is_pure_decode=is_pure_decode)
        return asked

    @property
    def loss(self) -> float:
        """By how much more time was taken than the better choice at each step would have."""
        return self.seconds / self.best_seconds - 1

    def _accepted(self) -> int:
        return next((i for i in range(K) if self.random.random() >= self.acceptance), K)

    def _judge(self, asked: bool) -> None:
        """Adds expected times; for one row, or for drafts that are always found."""
        tokens = 1 + self.found * sum(self.acceptance**i for i in range(1, K + 1))
        seconds = 1 + self.found * (self.ratio - 1) + self.lookup
        self.seconds += self.load * (seconds if asked else 1.0)
        self.best_seconds += self.load * (tokens if asked else 1.0) * min(1.0, seconds / tokens)


def choice(controller: Controller, rows: int) -> int:
    """What is in use for so many rows, trials aside."""
    ranges = controller.to_json()["batch_sizes"]
    return next(each["choice"] for each in ranges if each["rows"][0] <= rows <= each["rows"][1])


def feed(controller: Controller, rows: int, steps: int, seconds: Callable[[int], float], tokens_per_row: int) -> None:
    """Steps without chance; `seconds` of the number of drafts."""
    for _ in range(steps):
        k = controller.choose(rows)
        controller.observe(rows, k, rows * tokens_per_row if k else rows, seconds(k), is_pure_decode=True)


def test_without_adaptation_every_step_asks_for_drafts() -> None:
    controller = Controller(K, adaptive=False)
    machine = Machine(ratio=4.0, acceptance=0.0)
    assert all(machine.step(controller, 8) for _ in range(300))
    assert controller.to_json()["batch_sizes"][0]["ground"] == "speculative_adaptive is off"


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_step_without_decoding_rows_asks_for_none(adaptive: bool) -> None:
    controller = Controller(K, adaptive)
    assert controller.choose(0) == 0
    controller.observe(0, 0, 0, 1.0, is_pure_decode=False)
    assert controller.to_json()["batch_sizes"] == []
    assert controller.choose(1) == K


@pytest.mark.parametrize(
    ("rows", "ratio"), [(1, 1.1), (1, 1.3), (1, 2.0), (4, 1.5), (8, 1.5), (8, 2.2), (32, 2.0), (32, 3.0)]
)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
def test_the_time_is_within_three_percent_of_the_better_choice(rows: int, ratio: float, acceptance: float) -> None:
    losses = []
    for seed in range(16):
        machine, controller = Machine(ratio, acceptance, seed=seed), Controller(K, adaptive=True)
        for _ in range(300):
            machine.step(controller, rows)
        losses.append(machine.loss)
    assert fmean(losses) < 0.03
    assert sorted(losses)[-2] < 0.1


@pytest.mark.parametrize(("rows", "ratio", "acceptance"), [(1, 1.3, 0.6), (8, 1.6, 0.7), (32, 2.2, 0.9)])
def test_a_gain_is_taken_from_the_start(rows: int, ratio: float, acceptance: float) -> None:
    machine, controller = Machine(ratio, acceptance), Controller(K, adaptive=True)
    asked = [machine.step(controller, rows) for _ in range(400)]
    assert sum(asked) > 0.9 * len(asked)
    assert machine.loss < 0.03
    assert choice(controller, rows) == K


@pytest.mark.parametrize("rows", [1, 8])
def test_a_change_of_acceptance_is_followed_both_ways(rows: int) -> None:
    machine, controller = Machine(1.5, 0.9), Controller(K, adaptive=True)
    for acceptance, share in ((0.9, 0.9), (0.02, 0.1), (0.9, 0.9)):
        machine.acceptance = acceptance
        asked = [machine.step(controller, rows) for _ in range(500)][250:]
        assert abs(sum(asked) / len(asked) - share) <= 0.1
    assert machine.loss < 0.08


@pytest.mark.parametrize(("ratio", "tokens_per_row", "right"), [(2.0, 3, K), (2.0, 1, 0)])
def test_one_slow_step_does_not_decide(ratio: float, tokens_per_row: int, right: int) -> None:
    for slow in range(30):
        controller = Controller(K, adaptive=True)
        for number in range(60):
            k = controller.choose(8)
            seconds = (ratio if k else 1.0) * (1000 if number == slow else 1)
            controller.observe(8, k, 8 * tokens_per_row if k else 8, seconds, is_pure_decode=True)
        assert choice(controller, 8) == right, f"step {slow} was slow"


@pytest.mark.parametrize(("ratio", "tokens_per_row"), [(1.5, 3), (1.2, 1), (3.5, 1), (1.9, 2), (3.0, 4)])
def test_trials_cost_about_a_hundredth_of_the_time(ratio: float, tokens_per_row: int) -> None:
    controller = Controller(K, adaptive=True)
    feed(controller, 8, 200, lambda k: ratio if k else 1.0, tokens_per_row)
    steps = {True: 0, False: 0}
    for _ in range(4000):
        k = controller.choose(8)
        steps[k > 0] += 1
        controller.observe(8, k, 8 * tokens_per_row if k else 8, ratio if k else 1.0, is_pure_decode=True)
    tokens = steps[True] * tokens_per_row + steps[False]
    loss = (steps[True] * ratio + steps[False]) / (tokens * min(1.0, ratio / tokens_per_row)) - 1
    assert min(steps.values()) >= 2, "the other choice is not forgotten"
    assert loss < 0.012


def test_drafts_that_rest_are_taken_up_in_the_first_trial_that_shows_them_good() -> None:
    controller = Controller(K, adaptive=True)
    for tokens_per_row, steps in ((3, 300), (1, 300)):
        feed(controller, 1, steps, lambda k: 2.5 if k else 1.0, tokens_per_row)
    assert choice(controller, 1) == 0
    while not controller.choose(1):
        feed(controller, 1, 1, lambda k: 1.0, tokens_per_row=1)
    feed(controller, 1, 20, lambda k: 2.5 if k else 1.0, tokens_per_row=4)
    assert choice(controller, 1) == K


def test_even_hopeless_drafts_are_tried_again_at_times() -> None:
    controller = Controller(K, adaptive=True)
    feed(controller, 8, 20, lambda k: 50.0 if k else 1.0, tokens_per_row=1)
    feed(controller, 8, 2200, lambda k: 1.1 if k else 1.0, tokens_per_row=4)
    assert choice(controller, 8) == K


def test_what_slows_all_steps_alike_changes_nothing() -> None:
    for ratio, acceptance, right in ((1.6, 0.8, K), (1.6, 0.1, 0)):
        machine, controller = Machine(ratio, acceptance), Controller(K, adaptive=True)
        for number in range(900):
            machine.load = 1 + number / 100 + (3 if 400 < number < 500 else 0)
            machine.step(controller, 8)
            assert number < 20 or choice(controller, 8) == right
        assert machine.loss < 0.03


def test_a_step_with_prefill_rows_says_nothing_about_the_cost_of_drafts() -> None:
    machine, controller = Machine(1.6, 0.8), Controller(K, adaptive=True)
    for number in range(600):
        machine.step(controller, 8, is_pure_decode=number % 3 == 0)
    assert machine.loss < 0.04
    assert controller.to_json()["batch_sizes"][0]["time_ratio"] == pytest.approx(1.6, rel=0.1)


def test_while_every_step_has_prefill_rows_most_ask_for_drafts() -> None:
    machine, controller = Machine(1.6, 0.8), Controller(K, adaptive=True)
    asked = [machine.step(controller, 8, is_pure_decode=False) for _ in range(100)]
    assert sum(asked) >= 75
    assert controller.to_json()["batch_sizes"][0]["ground"] == "not measured yet"


def test_a_new_batch_size_begins_with_drafts_and_soon_has_times_of_its_own() -> None:
    controller = Controller(K, adaptive=True)
    feed(controller, 16, 40, lambda k: 3.0 if k else 1.0, tokens_per_row=2)
    assert choice(controller, 16) == 0
    assert controller.choose(17) == K
    feed(controller, 17, 10, lambda k: 3.0 if k else 1.0, tokens_per_row=2)
    assert choice(controller, 17) == 0
    assert controller.choose(1) == K


def test_each_range_of_batch_sizes_has_a_choice_of_its_own() -> None:
    controller = Controller(K, adaptive=True)
    feed(controller, 16, 40, lambda k: 3.0 if k else 1.0, tokens_per_row=2)
    feed(controller, 8, 40, lambda k: 1.5 if k else 1.0, tokens_per_row=2)
    assert choice(controller, 8) == K
    assert choice(controller, 16) == 0


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.8])
def test_batches_that_shrink_and_grow_lose_little(acceptance: float) -> None:
    losses = []
    for seed in range(8):
        machine, controller = Machine(1.0, acceptance, seed=seed), Controller(K, adaptive=True)
        for number in range(1200):
            rows = 32 - number % 300 * 32 // 300
            machine.load, machine.ratio = 1 + rows / 20, (1 + rows / 5) / (1 + rows / 20)
            machine.step(controller, rows)
        losses.append(machine.loss)
    assert fmean(losses) < 0.03


def test_two_choices_that_are_equally_fast_are_not_swapped_all_the_time() -> None:
    machine, controller = Machine(1.0 + 0.6 + 0.36 + 0.216, 0.6), Controller(K, adaptive=True)
    chosen = []
    for _ in range(2000):
        machine.step(controller, 8)
        chosen.append(choice(controller, 8))
    assert sum(a != b for a, b in pairwise(chosen)) <= 20


@pytest.mark.parametrize("found", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("acceptance", [0.05, 0.9])
@pytest.mark.parametrize("lookup", [0.0, 0.01, 0.1])
def test_drafts_that_are_found_only_at_times_never_cost_much(found: float, acceptance: float, lookup: float) -> None:
    losses = []
    for seed in range(6):
        machine = Machine(1.5, acceptance, seed=seed, found=found, lookup=lookup)
        controller = Controller(K, adaptive=True)
        for _ in range(600):
            machine.step(controller, 1)
        losses.append(machine.loss)
    assert fmean(losses) < 0.03


def test_as_long_as_looking_for_drafts_costs_nothing_they_are_asked_for() -> None:
    shares = []
    for seed in range(10):
        machine, controller = Machine(1.5, 0.9, seed=seed, found=0.0), Controller(K, adaptive=True)
        shares.append(fmean(machine.step(controller, 1) for _ in range(300)))
    assert fmean(shares) > 0.7
    described = controller.to_json()["batch_sizes"][0]
    assert described["ground"] == "no drafts were found"
    assert described["tokens_per_row"] is None
    assert described["steps"]["drafts"] == 0


def test_a_row_that_ends_with_an_error_disturbs_nothing() -> None:
    controller = Controller(K, adaptive=True)
    for _ in range(50):
        controller.observe(2, controller.choose(2), 0, 1.0, is_pure_decode=True)
    assert controller.choose(2) in (0, K)


def test_the_statistics_are_those_of_a_sequence_counted_by_hand() -> None:
    controller = Controller(K, adaptive=True)
    # Four steps with drafts, three of the first trial, the first of which finds cold caches; 3.75 tokens for twice the
    # time: drafts stay in use.
    drafts = [(K, 16, 0.020), (K, 14, 0.024), (K, 14, 0.020), (K, 16, 0.022)]
    for k, tokens, seconds in (*drafts, (0, 4, 0.019), (0, 4, 0.010), (0, 4, 0.011), (K, 15, 0.022)):
        assert controller.choose(4) == k
        controller.observe(4, k, tokens, seconds, is_pure_decode=True)
    assert controller.to_json() == {
        "adaptive": True,
        "num_speculative_tokens": K,
        "batch_sizes": [
            {
                "rows": [3, 4],
                "milliseconds": {"plain": 10.0, "drafts": 20.0, "no_draft": None},
                "tokens_per_row": 3.75,
                "time_ratio": 2.0,
                # One row with all drafts accepted is taken for granted: (75 + 4) / (20 + 1) tokens per row.
                "speed_up": round(79 / 21 / 2, 4),
                "choice": K,
                "ground": "drafts: 3.8 tokens for 2.0 times the time of 1",
                "steps": {"plain": 3, "drafts": 5, "no_draft": 0},
                "trials": 1,
            }
        ],
    }


def test_steps_right_behind_drafts_are_not_what_plain_steps_take() -> None:
    """Drafts give 3 tokens for 3.2 times the time of a plain step, or 2.5 times that of one that finds cold caches."""
    controller, since = Controller(K, adaptive=True), 0
    for _ in range(300):
        k = controller.choose(1)
        since = 0 if k else since + 1
        seconds = 3.2 if k else {1: 1.3, 2: 1.15}.get(since, 1.0)
        controller.observe(1, k, 3 if k else 1, seconds, is_pure_decode=True)
    assert choice(controller, 1) == 0
    assert controller.to_json()["batch_sizes"][0]["time_ratio"] == 3.2


def test_the_controller_imports_no_torch() -> None:
    code = "import sys, ostinato.speculate.controller; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
