"""Fitting: which limits and which split of the memory a config comes to on a device, or why none fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, OstinatoError
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
from ostinato.plan.graphs.capture_plan import choose_graph_mode, choose_ladders, largest_graphs
from ostinato.plan.graphs.coverage import FULL_MODES, GraphMode
from ostinato.plan.graphs.ladders import CaptureLadders
from ostinato.plan.kernels import KernelChoice, backend_of, choose_kernels, splits_of
from ostinato.plan.limits import DEFAULT_MAX_NUM_SEQS, Limits, lower_limits, wanted_limits
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
from ostinato.plan.memory.passes import of_each_kind
from ostinato.plan.memory.state_cache import StateCacheMode, choose_state_block_size, choose_state_cache_mode
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization_setting import with_quantization
from ostinato.plan.search import largest
from ostinato.plan.settings import choose_dtype, choose_ssm_state_dtype, choose_threads
from ostinato.plan.speculation.speculative import with_drafter
from ostinato.plan.words.fit_words import cache_decisions, even_if_lowered, explain, limit_decisions
from ostinato.units import GiB

DEFAULT_MEMORY_UTILIZATION = {"cuda": 0.9, "cpu": 1.0}
DEFAULT_CPU_CACHE = 4 * GiB


@dataclass(frozen=True)
class Fit:
    """The outcome: what was lowered or chosen is in `decisions`."""

    dtype: str
    ssm_state_dtype: str
    state_cache_mode: StateCacheMode
    state_block_size: int
    limits: Limits
    memory: MemoryPlan
    kernels: dict[str, KernelChoice]
    graph_mode: GraphMode
    ladders: CaptureLadders
    encoder: EncoderPlan | None
    decisions: tuple[Decision, ...]


class DoesNotFit(CapacityError):
    """A CapacityError together with what was tried, from which remedies are searched.

    `captured_tokens` are those of the largest graph; 0 if there is none.
    """

    def __init__(self, message: str, wanted: Limits, limits: Limits, budget: Budget, captured_tokens: int) -> None:
        super().__init__(message)
        self.captured_tokens = captured_tokens
        self.wanted = wanted
        self.limits = limits
        self.budget = budget


def fit(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> Fit:
    """Raises DoesNotFit if nothing fits, ConfigError if given values contradict each other or the model."""
    dtype, decisions = choose_dtype(config, model)
    ssm_state_dtype, ssm_decisions = choose_ssm_state_dtype(config, model)
    mode = choose_state_cache_mode(config, model)
    state_block_size = choose_state_block_size(config, model)
    per_request = slots_per_request(config.num_speculative_tokens)
    wanted, of_limits = wanted_limits(config, model, device.kind, per_request)
    # A model without state needs no checkpoints to hit.
    hits = config.enable_prefix_caching and (mode.effective != "none" or not model.keeps_state)
    budget = _budget(config, model, device, dtype, ssm_state_dtype, hits)
    backend = backend_of(device.kind)
    kernels = choose_kernels(model, device, config.kernels, config.deterministic)
    graph_mode, graph_decisions = choose_graph_mode(config, kernels, backend)
    asked_rows = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.kind]
    choose_ladders(config, graph_mode, asked_rows, wanted, per_request)  # a contradiction is told before what fits
    # A step's peak is that of its greediest layer, so one of each kind is enough to find it.
    kinds = of_each_kind(model)
    native = [op for op, choice in kernels.items() if choice.implementation == "native"]
    threads = choose_threads(config, device) or 1
    encoder = choose_encoder(config, model, dtype, kernels, backend, threads)
    if encoder is not None:
        choose_budgets(encoder, wanted)  # as above

    def activations(limits: Limits) -> int:
        of_text = activation_bytes(
            kinds,
            dtype,
            tokens=limits.max_num_batched_tokens,
            rows=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            gathers_states=device.kind == "cuda",
            tokens_per_row=per_request,
            native=native,
            threads=threads,
        )
        # Images are encoded before the text part runs.
        return of_text if encoder is None else max(of_text, encoder_activations(encoder, limits))

    def captured(limits: Limits) -> LargestGraphs:
        return largest_graphs(config, graph_mode, asked_rows, limits, per_request)

    gathers_states = device.kind == "cuda" and graph_mode in FULL_MODES
    capture = Capture(backend, frozenset(splits_of(kernels)), gathers_states)

    def graphs(limits: Limits) -> int:
        return graph_bytes(
            kinds,
            dtype,
            captured(limits),
            limits=limits,
            block_size=config.block_size,
            capture=capture,
        )

    def kept(limits: Limits) -> EncoderMemory:
        return NO_ENCODER if encoder is None else encoder_memory(encoder, limits)

    def fits(limits: Limits, rows: int) -> bool:
        room = cache_room(budget, activations(limits), graphs(limits) + kept(limits).total)
        return cache_need(budget, rows, limits.max_model_len) <= room

    limits, _ = lower_limits(config, wanted, per_request, fits)
    tokens = captured(limits).most_tokens
    of_activations, of_graphs = activations(limits), graphs(limits)
    cache_tokens = 0
    of_encoder = kept(limits)
    if encoder is not None:
        cache_tokens = _cache_tokens(encoder, budget, limits, of_activations, of_graphs)
        of_encoder = encoder_memory(encoder, limits, cache_tokens)
    memory = fit_memory(budget, of_activations, limits.max_num_seqs, limits.max_model_len, of_graphs, of_encoder)
    if memory is None:
        explained = explain(budget, of_activations, of_graphs, of_encoder, tokens, limits, device)
        raise DoesNotFit(even_if_lowered(wanted, limits) + explained, wanted, limits, budget, tokens)
    if config.expected_prefix_tokens is not None and config.expected_prefix_tokens > limits.max_model_len:
        message = (
            f"max_model_len {limits.max_model_len} is the most that fits, and expected_prefix_tokens "
            f"{config.expected_prefix_tokens} is more"
        )
        raise DoesNotFit(message, wanted, limits, budget, tokens)
    ladders = choose_ladders(config, graph_mode, asked_rows, limits, per_request)
    try:
        encoder_plan = None if encoder is None else plan_encoder(encoder, limits, cache_tokens)
    except ConfigError as error:
        raise DoesNotFit(even_if_lowered(wanted, limits) + error.message, wanted, limits, budget, tokens) from None
    return Fit(
        dtype,
        ssm_state_dtype,
        mode.effective,
        state_block_size,
        limits,
        memory,
        kernels,
        graph_mode,
        ladders,
        encoder_plan,
        (
            *decisions,
            *ssm_decisions,
            *([mode] if mode.effective != config.state_cache_mode else []),
            *limit_decisions(of_limits, wanted, limits, memory),
            *graph_decisions,
            *ladders.decisions,
            *cache_decisions(budget, memory, limits),
            *encoder_decisions(config, model, limits, encoder_plan),
        ),
    )


def fit_with(config: EngineConfig, model: ModelSpec, device: DeviceSpec, setting: str, value: Any) -> Fit | None:
    """The outcome with one setting changed; None if that contradicts the others or does not fit."""
    try:
        changed = config.with_settings(**{setting: value})
        return fit(changed, with_quantization(changed, with_drafter(changed, model)), device)
    except OstinatoError:
        return None


def utilization(config: EngineConfig, device: DeviceSpec) -> float:
    """The part of the device's memory that the plan may use."""
    return config.memory_utilization or DEFAULT_MEMORY_UTILIZATION[device.kind]


