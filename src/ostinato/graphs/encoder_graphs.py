"""Graphs of the vision encoder, one per token budget: capture as planned, the measured choice, and packs of images."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostinato.graphs.buffers import EncoderBuffers, check_unmoved
from ostinato.graphs.replay_check import compare_encoding
from ostinato.graphs.step_graphs import CaptureBackend, Graph
from ostinato.json_io import JsonObject
from ostinato.media.media_item import MediaItem
from ostinato.observe.counts import EncoderCounts, ProgressFn, no_progress
from ostinato.ops.arrays import Arrays, copied
from ostinato.ops.step_inputs import EncoderInputs
from ostinato.plan.encoder.budgets import Pack, pack_items
from ostinato.plan.encoder.encoder_plan import EncoderPlan
from ostinato.plan.layer_specs import VisionSpec
from ostinato.units import format_bytes

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array

Encode = Callable[[EncoderInputs], "Array"]
WriteImages = Callable[[EncoderBuffers, Sequence[MediaItem]], EncoderInputs]
"""Function that writes images into buffers, one after the other -> views of the written part."""

GRAPHS_OFF = "encoder graphs are off"
TOO_LARGE = "larger than the largest budget"
EAGER_FASTER = "eager was faster when both were timed"

MAX_TIMING_ROUNDS = 5
ENOUGH_SECONDS = 0.2
"""Time limit of a budget's timing. A round that has begun is finished, so large budgets get one."""


@dataclass(frozen=True, slots=True)
class BudgetTimes:
    """Seconds of one pack that fills a budget, the shortest with the graph and eagerly; None where not measured."""

    budget: int
    graph_seconds: float | None = None
    eager_seconds: float | None = None

    @property
    def graph_loses(self) -> bool:
        if self.graph_seconds is None or self.eager_seconds is None:
            return False
        return self.graph_seconds > self.eager_seconds

    def to_json(self) -> JsonObject:
        return {
            "budget": self.budget,
            "graph_seconds": self.graph_seconds,
            "eager_seconds": self.eager_seconds,
            "runs": "eager" if self.graph_loses else "graph",
        }


