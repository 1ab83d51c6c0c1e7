"""Chooses for each step between drafts and none, by what either has cost and given. Imports no torch.

Drafts pay while the tokens that they add outweigh the time that they add:

    speed-up = tokens per row of steps that ask for drafts / (their time / the time of plain steps)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ostinato.speculate.evidence import DraftGains, StepKind, StepTimes

# A trial of the choice that is not in use takes so many steps; some more if their times disagree; and one of drafts
# more, as long as it pays.
_TRIAL_STEPS, _MOST_UNSETTLED_STEPS, _MOST_TRIAL_STEPS = 2, 4, 32
# Plain steps behind one with drafts whose times are not those of plain steps alone: the processor's caches hold what
# that one read, and the first takes up to twice as long as the fourth. A trial has so many more.
_SETTLING_STEPS = 3
# The steps between trials are so many that these cost about this share of the time.
_TRIAL_SHARE, _SHORTEST_WAIT, _LONGEST_WAIT = 0.01, 16, 1000
# Steps before the first trial: at a new batch size, and at one that can lean on its neighbours.
_FIRST_WAIT, _LEANING_WAIT = 2, 16
# The other choice must be so many times as fast to be taken.
_SWITCH = 1.02
# Standard errors by which the tokens of drafts that rest may be underestimated: the fewer were seen, the sooner
# they are tried again.
_DOUBT = 0.5


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
    weighed: int = -1
    """How much had been observed when the choice was last weighed."""
    steps: Counter[StepKind] = field(default_factory=Counter)
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most rows."""
        return 2**self.index // 2 + 1, 2**self.index


