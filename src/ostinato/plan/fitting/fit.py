"""Fitting: the limits and the memory split of a config on a device, or why none fits.

`resolve_config` resolves all that does not depend on memory. `shrink_to_fit` then searches limits that fit, and adds
up the costs of each (`costs_of`): the bytes that they take besides weights, blocks and slots. `fit` builds the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, OstinatoError
from ostinato.ops.operations import ops_called_by
from ostinato.plan.decision import Decision
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.encoder.encoder_plan import (
    EncoderPlan,
    encoder_activations,
    encoder_decisions,
    encoder_memory,
    max_cache_tokens,
    min_cache_tokens,
    plan_encoder,
)
from ostinato.plan.encoder.memory import EncoderMemory
from ostinato.plan.fitting.explain import (
    cache_decisions,
    even_if_lowered,
    explain,
    limit_decisions,
    why_graphs_are_smaller,
)
from ostinato.plan.fitting.resolve import ResolvedConfig, resolve_config
from ostinato.plan.graphs.capture_plan import choose_ladders, ladder_decisions
from ostinato.plan.graphs.capture_sizes import CaptureSizes, LadderLimit
from ostinato.plan.graphs.coverage import FULL_MODES
from ostinato.plan.kernels import graph_backend_of, not_capturable_in_decode, ops_of, splits_of
from ostinato.plan.limits import Limits, largest, lower_limits, lowest_batched_tokens
from ostinato.plan.memory.activations import activation_bytes, workspace_bytes
from ostinato.plan.memory.graph_memory import Capture, LargestGraphs, graph_bytes
from ostinato.plan.memory.split import NO_ENCODER, MemoryBudget, MemoryPlan, cache_bytes_left, cache_need, fit_memory
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes that some limits take besides weights, blocks and slots."""

    activations: int
    graphs: int
    encoder: EncoderMemory

    def room(self, budget: MemoryBudget) -> int:
        """Return the bytes that are left for blocks and slots; negative if not even the costs fit."""
        return cache_bytes_left(budget, self.activations, self.graphs + self.encoder.total)


def costs_of(
    settled: ResolvedConfig, limits: Limits, reach: LadderLimit, cache_tokens: int | None = None
) -> MemoryCosts:
    """Return the costs of these limits, with an encoder cache of `cache_tokens` tokens, or of the minimum."""
    encoder = settled.encoder
    activations = activation_bytes(
        settled.distinct_layers,
        settled.dtype,
        tokens=limits.max_num_batched_tokens,
        rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        gathers_states=_gathers_states(settled),
        tokens_per_row=settled.slots_per_request,
        native=ops_of(settled.kernels, "native"),
        threads=settled.threads or 1,
        triton=ops_of(settled.kernels, "triton"),
        kv_cache_dtype=settled.kv_cache_dtype,
        ukernels={op: choice.ukernels for op, choice in settled.kernels.items()},
    )
    if settled.device.kind == "cuda":
        activations += workspace_bytes(settled.device.capability, streams=2)
    if encoder is not None:
        # Images are encoded before the text part runs.
        activations = max(activations, encoder_activations(encoder, limits))
    return MemoryCosts(
        activations,
        graph_cost(settled, limits, settled.captured(limits, reach)),
        NO_ENCODER if encoder is None else encoder_memory(encoder, limits, cache_tokens),
    )


def graph_cost(settled: ResolvedConfig, limits: Limits, captured: LargestGraphs) -> int:
    """Return the bytes of all graphs if these are the largest."""
    # Without graphs, the mode that would cover a batch has full graphs, if their kernels can be captured.
    can_be_full = settled.graph_mode == "none" and not not_capturable_in_decode(settled.kernels)
    gathers_states = _gathers_states(settled) and (settled.graph_mode in FULL_MODES or can_be_full)
    references = {*ops_of(settled.kernels, "reference")} - ops_called_by("encoder")
    return graph_bytes(
        settled.distinct_layers,
        settled.dtype,
        captured,
        limits=limits,
        block_size=settled.config.block_size,
        has_window_blocks=settled.budget.window_block_window > 0,
        capture=Capture(
            graph_backend_of(settled.device.kind),
            frozenset(splits_of(settled.kernels)),
            gathers_states,
            holds_references=bool(references - {"sample"}),
            triton=frozenset(ops_of(settled.kernels, "triton")),
        ),
    )


def _gathers_states(settled: ResolvedConfig) -> bool:
    """Return whether a decode step gathers all rows' states into one tensor, as the reference does on a GPU."""
    triton = ops_of(settled.kernels, "triton")
    return settled.device.kind == "cuda" and any(
        array is not None and mixer.state[array].dtype == "state" and operation not in triton
        for mixer in settled.distinct_layers.state_layers
        for operation, array in mixer.operations.items()
    )


def shrink_to_fit(settled: ResolvedConfig) -> tuple[Limits, LadderLimit]:
    """Return the limits and the reach of open ladders that fit, or the last ones tried if none do.

    Open ladders keep their default reach as long as one request fits with it, however few its tokens: graphs are what
    makes steps fast. They are never lowered to make room for the slots of given rows. If no request fits, ladders
    become as if the `max_num_seqs` tried had been given. If that is not enough, or it was given, they are lowered to
    graphs of one token, and then raised to the most that fits.
    """
    reach = settled.reach
    limits, is_fitting = _lower_limits(settled, reach)
    for smaller in (LadderLimit(), LadderLimit(most_tokens=1)):
        if is_fitting or _fits(settled, reach, limits, 1):
            break
        if settled.captured(limits, smaller) != settled.captured(limits, reach):
            reach = smaller
            limits, is_fitting = _lower_limits(settled, reach)
    return _with_larger_graphs(settled, limits) if is_fitting and reach.most_tokens is not None else (limits, reach)


