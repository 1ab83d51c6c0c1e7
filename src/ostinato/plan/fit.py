"""Fitting: which limits and which split of the memory a config comes to on a device, or why none fits.

`settle` decides all that does not depend on memory. `lower` then looks for limits that fit, each tried by adding up
what it costs (`costs_of`). `fit` makes the outcome of what it found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ostinato.cache.placement import StateCacheMode
from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, OstinatoError
from ostinato.ops.facts import called_by
from ostinato.plan.cuts import without_graphs_of_ranks
from ostinato.plan.decision import Decision
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.encoder.choice import (
    EncoderChoice,
    EncoderPlan,
    choose_budgets,
    choose_encoder,
    encoder_activations,
    encoder_decisions,
    encoder_memory,
    least_cache_tokens,
    most_cache_tokens,
    plan_encoder,
)
from ostinato.plan.encoder.needs import EncoderMemory
from ostinato.plan.graphs.capture_plan import choose_graph_mode, choose_ladders, ladder_decisions, largest_graphs
from ostinato.plan.graphs.coverage import FULL_MODES, GraphMode
from ostinato.plan.graphs.ladders import CaptureLadders, Reach
from ostinato.plan.kernels import (
    KernelChoice,
    backend_of,
    choose_kernels,
    not_capturable_in_decode,
    ops_of,
    splits_of,
)
from ostinato.plan.limits import DEFAULT_MAX_NUM_SEQS, Limits, lower_limits, lowest_batched_tokens, wanted_limits
from ostinato.plan.memory.activations import activation_bytes
from ostinato.plan.memory.cache_split import (
    NO_ENCODER,
    Budget,
    MemoryPlan,
    cache_need,
    cache_room,
    fit_memory,
    kv_block_bytes,
    slots_per_request,
    state_slot_bytes,
)
from ostinato.plan.memory.graph_memory import Capture, LargestGraphs, graph_bytes
from ostinato.plan.memory.keys_and_values import choose_kv_cache_dtype
from ostinato.plan.memory.passes import of_each_kind
from ostinato.plan.memory.state_cache import choose_state_block_size, choose_state_cache_mode
from ostinato.plan.memory.torch_memory import workspace_bytes
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization_setting import with_quantization
from ostinato.plan.reasons import cache_decisions, even_if_lowered, explain, limit_decisions, why_graphs_are_smaller
from ostinato.plan.search import largest
from ostinato.plan.settings import choose_dtype, choose_ssm_state_dtype, choose_threads
from ostinato.plan.speculation.drafter import with_drafter
from ostinato.plan.windows import pane_bytes, pane_window
from ostinato.units import GiB

DEFAULT_MEMORY_UTILIZATION = {"cuda": 0.9, "cpu": 1.0}
DEFAULT_CPU_CACHE = 4 * GiB


@dataclass(frozen=True)
class Settled:
    """A config on a device, and what it comes to whatever the limits are.

    `model` has what makes drafts, and its weights are quantised as asked; `kinds` has one of each kind of its layers.
    `wanted` are the limits asked for, or the defaults; `reach` says how far ladders go by default.
    """

    config: EngineConfig
    model: ModelSpec
    device: DeviceSpec
    kinds: ModelSpec
    dtype: str
    ssm_state_dtype: str
    kv_cache_dtype: str
    """Of keys and values: the model's, or `int8`"""
    state_cache_mode: StateCacheMode
    state_block_size: int
    slots_per_request: int
    kernels: dict[str, KernelChoice]
    graph_mode: GraphMode
    encoder: EncoderChoice | None
    budget: Budget
    wanted: Limits
    reach: Reach
    decisions: tuple[Decision, ...]
    of_limits: tuple[Decision, ...]
    """Those by which `wanted` differs from what was asked for."""

    @property
    def threads(self) -> int | None:
        return choose_threads(self.config, self.device)

    def captured(self, limits: Limits, reach: Reach) -> LargestGraphs:
        return largest_graphs(self.config, self.graph_mode, reach, limits, self.slots_per_request)


