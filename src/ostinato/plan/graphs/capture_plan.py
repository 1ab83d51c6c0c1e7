"""CapturePlan: the graphs to capture, the mode of each batch, and the settings that would cover the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.ops.operations import GraphBackend
from ostinato.plan.decision import Decision, no_effect
from ostinato.plan.graphs.capture_sizes import (
    LARGEST_DEFAULT_SIZE,
    CaptureSizes,
    LadderLimit,
    LadderSettings,
    make_capture_sizes,
    widths,
)
from ostinato.plan.graphs.coverage import (
    FULL_MODES,
    PIECEWISE_MODES,
    Coverage,
    GraphMode,
    GraphShape,
    Uncovered,
    coverage,
    uncovered,
)
from ostinato.plan.kernels import KernelChoice, not_capturable_in_decode, splits_of
from ostinato.plan.limits import Limits
from ostinato.plan.memory.graph_memory import LargestGraphs


@dataclass(frozen=True)
class CaptureTime:
    """Estimated `seconds` of capturing `graphs` graphs of `launches` launches in all; `source` is its basis."""

    graphs: int
    launches: int
    seconds: float
    source: str


@dataclass(frozen=True)
class CapturePlan:
    """Graphs of an engine.

    `tokens` are the sizes of piecewise graphs, `rows` those of full ones, each captured for every one of
    `tokens_per_row`; empty if `graph_mode` has no such graphs. `splits` are the parts of the model that piecewise
    graphs leave out (see `ops.facts.parts`). `uncovered` are the ranges of `coverage` that run eagerly, with the
    settings that would cover them. `time` is that of capturing all graphs, the drafter's and the encoder's included;
    None for tapes, which take milliseconds.
    """

    backend: GraphBackend
    graph_mode: GraphMode
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    tokens_per_row: tuple[int, ...]
    splits: tuple[str, ...]
    coverage: Coverage
    uncovered: tuple[Uncovered, ...]
    time: CaptureTime | None = None

    def ladders(self) -> CaptureSizes:
        """Return the ladders that `plan.graphs.coverage.dispatch` chooses from."""
        return CaptureSizes(self.tokens, self.rows)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest graph; 0 if there is none."""
        return self.ladders().most_tokens(self.tokens_per_row[-1])


def choose_capture(config: EngineConfig, backend: GraphBackend, has_encoder: bool) -> str:
    """Return when graphs are captured: as asked, else `startup` or `lazy`, whichever gives the first token sooner.

    A tape is a list of calls: it is recorded in milliseconds, and its memory is planned to the byte, so capturing all
    of them first would reveal nothing. An encoder's graphs are timed when they are captured, which takes longer.
    """
    if config.capture != "auto":
        return config.capture
    return "lazy" if backend == "tape" and not has_encoder else "startup"


def choose_graph_mode(
    config: EngineConfig, kernels: Mapping[str, KernelChoice], backend: GraphBackend
) -> tuple[GraphMode, list[Decision]]:
    """Return the mode asked for, or piecewise if it was left open and a decode kernel cannot be captured.

    ConfigError if such a kernel meets a given mode with full graphs, or given sizes of full graphs.
    """
    asked, blockers = config.graph_mode, not_capturable_in_decode(kernels)
    if asked not in FULL_MODES or not blockers:
        return asked, []
    named = ", ".join(f"{op} ({kernels[op].implementation})" for op in blockers)
    reason = f"a full graph holds a whole decode step, and one of backend {backend} cannot hold {named}"
    piecewise = Remedy("graph_mode", "piecewise")
    if config.is_given("graph_mode"):
        message = f"graph_mode {asked} has full graphs: {reason}; set it to piecewise or none"
        raise ConfigError(message, [piecewise, Remedy("graph_mode", "none")])
    if config.capture_rows is not None:
        message = (
            f"capture_rows are sizes of full graphs: {reason}; leave capture_rows out, or set graph_mode to piecewise"
        )
        raise ConfigError(message, [Remedy("capture_rows", None), piecewise])
    return "piecewise", [Decision("graph_mode", asked, "piecewise", reason)]


def choose_ladders(
    config: EngineConfig, graph_mode: GraphMode, reach: LadderLimit, limits: Limits, slots_per_request: int
) -> CaptureSizes:
    """Return both ladders that result from the settings, whether or not `graph_mode` has such graphs.

    Decisions are about those that it has. Rows come from the `max_num_seqs` that fits, tokens from `reach`, so that
    slots bound only rows. ConfigError as `make_capture_sizes`.
    """
    settings = _settings(config, limits, slots_per_request)
    of_tokens = replace(settings, max_num_seqs=reach.rows or limits.max_num_seqs)
    if reach.most_tokens is not None and config.capture_sizes is None and config.max_capture_size is None:
        of_tokens = replace(of_tokens, max_capture_size=_max_tokens(config, reach, limits, slots_per_request))
    by_tokens = make_capture_sizes(of_tokens)
    most_rows = _max_rows(config, reach, limits, slots_per_request)
    by_rows = make_capture_sizes(replace(settings, max_num_seqs=max(1, most_rows)))
    decisions = _idle_settings(config, graph_mode)
    if graph_mode in PIECEWISE_MODES:
        decisions += [decision for decision in by_tokens.decisions if decision.topic != "capture_rows"]
    if graph_mode in FULL_MODES:
        decisions += [decision for decision in by_rows.decisions if decision.topic == "capture_rows" and most_rows]
    return CaptureSizes(by_tokens.tokens, by_rows.rows if most_rows else (), tuple(decisions))


