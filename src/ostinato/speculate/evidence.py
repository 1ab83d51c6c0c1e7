"""What steps with and without drafts have given and cost lately. Imports no torch."""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from statistics import median
from typing import NamedTuple

# Times make a pair if they were measured within the last so many steps.
_FRESH_STEPS = 64
# Two times agree if the slower is at most so many times the faster.
_AGREEMENT = 1.25
_REMEMBERED_PAIRS, _REMEMBERED_TIMES = 7, 15

# At least so many rows and steps with drafts are remembered.
_REMEMBERED_ROWS, _REMEMBERED_STEPS = 256, 16
# If the last so many differ from those before by more than so many standard errors, the text has changed.
_LATEST_ROWS, _LATEST_STEPS, _SURPRISE = 16, 4, 3.0
# Rows whose drafts were all accepted, taken for granted at the start: few samples of a wide distribution must not
# end what was asked for.
_CREDIT_ROWS = 1


class StepKind(StrEnum):
    PLAIN = "plain"
    """No drafts were asked for."""
    DRAFTS = "drafts"
    """Drafts were verified."""
    NO_DRAFT = "no_draft"
    """Drafts were asked for and no row had one: a plain step, and the time of looking for them."""


_ASKING = (StepKind.DRAFTS, StepKind.NO_DRAFT)


class _Time(NamedTuple):
    number: int
    rows: int
    seconds: float


class StepTimes:
    """Times of the steps of about one batch size, and what a step of one kind takes in units of a plain one.

    Times drift: contexts grow, requests end, the machine has other work. So the ratio comes from pairs: the faster of
    two steps of one kind that agree over that of two of the other, all measured within a few steps of each other. A
    drift moves both, and a slow step (a graph captured at its first use) neither.
    """

    def __init__(self) -> None:
        self._number = 0
        self._times: dict[StepKind, deque[_Time]] = {kind: deque(maxlen=_REMEMBERED_TIMES) for kind in StepKind}
        self._pairs: dict[StepKind, deque[float]] = {kind: deque(maxlen=_REMEMBERED_PAIRS) for kind in _ASKING}
        self._paired = dict.fromkeys(_ASKING, 0)
        self._ratios: dict[StepKind, float] = {}

    def add(self, kind: StepKind, rows: int, seconds: float) -> None:
        """Takes in the time of a step, and makes the pair that it completes, if it does."""
        self._number += 1
        self._times[kind].append(_Time(self._number, rows, seconds))
        for asking in _ASKING if kind is StepKind.PLAIN else (kind,):
            oldest = max(self._paired[asking], self._number - _FRESH_STEPS)
            # The other kind first: mostly there is none of it, and no need to look at this one.
            other = self._typical(asking if kind is StepKind.PLAIN else StepKind.PLAIN, rows, oldest)
            this = self._typical(kind, rows, oldest) if other else None
            if other and this:
                self._pairs[asking].append(other / this if kind is StepKind.PLAIN else this / other)
                self._paired[asking] = self._number
                self._ratios[asking] = max(1.0, median(self._pairs[asking]))

    def ratio(self, kind: StepKind) -> float | None:
        """Time of a step of a kind that asked for drafts, in units of a plain step; None if it was not measured.

        At least 1: it does all that a plain step does, and what says otherwise is noise.
        """
        return self._ratios.get(kind)

    def milliseconds(self, kind: StepKind) -> float | None:
        """Median time of the last steps of this kind."""
        times = self._times[kind]
        return 1e3 * median(time.seconds for time in times) if times else None

    def is_settled(self, kind: StepKind, rows: int) -> bool:
        """Whether two times of this kind, fresh and of about so many rows, agree."""
        return self._typical(kind, rows, self._number - _FRESH_STEPS) is not None

    def _typical(self, kind: StepKind, rows: int, oldest: int) -> float | None:
        """The faster of two times newer than `oldest` that agree; those of most nearly so many rows, then the newest,
        are asked first."""
        times = self._times[kind]
        if len(times) < 2 or times[-2].number <= oldest:
            return None
        fresh = [time for time in reversed(times) if time.number > oldest]
        fresh.sort(key=lambda time: abs(time.rows - rows))
        for count in range(2, len(fresh) + 1):
            fastest, second = sorted(time.seconds for time in fresh[:count])[:2]
            if second <= _AGREEMENT * fastest:
                return fastest
        return None


