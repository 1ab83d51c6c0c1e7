"""The tape: a graph for the CPU. It is the list of a step's calls, with addresses and Python scalars baked in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ostinato.graphs.arena import Arena, plan_layout
from ostinato.graphs.errors import CaptureError
from ostinato.graphs.recorder import Call, Recorder
from ostinato.layers.step import StepInputs
from ostinato.ops.recording import Tap

WRITES_INTO = frozenset({"add", "mul", "sub", "neg", "exp", "silu", "cat", "embedding", "cos", "sin"})
"""Operations that are replayed by their form with an output; the results of others are copied to their place."""

Play = Callable[[StepInputs], None]
Forward = Callable[[StepInputs], torch.Tensor]


class Tape:
    """A captured step. `replay` makes its calls again and returns the step's result, which the next replay of any
    tape overwrites."""

    def __init__(self, calls: list[Call], result: torch.Tensor, captured: StepInputs) -> None:
        self._plays = [_play(call, captured) for call in calls]
        self.result = result
        self.num_calls = len(calls)

    def replay(self, step: StepInputs) -> torch.Tensor:
        """`step` is given to the parts that were left out, as they depend on its rows. -> [padded tokens, hidden]"""
        for play in self._plays:
            play(step)
        return self.result


class TapeBackend:
    """Captures tapes of one model; they share an arena.

    `persistent` maps the storage of each buffer that stays where it is to its name.
    """

    name = "tape"

    def __init__(self, tap: Tap, persistent: Mapping[int, str], device: torch.device) -> None:
        self._tap = tap
        self._persistent = persistent
        self.arena = Arena(device)

    @property
    def num_bytes(self) -> int:
        """What the graphs take beside the persistent buffers."""
        return self.arena.size

    def capture(self, forward: Forward, step: StepInputs, splits: Collection[str]) -> Tape:
        """Runs `forward(step)` once and notes what it does. CaptureError if a replay could not repeat it."""
        recorder = Recorder(self._persistent, splits)
        self._tap.recorder = recorder
        try:
            with recorder:
                result = forward(step)
        finally:
            self._tap.recorder = None
        sizes = {pointer: storage.nbytes() for pointer, storage in recorder.produced.items()}
        if result.untyped_storage().data_ptr() not in sizes:
            raise CaptureError("the result of the step is no tensor that the step computed")
        layout = plan_layout(recorder.calls, sizes, [result])
        calls = self.arena.bind(recorder.calls, layout)
        return Tape(calls, self.arena.bind_tensor(result, layout), step)


def _play(call: Call, captured: StepInputs) -> Play:
    if call.kind == "split":
        return _split_play(call, captured)
    function, args, kwargs = call.function, call.args, call.kwargs
    if not call.writes:
        return lambda _: function(*args, **kwargs)
    if len(call.writes) == 1:
        [out] = call.writes
        with_output = _with_output(call)
        if with_output is not None:
            kwargs = kwargs | {"out": out}
            return lambda _: with_output(*args, **kwargs)
        return lambda _: out.copy_(function(*args, **kwargs))

    def copy_each(_: StepInputs) -> None:
        for out, value in zip(call.writes, function(*args, **kwargs), strict=True):
            out.copy_(value)

    return copy_each


def _split_play(call: Call, captured: StepInputs) -> Play:
    """The part on the real tokens alone, with the step of now in place of the captured one; zeros for padding."""
    tensors, others = call.args
    function, [out] = call.function, call.writes

    def play(step: StepInputs) -> None:
        count = step.token_ids.shape[0]
        now = [step if other is captured else other for other in others]
        out[:count] = function(*(tensor[:count] for tensor in tensors), *now)
        out[count:] = 0

    return play


def _with_output(call: Call) -> Any:
    if call.kind != "torch" or call.name not in WRITES_INTO:
        return None
    packet = call.function.overloadpacket
    return packet.out if "out" in packet.overloads() else None
