"""The time of the engine's own steps: the model, and the engine's work around it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore

MODEL = ("model", "logits")
"""Phases of a step that are the model; the others are the engine around it."""


def phase_figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase over steps that all have the same ones."""
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


class PhaseClock:
    """Seconds by phase. A phase inside another one counts there alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = 0.0

    def timed(self, phase: str, function: Callable[..., object]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> Any:
            self._turn(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn(None)

        return call

    def _turn(self, phase: str | None) -> None:
        """Enter a phase, or with None leave the innermost."""
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] = self.seconds.get(self._stack[-1], 0.0) + now - self._since
        if phase is None:
            self._stack.pop()
        else:
            self._stack.append(phase)
        self._since = time.perf_counter()


@contextmanager
def watched(engine: EngineCore, clock: PhaseClock) -> Iterator[None]:
    """Time the phases of the engine's steps with `clock` inside the context."""
    from ostinato.graphs.tape import Tape
    from ostinato.runner import model_runner as runner_module

    runner = engine.runner
    places: list[tuple[str, Any, str]] = [
        ("loop", engine, "step"),
        ("schedule", engine.scheduler, "schedule"),
        ("inputs", runner_module, "write_step_inputs"),
        ("run", runner, "execute"),
        ("buffers", runner.graphs, "run"),
        ("model", runner.model, "forward"),
        ("model", Tape, "replay"),
        ("logits", runner.model, "compute_logits"),
        ("sampling", runner_module, "sample_rows"),
        ("update", engine.scheduler, "update"),
        ("deliver", engine.output_processor, "process_updates"),
    ]
    with ExitStack() as stack:
        for phase, owner, name in places:
            stack.enter_context(_in_place(owner, name, clock.timed(phase, getattr(owner, name))))
        yield


@contextmanager
def _in_place(owner: object, name: str, value: object) -> Iterator[None]:
    """Set attribute `name` of `owner` to `value` inside the context, and restore it afterwards."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def decode_phases(
    engine: EngineCore, rows: int, context: int, steps: int, before_each: Callable[[], object] = lambda: None
) -> list[dict[str, float]]:
    """Return the seconds by phase of `steps` decode steps, greedy, of requests with `context` tokens before them."""
    from ostinato.sampling.params import SamplingParams

    rng = random.Random(context)
    params = SamplingParams(temperature=0, max_tokens=steps + 3, ignore_eos=True)
    for _ in range(rows):
        engine.add_request([rng.randrange(engine.spec.vocab_size) for _ in range(context)], params)
    waiting = rows
    while waiting:
        waiting -= sum(len(output.outputs[0].token_ids) == 1 for output in engine.step())
    engine.step()  # the graph may be captured here
    measured = []
    clock = PhaseClock()
    with watched(engine, clock):
        for _ in range(steps):
            before_each()
            clock.seconds = {}
            engine.step()
            measured.append(clock.seconds)
    while engine.has_unfinished:
        engine.step()
    return measured
