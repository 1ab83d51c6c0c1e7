"""The tape: a graph for the CPU.

It is the list of a step's calls, with addresses and Python scalars baked in. All tapes of a model compute in one piece
of memory, the arena.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ostinato.graphs.array_recorder import ArrayRecorder
from ostinato.graphs.buffers import BufferAddresses, BufferedInputs, eager_part
from ostinato.graphs.tensor_refs import CallRecord, RecordedCall, ReplayFn, StepForward, TensorRef, items_in, map_items
from ostinato.ops.arrays import NUMPY, Arrays
from ostinato.ops.dispatch import CallHook, NativeKernel
from ostinato.ops.native_extension import Program
from ostinato.ops.step_inputs import Array
from ostinato.plan.graphs.arena import ALIGNMENT, Layout, pack_buffers

HAS_OUT_VARIANT = frozenset({"add", "mul", "sub", "neg", "exp", "silu", "cat", "embedding", "cos", "sin"})
"""Operations that are replayed in their variant with an output; the results of others are copied to their place."""

Profile = Callable[[BufferedInputs], list[tuple[str, float]]]
"""Function that runs calls -> (name, seconds) of each."""


class Tape:
    """A captured step.

    `replay` makes its calls again and returns the step's result, which the next replay of any tape overwrites.
    """

    computes_padding = False
    """True if native kernels compute padding too, as those of a CUDA graph do."""

    def __init__(
        self, calls: Sequence[RecordedCall], layout: Layout, result: TensorRef, captured: BufferedInputs
    ) -> None:
        self.calls = calls
        """Recorded calls, in order."""
        self._layout = layout
        self._result_place = result
        self._captured = captured
        self._length = captured.num_tokens
        self._addresses = BufferAddresses(captured)

    def bind(self, memory: Array) -> None:
        """Bind the calls to `memory` by the layout's offsets: before the first replay, and when the arena has grown."""
        self._plays: list[ReplayFn] = []
        self._profiles: list[Profile] = []
        self.programs: list[Program] = []
        for is_native, calls in groupby(self.calls, key=lambda call: isinstance(call.function, NativeKernel)):
            if is_native:
                self._add_programs(calls, memory)
                continue
            for call in calls:
                play = self._play(call, memory)
                self._plays.append(play)
                self._profiles.append(_timed(call.name, play))
        self._result: Array = bind(self._result_place, self._layout, memory)

    def replay(self, inputs: BufferedInputs) -> Array:
        """Run the calls and return the step's result, [padded tokens, hidden].

        `inputs`, the real part of the buffers' content, is passed to the parts that were left out, as they depend on
        its rows. CaptureError if a step buffer has moved since the capture.
        """
        self._addresses.check(inputs)
        for play in self._plays:
            play(inputs)
        return self._result

    def profile(self, inputs: BufferedInputs) -> list[tuple[str, float]]:
        """Replay the step, and return the name of every call and the seconds that it took, in order."""
        self._addresses.check(inputs)
        return [call for profile in self._profiles for call in profile(inputs)]

    def _add_programs(self, calls: Iterable[RecordedCall], memory: Array) -> None:
        """Add adjacent native kernels as programs: one call of the extension per run of kernels with as many tokens.

        A program leaves padding out.
        """
        program, of_program = None, 0
        for call in calls:
            args, kwargs, writes = bind((call.args, call.kwargs, call.writes), self._layout, memory)
            tokens, arguments = call.function.prepare_call(writes[0], args, kwargs)
            if program is None or tokens != of_program:
                program, of_program = call.function.extension.Program(), tokens
                self._add_program(program, tokens, call.function.threads)
            getattr(program, call.name)(tokens, arguments)

    def _add_program(self, program: Program, tokens: int, threads: int) -> None:
        """Add a program that runs on `threads`; `tokens` is the number of its kernels' tokens, padding included."""
        self.programs.append(program)
        real = _real_tokens(tokens, self._length)
        self._plays.append(lambda inputs: program.run(tokens if self.computes_padding else real(inputs), threads))
        self._profiles.append(lambda inputs: program.profile(real(inputs), threads))

    def _play(self, call: RecordedCall, memory: Array) -> ReplayFn:
        function = call.function
        args, kwargs, writes = bind((call.args, call.kwargs, call.writes), self._layout, memory)
        if call.kind == "split":
            tensors, other_args = args
            return eager_part(function, tensors, other_args, writes[0], self._captured)
        if not any(out is not None for out in writes):
            return lambda _: function(*args, **kwargs)
        if call.returns_tensor:
            [out] = writes
            with_output = _with_output(call)
            if with_output is not None:
                kwargs = kwargs | {"out": out}
                return lambda _: with_output(*args, **kwargs)
            return lambda _: out.copy_(function(*args, **kwargs))

        kind = next(type(out) for out in writes if out is not None)

        def copy_each(_: BufferedInputs) -> None:
            for out, value in zip(writes, items_in(function(*args, **kwargs), kind), strict=True):
                if out is not None:
                    out.copy_(value)

        return copy_each


