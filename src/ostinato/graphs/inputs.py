"""What a graph reads: inputs that name their tensors, which lie where they lay when it was captured."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from ostinato.graphs.errors import CaptureError


class Inputs(Protocol):
    """Inputs of a forward pass: a dataclass whose tensors lie in persistent buffers while it is captured and replayed.

    Padding is added behind the `length` real entries (tokens, patches) of each tensor that is indexed by them.
    """

    buffers: ClassVar[str]
    """What the buffers of such inputs are called."""

    @property
    def length(self) -> int: ...


class Addresses:
    """Where the tensors of captured inputs lie. Those that were absent are not looked at."""

    def __init__(self, captured: Inputs) -> None:
        self._names = tuple(name for name, value in vars(captured).items() if isinstance(value, torch.Tensor))
        self._captured = self._of(captured)

    def check(self, inputs: Inputs) -> None:
        """CaptureError if `inputs` do not lie where the captured ones did: they would not be what a graph reads."""
        now = self._of(inputs)
        if now == self._captured:
            return
        moved = [name for name, old, new in zip(self._names, self._captured, now, strict=True) if old != new]
        named = ", ".join(f"{inputs.buffers}.{name}" for name in moved)
        raise CaptureError(
            f"{named} moved after the graph was captured, which would go on reading the old memory. Buffers are "
            "written in place, never replaced"
        )

    def _of(self, inputs: Inputs) -> list[int]:
        return [getattr(inputs, name).data_ptr() for name in self._names]