def largest_graphs(
    config: EngineConfig, graph_mode: GraphMode, reach: LadderLimit, limits: Limits, slots_per_request: int
) -> LargestGraphs:
    """Return upper bounds of the graphs' sizes.

    They never fall as `limits` or `reach` grow. The top of a ladder can fall, where it drops a size that is off stride.
    """
    tokens = rows = 0
    if graph_mode in PIECEWISE_MODES:
        tokens = _max_tokens(config, reach, limits, slots_per_request)
        if config.capture_sizes is not None:
            tokens = max((size for size in config.capture_sizes if size <= limits.max_num_batched_tokens), default=0)
    if graph_mode in FULL_MODES:
        rows = _max_rows(config, reach, limits, slots_per_request)
        given_rows = config.capture_rows
        if given_rows is None and config.capture_sizes is not None:
            given_rows = tuple(
                size // slots_per_request for size in config.capture_sizes if not size % slots_per_request
            )
        if given_rows is not None:
            rows = max((size for size in given_rows if size <= rows), default=0)
    return LargestGraphs(tokens, rows, slots_per_request)


def ladder_decisions(first: LargestGraphs, last: LargestGraphs, ladders: CaptureSizes, reason: str) -> list[Decision]:
    """Return the decisions that open ladders reach less far than by default.

    `first` are the largest graphs of the default, `last` the largest that there are.
    """
    decisions = []
    if last.tokens < first.tokens:
        decisions.append(Decision("max_capture_size", first.tokens, last.tokens, reason))
    if last.rows < first.rows:
        decisions.append(Decision("capture_rows", None, list(ladders.rows), reason))
    return decisions


def _max_tokens(config: EngineConfig, reach: LadderLimit, limits: Limits, slots_per_request: int) -> int:
    """Return an upper bound of a piecewise graph's tokens, if `capture_sizes` are open."""
    if config.max_capture_size is not None:
        return min(config.max_capture_size, limits.max_num_batched_tokens)
    rows = reach.rows or limits.max_num_seqs
    default = min(rows * slots_per_request * 2, LARGEST_DEFAULT_SIZE, limits.max_num_batched_tokens)
    return default if reach.most_tokens is None else min(default, reach.most_tokens)


def _max_rows(config: EngineConfig, reach: LadderLimit, limits: Limits, slots_per_request: int) -> int:
    """Return an upper bound of a full graph's rows."""
    if config.capture_rows is not None or reach.most_tokens is None:
        return limits.max_num_seqs
    return min(limits.max_num_seqs, reach.most_tokens // slots_per_request)


def plan_capture(
    config: EngineConfig,
    kernels: Mapping[str, KernelChoice],
    backend: GraphBackend,
    graph_mode: GraphMode,
    ladders: CaptureSizes,
    limits: Limits,
    slots_per_request: int,
    bytes_for: Callable[[LargestGraphs], int],
) -> CapturePlan:
    """Return the plan of the graphs.

    `ladders` are those of `choose_ladders`; `bytes_for` returns the bytes of all graphs if these are the largest.
    """
    has_piecewise, has_full = graph_mode in PIECEWISE_MODES, graph_mode in FULL_MODES
    captured = CaptureSizes(ladders.tokens if has_piecewise else (), ladders.rows if has_full else ())
    largest = LargestGraphs(max(captured.tokens, default=0), max(captured.rows, default=0), slots_per_request)

    def bytes_of_more(graphs: Collection[GraphShape]) -> int:
        tokens = max((graph.size for graph in graphs if graph.mode == "piecewise"), default=0)
        rows = max((graph.size for graph in graphs if graph.mode == "full"), default=0)
        more = LargestGraphs(max(tokens, largest.tokens), max(rows, largest.rows), slots_per_request)
        return bytes_for(more) - bytes_for(largest)

    return CapturePlan(
        backend=backend,
        graph_mode=graph_mode,
        tokens=captured.tokens,
        rows=captured.rows,
        tokens_per_row=widths(slots_per_request - 1, config.speculative_adaptive == "on"),
        splits=splits_of(kernels) if has_piecewise else (),
        coverage=coverage(
            captured,
            graph_mode,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_speculative_tokens=slots_per_request - 1,
            adaptive=config.speculative_adaptive == "on",
        ),
        uncovered=uncovered(
            ladders,
            graph_mode,
            _settings(config, limits, slots_per_request),
            bytes_for=bytes_of_more,
            full_graphs_work=not not_capturable_in_decode(kernels),
        ),
    )


def _settings(config: EngineConfig, limits: Limits, slots_per_request: int) -> LadderSettings:
    return LadderSettings(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        slots_per_request - 1,
        config.max_capture_size,
        config.capture_sizes,
        config.capture_rows,
        config.performance_mode,
        config.speculative_adaptive == "on",
    )


def _idle_settings(config: EngineConfig, graph_mode: GraphMode) -> list[Decision]:
    """Return the decisions on given settings that have no effect in this mode."""
    idle: list[str] = []
    if graph_mode == "none":
        idle = ["capture_sizes", "capture_rows", "max_capture_size", "performance_mode", "check_replay"]
    elif graph_mode == "piecewise":
        idle = ["capture_rows"]
    elif graph_mode == "full_decode_only":
        idle = ["max_capture_size", *(["capture_sizes"] if config.capture_rows is not None else [])]
    return [no_effect(config, name, f"graph_mode is {graph_mode}") for name in idle if config.is_given(name)]