class Arena:
    """Memory shared by tapes that run one at a time. When it grows, tapes must be bound to it again."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self.memory = arrays.zeros((0,), "uint8")

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.memory.nbytes

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes, and return whether the arena had to grow, and so has moved."""
        if size <= self.size:
            return False
        self.memory = self._arrays.zeros((size,), "uint8")
        return True

    def poison(self) -> None:
        """Fill the memory with NaN for any float dtype, and -1 for integers, so that a read before a write shows."""
        self.memory[:] = 0xFF


class TapeBackend:
    """Backend that captures tapes of one model; they share an arena.

    `persistent` maps the storage of each buffer that never moves to its name.
    """

    name = "tape"
    tape_type: type[Tape] = Tape

    def __init__(self, hook: CallHook, persistent: Mapping[int, str], arrays: Arrays = NUMPY) -> None:
        self._hook = hook
        self._persistent = persistent
        self._arrays = arrays
        self._tapes: list[Tape] = []
        self.arena = Arena(arrays)
        self._computes_padding = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the graphs, without the persistent buffers."""
        return self.arena.size

    def compute_padding(self) -> None:
        """Let the replays of all tapes compute padding."""
        self._computes_padding = True
        for tape in self._tapes:
            tape.computes_padding = True

    def capture(self, forward: StepForward, inputs: BufferedInputs, splits: Collection[str]) -> Tape:
        """Run `forward(inputs)` once and record it. CaptureError if a replay could not repeat it."""
        recorder = self._recorder(splits)
        result = recorder.record(self._hook, forward, inputs)
        layout = plan_layout(recorder.calls, recorder.sizes, [result], inputs.num_tokens)
        tape = self.tape_type(recorder.calls, layout, result, inputs)
        tape.computes_padding = self._computes_padding
        self._tapes.append(tape)
        with self._arrays.inference_mode():
            to_bind = self._tapes if self.arena.reserve(layout.size) else [tape]
            for bound_tape in to_bind:
                bound_tape.bind(self.arena.memory)
        return tape

    def _recorder(self, splits: Collection[str]) -> CallRecord:
        if self._arrays is NUMPY:
            return ArrayRecorder(self._persistent, splits)
        from ostinato.graphs.recorder import CallRecorder  # it imports torch

        return CallRecorder(self._persistent, splits)


def plan_layout(
    calls: Sequence[RecordedCall], sizes: Mapping[int, int], results: Sequence[TensorRef], entries: int = 1
) -> Layout:
    """Return offsets for the storages that the calls name, so that no two that live at once overlap.

    `sizes` maps a storage's number to its bytes. Each takes the same whole number of cache lines for every one of the
    step's `entries`. So steps of any number of entries have the same layout, and the arena grows with the largest,
    which the plan relies on.

    A storage lives from the first call that names it to the last; those of `results` live to the end. First fit in the
    order of the calls.
    """
    lives: dict[int, tuple[int, int]] = {}
    for position, call in enumerate([*calls, None]):
        named = items_in((call.args, call.kwargs, call.writes) if call else tuple(results), TensorRef)
        for storage in {ref.storage: None for ref in named}:
            lives[storage] = (lives[storage][0] if storage in lives else position, position)
    return pack_buffers(sizes, lives, ALIGNMENT * entries)


def bind(value: object, layout: Layout, memory: Array) -> Any:
    """Return `value` with every TensorRef in it as a tensor in `memory`."""
    return map_items(value, TensorRef, lambda place: place.bind(memory, layout.offsets[place.storage]))


def _real_tokens(tokens: int, length: int) -> Callable[[BufferedInputs], int]:
    """Return a function from a replay's inputs to the real ones of a kernel's `tokens`, for inputs padded to `length`.

    One token may represent several entries (merged patches), or several tokens one entry. All tokens count as real
    where neither number divides the other.
    """
    if tokens == length:
        return lambda inputs: inputs.num_tokens
    if tokens and (length % tokens == 0 or tokens % length == 0):
        return lambda inputs: -(-inputs.num_tokens * tokens // length)
    return lambda inputs: tokens


def _timed(name: str, play: ReplayFn) -> Profile:
    def profile(inputs: BufferedInputs) -> list[tuple[str, float]]:
        begin = time.perf_counter()
        play(inputs)
        return [(name, time.perf_counter() - begin)]

    return profile


def _with_output(call: RecordedCall) -> Any:
    if call.kind != "torch" or call.name not in HAS_OUT_VARIANT:
        return None
    packet = call.function.overloadpacket
    return packet.out if "out" in packet.overloads() else None
