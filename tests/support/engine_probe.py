"""Faults for an engine in a process of its own: a test says what shall go wrong, its engine looks before each step."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from typing import Any

import numpy as np

from tests.support.patience import PATIENCE

FIELDS = (
    "allowed",
    "steps",
    "held",
    "delay",
    "fail_rows",
    "nan_rows",
    "breaks",
    "clock_jumps",
    "grammars_allowed",
    "compiling",
    "most_compiling",
)
SECRET = "/a/secret/path"
"""What a step says that fails."""


class Probe:
    """Numbers that a test and the process of its engine share. Made in the test, and called in the process.

    `allowed_mask`: steps that may run since the start; the next one waits. `steps`: those that have begun. `pinned_by`:
    whether one waits. `delay`: seconds before each. `fail_rows`, `nan_rows`: the next step of so many rows raises, or
    has NaN in its last row's logits; -1 stands for any. `breaks`: the next step leaves the bookkeeping in disorder, and
    raises. `clock_jumps`: the time of day jumps. `grammars_allowed`: whether guides are compiled now, else they wait;
    `compiling`, `most_compiling`: how many are, and were at a time.
    """

    def __init__(self, path: str | None = None, reference: bool = False) -> None:
        """`reference`: without native kernels."""
        is_new = path is None
        if path is None:
            handle, path = tempfile.mkstemp(suffix=".probe")
            os.ftruncate(handle, 8 * len(FIELDS))
            os.close(handle)
        memory = np.memmap(path, np.float64, "r+", shape=(len(FIELDS),))
        self.__dict__.update(path=path, reference=reference, _memory=memory)
        if is_new:
            self.reset()

    def __reduce__(self) -> Any:
        return Probe, (self.path, self.reference)

    def __getattr__(self, name: str) -> float:
        if name not in FIELDS:
            raise AttributeError(name)
        return float(self._memory[FIELDS.index(name)])

    def __setattr__(self, name: str, value: float) -> None:
        self._memory[FIELDS.index(name)] = value

    def reset(self) -> None:
        """Nothing goes wrong any more."""
        self.allowed, self.grammars_allowed = math.inf, 1
        self.delay = self.fail_rows = self.nan_rows = self.breaks = self.clock_jumps = 0

    def hold(self) -> None:
        """No further step begins."""
        self.allowed = self.steps

    def hold_next(self) -> None:
        """Returns when a step waits, so that nothing happens any more. There must be requests to compute."""
        self.hold()
        self.held, end = 0, time.monotonic() + PATIENCE
        while not self.held:
            assert time.monotonic() < end, "no step begins"
            time.sleep(0.001)
        self.hold()  # one may have begun when it was said first

    def go(self) -> None:
        self.allowed = math.inf

    def close(self) -> None:
        os.unlink(self.path)

    def __call__(self, config: Any, progress: Any) -> Any:
        """The engine, with all that can go wrong in it."""
        from ostinato.engine.core import EngineCore

        if self.reference:
            _without_native_kernels()
        engine = EngineCore(config, progress)
        stats, unfinished = engine.stats, engine.output_processor
        engine.stats = lambda: {**stats(), "kept": len(unfinished.request_states) + len(unfinished.state_by_sample)}
        engine.runner.execute = self._run(engine.runner.execute, engine.scheduler)
        engine.runner.model.compute_logits = self._logits(engine.runner.model.compute_logits)
        engine.compile_guide = self._compile(engine.compile_guide)
        real, jumps = time.time, itertools.count()
        time.time = lambda: real() + (-1) ** next(jumps) * 10**8 if self.clock_jumps else real()
        return engine

    def _run(self, run: Any, scheduler: Any) -> Any:
        def probed(batch: Any) -> Any:
            while self.steps >= self.allowed:
                self.held = 1
                time.sleep(0.001)
            self.held = 0
            self.steps += 1
            time.sleep(self.delay)
            if self.breaks:
                scheduler.cache.blocks.allocate(1)  # a block that nobody holds
                raise RuntimeError(SECRET)
            if self._due("fail_rows", len(batch.rows)):
                raise RuntimeError(SECRET)
            return run(batch)

        return probed

    def _logits(self, logits: Any) -> Any:
        def probed(hidden: Any) -> Any:
            result = logits(hidden)
            if self._due("nan_rows", hidden.shape[0]):
                result[-1] = math.nan
            return result

        return probed

    def _compile(self, compile_guide: Any) -> Any:
        def probed(guide: Any) -> Any:
            self.compiling += 1
            self.most_compiling = max(self.most_compiling, self.compiling)
            while not self.grammars_allowed:
                time.sleep(0.001)
            self.compiling -= 1
            return compile_guide(guide)

        return probed

    def _due(self, name: str, rows: int) -> bool:
        if getattr(self, name) not in (rows, -1):
            return False
        setattr(self, name, 0)
        return True


def without_native_kernels() -> bool:
    """Whether this process plans without native kernels, as `--reference-kernels` has it."""
    from ostinato.plan.device import detect as device

    return device.detect_native.__module__ != "ostinato.plan.device.kernel_support"


def _without_native_kernels() -> None:
    from ostinato.plan.device import detect as device
    from ostinato.plan.device.kernel_support import NativeFacts

    device.detect_native = lambda root: NativeFacts(None, "the tests run without native kernels")
