"""All graphs of one model: capture as planned, and in each step the choice among them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ostinato.errors import ConfigError, Remedy
from ostinato.graphs.buffers import BufferedInputs, StepBuffers, check_unmoved
from ostinato.graphs.replay_check import compare_replay
from ostinato.graphs.tape import TapeBackend
from ostinato.graphs.tensor_refs import StepForward
from ostinato.json_io import JsonObject
from ostinato.layers.module import Module
from ostinato.observe.counts import ProgressFn, no_progress
from ostinato.ops.arrays import is_array, memory_address
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.graphs.coverage import PIECEWISE_MODES, StepMode, dispatch
from ostinato.plan.traffic import Traffic
from ostinato.units import format_bytes


class Graph(Protocol):
    """One captured step of the model, or of its encoder."""

    def replay(self, inputs: BufferedInputs) -> Array:
        """Run the captured step on the current content of the persistent buffers.

        `inputs` is the same without padding, for the parts that were left out. Returns [padded tokens, hidden], of an
        encoder [padded tokens, rows, hidden], valid until the next replay.
        """


class CaptureBackend(Protocol):
    """Capture of steps on one kind of device."""

    name: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all graphs, without the persistent buffers."""

    def capture(self, forward: StepForward, inputs: BufferedInputs, splits: Collection[str]) -> Graph:
        """Run `forward(inputs)`, whose tensors are in persistent buffers, and record it as a graph.

        Parts of the model named in `splits` are left out and run anew in each replay. CaptureError if a replay could
        not repeat the step.
        """


BatchShape = tuple[int | None, int]
"""Shape of a step: (tokens per row, rows) of uniform decode, (None, tokens) of a mixed batch."""


class GraphKey(NamedTuple):
    """Key of a graph. `size` is a full graph's rows of `tokens_per_row` tokens, or a piecewise graph's tokens."""

    mode: StepMode
    size: int
    tokens_per_row: int = 0

    @property
    def tokens(self) -> int:
        return self.size * self.tokens_per_row if self.mode == "full" else self.size

    def __str__(self) -> str:
        if self.mode == "full":
            return f"full, {self.size} rows of {self.tokens_per_row}"
        return f"piecewise, {self.size} tokens"