def _lower_limits(settled: ResolvedConfig, reach: LadderLimit) -> tuple[Limits, bool]:
    fits = partial(_fits, settled, reach)
    return lower_limits(settled.config, settled.requested_limits, settled.slots_per_request, fits)


def _with_larger_graphs(settled: ResolvedConfig, limits: Limits) -> tuple[Limits, LadderLimit]:
    """Return limits that fit with graphs, and the reach of the largest graphs that fit.

    The largest graphs are searched with the smallest `max_num_batched_tokens`, if that is open. It is then raised again
    as far as the graphs allow.
    """
    rows, most_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    fewest = limits
    if not settled.config.is_given("max_num_batched_tokens"):
        floor = lowest_batched_tokens(rows, settled.slots_per_request, settled.budget.block_size)
        fewest = replace(limits, max_num_batched_tokens=min(floor, most_tokens))
    captured = largest(
        1,
        settled.captured(fewest, LadderLimit()).most_tokens,
        lambda tokens: _fits(settled, LadderLimit(most_tokens=tokens), fewest, rows),
    )
    reach = LadderLimit(most_tokens=captured or 1)
    tokens = largest(
        fewest.max_num_batched_tokens,
        most_tokens,
        lambda tokens: _fits(settled, reach, replace(limits, max_num_batched_tokens=tokens), rows),
    )
    return replace(limits, max_num_batched_tokens=tokens or most_tokens), reach


def _fits(settled: ResolvedConfig, reach: LadderLimit, limits: Limits, rows: int) -> bool:
    """Return whether the slots of `rows` rows and the blocks of one request fit."""
    need = cache_need(settled.budget, rows, limits.max_model_len, limits.max_num_batched_tokens)
    return need <= costs_of(settled, limits, reach).room(settled.budget)


@dataclass(frozen=True)
class FitResult:
    """Outcome of fitting. `decisions` has the values that were lowered or chosen."""

    settled: ResolvedConfig
    limits: Limits
    memory: MemoryPlan
    ladders: CaptureSizes
    encoder: EncoderPlan | None
    decisions: tuple[Decision, ...]


class FitError(CapacityError):
    """CapacityError together with what was tried, from which remedies are searched.

    `captured_tokens` is the size of the largest graph in tokens; 0 if there is none.
    """

    def __init__(self, message: str, settled: ResolvedConfig, limits: Limits, captured_tokens: int) -> None:
        super().__init__(message)
        self.captured_tokens = captured_tokens
        self.wanted = settled.requested_limits
        self.limits = limits
        self.budget = settled.budget


def fit(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> FitResult:
    """Return the outcome. FitError if nothing fits, ConfigError if given values contradict each other or the model."""
    settled = resolve_config(config, model, device)
    limits, reach = shrink_to_fit(settled)
    budget, captured, even = (
        settled.budget,
        settled.captured(limits, reach),
        even_if_lowered(settled.requested_limits, limits),
    )
    cache_tokens = _cache_tokens(settled, limits, reach)
    costs = costs_of(settled, limits, reach, cache_tokens)
    memory = fit_memory(
        budget,
        costs.activations,
        limits.max_num_seqs,
        limits.max_model_len,
        costs.graphs,
        costs.encoder,
        limits.max_num_batched_tokens,
    )
    if memory is None:
        message = explain(budget, costs.activations, costs.graphs, costs.encoder, captured.most_tokens, limits, device)
        raise FitError(even + message, settled, limits, captured.most_tokens)
    prefix = config.expected_prefix_tokens
    if prefix is not None and prefix > limits.max_model_len:
        message = (
            f"max_model_len {limits.max_model_len} is the most that fits, and expected_prefix_tokens {prefix} is more"
        )
        raise FitError(message, settled, limits, captured.most_tokens)
    encoder = settled.encoder
    try:
        encoder_plan = None if encoder is None else plan_encoder(encoder, limits, cache_tokens)
    except ConfigError as error:
        raise FitError(even + error.message, settled, limits, captured.most_tokens) from None
    ladders = choose_ladders(config, settled.graph_mode, reach, limits, settled.slots_per_request)
    by_default = settled.captured(limits, settled.reach)
    decisions = (
        *settled.decisions,
        *limit_decisions(settled.limit_decisions, settled.requested_limits, limits, memory),
        *ladders.decisions,
        *ladder_decisions(by_default, captured, ladders, why_graphs_are_smaller(memory, limits, reach)),
        *cache_decisions(budget, memory, limits),
        *encoder_decisions(config, settled.model, limits, encoder_plan),
    )
    return FitResult(settled, limits, memory, ladders, encoder_plan, decisions)


def fit_with(
    config: EngineConfig, model: ModelSpec, device: DeviceSpec, setting: str, value: object
) -> FitResult | None:
    """Return the outcome with one setting changed; None if that contradicts the others or does not fit."""
    try:
        return fit(config.with_settings(**{setting: value}), model, device)
    except OstinatoError:
        return None


def _cache_tokens(settled: ResolvedConfig, limits: Limits, reach: LadderLimit) -> int:
    """Return the tokens of the encoder cache: as many as are wanted, if blocks and slots keep what they need."""
    encoder, budget = settled.encoder, settled.budget
    if encoder is None:
        return 0
    need = cache_need(budget, limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens)
    least = min_cache_tokens(encoder, limits)
    most = max_cache_tokens(encoder, limits, costs_of(settled, limits, reach, 0).room(budget))
    return largest(least, most, lambda tokens: need <= costs_of(settled, limits, reach, tokens).room(budget)) or least
