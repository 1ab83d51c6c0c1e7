"""Cost model of drafts: the tokens that a row gains from them, and the cost of their steps. Imports no torch.

Gains follow from the drafts accepted of late. Costs are by range of batch sizes, in units of a plain step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from math import log2, sqrt
from statistics import fmean, median
from typing import NamedTuple

# Decay of the weight of earlier steps: about 33 steps count. With 0.99 the estimate follows a change of the text too
# late; with 0.9 it takes chance at a single row for a change.
_KEPT_WEIGHT = 0.97
# Prior: this number of rows with this share of right drafts.
_ASSUMED_ROWS, _ASSUMED_SHARE = 1.0, 0.5


class AcceptanceRates:
    """The share of right drafts at each position, if the drafts before it are right.

    It depends on the text alone, so all batch sizes share it. A row for which no draft was found counts as one whose
    drafts were wrong: both gain nothing.
    """

    def __init__(self, max_drafts: int) -> None:
        """Start without observations; `max_drafts` is the largest number of drafts per row."""
        self._reached = [0.0] * max_drafts
        self._accepted = [0.0] * max_drafts

    def count(self, kept: Sequence[int], num_drafts: int) -> None:
        """Count a step that asked for `num_drafts` per row; `kept` are accepted drafts of rows with room."""
        if not kept:
            return
        for i in range(len(self._reached)):
            self._reached[i] = _KEPT_WEIGHT * self._reached[i] + (i < num_drafts) * sum(each >= i for each in kept)
            self._accepted[i] = _KEPT_WEIGHT * self._accepted[i] + (i < num_drafts) * sum(each > i for each in kept)

    @property
    def is_known(self) -> bool:
        """True if any draft was counted."""
        return self._reached[0] > 0

    def tokens(self, num_drafts: int) -> float:
        """Return the expected tokens of a row with `num_drafts` drafts, 1 to 1 + `num_drafts`.

        At positions that few rows have reached of late, the share is taken from the position before.
        """
        tokens = probability = 1.0
        share = _ASSUMED_SHARE
        for reached, accepted in zip(self._reached[:num_drafts], self._accepted[:num_drafts], strict=True):
            share = (accepted + _ASSUMED_ROWS * share) / (reached + _ASSUMED_ROWS)
            probability *= share
            tokens += probability
        return tokens


NO_DRAFT = -1
"""Kind of a step that asked for drafts while no row had one: a plain step, and the search for drafts.

