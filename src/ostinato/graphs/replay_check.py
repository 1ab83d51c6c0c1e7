"""The option `check_replay`: every replayed step also runs eagerly, and the results are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ostinato.errors import CaptureError
from ostinato.ops.step_inputs import LayerCache, StepInputs

RunStep = Callable[[StepInputs], torch.Tensor]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Tolerance by the model's dtype, relative to the largest value.

Padding changes the order in which matmuls add up, and so their rounding, which enters states of any dtype.
"""


def compare_replay(
    name: str, replay: RunStep, forward: RunStep, step: StepInputs, memory: Sequence[LayerCache]
) -> torch.Tensor:
    """Run `step` both ways from the same states, and return the hidden states of `replay`.

    CaptureError if they differ by more than rounding: in hidden states, or in the states that were written.
    """
    saved = _states(step, memory)
    replayed = replay(step).clone()
    after = _states(step, memory)
    _restore(step, memory, saved)
    eager = forward(step)
    expected = _states(step, memory)
    tolerance = TOLERANCE[eager.dtype]
    _compare(name, "hidden states", replayed[: eager.shape[0]], eager, tolerance)
    for layer, (actual, expected_states) in enumerate(zip(after, expected, strict=True)):
        for array, right in expected_states.items():
            _compare(name, f"{array} states of layer {layer}", actual[array], right, tolerance)
    _restore(step, memory, after)
    return replayed


def compare_encoding(name: str, replayed: torch.Tensor, eager: torch.Tensor) -> None:
    """Raise CaptureError if the result of a vision encoder graph differs from `eager` by more than rounding."""
    _compare(name, "encoded images", replayed, eager, TOLERANCE[eager.dtype])


def _slots(step: StepInputs) -> torch.Tensor:
    """Return every slot that the step reads or writes, except the null slot."""
    checkpoints = torch.tensor([slot for _, _, slot in step.checkpoints], dtype=torch.int32)
    named = torch.cat((step.read_slots.flatten().cpu(), step.write_slots.flatten().cpu(), checkpoints))
    slots: torch.Tensor = named[named != 0].unique()
    return slots.long()


def _states(step: StepInputs, memory: Sequence[LayerCache]) -> list[dict[str, torch.Tensor]]:
    slots = _slots(step)
    return [{name: states[slots].clone() for name, states in layer.states.items()} for layer in memory]


def _restore(step: StepInputs, memory: Sequence[LayerCache], states: list[dict[str, torch.Tensor]]) -> None:
    slots = _slots(step)
    for layer, saved in zip(memory, states, strict=True):
        for name, state in saved.items():
            layer.states[name][slots] = state


def _compare(name: str, label: str, actual: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    """Raise CaptureError if the arrays differ by more than `tolerance` times the largest value of `right`.

    Values that are NaN on both sides, or the same infinity, are equal: a slot that the step names and neither run
    writes keeps whatever its memory held before.
    """
    unequal = (actual != right) & ~(actual.isnan() & right.isnan())
    if not unequal.any():
        return
    difference = (actual.float() - right.float())[unequal].abs().max().item()
    largest = right.float()[right.isfinite()].abs().max().item() if right.isfinite().any() else 0.0
    if not difference <= tolerance * max(largest, 1e-3):
        raise CaptureError(
            f"the graph ({name}) gives other {label} than the eager step: they differ by {difference:.3g} where the "
            f"largest is {largest:.3g}. A Python value that changes from step to step was probably baked in"
        )
