"""Controller of the number of drafts per row in each step, from measured costs and acceptance. Imports no torch.

Drafts pay while the tokens that they add outweigh the time that they add:

    speed of k drafts = tokens per row with k drafts / time of such a step in units of a plain step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from ostinato.json_io import JsonObject
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
        """Start without measurements; without `adaptive`, ask for all drafts and only keep the statistics."""
        assert num_speculative_tokens >= 1, "without drafts there is nothing to choose"
        self.num_speculative_tokens = num_speculative_tokens
        self.adaptive = adaptive
        self._numbers = draft_numbers(num_speculative_tokens, adaptive)
        self._acceptance = AcceptanceRates(num_speculative_tokens)
        self._ranges: dict[int, _RowRange] = {}
        self._balance = _FIRST_BALANCE
        self._pending_drafts = 0

    def choose_num_drafts(self, rows: int) -> int:
        """Return the number of drafts per row for a step with `rows` decode rows."""
        self._pending_drafts = 0
        if rows:
            self._pending_drafts = self._range(rows).chosen if self.adaptive else self.num_speculative_tokens
        return self._pending_drafts

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
        row_range, num_asked = self._range(len(gained)), self._pending_drafts
        kind = num_drafts if num_drafts or not num_asked else NO_DRAFT
        row_range.steps[kind] += 1
        if num_asked and any(has_room):
            accepted = [tokens - 1 for tokens, room in zip(gained, has_room, strict=True) if room]
            self._acceptance.count(accepted, num_asked)
            row_range.costs.count_found(num_drafts > 0)
        row_range.costs.count(kind, num_asked, seconds if is_pure_decode else None)
        # A range that was first seen after `choose` may have another choice; then this step is no evidence for it.
        if self.adaptive and num_asked == row_range.chosen:
            self._advance(row_range, sum(gained) / len(gained), kind)

    def to_json(self) -> JsonObject:
        """Return the choices and their reasons per range of batch sizes as plain data; times in milliseconds."""
        return {
            "adaptive": self.adaptive,
            "num_speculative_tokens": self.num_speculative_tokens,
            "batch_sizes": [self._describe(row_range) for _, row_range in sorted(self._ranges.items())],
        }

    def _range(self, rows: int) -> _RowRange:
        index = (rows - 1).bit_length()
        row_range = self._ranges.get(index)
        if row_range is None:
            near = min(self._ranges.values(), key=lambda each: abs(each.index - index), default=None)
            costs = StepCosts(None if near is None else near.costs)
            # Drafts cost more with more rows, so a choice is only inherited from a larger batch size.
            in_use = 0 if near is None or near.index < index else near.in_use
            row_range = self._ranges[index] = _RowRange(index, costs, in_use)
        return row_range

    def _advance(self, row_range: _RowRange, tokens_per_row: float, kind: int) -> None:
        """Count the step towards the wait or the trial that it belongs to, and adopt the better choice."""
        if row_range.trial is None:
            self._balance = min(self._balance + _TRIAL_SHARE * row_range.costs.mean(row_range.in_use), _MAX_BALANCE)
            row_range.wait -= 1
            self._update_choice(row_range)
            is_timed = row_range.costs.seconds(row_range.in_use) is not None
            trial = self._next_trial(row_range) if row_range.wait <= 0 and is_timed else None
            if trial is not None:
                (
                    row_range.trial,
                    row_range.trial_steps,
                    row_range.trial_tokens,
                    row_range.blocks,
                    row_range.idle_steps,
                ) = trial, 0, 0.0, 0, 0
                row_range.costs.begin(trial, row_range.in_use)
            return
        if kind == NO_DRAFT and row_range.idle_steps < _PATIENCE:
            row_range.idle_steps += 1
            return
        row_range.trial_steps += 1
        row_range.trial_tokens += tokens_per_row
        if row_range.trial_steps < _steps_of_trial(row_range.trial):
            return
        is_new = row_range.costs.ratio(row_range.trial) is None
        row_range.costs.compare(row_range.trial, row_range.in_use)
        row_range.blocks += 1
        loss = row_range.trial_steps * row_range.costs.mean(
            row_range.trial
        ) - row_range.trial_tokens * self._time_per_token(row_range)
        loss += row_range.idle_steps * (row_range.costs.idle - self._time_per_token(row_range))
        # The loss of a first trial is capped: it could not be foreseen, and would delay all later trials.
        self._balance -= min(max(0.0, loss), _FIRST_BALANCE if is_new else loss)
        row_range.idle_steps = 0
        goes_on = loss < 0 and row_range.blocks < _MAX_TRIAL_BLOCKS
        row_range.drafts_since_plain = 0 if row_range.trial == 0 else row_range.drafts_since_plain + 1
        has_changed = self._update_choice(row_range)
        if has_changed or not goes_on:
            row_range.trial, row_range.trials = None, row_range.trials + 1
            # One gain may lead to the next, and a trial without drafts measured nothing: another trial may follow.
            row_range.wait = 1 if has_changed or kind == NO_DRAFT else _WAIT
        else:
            row_range.trial_steps, row_range.trial_tokens = 0, 0.0

    def _update_choice(self, row_range: _RowRange) -> bool:
        """Adopt the fastest choice whose cost was measured, and return whether it changed."""
        measured = [num_drafts for num_drafts in self._numbers if row_range.costs.ratio(num_drafts)]
        best = max(
            measured,
            key=lambda num_drafts: self._speed(row_range, num_drafts) / (1 + _uncertainty(row_range, num_drafts)),
        )
        margin = (_MARGIN if best else 1.0) * (1 + _uncertainty(row_range, best))
        if best == row_range.in_use or self._speed(row_range, best) < self._speed(row_range, row_range.in_use) * margin:
            return False
        row_range.drafts_since_plain = 0 if row_range.in_use == 0 else row_range.drafts_since_plain
        row_range.in_use = best
        if best != row_range.trial:
            row_range.costs.begin(best, row_range.trial or 0)
        return True

    def _next_trial(self, row_range: _RowRange) -> int | None:
        """Return the number of drafts to try now, or None until the balance covers a trial."""
        other_numbers = [num_drafts for num_drafts in self._numbers if num_drafts != row_range.in_use]
        # Untried numbers come first, if they would be faster at the cost of the next smaller number of drafts.
        speed = self._speed(row_range, row_range.in_use)
        new = [
            num_drafts
            for num_drafts in other_numbers
            if row_range.costs.ratio(num_drafts) is None
            and self._acceptance.tokens(num_drafts) > speed * row_range.costs.lower_bound(num_drafts)
        ]
        drafts = (
            new[0]
            if new
            else max(filter(None, other_numbers), key=lambda count: self._speed(row_range, count), default=0)
        )
        if row_range.in_use and row_range.costs.ratio(row_range.in_use) is None:
            return 0
        # All ratios are relative to plain steps, but where drafts pay, trials of plain steps lose most. They come at
        # once if the number in use may have been chosen by chance.
        is_doubtful = speed < 1 + row_range.costs.error(row_range.in_use)
        wants_plain = not drafts or is_doubtful or row_range.drafts_since_plain >= _TRIALS_PER_PLAIN
        for trial in [0] if row_range.in_use and wants_plain else [drafts]:
            tokens = self._acceptance.tokens(trial) if self._acceptance.is_known else 1.0
            cost = row_range.costs.mean(trial)
            if trial in new:
                cost = (cost + row_range.costs.lower_bound(trial)) / 2
            loss = _steps_of_trial(trial) * (cost - tokens * self._time_per_token(row_range))
            loss += (trial > 0) * _PATIENCE * (row_range.costs.idle - 1)
            if self._balance >= min(loss, _MAX_BALANCE):
                return trial
        return None

    def _time_per_token(self, row_range: _RowRange) -> float:
        """Return the time per token of the choice in use, in plain steps."""
        return 1 / self._speed(row_range, row_range.in_use)

    def _speed(self, row_range: _RowRange, num_drafts: int) -> float:
        """Return the tokens per second with `num_drafts` drafts, relative to plain steps."""
        return self._acceptance.tokens(num_drafts) / row_range.costs.mean(num_drafts)

    def _describe(self, row_range: _RowRange) -> JsonObject:
        return {
            "rows": list(row_range.bounds),
            "choice": row_range.in_use if self.adaptive else self.num_speculative_tokens,
            "ground": self._ground(row_range),
            "trials": row_range.trials,
            "steps_without_draft": row_range.steps[NO_DRAFT],
            "drafts": [
                {
                    "number": num_drafts,
                    "steps": row_range.steps[num_drafts],
                    "milliseconds": _rounded(row_range.costs.seconds(num_drafts), 1e3),
                    "time_ratio": _rounded(row_range.costs.ratio(num_drafts)),
                    "tokens_per_row": _rounded(self._acceptance.tokens(num_drafts)),
                    "speed_up": _rounded(
                        self._speed(row_range, num_drafts) if row_range.costs.ratio(num_drafts) else None
                    ),
                }
                for num_drafts in self._numbers
            ],
        }

    def _ground(self, row_range: _RowRange) -> str:
        """Return the reason of this choice in words, about the drafts in use, or else about the best drafts."""
        if not self.adaptive:
            return "speculative_adaptive is off"
        measured = [num_drafts for num_drafts in self._numbers if num_drafts and row_range.costs.ratio(num_drafts)]
        if row_range.costs.found_none:
            return "no drafts were found"
        if not measured or row_range.in_use not in (0, *measured):
            return "not measured yet"
        num_drafts = row_range.in_use or max(measured, key=lambda count: self._speed(row_range, count))
        tokens, ratio = self._acceptance.tokens(num_drafts), row_range.costs.mean(num_drafts)
        return f"{num_drafts} drafts: {tokens:.1f} tokens for {ratio:.1f} times the time of 1"


def _uncertainty(row_range: _RowRange, num_drafts: int) -> float:
    """Return the gain that more drafts than are in use must show for the error of their cost, as a share."""
    return row_range.costs.error(num_drafts) if num_drafts > row_range.in_use else 0.0


def _steps_of_trial(num_drafts: int) -> int:
    return _TRIAL_STEPS if num_drafts else _PLAIN_TRIAL_STEPS


def _rounded(value: float | None, scale: float = 1.0) -> float | None:
    return None if value is None else round(scale * value, 4)


class CapturedGraphs(Protocol):
    """Owner of an engine's graphs: its runner."""

    @property
    def num_captured(self) -> int:
        """Number of graphs captured so far."""


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

    def to_json(self) -> JsonObject:
        """Return counts and controller as plain data."""
        return {"method": self._method, **self.counters.to_json(), "controller": self.controller.to_json()}


def count_drafts(counts: SpeculationCounts, batch: Batch, result: StepResult) -> None:
    """Add a step that succeeded to the counts."""
    decode = result.rows[: batch.num_decode_rows]
    counts.count(batch.num_drafts, [(row.num_drafts, len(row.token_ids)) for row in decode if row.error is None])