@dataclass(frozen=True)
class Costs:
    """Bytes that some limits take beside weights, blocks and slots."""

    activations: int
    graphs: int
    encoder: EncoderMemory

    def room(self, budget: Budget) -> int:
        """Bytes that are left for blocks and slots; negative if not even these fit."""
        return cache_room(budget, self.activations, self.graphs + self.encoder.total)


@dataclass(frozen=True)
class Fit:
    """The outcome. What was lowered or chosen is in `decisions`."""

    settled: Settled
    limits: Limits
    memory: MemoryPlan
    ladders: CaptureLadders
    encoder: EncoderPlan | None
    decisions: tuple[Decision, ...]


class DoesNotFit(CapacityError):
    """A CapacityError together with what was tried, from which remedies are searched.

    `captured_tokens` are those of the largest graph; 0 if there is none.
    """

    def __init__(self, message: str, settled: Settled, limits: Limits, captured_tokens: int) -> None:
        super().__init__(message)
        self.captured_tokens = captured_tokens
        self.wanted = settled.wanted
        self.limits = limits
        self.budget = settled.budget


def fit(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> Fit:
    """Raises DoesNotFit if nothing fits, ConfigError if given values contradict each other or the model."""
    settled = settle(config, model, device)
    limits, reach = lower(settled)
    budget, captured, even = settled.budget, settled.captured(limits, reach), even_if_lowered(settled.wanted, limits)
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
        raise DoesNotFit(even + message, settled, limits, captured.most_tokens)
    prefix = config.expected_prefix_tokens
    if prefix is not None and prefix > limits.max_model_len:
        message = (
            f"max_model_len {limits.max_model_len} is the most that fits, and expected_prefix_tokens {prefix} is more"
        )
        raise DoesNotFit(message, settled, limits, captured.most_tokens)
    encoder = settled.encoder
    try:
        encoder_plan = None if encoder is None else plan_encoder(encoder, limits, cache_tokens)
    except ConfigError as error:
        raise DoesNotFit(even + error.message, settled, limits, captured.most_tokens) from None
    ladders = choose_ladders(config, settled.graph_mode, reach, limits, settled.slots_per_request)
    by_default = settled.captured(limits, settled.reach)
    decisions = (
        *settled.decisions,
        *limit_decisions(settled.of_limits, settled.wanted, limits, memory),
        *ladders.decisions,
        *ladder_decisions(by_default, captured, ladders, why_graphs_are_smaller(memory, limits, reach)),
        *cache_decisions(budget, memory, limits),
        *encoder_decisions(config, settled.model, limits, encoder_plan),
    )
    return Fit(settled, limits, memory, ladders, encoder_plan, decisions)


def fit_with(config: EngineConfig, model: ModelSpec, device: DeviceSpec, setting: str, value: Any) -> Fit | None:
    """The outcome with one setting changed; None if that contradicts the others or does not fit."""
    try:
        return fit(config.with_settings(**{setting: value}), model, device)
    except OstinatoError:
        return None


def settle(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> Settled:
    """What can be decided before the limits are. ConfigError if given values contradict each other or the model."""
    model = with_quantization(config, with_drafter(config, model), device.kind)
    dtype, of_dtype = choose_dtype(config, model)
    ssm_state_dtype, of_ssm_dtype = choose_ssm_state_dtype(config, model)
    kv_cache_dtype, of_kv_dtype = choose_kv_cache_dtype(config, model, dtype)
    mode = choose_state_cache_mode(config, model)
    state_block_size = choose_state_block_size(config, model)
    per_request = slots_per_request(config.num_speculative_tokens)
    wanted, of_limits = wanted_limits(config, model, device.kind, per_request)
    backend = backend_of(device.kind)
    kernels = choose_kernels(model, device, config.kernels, config.deterministic)
    graph_mode, of_mode = choose_graph_mode(config, kernels, backend)
    graph_mode, of_mode = without_graphs_of_ranks(config, backend) or (graph_mode, of_mode)
    encoder = choose_encoder(config, model, dtype, kernels, backend, choose_threads(config, device) or 1)
    reach = Reach(config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.kind])
    # A contradiction is told before what fits.
    choose_ladders(config, graph_mode, reach, wanted, per_request)
    if encoder is not None:
        choose_budgets(encoder, wanted)
    return Settled(
        config=config,
        model=model,
        device=device,
        # A step's peak is that of its greediest layer, so one of each kind is enough to find it.
        kinds=of_each_kind(model),
        dtype=dtype,
        ssm_state_dtype=ssm_state_dtype,
        kv_cache_dtype=kv_cache_dtype,
        state_cache_mode=mode.effective,
        state_block_size=state_block_size,
        slots_per_request=per_request,
        kernels=kernels,
        graph_mode=graph_mode,
        encoder=encoder,
        budget=_budget(
            config, model, device, dtype, ssm_state_dtype, kv_cache_dtype, mode.effective, wanted.max_model_len
        ),
        wanted=wanted,
        reach=reach,
        decisions=(
            *of_dtype,
            *of_ssm_dtype,
            *of_kv_dtype,
            *([mode] if mode.effective != config.state_cache_mode else []),
            *of_mode,
        ),
        of_limits=tuple(of_limits),
    )


def lower(settled: Settled) -> tuple[Limits, Reach]:
    """The limits and the reach of open ladders that fit, or the last ones tried if none do.

    Open ladders keep their default reach as long as one request fits beside it, however few its tokens: graphs are
    what makes steps fast. They are never lowered to make room for the slots of given rows. Where no request fits,
    ladders become as if the `max_num_seqs` tried had been given. Where that is not enough, or it was given, they are
    lowered as far as to graphs of one token, and from there raised to the most that fits.
    """
    reach = settled.reach
    limits, is_fitting = _lower_limits(settled, reach)
    for smaller in (Reach(), Reach(most_tokens=1)):
        if is_fitting or _fits(settled, reach, limits, 1):
            break
        if settled.captured(limits, smaller) != settled.captured(limits, reach):
            reach = smaller
            limits, is_fitting = _lower_limits(settled, reach)
    return _with_larger_graphs(settled, limits) if is_fitting and reach.most_tokens is not None else (limits, reach)


def costs_of(settled: Settled, limits: Limits, reach: Reach, cache_tokens: int | None = None) -> Costs:
    """What these limits take, with an encoder cache of `cache_tokens` tokens, or of the least."""
    encoder = settled.encoder
    activations = activation_bytes(
        settled.kinds,
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
    )
    if settled.device.kind == "cuda":
        activations += workspace_bytes(settled.device.capability, streams=2)
    if encoder is not None:
        # Images are encoded before the text part runs.
        activations = max(activations, encoder_activations(encoder, limits))
    return Costs(
        activations,
        graph_cost(settled, limits, settled.captured(limits, reach)),
        NO_ENCODER if encoder is None else encoder_memory(encoder, limits, cache_tokens),
    )


def graph_cost(settled: Settled, limits: Limits, captured: LargestGraphs) -> int:
    """Bytes of all graphs if these are the largest."""
    # Without graphs, what would cover a batch is a mode with full graphs, if their kernels can be captured.
    can_be_full = settled.graph_mode == "none" and not not_capturable_in_decode(settled.kernels)
    gathers_states = _gathers_states(settled) and (settled.graph_mode in FULL_MODES or can_be_full)
    references = {*ops_of(settled.kernels, "reference")} - called_by("encoder")
    return graph_bytes(
        settled.kinds,
        settled.dtype,
        captured,
        limits=limits,
        block_size=settled.config.block_size,
        has_panes=settled.budget.pane_window > 0,
        capture=Capture(
            backend_of(settled.device.kind),
            frozenset(splits_of(settled.kernels)),
            gathers_states,
            holds_references=bool(references - {"sample"}),
            triton=frozenset(ops_of(settled.kernels, "triton")),
        ),
    )


def _gathers_states(settled: Settled) -> bool:
    """Whether a decode step gathers all rows' states into one tensor, as the reference does on a GPU."""
    triton = ops_of(settled.kernels, "triton")
    return settled.device.kind == "cuda" and any(
        array is not None and mixer.state[array].dtype == "state" and operation not in triton
        for mixer in settled.kinds.state_layers
        for operation, array in mixer.operations.items()
    )


def utilization(config: EngineConfig, device: DeviceSpec) -> float:
    """The part of the device's memory that the plan may use."""
    return config.memory_utilization or DEFAULT_MEMORY_UTILIZATION[device.kind]


def _lower_limits(settled: Settled, reach: Reach) -> tuple[Limits, bool]:
    fits = partial(_fits, settled, reach)
    return lower_limits(settled.config, settled.wanted, settled.slots_per_request, fits)


def _with_larger_graphs(settled: Settled, limits: Limits) -> tuple[Limits, Reach]:
    """Limits that fit beside graphs of one token, with the largest graphs that fit beside the least
    `max_num_batched_tokens`, if that is open, which then gets back what they leave."""
    rows, most_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    fewest = limits
    if not settled.config.is_given("max_num_batched_tokens"):
        floor = lowest_batched_tokens(rows, settled.slots_per_request, settled.budget.block_size)
        fewest = replace(limits, max_num_batched_tokens=min(floor, most_tokens))
    captured = largest(
        1,
        settled.captured(fewest, Reach()).most_tokens,
        lambda tokens: _fits(settled, Reach(most_tokens=tokens), fewest, rows),
    )
    reach = Reach(most_tokens=captured or 1)
    tokens = largest(
        fewest.max_num_batched_tokens,
        most_tokens,
        lambda tokens: _fits(settled, reach, replace(limits, max_num_batched_tokens=tokens), rows),
    )
    return replace(limits, max_num_batched_tokens=tokens or most_tokens), reach


def _fits(settled: Settled, reach: Reach, limits: Limits, rows: int) -> bool:
    """Whether there is room for the slots of `rows` rows and the blocks of one request."""
    need = cache_need(settled.budget, rows, limits.max_model_len, limits.max_num_batched_tokens)
    return need <= costs_of(settled, limits, reach).room(settled.budget)


def _budget(
    config: EngineConfig,
    model: ModelSpec,
    device: DeviceSpec,
    dtype: str,
    ssm_state_dtype: str,
    kv_cache_dtype: str,
    mode: StateCacheMode,
    max_model_len: int,
) -> Budget:
    # Each rank has a GPU of its own; on a CPU all share one memory.
    own_memory = device.memory_bytes // (model.ranks if device.kind == "cpu" else 1)
    cache_size = config.cache_memory
    if cache_size is None and device.kind == "cpu":
        cache_size = min(DEFAULT_CPU_CACHE, own_memory // 4)
    window = pane_window(model, max_model_len)
    pane = pane_bytes(model, config.block_size, kv_cache_dtype) if window else 0
    return Budget(
        available=int(own_memory * utilization(config, device)),
        weights=model.weight_bytes(dtype) + (model.drafter.weight_bytes(dtype) if model.drafter is not None else 0),
        cache_size=cache_size,
        cache_is_given=config.cache_memory is not None,
        block_size=config.block_size,
        kv_block=kv_block_bytes(model, config.block_size, kv_cache_dtype) - pane,
        state_slot=state_slot_bytes(model, dtype, ssm_state_dtype),
        slots_per_request=slots_per_request(config.num_speculative_tokens),
        mapped_weights=model.mapped_bytes + (0 if model.drafter is None else model.drafter.mapped_bytes),
        # A model without state needs no checkpoints to hit.
        holds_prefixes=config.enable_prefix_caching and (mode != "none" or not model.keeps_state),
        expected_prefix_tokens=config.expected_prefix_tokens,
        pane=pane,
        pane_window=window,
    )


def _cache_tokens(settled: Settled, limits: Limits, reach: Reach) -> int:
    """Tokens of the encoder cache: as many as are wanted, if blocks and slots keep what they need."""
    encoder, budget = settled.encoder, settled.budget
    if encoder is None:
        return 0
    need = cache_need(budget, limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens)
    least = least_cache_tokens(encoder, limits)
    most = most_cache_tokens(encoder, limits, costs_of(settled, limits, reach, 0).room(budget))
    return largest(least, most, lambda tokens: need <= costs_of(settled, limits, reach, tokens).room(budget)) or least
