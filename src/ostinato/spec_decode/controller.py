"""Choice of the number of drafts per row in each step, from measured costs and acceptance. Imports no torch.

Drafts pay while the tokens that they add outweigh the time that they add:

    speed of k drafts = tokens per row with k drafts / time of such a step in units of a plain step

Measurements of the engine's drafts: how many were right, what they cost, and whether the next step drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from ostinato.observe.counts import SpeculationCounts
from ostinato.plan.graphs.capture_sizes import draft_numbers
from ostinato.plan.speculation import SpeculativePlan
from ostinato.scheduler.batch import Batch, StepResult
from ostinato.spec_decode.cost_model import LEFT_OUT_PLAIN, NO_DRAFT, AcceptanceRates, StepCosts

# Trials may lose this share of the time: each waits until the steps before have earned what it is expected to lose.
_TRIAL_SHARE = 0.008
# Initial balance, and the bound of the balance, in plain steps.
_FIRST_BALANCE, _MAX_BALANCE = 1.5, 8.0
# Steps of a trial of drafts, and of one of plain steps, where the first steps are not timed. A trial is prolonged by
# the same number of steps while it gains, so that one trial is enough to find better text.
_TRIAL_STEPS, _PLAIN_TRIAL_STEPS = 3, LEFT_OUT_PLAIN + 4
_MAX_TRIAL_BLOCKS = 10
# Steps without a draft that a trial of drafts tolerates.
_PATIENCE = 8
# Minimum steps between trials of numbers that were tried before, and steps before the first trial.
_WAIT, _FIRST_WAIT = 16, 4
# Another number of drafts must be faster by this factor, so that chance does not swap two that are alike. More drafts
# must also gain one standard error of their measured cost. Zero drafts must only be as fast.
_MARGIN = 1.05
# Trials of other numbers of drafts per trial of plain steps, while drafts are in use.
_TRIALS_PER_PLAIN = 2


class _RowRange:
    """Statistics for batches of 2**(index - 1) + 1 to 2**index rows: the choice in use, and trials of others."""

    def __init__(self, index: int, costs: StepCosts, in_use: int) -> None:
        self.index = index
        self.costs = costs
        self.in_use = in_use
        self.trial: int | None = None
        """Number of drafts on trial."""
        self.trial_steps = 0
        self.trial_tokens = 0.0
        """Tokens per row of the steps in the trial's current block."""
        self.blocks = 0
        self.idle_steps = 0
        """Steps of the trial where no row had a draft."""
        self.wait = _FIRST_WAIT
        self.trials = 0
        self.drafts_since_plain = 0
        """Trials since plain steps were last in use or on trial."""
        self.steps: Counter[int] = Counter()

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest number of rows."""
        return 2**self.index // 2 + 1, 2**self.index

    @property
    def chosen(self) -> int:
        """Number of drafts of the next step."""
        return self.in_use if self.trial is None else self.trial


class DraftController:
    """Controller that asks for 0 to `num_speculative_tokens` drafts per row: the number with most tokens per second.

    The numbers are those of `draft_numbers`. Call `choose` before each step and `observe` after it.

    The cost of drafts depends on the batch size: a step is bound by memory with few rows and by arithmetic with many.
    So costs are kept for ranges of 1, 2, 3 to 4, 5 to 8, ... rows. A new range starts with the choice of the nearest
    range, or without drafts if that one has fewer rows or there is none. It tries other numbers when its steps have
    earned that.
    """

    def __init__(self, num_speculative_tokens: int, adaptive: bool) -> None:
        """Start without measurements.

        Without `adaptive` it always asks for all drafts, and only keeps the statistics.
        """
        assert num_speculative_tokens >= 1, "without drafts there is nothing to choose"
        self.num_speculative_tokens = num_speculative_tokens
        self.adaptive = adaptive
        self._numbers = draft_numbers(num_speculative_tokens, adaptive)
        self._acceptance = AcceptanceRates(num_speculative_tokens)
        self._ranges: dict[int, _RowRange] = {}
        self._balance = _FIRST_BALANCE
        self._asked = 0

    def choose_num_drafts(self, rows: int) -> int:
        """Return the number of drafts per row for a step with `rows` decode rows."""
        self._asked = 0
        if rows:
            self._asked = self._range(rows).chosen if self.adaptive else self.num_speculative_tokens
        return self._asked

    def record_step(
        self, gained: Sequence[int], num_drafts: int, seconds: float, *, is_pure_decode: bool, has_room: Sequence[bool]
    ) -> None:
        """Record the step that the last `choose` was for.

        `gained` has the new tokens of each decode row; `has_room` is true for rows that had room for all drafts asked
        for. `num_drafts` is the number that the step ran with; 0 where more were chosen means that no row had a draft.
        `seconds` includes the search for drafts. The time is ignored if the step had prefill rows, that is without
        `is_pure_decode`.
        """
        if not gained:
            return
        at, asked = self._range(len(gained)), self._asked
        kind = num_drafts if num_drafts or not asked else NO_DRAFT
        at.steps[kind] += 1
        if asked and any(has_room):
            kept = [tokens - 1 for tokens, room in zip(gained, has_room, strict=True) if room]
            self._acceptance.count(kept, asked)
            at.costs.count_found(num_drafts > 0)
        at.costs.count(kind, asked, seconds if is_pure_decode else None)
        # A range that was first seen after `choose` may have another choice; then this step is no evidence for it.
        if self.adaptive and asked == at.chosen:
            self._advance(at, sum(gained) / len(gained), kind)

    def to_json(self) -> dict[str, Any]:
        """Return the choices and their reasons per range of batch sizes as plain data; times in milliseconds."""
        return {
            "adaptive": self.adaptive,
            "num_speculative_tokens": self.num_speculative_tokens,
            "batch_sizes": [self._describe(at) for _, at in sorted(self._ranges.items())],
        }

    def _range(self, rows: int) -> _RowRange:
        index = (rows - 1).bit_length()
        at = self._ranges.get(index)
        if at is None:
            near = min(self._ranges.values(), key=lambda each: abs(each.index - index), default=None)
            costs = StepCosts(None if near is None else near.costs)
            # Drafts cost more with more rows, so a choice is only inherited from a larger batch size.
            in_use = 0 if near is None or near.index < index else near.in_use
            at = self._ranges[index] = _RowRange(index, costs, in_use)
        return at

    def _advance(self, at: _RowRange, tokens_per_row: float, kind: int) -> None:
        """Count the step towards the wait or the trial that it belongs to, and adopt the better choice."""
        if at.trial is None:
            self._balance = min(self._balance + _TRIAL_SHARE * at.costs.mean(at.in_use), _MAX_BALANCE)
            at.wait -= 1
            self._settle(at)
            is_timed = at.costs.seconds(at.in_use) is not None
            trial = self._next_trial(at) if at.wait <= 0 and is_timed else None
            if trial is not None:
                at.trial, at.trial_steps, at.trial_tokens, at.blocks, at.idle_steps = trial, 0, 0.0, 0, 0
                at.costs.begin(trial, at.in_use)
            return
        if kind == NO_DRAFT and at.idle_steps < _PATIENCE:
            at.idle_steps += 1
            return
        at.trial_steps += 1
        at.trial_tokens += tokens_per_row
        if at.trial_steps < _steps_of_trial(at.trial):
            return
        is_new = at.costs.ratio(at.trial) is None
        at.costs.compare(at.trial, at.in_use)
        at.blocks += 1
        loss = at.trial_steps * at.costs.mean(at.trial) - at.trial_tokens * self._time_per_token(at)
        loss += at.idle_steps * (at.costs.idle - self._time_per_token(at))
        # The loss of a first trial is capped: it could not be foreseen, and would delay all later trials.
        self._balance -= min(max(0.0, loss), _FIRST_BALANCE if is_new else loss)
        at.idle_steps = 0
        goes_on = loss < 0 and at.blocks < _MAX_TRIAL_BLOCKS
        at.drafts_since_plain = 0 if at.trial == 0 else at.drafts_since_plain + 1
        has_changed = self._settle(at)
        if has_changed or not goes_on:
            at.trial, at.trials = None, at.trials + 1
            # One gain may lead to the next, and a trial without drafts measured nothing: another trial may follow.
            at.wait = 1 if has_changed or kind == NO_DRAFT else _WAIT
        else:
            at.trial_steps, at.trial_tokens = 0, 0.0

    def _settle(self, at: _RowRange) -> bool:
        """Adopt the fastest choice whose cost was measured, and return whether it changed."""
        measured = [number for number in self._numbers if at.costs.ratio(number)]
        best = max(measured, key=lambda number: self._speed(at, number) / (1 + _uncertainty(at, number)))
        margin = (_MARGIN if best else 1.0) * (1 + _uncertainty(at, best))
        if best == at.in_use or self._speed(at, best) < self._speed(at, at.in_use) * margin:
            return False
        at.drafts_since_plain = 0 if at.in_use == 0 else at.drafts_since_plain
        at.in_use = best
        if best != at.trial:
            at.costs.begin(best, at.trial or 0)
        return True

    def _next_trial(self, at: _RowRange) -> int | None:
        """Return the number of drafts to try now, or None until the balance covers a trial."""
        others = [number for number in self._numbers if number != at.in_use]
        # Untried numbers come first, if they would be faster at the cost of the next smaller number of drafts.
        speed = self._speed(at, at.in_use)
        new = [
            number
            for number in others
            if at.costs.ratio(number) is None and self._acceptance.tokens(number) > speed * at.costs.lower_bound(number)
        ]
        drafts = new[0] if new else max(filter(None, others), key=lambda each: self._speed(at, each), default=0)
        if at.in_use and at.costs.ratio(at.in_use) is None:
            return 0
        # All ratios are relative to plain steps, but where drafts pay, trials of plain steps lose most. They come at
        # once if the number in use may have been chosen by chance.
        is_doubtful = speed < 1 + at.costs.error(at.in_use)
        wants_plain = not drafts or is_doubtful or at.drafts_since_plain >= _TRIALS_PER_PLAIN
        for trial in [0] if at.in_use and wants_plain else [drafts]:
            tokens = self._acceptance.tokens(trial) if self._acceptance.is_known else 1.0
            cost = at.costs.mean(trial)
            if trial in new:
                cost = (cost + at.costs.lower_bound(trial)) / 2
            loss = _steps_of_trial(trial) * (cost - tokens * self._time_per_token(at))
            loss += (trial > 0) * _PATIENCE * (at.costs.idle - 1)
            if self._balance >= min(loss, _MAX_BALANCE):
                return trial
        return None

    def _time_per_token(self, at: _RowRange) -> float:
        """Return the time per token of the choice in use, in plain steps."""
        return 1 / self._speed(at, at.in_use)

    def _speed(self, at: _RowRange, number: int) -> float:
        """Return the tokens per second with `number` drafts, relative to plain steps."""
        return self._acceptance.tokens(number) / at.costs.mean(number)

    def _describe(self, at: _RowRange) -> dict[str, Any]:
        return {
            "rows": list(at.bounds),
            "choice": at.in_use if self.adaptive else self.num_speculative_tokens,
            "ground": self._ground(at),
            "trials": at.trials,
            "steps_without_draft": at.steps[NO_DRAFT],
            "drafts": [
                {
                    "number": number,
                    "steps": at.steps[number],
                    "milliseconds": _rounded(at.costs.seconds(number), 1e3),
                    "time_ratio": _rounded(at.costs.ratio(number)),
                    "tokens_per_row": _rounded(self._acceptance.tokens(number)),
                    "speed_up": _rounded(self._speed(at, number) if at.costs.ratio(number) else None),
                }
                for number in self._numbers
            ],
        }

    def _ground(self, at: _RowRange) -> str:
        """Return the reason of this choice in words, about the drafts in use, or else about the best drafts."""
        if not self.adaptive:
            return "speculative_adaptive is off"
        measured = [number for number in self._numbers if number and at.costs.ratio(number)]
        if at.costs.found_none:
            return "no drafts were found"
        if not measured or at.in_use not in (0, *measured):
            return "not measured yet"
        number = at.in_use or max(measured, key=lambda each: self._speed(at, each))
        tokens, ratio = self._acceptance.tokens(number), at.costs.mean(number)
        return f"{number} drafts: {tokens:.1f} tokens for {ratio:.1f} times the time of 1"


def _uncertainty(at: _RowRange, number: int) -> float:
    """Return the gain that more drafts than are in use must show for the error of their cost, as a share."""
    return at.costs.error(number) if number > at.in_use else 0.0


def _steps_of_trial(number: int) -> int:
    return _TRIAL_STEPS if number else _PLAIN_TRIAL_STEPS


def _rounded(value: float | None, scale: float = 1.0) -> float | None:
    return None if value is None else round(scale * value, 4)


class CapturedGraphs(Protocol):
    """Owner of an engine's graphs: its runner."""

    @property
    def num_captured(self) -> int:
        """Number of graphs captured so far."""
        ...


