"""Model without memory: shapes in place of tensors, to read its weight table and the calls of its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from ostinato.layers.module import Multiplier
from ostinato.ops.operations import OPERATIONS, Operations
from ostinato.plan.graphs.arena import CallTrace, TraceCall
from ostinato.plan.tensor_parallel import SINGLE_RANK, Rank
from ostinato.plan.weights import Weight


@dataclass(frozen=True, eq=False)
class SketchTensor:
    """Stand-in for a tensor: shape, dtype name and the call that computed it.

    The dtype `model` is the model's own. `call` is None for weights, inputs and cache memory.

    It has no functions that torch rounds by an element's place in memory, as it does exponentials: the last elements
    of a tensor are not computed by vectors. Layers call operations for those, whose kernels treat all tokens alike.
    """

    shape: tuple[int, ...]
    dtype: str
    trace: CallTracer | None = None
    call: int | None = None

    def reshape(self, *shape: int) -> SketchTensor:
        return replace(self, shape=tuple(prod(self.shape) // -prod(shape) if size == -1 else size for size in shape))

    def __getitem__(self, index: slice | tuple[slice | int, ...]) -> SketchTensor:
        each = index if isinstance(index, tuple) else (index,)
        lengths = [len(range(size)[at]) for at, size in zip(each, self.shape, strict=False) if isinstance(at, slice)]
        return replace(self, shape=(*lengths, *self.shape[len(each) :]))


class CallTracer:
    """Record of the calls of a forward pass, in place of the hook of the model's kernels."""

    def __init__(self) -> None:
        self._calls: list[TraceCall] = []
        self._part: str | None = None
        self._parts = 0

    def input(self, shape: tuple[int, ...], dtype: str) -> SketchTensor:
        """Return an input of the pass, which none of its calls computes."""
        return SketchTensor(shape, dtype, self)

    def run(self, forward: Callable[[], SketchTensor]) -> CallTrace:
        """Return the calls of `forward`, and which of them gives its result."""
        self._calls = []
        result = forward()
        assert result.call is not None, "a pass computes its result"
        return CallTrace(tuple(self._calls), result.call)

    def kernel(self, name: str, *args: object, **kwargs: object) -> SketchTensor:
        """Return the result of an operation, by the rule of its row."""
        result = OPERATIONS[name].result(*args, **kwargs)
        given = (*args, *kwargs.values())
        if isinstance(result, SketchTensor):
            return self.note(name, given, result)
        assert isinstance(result, tuple), "the result is an argument, or a shape and a dtype"
        shape, dtype = result
        return self.note(name, given, shape, str(dtype))

    def split(
        self, name: str, function: Callable[..., SketchTensor], tensors: tuple[SketchTensor, ...], *others: object
    ) -> SketchTensor:
        """Record the calls of a part of a layer as such."""
        self._part, self._parts = name, self._parts + 1
        result = function(*tensors, *others)
        self._part = None
        return result

    def note(
        self, operation: str, args: Sequence[object], result: SketchTensor | tuple[int, ...], dtype: str = "model"
    ) -> SketchTensor:
        """Record a call and return its result: `result` itself if that is an argument, else a new one of that shape."""
        reads = tuple(dict.fromkeys(arg.call for arg in args if isinstance(arg, SketchTensor) and arg.call is not None))
        elements = 0 if isinstance(result, SketchTensor) else prod(result)
        self._calls.append(TraceCall(operation, elements, dtype, reads, self._part, self._parts))
        return result if isinstance(result, SketchTensor) else SketchTensor(result, dtype, self, len(self._calls) - 1)


class SketchedOps(Operations):
    """Stand-in for the kernels that records each call."""

    def __init__(self, trace: CallTracer) -> None:
        vars(self).update({name: partial(trace.kernel, name) for name in OPERATIONS})
        self.hook = trace


class Sketch:
    """Builder of a model without memory."""

    dtype: Any = "model"
    float32: Any = "float32"
    arrays: Any = None

    def __init__(self, rank: Rank = SINGLE_RANK) -> None:
        self.rank = rank
        self.trace = CallTracer()
        self.ops: Any = SketchedOps(self.trace)

    def weight(self, row: Weight) -> Any:
        return self.trace.input(row.shape, "float32" if row.in_float32 else "model")

    def scale(self, multiplier: Multiplier, size: int, factor: float) -> Any:
        return None if multiplier == factor == 1.0 else self.trace.input((size,), "float32")

    def rounded(self, value: float) -> float:
        return value

    def constant(self, values: Sequence[float], dtype: Any) -> Any:
        return self.trace.input((len(values),), dtype)

    def repeat(self, x: Any, count: int) -> Any:
        tokens, heads, size = x.shape
        return self.trace.note("repeat", (x,), (tokens, heads * count, size), x.dtype)