class EncoderGraphs:
    """Runner of the vision encoder.

    Packs of images are replayed if a budget holds them and its graph is faster, else they run eagerly. Both are
    counted.
    """

    def __init__(
        self,
        plan: EncoderPlan,
        vision: VisionSpec,
        encode: Encode,
        write: WriteImages,
        arrays: Arrays,
        dtype: str,
        make_backend: Callable[[Mapping[int, str]], CaptureBackend],
        weights: Callable[[], Mapping[int, str]] = dict,
        *,
        check_replay: bool = False,
    ) -> None:
        """Allocate buffers and the backend; capture nothing yet.

        `encode` is the model's. `make_backend` gets the storages that must not move, with their names; `weights`
        returns those that are not buffers.
        """
        self.counts = EncoderCounts()
        self.capture_seconds = 0.0
        self.times: dict[int, BudgetTimes] = {}
        """Budget -> times that decided between graph and eager."""
        self._plan = plan
        self._vision = vision
        self._encode = encode
        self._write = write
        self._arrays, self._dtype = arrays, dtype
        self._weights = weights
        self._check_replay = check_replay
        self._budgets = plan.token_budgets if plan.graph_mode != "none" else ()
        self._graphs: dict[int, Graph] = {}
        self._buffers: EncoderBuffers | None = None
        self._backend: CaptureBackend | None = None
        if self._budgets:
            self._buffers = self._make_buffers(self._budgets[-1] + vision.prefix_tokens, plan.max_items_per_batch)
            self._captured_at = self._persistent()
            self._backend = make_backend(self._captured_at)

    @property
    def num_bytes(self) -> int:
        """Bytes of buffers and graphs."""
        if self._buffers is None or self._backend is None:
            return 0
        return self._buffers.num_bytes + self._backend.num_bytes

    @property
    def planned(self) -> tuple[int, ...]:
        """Budgets that have a graph, or get one when they are first used."""
        return self._budgets

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def figures(self) -> JsonObject:
        """Return statistics of the graphs: number captured, capture time, and observed and planned memory.

        They include the decision on `encoder_graph_mode` and the times that decided each budget.
        """
        return {
            "captured": self.num_captured,
            "capture_seconds": round(self.capture_seconds, 3),
            "planned_bytes": self._plan.graph_bytes,
            "observed_bytes": self.num_bytes,
            "decides": "encoder_graph_mode",
            "mode": self._plan.graph_mode,
            "timed": [self.times[budget].to_json() for budget in sorted(self.times)],
        }

    def capture_all(self, progress: ProgressFn = no_progress) -> None:
        """Capture and time every budget without a graph, the largest first, which makes the arena large enough."""
        missing = [budget for budget in reversed(self._budgets) if budget not in self._graphs]
        for done, budget in enumerate(missing):
            name = f"{budget} tokens; {format_bytes(self.num_bytes)}"
            progress(f"Capturing encoder graphs ({name})", done, len(missing))
            self._capture(budget)
        if missing:
            check_unmoved(self._captured_at, self._persistent())
            progress("Capturing encoder graphs", len(missing), len(missing))

    def run(self, items: Sequence[MediaItem]) -> list[Array]:
        """Encode images and return all output tokens of each, also those that are not kept.

        Each result is [tokens, rows, hidden] in newly allocated memory.
        """
        results: dict[int, Array] = {}
        sizes = [self._tokens_of(item) for item in items]
        prefix = self._vision.prefix_tokens
        for pack in pack_items(sizes, self._budgets, self._plan.max_items_per_batch, prefix):
            encoded = self._run_pack(pack, [items[index] for index in pack.indices])
            begin = 0
            for index in pack.indices:
                begin += prefix
                results[index] = encoded[begin : begin + sizes[index]]
                begin += sizes[index]
        return [results[index] for index in range(len(items))]

    def _run_pack(self, pack: Pack, items: Sequence[MediaItem]) -> Array:
        """Return the hidden states of the pack's images, one after the other: [tokens, rows, hidden].

        Each image's begin with its prefix.
        """
        tokens = pack.tokens + len(items) * self._vision.prefix_tokens
        if pack.budget is not None and pack.budget not in self._graphs:
            self._capture(pack.budget)
        begin = time.perf_counter()
        reason = self._eager_reason(pack.budget)
        if pack.budget is None or reason is not None:
            encoded = self._run_eagerly(items)[:tokens]
            self.counts.count_eager(reason or GRAPHS_OFF, len(items), pack.tokens, time.perf_counter() - begin)
            return encoded
        encoded = self._replay(pack.budget, items)[:tokens]
        encoded = copied(encoded)
        self.counts.count_replay(pack.budget, len(items), pack.tokens, time.perf_counter() - begin)
        if self._check_replay:
            check_unmoved(self._captured_at, self._persistent())
            compare_encoding(f"{pack.budget} tokens", encoded, self._run_eagerly(items)[:tokens])
        return encoded

    def _run_eagerly(self, items: Sequence[MediaItem]) -> Array:
        """Encode in buffers as large as the images, which may be larger than any budget."""
        buffers = self._make_buffers(
            sum(self._tokens_of(item) + self._vision.prefix_tokens for item in items), len(items)
        )
        inputs = self._write(buffers, items)
        buffers.pad(inputs.num_tokens, self._vision.segments_of(len(items)), inputs.num_tokens)
        return self._encode(inputs)

    def _make_buffers(self, tokens: int, images: int) -> EncoderBuffers:
        """Return buffers for `images` images with `tokens` output tokens in all, and what they have for prefixes."""
        vision = self._vision
        segments = vision.segments_of(images)
        rows = tokens * vision.patches_per_token
        how = (vision.patch_elements, self._arrays, self._dtype, vision.taps, vision.has_windows)
        return EncoderBuffers(rows, segments, *how)

    def _eager_reason(self, budget: int | None) -> str | None:
        if not self._budgets:
            return GRAPHS_OFF
        if budget is None:
            return TOO_LARGE
        return EAGER_FASTER if self.times[budget].graph_loses else None

    def _replay(self, budget: int, items: Sequence[MediaItem]) -> Array:
        assert self._buffers is not None, "a budget has buffers"
        inputs = self._write(self._buffers, items)
        self._buffers.pad(inputs.num_tokens, self._vision.segments_of(len(items)), self._vision.rows_of(budget))
        return self._graphs[budget].replay(inputs)

    def _capture(self, budget: int) -> None:
        """Capture the graph of a budget, and time it against eager unless graphs are always used."""
        assert self._buffers is not None, "a budget has buffers"
        assert self._backend is not None, "a budget has a backend"
        begin = time.perf_counter()
        items = [self._filling(budget)]
        inputs = self._write(self._buffers, items)
        self._buffers.pad(inputs.num_tokens, self._vision.segments_of(len(items)), inputs.num_tokens)
        self._graphs[budget] = self._backend.capture(self._encode, inputs, ())
        self.capture_seconds += time.perf_counter() - begin
        self.times[budget] = BudgetTimes(budget)
        if self._plan.graph_mode == "auto":
            self.times[budget] = time_both(
                budget,
                lambda: copied(self._replay(budget, items)),
                lambda: self._run_eagerly(items),
                self._arrays.synchronize,
            )

    def _filling(self, budget: int) -> MediaItem:
        """Return a black image with as many output tokens as the budget."""
        merge = self._vision.merge_size
        patches = np.zeros((budget * merge**2, self._vision.patch_elements), dtype=np.float32)
        return MediaItem(patches, (merge, merge * budget), budget, "")

    def _tokens_of(self, item: MediaItem) -> int:
        return item.grid[0] * item.grid[1] // self._vision.patches_per_token

    def _persistent(self) -> Mapping[int, str]:
        assert self._buffers is not None, "only graphs have something that must not move"
        return {self._buffers.storage: EncoderInputs.buffers, **self._weights()}


def time_both(
    budget: int,
    graph: Callable[[], object],
    eager: Callable[[], object],
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> BudgetTimes:
    """Time a pack with the graph and eagerly, alternately. `wait` returns when the device has finished all its work."""
    graphs: list[float] = []
    eagers: list[float] = []
    begin = clock()
    while len(graphs) < MAX_TIMING_ROUNDS and (not graphs or clock() - begin < ENOUGH_SECONDS):
        for run, seconds in ((eager, eagers), (graph, graphs)):
            wait()
            start = clock()
            run()
            wait()
            seconds.append(clock() - start)
    return BudgetTimes(budget, min(graphs), min(eagers))