def _budget(
    config: EngineConfig, model: ModelSpec, device: DeviceSpec, dtype: str, ssm_state_dtype: str, hits: bool
) -> Budget:
    cache_size = config.cache_memory
    if cache_size is None and device.kind == "cpu":
        cache_size = min(DEFAULT_CPU_CACHE, device.memory_bytes // 4)
    return Budget(
        available=int(device.memory_bytes * utilization(config, device)),
        weights=model.weight_bytes(dtype) + (model.drafter.weight_bytes(dtype) if model.drafter is not None else 0),
        cache_size=cache_size,
        cache_is_given=config.cache_memory is not None,
        block_size=config.block_size,
        kv_block=kv_block_bytes(model, config.block_size, dtype),
        state_slot=state_slot_bytes(model, dtype, ssm_state_dtype),
        slots_per_request=slots_per_request(config.num_speculative_tokens),
        holds_prefixes=hits,
        expected_prefix_tokens=config.expected_prefix_tokens,
    )


def _cache_tokens(encoder: EncoderChoice, budget: Budget, limits: Limits, of_activations: int, of_graphs: int) -> int:
    """Tokens of the encoder cache: as many as are wanted, if blocks and slots keep what they need."""

    def room(tokens: int) -> int:
        return cache_room(budget, of_activations, of_graphs + encoder_memory(encoder, limits, tokens).total)

    need = cache_need(budget, limits.max_num_seqs, limits.max_model_len)
    least = least_cache_tokens(encoder, limits)
    most = most_cache_tokens(encoder, limits, room(0))
    return largest(least, most, lambda tokens: need <= room(tokens)) or least