class _Gain(NamedTuple):
    rows: int
    tokens: int
    drafted: bool


class DraftGains:
    """What steps that asked for drafts gave lately, in tokens per row.

    It depends on the texts, and not on how many rows run side by side, so one window serves all batch sizes.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._most = 1 + num_speculative_tokens
        self._window: deque[_Gain] = deque()
        self._credit_rows = _CREDIT_ROWS
        # Sums over the window, of all steps and of those that had drafts.
        self._rows = self._tokens = self._drafted_rows = self._drafted_tokens = 0

    @property
    def drafted_share(self) -> float:
        """Of the rows that asked for drafts, those in steps that had some."""
        return self._drafted_rows / self._rows if self._rows else 1.0

    @property
    def tokens_per_drafted_row(self) -> float | None:
        """Mean over rows in steps that had drafts, 1 to 1 + k; None if there was none."""
        return self._drafted_tokens / self._drafted_rows if self._drafted_rows else None

    @property
    def estimate(self) -> float:
        """Tokens to expect of a row that asks for drafts, 1 to 1 + k: the mean over the window and the credit."""
        return (self._tokens + self._credit_rows * self._most) / (self._rows + self._credit_rows)

    @property
    def error(self) -> float:
        """Standard error of the estimate.

        A row of the middle value is thrown in, since a few rows that happen to be equal tell nothing of the spread.
        """
        mean = (self._tokens + (1 + self._most) / 2) / (self._rows + 1)
        return math.sqrt(self._variance(mean) / (self._rows + 1))

    def end_credit(self) -> None:
        """What was taken for granted is refuted."""
        self._credit_rows = 0

    def add(self, rows: int, tokens: int, *, drafted: bool) -> None:
        """Takes in a step that asked for drafts, and forgets what is too old or no longer holds."""
        self._count(_Gain(rows, tokens, drafted), 1)
        while len(self._window) > _REMEMBERED_STEPS and self._rows - self._window[0].rows >= _REMEMBERED_ROWS:
            self._forget()
        num_latest = self._num_surprising()
        while num_latest and len(self._window) > num_latest:
            self._forget()

    def _num_surprising(self) -> int:
        """How many of the last steps contradict those before; 0 if they do not.

        Two means are compared, in units of the standard error of their difference.
        """
        rows = tokens = count = 0
        for gain in reversed(self._window):
            rows, tokens, count = rows + gain.rows, tokens + gain.tokens, count + 1
            if rows >= _LATEST_ROWS and count >= _LATEST_STEPS:
                break
        earlier = self._rows - rows
        if earlier < rows:
            return 0
        error = math.sqrt(self._variance(self._tokens / self._rows) * (1 / rows + 1 / earlier))
        return count if abs(tokens / rows - (self._tokens - tokens) / earlier) > _SURPRISE * error else 0

    def _variance(self, mean: float) -> float:
        """The most that the variance of a number from 1 to 1 + k with this mean can be."""
        return max(0.0, (mean - 1) * (self._most - mean))

    def _forget(self) -> None:
        self.end_credit()
        self._count(self._window[0], -1)

    def _count(self, gain: _Gain, sign: int) -> None:
        """Puts a step at the window's end, or takes it from its beginning, and brings the sums up to date."""
        if sign > 0:
            self._window.append(gain)
        else:
            self._window.popleft()
        self._rows += sign * gain.rows
        self._tokens += sign * gain.tokens
        self._drafted_rows += sign * gain.rows * gain.drafted
        self._drafted_tokens += sign * gain.tokens * gain.drafted