class StepGraphs:
    """Runner of every step: replayed if the plan has a graph for it, else eager, and counted either way."""

    def __init__(
        self,
        plan: CapturePlan,
        backend: CaptureBackend,
        forward: StepForward,
        buffers: StepBuffers,
        memory: Sequence[LayerCache],
        *,
        persistent: Callable[[], Mapping[int, str]] = dict,
        strict: bool = False,
        check_replay: bool = False,
        check_size: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare to run steps; capture nothing yet.

        `persistent` returns the storages that must not move, with their names. `check_size` is called after each
        capture that a step has to wait for.
        """
        self.counts = GraphCounts()
        self.capture_seconds = 0.0
        self._plan = plan
        self._ladders = plan.ladders()
        self._backend = backend
        self._forward = forward
        self.buffers = buffers
        """Buffers that each step is written into before `run`."""
        self._memory = memory
        self._strict = strict
        self._check_replay = check_replay
        self._check_size = check_size
        self._persistent = persistent
        self._captured_at = persistent()
        self._graphs: dict[GraphKey, Graph] = {}
        self._serving: dict[BatchShape, GraphKey | None] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of persistent buffers and graphs."""
        return self.buffers.num_bytes + self._backend.num_bytes

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def compute_padding(self) -> None:
        """Let replays compute padding, as those of CUDA graphs always do, so that a mistake in it shows."""
        if isinstance(self._backend, TapeBackend):
            self._backend.compute_padding()

    def planned(self) -> list[GraphKey]:
        """Return every graph of the plan, largest first, so that the first one makes the arena large enough."""
        piecewise = [GraphKey("piecewise", size) for size in self._ladders.tokens]
        full = [GraphKey("full", rows, count) for rows in self._ladders.rows for count in self._plan.tokens_per_row]
        return sorted(piecewise + full, key=lambda key: (-key.tokens, key.mode))

    def capture_all(self, progress: ProgressFn = no_progress) -> None:
        """Capture every planned graph that does not exist yet."""
        missing = [key for key in self.planned() if key not in self._graphs]
        for done, key in enumerate(missing):
            progress(f"Capturing graphs ({key}; {format_bytes(self.num_bytes)})", done, len(missing))
            self._capture(key)
        check_unmoved(self._captured_at, self._persistent())
        progress("Capturing graphs", len(missing), len(missing))

    def run(self, inputs: StepInputs) -> Array:
        """Compute the step that was written into the buffers.

        Returns the hidden states of its tokens and then of padding, [padded tokens, hidden].
        """
        rows, tokens = inputs.read_slots.shape[0], inputs.token_ids.shape[0]
        tokens_per_row = inputs.write_slots.shape[1] if inputs.num_decode_rows == rows else None
        shape = (tokens_per_row, tokens if tokens_per_row is None else rows)
        self.counts.shapes[shape] += 1
        key = self._serving[shape] if shape in self._serving else self._choose(rows, tokens_per_row, tokens)
        if key is None:
            return self._run_eagerly(inputs, rows, tokens_per_row, tokens)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(key)
            self._check_size()
        self.counts.count_replay(key, tokens)
        self.buffers.pad(rows, tokens, key.size if key.mode == "full" else rows, key.tokens)
        if self._check_replay:
            check_unmoved(self._captured_at, self._persistent())
            return compare_replay(str(key), graph.replay, self._forward, inputs, self._memory)
        return graph.replay(inputs)

    def _choose(self, rows: int, tokens_per_row: int | None, tokens: int) -> GraphKey | None:
        """Return the graph that serves steps of a shape, and cache it for later steps; None if they run eagerly."""
        mode, size = dispatch(self._ladders, self._plan.graph_mode, rows, tokens_per_row, tokens)
        key = None if size is None else GraphKey(mode, size, (tokens_per_row or 0) if mode == "full" else 0)
        self._serving[tokens_per_row, tokens if tokens_per_row is None else rows] = key
        return key

    def _run_eagerly(self, inputs: StepInputs, rows: int, tokens_per_row: int | None, tokens: int) -> Array:
        shape = f"{rows} rows of {tokens_per_row} tokens" if tokens_per_row else f"{tokens} tokens in {rows} rows"
        was_planned = self._plan.coverage.mode_of(rows, tokens_per_row, tokens) == "eager"
        if not was_planned and self._strict:
            raise ConfigError(
                f"strict: a step of {shape} has no graph, and the plan did not foresee that", [Remedy("strict", False)]
            )
        if self._plan.graph_mode == "none":
            reason = "graph_mode is none"
        elif tokens_per_row is not None and not self._ladders.rows and not self._ladders.tokens:
            reason = f"decode: {self._plan.graph_mode} has no graphs for it"
        elif tokens_per_row is not None:
            reason = "decode: no graph of so many rows"
        elif self._plan.graph_mode not in PIECEWISE_MODES:
            reason = f"mixed: {self._plan.graph_mode} has no graphs for it"
        else:
            reason = "mixed: no graph of so many tokens"
        self.counts.count_eager(reason, tokens, was_planned)
        self.buffers.pad(rows, tokens, rows, tokens)
        return self._forward(inputs)

    def _capture(self, key: GraphKey) -> Graph:
        begin = time.perf_counter()
        with self.buffers.cleared():
            if key.mode == "full":
                inputs = self.buffers.view(key.size, key.tokens, key.tokens_per_row, key.size)
                graph = self._backend.capture(self._forward, inputs, ())
            else:
                inputs = self.buffers.view(1, key.tokens, 1, 0)
                graph = self._backend.capture(self._forward, inputs, self._plan.splits)
        self._graphs[key] = graph
        self.capture_seconds += time.perf_counter() - begin
        return graph


def persistent_storages(buffers: StepBuffers, model: Module, memory: Sequence[LayerCache]) -> Mapping[int, str]:
    """Return storage pointer -> name of all memory that never moves: step buffers, weights and constants, cache."""
    return {
        buffers.storage: StepInputs.buffers,
        **weight_storages(model),
        **_storages(
            (f"cache memory.{index}.{name}", value)
            for index, layer in enumerate(memory)
            for name, value in layer.tensors.items()
        ),
    }


def weight_storages(model: Module) -> Mapping[int, str]:
    """Return storage pointer -> name of a model's weights and constants."""
    return _storages(
        (f"weights.{path}.{name}", value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    )


def _storages(named: Iterable[tuple[str, object]]) -> dict[int, str]:
    return {memory_address(value): name for name, value in named if is_array(value)}


@dataclass(slots=True)
class SizeCount:
    """Steps that one graph served, and their tokens without padding."""

    steps: int = 0
    tokens: int = 0


@dataclass(slots=True)
class GraphCounts:
    """Counts since the start. The sum over all modes is the number of steps."""

    by_graph: dict[GraphKey, SizeCount] = field(default_factory=dict)
    eager: Counter[str] = field(default_factory=Counter)
    """Reason -> steps without a graph."""
    eager_tokens: Counter[str] = field(default_factory=Counter)
    """Reason -> their tokens."""
    unplanned: int = 0
    """Eager steps for which the plan had promised a graph."""
    shapes: Counter[BatchShape] = field(default_factory=Counter)
    """Shape -> all steps of it."""

    @property
    def traffic(self) -> Traffic:
        """Shapes of all steps, in the form from which capture sizes are planned."""
        traffic = Traffic()
        for (tokens_per_row, size), steps in self.shapes.items():
            traffic.count(size, tokens_per_row, size, steps)
        return traffic

    def count_replay(self, key: GraphKey, tokens: int) -> None:
        one = self.by_graph.get(key)
        if one is None:
            one = self.by_graph[key] = SizeCount()
        one.steps += 1
        one.tokens += tokens

    def count_eager(self, reason: str, tokens: int, was_planned: bool) -> None:
        self.eager[reason] += 1
        self.eager_tokens[reason] += tokens
        self.unplanned += not was_planned

    def to_json(self) -> JsonObject:
        """Return the counts as plain data: steps per mode and per graph, and the reasons of eager steps."""
        graphs: list[JsonObject] = [
            {
                "mode": key.mode,
                "size": key.size,
                "tokens_per_row": key.tokens_per_row or None,
                "steps": one.steps,
                "tokens": one.tokens,
                "padding": one.steps * key.tokens - one.tokens,
            }
            for key, one in sorted(self.by_graph.items(), key=lambda item: (item[0].mode, item[0].size))
        ]
        steps = {mode: sum(g["steps"] for g in graphs if g["mode"] == mode) for mode in ("full", "piecewise")}
        return {
            "steps": {**steps, "eager": self.eager.total()},
            "padding": sum(g["padding"] for g in graphs),
            "graphs": graphs,
            "eager_reasons": dict(self.eager),
            "eager_tokens": dict(self.eager_tokens),
            "unplanned": self.unplanned,
            "traffic": self.traffic.to_json(),
        }
