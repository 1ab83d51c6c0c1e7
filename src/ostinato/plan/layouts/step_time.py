"""Seconds of any step, interpolated between predicted steps."""

from __future__ import annotations

from ostinato.ops.work import StepShape
from ostinato.plan.memory.kernel_work import LOGITS
from ostinato.plan.prediction import ENGINE, StepPredictor, PredictedStep

OF_ALL_TOKENS = ("linear", "moe", ENGINE)
"""Parts of a step that depend only on its number of tokens: a step of rows and a prompt counts them once."""
MIN_CONTEXT = 256
"""Context up to which one prediction per row count would do: keys and values are a small part of a step."""


class StepTimeTable:
    """Step times, predicted at powers of two and interpolated linearly between them.

    So thousands of steps cost few predictions.
    """

    def __init__(self, machine: StepPredictor) -> None:
        self._machine = machine
        self._rows: dict[tuple[int, int], PredictedStep] = {}
        self._prompts: dict[tuple[int, int], PredictedStep] = {}

    def seconds(self, rows: int, context: float, prompt_tokens: int = 0, before: float = 0) -> float:
        """Return the seconds of a step of `rows` decode rows and `prompt_tokens` tokens of prompts.

        Each row has `context` tokens before it in the mean; `previous_hidden` tokens of the prompts were computed in earlier
        steps. Either part may be missing, not both.
        """
        if not prompt_tokens:
            return sum(share * self._row_step(*shape).seconds for share, shape in _around(rows, context))
        tokens = prompt_tokens + rows
        prompts = [(share, self._prompt_step(*shape)) for share, shape in _around(tokens, before)]
        if not rows:
            return sum(share * step.seconds for share, step in prompts)
        # First the matmuls of all tokens and the prompt's other parts; then the rows' other parts, including logits.
        seconds = sum(share * (step.seconds - step.parts[LOGITS]) for share, step in prompts)
        for share, shape in _around(rows, context):
            parts = self._row_step(*shape).parts
            seconds += share * sum(each for name, each in parts.items() if name not in OF_ALL_TOKENS)
        return seconds

    def _row_step(self, rows: int, context: int) -> PredictedStep:
        found = self._rows.get((rows, context))
        if found is None:
            found = self._rows[rows, context] = self._machine.predict(StepShape(rows, 1, context, decodes=True))
        return found

    def _prompt_step(self, tokens: int, before: int) -> PredictedStep:
        found = self._prompts.get((tokens, before))
        if found is None:
            found = self._prompts[tokens, before] = self._machine.predict(StepShape(1, tokens, before, decodes=False))
        return found


def _around(count: float, context: float) -> list[tuple[float, tuple[int, int]]]:
    """Return up to four predicted shapes around (count, context), each with its weight in the interpolation."""
    return [
        (of_count * of_context, (near_count, near_context))
        for of_count, near_count in _between(count, 1)
        for of_context, near_context in _between(context, MIN_CONTEXT)
        if of_count * of_context
    ]


def _between(value: float, least: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """Return the next smaller and the next larger of 0, `least` and its doubles, each with its weight."""
    low, high = (0, least) if value < least else (least, 2 * least)
    while high <= value:
        low, high = high, 2 * high
    share = (value - low) / (high - low)
    return (1 - share, low), (share, high)