The other kinds are numbers of drafts.
"""

# Number of times remembered per kind, and of comparisons of two kinds.
_REMEMBERED_TIMES, _REMEMBERED_RATIOS = 9, 3
# Decay of the weight of earlier steps in the share of steps that found drafts.
_DECAY = 0.97
# Steps after a change of the number of drafts whose times are left out. The first step with drafts may capture its
# graph; plain steps after drafts find cold caches: 2.0, 1.6, 1.35, 1.3 times the later time on the embedded model.
_LEFT_OUT, LEFT_OUT_PLAIN = 1, 4
# Assumed cost of a step with one draft, in plain steps.
_ASSUMED_COST = 1.5
# Ratio of a median's standard error to that of a mean, for normally distributed times.
_ERROR_OF_MEDIAN = 1.25


class Comparison(NamedTuple):
    """Result of one trial: the time of a kind of step in plain steps, and the share of it that may be chance."""

    ratio: float
    error: float


class StepCosts:
    """Times of steps by kind, and the ratios that trials measured.

    Only times taken shortly after one another are compared, so what slows all steps alike changes no ratio.
    """

    def __init__(self, near: StepCosts | None) -> None:
        """Start without measurements; `near` has the costs of another batch size, used where none are known here."""
        self._near = near
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_TIMES))
        self._comparisons: dict[int, deque[Comparison]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_RATIOS))
        self._found = self._looked = 0.0
        self._last_asked: int | None = None
        self._left_out = _LEFT_OUT

    def count(self, kind: int, asked: int, seconds: float | None) -> None:
        """Count a step of a kind that asked for `asked` drafts, and its time; None if the time means nothing."""
        if asked != self._last_asked:
            self._left_out = _LEFT_OUT if asked or self._last_asked is None else LEFT_OUT_PLAIN
            self._last_asked = asked
        if self._left_out:
            self._left_out -= 1
        elif seconds is not None:
            self._seconds[kind].append(seconds)

    def count_found(self, has_draft: bool) -> None:
        """Count a step that asked for drafts; `has_draft` is true if some row had one."""
        self._looked = _DECAY * self._looked + 1
        self._found = _DECAY * self._found + has_draft

    def begin(self, kind: int, other: int) -> None:
        """Discard old times before steps of `kind`, which will be compared with those of `other`; its times stay."""
        for timed_kind in (kind, NO_DRAFT) if other == 0 else (kind,):
            if self.seconds(timed_kind) is not None:  # with one time or none, keep it: some trials seldom find drafts
                self._seconds[timed_kind].clear()

    def seconds(self, kind: int) -> float | None:
        """Return the median time of a kind of step; None before two were timed. Slow outliers do not move it."""
        times = sorted(self._seconds[kind])
        return times[(len(times) - 1) // 2] if len(times) > 1 else None

    def compare(self, tried: int, in_use: int) -> None:
        """Record the result of a trial of kind `tried`, which interrupted steps of kind `in_use`."""
        base = self.seconds(0 if 0 in (tried, in_use) else in_use)
        if base is None:
            return
        kinds: tuple[int, ...] = (tried,)
        error = self._error(tried, in_use)
        scale = self._of_drafts(in_use) / base
        if 0 in (tried, in_use):
            scale, kinds = 1 / base, (tried or in_use, NO_DRAFT)
        for kind in kinds:
            seconds = self.seconds(kind)
            if seconds is not None:
                # At least 1: a step that asks for drafts does all that a plain one does.
                self._comparisons[kind].append(Comparison(max(1.0, seconds * scale), error))

    @property
    def found_none(self) -> bool:
        """True if drafts were asked for, and no row ever had one."""
        return self._looked > 0 and self._found == 0

    def ratio(self, num_drafts: int) -> float | None:
        """Return the time of a step that has `num_drafts` drafts, in plain steps; None if it was not measured."""
        if num_drafts == 0:
            return 1.0
        return self._median(num_drafts)

    def error(self, num_drafts: int) -> float:
        """Return the share of the time ratio that may be chance, as the times spread; 0 if that is not known."""
        comparisons = self._comparisons[num_drafts]
        if not comparisons:
            return 0.0
        error = fmean(comparison.error for comparison in comparisons) / sqrt(len(comparisons))
        return error * self._share_found * self._of_drafts(num_drafts) / self.mean(num_drafts)

    def mean(self, num_drafts: int) -> float:
        """Return the mean time of a step that asks for `num_drafts` drafts, in plain steps."""
        if num_drafts == 0:
            return 1.0
        share = self._share_found
        return share * self._of_drafts(num_drafts) + (1 - share) * self.idle

    def lower_bound(self, num_drafts: int) -> float:
        """Return a lower bound of such a step's cost: the largest measured ratio of a step with fewer drafts."""
        return max(ratio for fewer in range(num_drafts) if (ratio := self.ratio(fewer)) is not None)

    @property
    def _share_found(self) -> float:
        return self._found / self._looked if self._looked else 1.0

    @property
    def idle(self) -> float:
        """Time of a step that asks for drafts and has none, in plain steps."""
        return self._median(NO_DRAFT) or 1.0

    def _of_drafts(self, num_drafts: int) -> float:
        """Return the time of a step that has `num_drafts` drafts, in plain steps.

        It is the measured ratio; else on the line through the measured neighbours; else that of other batch sizes.
        """
        measured = self.ratio(num_drafts)
        if measured is not None:
            return measured
        medians = {kind: self._median(kind) for kind in self._comparisons if kind != NO_DRAFT}
        ratios = {0: 1.0} | {kind: ratio for kind, ratio in medians.items() if ratio is not None}
        if len(ratios) == 1:
            return 1 + (_ASSUMED_COST - 1) * num_drafts if self._near is None else self._near._of_drafts(num_drafts)
        below = max(kind for kind in ratios if kind < num_drafts)
        above = min((kind for kind in ratios if kind > num_drafts), default=None)
        if above is None:
            return 1 + (ratios[below] - 1) * num_drafts / below
        return ratios[below] + (ratios[above] - ratios[below]) * (num_drafts - below) / (above - below)

    def _median(self, kind: int) -> float | None:
        comparisons = self._comparisons[kind]
        return median(comparison.ratio for comparison in comparisons) if comparisons else None

    def _error(self, tried: int, in_use: int) -> float:
        """Return the standard error of the quotient of two medians, as a share of it."""
        spread = max(self._spread(tried), self._spread(in_use))
        return _ERROR_OF_MEDIAN * spread * sqrt(sum(1 / max(1, len(self._seconds[kind])) for kind in (tried, in_use)))

    def _spread(self, kind: int) -> float:
        """Return the standard deviation of a kind's times as a share of the median, 0 if fewer than three are known.

        It is measured from the median down to the minimum, since slow steps are exceptions. For n times that distance
        is about log2(n) / 2 deviations.
        """
        times = sorted(self._seconds[kind])
        if len(times) < 3:
            return 0.0
        middle = times[(len(times) - 1) // 2]
        return (middle - times[0]) / (middle * log2(len(times)) / 2) if middle else 0.0