class SpeculationMonitor:
    """Counts of drafts, and the controller that uses them."""

    def __init__(self, plan: SpeculativePlan, runner: CapturedGraphs) -> None:
        self._method = plan.method
        self.controller = DraftController(plan.num_speculative_tokens, plan.adaptive)
        self.counters = SpeculationCounts(plan.num_speculative_tokens, plan.draft_numbers)
        self._runner = runner
        self._num_captured = 0

    def count_step(self, batch: Batch, result: StepResult, seconds: float) -> None:
        """Count a step that succeeded."""
        count_drafts(self.counters, batch, result)
        num_captured = self._runner.num_captured
        # The time of a step that captured a graph is not typical.
        is_typical, self._num_captured = num_captured == self._num_captured, num_captured
        decode = result.rows[: batch.num_decode_rows]
        has_drafts = batch.num_drafts > 0 and any(row.num_drafts for row in decode)
        self.controller.record_step(
            [len(row.token_ids) for row in decode],
            batch.num_drafts if has_drafts else 0,
            seconds,
            is_pure_decode=is_typical and len(decode) == len(batch.rows),
            has_room=[0 < row.num_drafts == batch.num_drafts for row in batch.rows[: len(decode)]],
        )

    def to_json(self) -> dict[str, Any]:
        """Return counts and controller as plain data."""
        return {"method": self._method, **self.counters.to_json(), "controller": self.controller.to_json()}


def count_drafts(counts: SpeculationCounts, batch: Batch, result: StepResult) -> None:
    """Add a step that succeeded to the counts."""
    decode = result.rows[: batch.num_decode_rows]
    counts.count(batch.num_drafts, [(row.num_drafts, len(row.token_ids)) for row in decode if row.error is None])
