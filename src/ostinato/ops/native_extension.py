"""Types of the extension modules that hold the native kernels, one module for each instruction set.

The build writes the modules (`native/bind/module.cpp`), and `ops.dispatch.load_extension` imports the one that the plan
chose, so a stub file of one name could not describe them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class KernelCall(Protocol):
    """A kernel's function: the number of tokens, and the other arguments by name, with `out` for the result.

    TypeError for a missing or unknown name, AssertionError for another dtype or layout. With 0 `threads` it runs on as
    many as torch does.
    """

    def __call__(self, tokens: int, arguments: Mapping[str, object], threads: int = 0, /) -> None: ...


RecordCall = Callable[[int, Mapping[str, object]], None]
"""A program's method that adds a call: as `KernelCall`, without the threads, which each run names."""


class Program(Protocol):
    """A list of kernel calls that the extension repeats without Python.

    It has a method for each kernel, of the kernel's name, which adds a call and notes the addresses of its tensors.
    """

    def __getattr__(self, kernel: str) -> RecordCall: ...

    def run(self, tokens: int, threads: int = 0) -> None:
        """Repeat the calls on the first `tokens` tokens, on `threads` threads, or with 0 on as many as torch's."""

    def profile(self, tokens: int, threads: int = 0) -> list[tuple[str, float]]:
        """Repeat the calls; return the name of each and the seconds that it took."""


class NativeExtension(Protocol):
    """A module of native kernels. It has a function for each kernel, of the kernel's name."""

    tiles: str | None
    """Matrix units that its kernels use (`amx`, or `emulated` for tests), or None."""

    def __getattr__(self, kernel: str) -> KernelCall: ...

    def Program(self) -> Program:
        """Return a program without calls."""

    def set_spin_turns(self, turns: int) -> None:
        """Have threads spin for `turns` before they sleep; if negative, as long as fits the machine."""

    def explain_bus_error(self, message: str) -> None:
        """Have a SIGBUS write `message` to stderr before it ends the process."""
