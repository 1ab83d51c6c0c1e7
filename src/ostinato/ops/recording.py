"""Where a recorder listens: every kernel of a model is called through here, and so is every part that varies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Kernel = Callable[..., torch.Tensor]


class Recorder(Protocol):
    """Notes what a model does, so that it can be done again without the model's Python."""

    def kernel(self, name: str, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Calls a kernel and notes the call as one."""
        ...

    def split(
        self, name: str, function: Kernel, tensors: tuple[torch.Tensor, ...], others: tuple[Any, ...]
    ) -> torch.Tensor:
        """Calls a part of a layer, and notes it as one if parts of that name are left out."""
        ...


class Tap:
    """One model's connection to a recorder. Nothing is recorded while `recorder` is None."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def wrap(self, name: str, kernel: Kernel) -> Kernel:
        """`kernel`, passing through the recorder."""

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self.recorder is None:
                return kernel(*args, **kwargs)
            return self.recorder.kernel(name, kernel, args, kwargs)

        return call

    def split(self, name: str, function: Kernel, tensors: tuple[torch.Tensor, ...], *others: Any) -> torch.Tensor:
        """`function(*tensors, *others)`: a part that piecewise graphs may leave out.

        It is `attention` or `state`, whose work depends on the rows of a step, or `moe`, whose kernel may not be
        capturable. `tensors` and the result have one entry per token in their first dimension; `others` are the step
        and what belongs to the layer.
        """
        if self.recorder is None:
            return function(*tensors, *others)
        return self.recorder.split(name, function, tensors, others)
