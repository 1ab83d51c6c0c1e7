"""Chooses for each step between drafts and none, by what either has cost and given. Imports no torch.

Drafts pay while the tokens that they add outweigh the time that they add:

    speed-up = tokens per row of steps that ask for drafts / (their time / the time of plain steps)
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, NamedTuple

# The figures are of a simulation: step times of the embedded model, of a 300M model, and as of a large model and a GPU,
# with noise and slow steps; 1 to 32 rows; drafts right with 0.1 to 0.95; texts, batch sizes and load that change. Each
# says how much more time is lost with another value, in the kind of traffic that it hurts most.

# Steps of a trial; one of plain steps has one more, since the first two behind drafts find cold caches and take up to
# 1.3 times as long (embedded model; a 300M model shows none of it). With 3: 3 % where texts change often.
_TRIAL_STEPS = 2
# A trial of drafts goes on for so many steps while it pays, so that a better text is taken up in its first trial.
# Without: 4 % where texts change.
_MOST_TRIAL_STEPS = 32
# Trials may cost this share of the time. With 0.02: 1.4 % everywhere; with 0.005: 10 % where texts change often. A
# trial every 128 steps, whatever it costs: 5 %.
_TRIAL_SHARE = 0.01
# Steps before the first trial, and least and most between two. A first one of 3 ends drafts that pay by chance. Least
# 64: 4 %. A most of 250: 1 %; without one, drafts that were hopeless once would never be tried again.
_FIRST_WAIT, _SHORTEST_WAIT, _LONGEST_WAIT = 4, 16, 1000
# Steps whose tokens are remembered. With 128: 5 % where texts change; with 12: 1 % on a busy machine.
_REMEMBERED_STEPS = 32
# Last times of each kind of step, and last comparisons of them. 3 and 1: 1.6 % where the load changes.
_REMEMBERED_TIMES, _REMEMBERED_RATIOS = 7, 5
# Drafts in use stay until their speed-up is below the first, and come back from the second on. Speed-ups are measured
# to a few per cent: with 1 for both, drafts that are found now and then lose 2 %; with 0.95 for both, two choices that
# are alike are swapped too often.
_LEAVE, _RETURN = 0.95, 0.975
# Rows that are counted besides, as if all their drafts had been right: while a choice is made at the start, so that a
# few rows do not end what was asked for, and when trials are put off, so that what few rows said is tried again sooner.
# Without the two: 4 % at batch size 1 in the first 300 steps where drafts pay by 9 %.
_GRANTED_ROWS, _DOUBTED_ROWS = 1, 0.5


class StepKind(StrEnum):
    PLAIN = "plain"
    """No drafts were asked for."""
    DRAFTS = "drafts"
    """Drafts were verified."""
    NO_DRAFT = "no_draft"
    """Drafts were asked for and no row had one: a plain step, and the time of looking for them."""


_ASKING = (StepKind.DRAFTS, StepKind.NO_DRAFT)


@dataclass(slots=True)
class _RowRange:
    """The batch sizes from 2**(index - 1) + 1 to 2**index rows: the choice in use there, and trials of the other."""

    index: int
    uses_drafts: bool = True
    wait: int = _FIRST_WAIT
    """Steps until the next trial; 0 while one is under way."""
    trial_steps: int = 0
    trial_balance: float = 0.0
    """What the drafts of the trial under way have gained, in times of a plain step."""
    trials: int = 0
    steps: Counter[StepKind] = field(default_factory=Counter)
    seconds: dict[StepKind, deque[float]] = field(
        default_factory=lambda: {kind: deque(maxlen=_REMEMBERED_TIMES) for kind in StepKind}
    )
    """The last times of each kind; of those that are not in use, the times of the last trial."""
    ratios: dict[StepKind, deque[float]] = field(
        default_factory=lambda: {kind: deque(maxlen=_REMEMBERED_RATIOS) for kind in _ASKING}
    )
    """Of each of the last trials, the time of a step of a kind in units of a plain step."""

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most rows."""
        return 2**self.index // 2 + 1, 2**self.index

    def typical_seconds(self, kind: StepKind) -> float | None:
        """Time of a step of a kind, which slow ones do not move; None before two were timed."""
        times = sorted(self.seconds[kind])
        return times[len(times) // 4] if len(times) > 1 else None

    def time_ratio(self, kind: StepKind) -> float | None:
        """Time of a step of a kind in units of a plain step; None if it was not measured.

        At least 1: a step that asks for drafts does all that a plain one does, and what says otherwise is noise.
        """
        ratios = self.ratios[kind]
        return max(1.0, median(ratios)) if ratios else None

    def begin_trial(self) -> None:
        """From now on, the times of the other choice are those of this trial, unless the last one gave too few."""
        for kind in (StepKind.PLAIN,) if self.uses_drafts else _ASKING:
            if self.typical_seconds(kind) is not None:
                self.seconds[kind].clear()

    def compare_times(self) -> None:
        """Compares the times of a trial with those just before it: what slows all steps alike changes no ratio."""
        plain = self.typical_seconds(StepKind.PLAIN)
        for kind in _ASKING:
            seconds = self.typical_seconds(kind)
            if plain and seconds is not None:
                self.ratios[kind].append(seconds / plain)


class _Gain(NamedTuple):
    """A step that asked for drafts. `drafted_rows` is `rows` if it had some, else 0."""

    rows: int
    tokens: int
    drafted_rows: int


class Controller:
    """Asks for 0 or `num_speculative_tokens` drafts per row, whichever gives more tokens per second.

    `choose` before each step, `observe` after it. What drafts cost depends on the batch size: a step is bound by
    memory with few rows and by arithmetic with many. So times are kept for ranges of 1, 2, 3 to 4, 5 to 8, ... rows,
    and each range has a choice in use, drafts at first, and tries the other now and then. With one range for all,
    traffic that comes in bursts loses 4 to 6 % more. What drafts give depends on the text alone, and is kept for all
    ranges together.
    """

    def __init__(self, num_speculative_tokens: int, adaptive: bool) -> None:
        """Without `adaptive` it always asks for drafts, and only keeps the statistics."""
        assert num_speculative_tokens >= 1, "without drafts there is nothing to choose"
        self.num_speculative_tokens = num_speculative_tokens
        self.adaptive = adaptive
        self._ranges: dict[int, _RowRange] = {}
        self._gains: deque[_Gain] = deque()
        self._rows = self._tokens = self._drafted_rows = 0  # sums over `_gains`
        self._granted_rows = _GRANTED_ROWS
        self._asked = True

    def choose(self, rows: int) -> int:
        """How many drafts per row to ask for in a step with `rows` decoding rows: 0 or `num_speculative_tokens`."""
        self._asked = rows > 0
        if rows and self.adaptive:
            at = self._range(rows)
            self._asked = at.uses_drafts != (at.wait == 0)
        return self.num_speculative_tokens if self._asked else 0

    def observe(self, rows: int, num_drafts: int, num_tokens: int, seconds: float, *, is_pure_decode: bool) -> None:
        """Takes in the step that the last `choose` was for.

        `num_drafts` is 0 or k, as the step ran; 0 where k was chosen means that no row had a draft. Its `rows`
        decode rows gained `num_tokens` tokens in all. It took `seconds`, the search for drafts included, which tell
        nothing if there were prefill rows besides.
        """
        if rows == 0:
            return
        kind = StepKind.DRAFTS if num_drafts else StepKind.NO_DRAFT if self._asked else StepKind.PLAIN
        at = self._range(rows)
        at.steps[kind] += 1
        if is_pure_decode:
            at.seconds[kind].append(seconds)
        if self._asked:
            self._add_gain(_Gain(rows, num_tokens, rows if num_drafts else 0))
        if self.adaptive:
            self._advance(at, kind, num_tokens / rows)

    def to_json(self) -> dict[str, Any]:
        """The choices and their grounds, per range of batch sizes, as plain data; times in milliseconds."""
        return {
            "adaptive": self.adaptive,
            "num_speculative_tokens": self.num_speculative_tokens,
            "batch_sizes": [self._describe(at) for _, at in sorted(self._ranges.items())],
        }

    def _range(self, rows: int) -> _RowRange:
        index = (rows - 1).bit_length()
        at = self._ranges.get(index)
        if at is None:
            at = self._ranges[index] = _RowRange(index)
        return at

    def _add_gain(self, gain: _Gain) -> None:
        self._gains.append(gain)
        oldest = _Gain(0, 0, 0)
        if len(self._gains) > _REMEMBERED_STEPS:
            oldest = self._gains.popleft()
            self._granted_rows = 0
        self._rows += gain.rows - oldest.rows
        self._tokens += gain.tokens - oldest.tokens
        self._drafted_rows += gain.drafted_rows - oldest.drafted_rows

    def _advance(self, at: _RowRange, kind: StepKind, tokens_per_row: float) -> None:
        """Counts the step towards the wait or the trial that it was part of, and takes the better choice."""
        if self._asked == at.uses_drafts:
            at.wait -= 1
            if at.wait == 0:
                at.begin_trial()
            if not self._asked:
                return  # nothing new about drafts
        else:
            at.trial_steps += 1
            if self._asked:
                at.trial_balance += tokens_per_row - (at.time_ratio(kind) or 1.0)
            # Steps with prefill rows tell no time, and count all the same.
            most = _MOST_TRIAL_STEPS if self._asked and at.trial_balance >= 0 else _TRIAL_STEPS + (not self._asked)
            if at.trial_steps >= most:
                at.trials += 1
                at.compare_times()
                self._put_off_trial(at, at.trial_steps)
        speed_up = self._speed_up(at)
        if speed_up is not None and (speed_up >= (_LEAVE if at.uses_drafts else _RETURN)) != at.uses_drafts:
            at.uses_drafts = not at.uses_drafts
            if not at.uses_drafts:
                self._granted_rows = 0
            self._put_off_trial(at, _TRIAL_STEPS)

    def _put_off_trial(self, at: _RowRange, num_steps: int) -> None:
        """Ends the trial and puts the next one so far off that `num_steps` of it cost their share of the time.

        A step of the other choice that takes c times as long as one of the choice in use, and gives t times its
        tokens, loses the time of c - t steps of that.
        """
        at.trial_steps, at.trial_balance, at.wait = 0, 0.0, _SHORTEST_WAIT
        cost, tokens = self._cost(at), self._tokens_to_expect(_DOUBTED_ROWS)
        if cost is not None:
            loss = 1 / cost - 1 / tokens if at.uses_drafts else cost - tokens
            at.wait = round(min(max(num_steps * loss / _TRIAL_SHARE, _SHORTEST_WAIT), _LONGEST_WAIT))

    def _tokens_to_expect(self, granted_rows: float) -> float:
        """Tokens of a row that asks for drafts, 1 to 1 + k, if so many rows are counted as all right besides."""
        return (self._tokens + granted_rows * (1 + self.num_speculative_tokens)) / (self._rows + granted_rows)

    @property
    def _drafted_share(self) -> float:
        """Of the rows that asked for drafts, those in steps that had some."""
        return self._drafted_rows / self._rows if self._rows else 1.0

    def _cost(self, at: _RowRange) -> float | None:
        """Mean time of a step that asks for drafts, in units of a plain step."""
        share = self._drafted_share
        none = at.time_ratio(StepKind.NO_DRAFT) if share < 1 else None
        if share == 0:
            return none
        drafts = at.time_ratio(StepKind.DRAFTS)
        return None if drafts is None else share * drafts + (1 - share) * (none or 1.0)

    def _speed_up(self, at: _RowRange) -> float | None:
        """Tokens per second of asking for drafts, in units of not asking; None where that was not measured."""
        cost = self._cost(at)
        return None if cost is None else self._tokens_to_expect(self._granted_rows) / cost

    def _describe(self, at: _RowRange) -> dict[str, Any]:
        seconds = {kind: at.typical_seconds(kind) for kind in StepKind}
        return {
            "rows": list(at.bounds),
            "milliseconds": {kind.value: _rounded(1e3 * each) if each else None for kind, each in seconds.items()},
            "tokens_per_row": _rounded(self._tokens_per_drafted_row),
            "time_ratio": _rounded(at.time_ratio(StepKind.DRAFTS)),
            "speed_up": _rounded(self._speed_up(at)),
            "choice": self.num_speculative_tokens if at.uses_drafts or not self.adaptive else 0,
            "ground": self._ground(at),
            "steps": {kind.value: at.steps[kind] for kind in StepKind},
            "trials": at.trials,
        }

    @property
    def _tokens_per_drafted_row(self) -> float | None:
        """Mean over rows in steps that had drafts, 1 to 1 + k; None if there was none."""
        if not self._drafted_rows:
            return None
        return (self._tokens - (self._rows - self._drafted_rows)) / self._drafted_rows

    def _ground(self, at: _RowRange) -> str:
        """Why this choice, in words."""
        if not self.adaptive:
            return "speculative_adaptive is off"
        tokens, ratio = self._tokens_per_drafted_row, at.time_ratio(StepKind.DRAFTS)
        if self._drafted_share == 0:
            return "no drafts were found"
        if tokens is None or ratio is None:
            return "not measured yet"
        return f"drafts: {tokens:.1f} tokens for {ratio:.1f} times the time of 1"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
