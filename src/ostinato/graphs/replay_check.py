"""The option `check_replay`: every replayed step also runs eagerly, and the results are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ostinato.errors import CaptureError
from ostinato.ops.arrays import copied, dtype_name, host_values, like
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs

RunStep = Callable[[StepInputs], "Array"]

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Tolerance by the model's dtype, relative to the largest value.

Padding changes the order in which matmuls add up, and so their rounding, which enters states of any dtype.
"""


def compare_replay(
    name: str, replay: RunStep, forward: RunStep, inputs: StepInputs, memory: Sequence[LayerCache]
) -> Array:
    """Run `inputs` both ways from the same states, and return the hidden states of `replay`.

    CaptureError if they differ by more than rounding: in hidden states, or in the states that were written.
    """
    saved = _states(inputs, memory)
    replayed = copied(replay(inputs))
    after = _states(inputs, memory)
    _restore(inputs, memory, saved)
    eager = forward(inputs)
    expected = _states(inputs, memory)
    tolerance = TOLERANCE[dtype_name(eager.dtype)]
    _compare(name, "hidden states", host_values(replayed[: eager.shape[0]]), host_values(eager), tolerance)
    for layer, (actual, expected_states) in enumerate(zip(after, expected, strict=True)):
        for array, right in expected_states.items():
            _compare(name, f"{array} states of layer {layer}", actual[array], right, tolerance)
    _restore(inputs, memory, after)
    return replayed


def compare_encoding(name: str, replayed: Array, eager: Array) -> None:
    """Raise CaptureError if the result of a vision encoder graph differs from `eager` by more than rounding."""
    _compare(name, "encoded images", host_values(replayed), host_values(eager), TOLERANCE[dtype_name(eager.dtype)])


def _slots(inputs: StepInputs) -> list[int]:
    """Return every slot that the step reads or writes, except the null slot."""
    written = [host_values(each).ravel().tolist() for each in (inputs.read_slots, inputs.write_slots)]
    return sorted({*written[0], *written[1], *(slot for _, _, slot in inputs.checkpoints)} - {0})


def _states(inputs: StepInputs, memory: Sequence[LayerCache]) -> list[dict[str, np.ndarray]]:
    slots = _slots(inputs)
    return [{name: host_values(states[slots]) for name, states in layer.states.items()} for layer in memory]


def _restore(inputs: StepInputs, memory: Sequence[LayerCache], states: list[dict[str, np.ndarray]]) -> None:
    slots = _slots(inputs)
    for layer, saved in zip(memory, states, strict=True):
        for name, state in saved.items():
            layer.states[name][slots] = like(layer.states[name], state)


def _compare(name: str, label: str, actual: np.ndarray, right: np.ndarray, tolerance: float) -> None:
    """Raise CaptureError if the arrays differ by more than `tolerance` times the largest value of `right`.

    Values that are NaN on both sides, or the same infinity, are equal: a slot that the step names and neither run
    writes keeps whatever its memory held before.
    """
    if np.array_equal(actual.view(np.uint8), right.view(np.uint8)):
        return
    actual, right = actual.astype(np.float32), right.astype(np.float32)
    unequal = (actual != right) & ~(np.isnan(actual) & np.isnan(right))
    if not unequal.any():
        return
    with np.errstate(invalid="ignore"):
        difference = float(np.abs(actual - right)[unequal].max())
    finite = right[np.isfinite(right)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    if not difference <= tolerance * max(largest, 1e-3):
        raise CaptureError(
            f"the graph ({name}) gives other {label} than the eager step: they differ by {difference:.3g} where the "
            f"largest is {largest:.3g}. A Python value that changes from step to step was probably baked in"
        )
