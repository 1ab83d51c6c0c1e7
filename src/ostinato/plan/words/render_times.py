"""The predicted time of steps, in rows of the plan."""

from __future__ import annotations

from collections.abc import Iterator

from ostinato.plan.prediction import PredictedStep, Prediction

QUIET = 0.1
"""Share of the processors' time that other work may take while rates are measured."""


def time_rows(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield (name, time) of each step, and the source of the prediction."""
    for step in prediction.steps:
        yield _name(step), _time(step, "at least " if prediction.is_lower_bound else "")
    yield "source" if prediction.steps else "", prediction.reason
    if prediction.rates is not None:
        yield "", f"memory {prediction.rates.bandwidth / 1e9:.0f} GB/s, products {_rate(prediction)}"
        if prediction.rates.other_load > QUIET:
            yield "", f"other work took {prediction.rates.other_load:.0%} of the processors meanwhile: --measure again"


def _name(step: PredictedStep) -> str:
    if step.tokens_per_row > 1:
        return f"prompt of {step.tokens_per_row}"
    return f"{step.rows} row{'s' if step.rows > 1 else ''}, context {step.context}"


def _time(step: PredictedStep, prefix: str) -> str:
    """Return a text such as `13.9 ms, 72 tokens/s; linear 84%, bound by memory`.

    On a GPU it also has the time of launching its kernels.
    """
    share = step.parts[step.largest] / step.seconds
    most = " at the most" if prefix else ""
    words = f"{prefix}{_milliseconds(step.seconds)}, {step.tokens_per_second:,.0f} tokens/s{most}"
    words += f"; {step.largest} {share:.0%}, bound by {step.bound}"
    if step.eager_seconds is None:
        return words
    return f"{words}; {step.launches:,} launches, eagerly at least {_milliseconds(step.eager_seconds)}"


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1e3
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 0.1 else 3
    return f"{milliseconds:,.{digits}f} ms"


def _rate(prediction: Prediction) -> str:
    assert prediction.rates is not None, "what was measured has a rate"
    return f"{prediction.rates.product_rate / 1e9:,.0f} GFLOP/s"