class Controller:
    """Asks for 0 or `num_speculative_tokens` drafts per row, whichever gives more tokens per second.

    `choose` before each step, `observe` after it. Batch sizes fall into ranges of 1, 2, 3 to 4, 5 to 8, ... rows:
    the ratio of the times goes with how far a step is bound by memory or by arithmetic, which changes over octaves,
    and so few ranges are soon measured. Each has a choice in use, drafts at first, and tries the other now and then.
    """

    def __init__(self, num_speculative_tokens: int, adaptive: bool) -> None:
        """Without `adaptive` it always asks for drafts, and only keeps the statistics."""
        assert num_speculative_tokens >= 1, "without drafts there is nothing to choose"
        self.num_speculative_tokens = num_speculative_tokens
        self.adaptive = adaptive
        self._gains = DraftGains(num_speculative_tokens)
        self._ranges: dict[int, _RowRange] = {}
        self._num_observed = 0  # steps that told something
        self._num_settled = 0  # steps since the last one that had drafts
        self._asked = True

    def choose(self, rows: int) -> int:
        """How many drafts per row to ask for in a step with `rows` decoding rows: 0 or `num_speculative_tokens`."""
        self._asked = rows > 0
        if rows and self.adaptive:
            at = self._range(rows)
            if at.weighed != self._num_observed:
                self._weigh(at)
                at.weighed = self._num_observed
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
        self._num_settled = 0 if num_drafts else self._num_settled + 1
        self._num_observed += 1
        if kind is not StepKind.PLAIN:
            self._gains.add(rows, num_tokens, drafted=kind is StepKind.DRAFTS)
        is_typical = self._asked or self._num_settled > _SETTLING_STEPS
        if is_pure_decode and is_typical:
            at.times.add(kind, rows, seconds)
        if self.adaptive:
            self._advance(at, kind, rows, num_tokens, is_pure_decode)

    def to_json(self) -> dict[str, Any]:
        """The choices and their grounds, per range of batch sizes, as plain data; times in milliseconds."""
        return {
            "adaptive": self.adaptive,
            "num_speculative_tokens": self.num_speculative_tokens,
            "batch_sizes": [self._describe(at) for _, at in sorted(self._ranges.items())],
        }

    def _range(self, rows: int) -> _RowRange:
        """The range of `rows`; a new one begins with what its neighbours' times suggest, or else with drafts."""
        index = (rows - 1).bit_length()
        if index not in self._ranges:
            at = self._ranges[index] = _RowRange(index)
            speed_up = self._speed_up(at)
            if speed_up is not None:
                at.uses_drafts = speed_up >= 1
                at.wait = _LEANING_WAIT
        return self._ranges[index]

    def _advance(self, at: _RowRange, kind: StepKind, rows: int, num_tokens: int, is_pure_decode: bool) -> None:
        """Counts the step towards the wait or the trial that it was part of."""
        asked = kind is not StepKind.PLAIN
        if asked == at.uses_drafts:
            at.wait = max(0, at.wait - 1)
        else:
            at.trial_steps += 1
            if asked:
                at.trial_balance += num_tokens / rows - (self._ratio(at, kind) or 1.0)
            # Drafts that were asked for and not found leave nothing to settle.
            settling = 0 if asked else max(0, _SETTLING_STEPS - (self._num_settled - at.trial_steps))
            most = _TRIAL_STEPS + settling
            if asked and at.trial_balance >= 0:
                most = _MOST_TRIAL_STEPS
            elif is_pure_decode and not at.times.is_settled(kind, rows):
                most = _MOST_UNSETTLED_STEPS + settling
            if at.trial_steps >= most:
                at.trials += 1
                self._put_off_trial(at, at.trial_steps)

    def _weigh(self, at: _RowRange) -> None:
        """Takes the better choice, by all evidence that there is now."""
        if self._prefers_drafts(at) != at.uses_drafts:
            at.uses_drafts = not at.uses_drafts
            if not at.uses_drafts:
                self._gains.end_credit()
            self._put_off_trial(at, _TRIAL_STEPS)

    def _prefers_drafts(self, at: _RowRange) -> bool:
        speed_up = self._speed_up(at)
        if speed_up is None:
            return at.uses_drafts
        return speed_up > (1 / _SWITCH if at.uses_drafts else _SWITCH)

    def _put_off_trial(self, at: _RowRange, num_steps: int) -> None:
        """Ends the trial and puts the next one so far off that `num_steps` of it cost their share of the time.

        A step of the other choice that takes c times as long as one of the choice in use, and gives t times its
        tokens, loses the time of c - t steps of that.
        """
        at.trial_steps, at.trial_balance, at.wait = 0, 0.0, _SHORTEST_WAIT
        cost, tokens = self._cost(at), self._gains.estimate
        if cost is not None:
            loss = 1 / cost - 1 / tokens if at.uses_drafts else cost - tokens - _DOUBT * self._gains.error
            share = num_steps * loss / _TRIAL_SHARE
            at.wait = round(min(max(share, at.wait), _LONGEST_WAIT))

    def _speed_up(self, at: _RowRange) -> float | None:
        """Tokens per second of asking for drafts, in units of not asking; None where that was not measured."""
        cost = self._cost(at)
        return None if cost is None else self._gains.estimate / cost

    def _cost(self, at: _RowRange) -> float | None:
        """Mean time of a step that asks for drafts, in units of a plain step."""
        share = self._gains.drafted_share
        none = self._ratio(at, StepKind.NO_DRAFT) if share < 1 else None
        if share == 0:
            return none
        drafts = self._ratio(at, StepKind.DRAFTS)
        return None if drafts is None else share * drafts + (1 - share) * (none or 1.0)

    def _ratio(self, at: _RowRange, kind: StepKind) -> float | None:
        """Time of such a step in units of a plain step: as measured there, else between that of the ranges beside."""
        measured = at.times.ratio(kind)
        if measured is not None:
            return measured
        beside = [self._ranges[i].times.ratio(kind) for i in (at.index - 1, at.index + 1) if i in self._ranges]
        known = [ratio for ratio in beside if ratio is not None]
        return fmean(known) if known else None

    def _describe(self, at: _RowRange) -> dict[str, Any]:
        return {
            "rows": list(at.bounds),
            "milliseconds": {kind.value: _rounded(at.times.milliseconds(kind)) for kind in StepKind},
            "tokens_per_row": _rounded(self._gains.tokens_per_drafted_row),
            "time_ratio": _rounded(self._ratio(at, StepKind.DRAFTS)),
            "speed_up": _rounded(self._speed_up(at)),
            "choice": self.num_speculative_tokens if self._prefers_drafts(at) or not self.adaptive else 0,
            "ground": self._ground(at),
            "steps": {kind.value: at.steps[kind] for kind in StepKind},
            "trials": at.trials,
        }

    def _ground(self, at: _RowRange) -> str:
        """Why this choice, in words."""
        if not self.adaptive:
            return "speculative_adaptive is off"
        tokens, ratio = self._gains.tokens_per_drafted_row, self._ratio(at, StepKind.DRAFTS)
        if self._gains.drafted_share == 0:
            return "no drafts were found"
        if tokens is None or ratio is None:
            return "not measured yet"
        ground = f"drafts: {tokens:.1f} tokens for {ratio:.1f} times the time of 1"
        return ground if at.times.ratio(StepKind.DRAFTS) is not None else f"{ground}, at other batch sizes"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
