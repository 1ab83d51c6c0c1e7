"""A stopwatch for kernels, where the recorder listens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ostinato.ops.recording import Kernel


class Stopwatch:
    """The seconds of every kernel that runs through it; stands in a tap as a recorder that records nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self._is_running = False

    @property
    def seconds(self) -> float:
        """Of all calls together."""
        return sum(seconds for _, seconds in self.calls)

    def timed(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """`kernel`, under the stopwatch. What one kernel calls belongs to it, and is not counted twice."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return kernel(*args, **kwargs)
            self._is_running = True
            begin = time.perf_counter()
            try:
                return kernel(*args, **kwargs)
            finally:
                self.calls.append((name, time.perf_counter() - begin))
                self._is_running = False

        return call

    def kernel(self, name: str, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return self.timed(name, kernel)(*args, **kwargs)

    def split(
        self,
        name: str,  # noqa: ARG002
        function: Kernel,
        tensors: tuple[torch.Tensor, ...],
        others: tuple[Any, ...],
    ) -> torch.Tensor:
        return function(*tensors, *others)
