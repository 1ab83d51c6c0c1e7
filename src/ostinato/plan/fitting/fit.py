"""Fitting: the limits and the memory split of a config on a device, or why none fits.

`settle` resolves all that does not depend on memory. `shrink_to_fit` then searches limits that fit, and adds up the costs of
each (`costs_of`). `fit` builds the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, OstinatoError
from ostinato.plan.decision import Decision
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.encoder.choice import (
    EncoderPlan,
    encoder_decisions,
    min_cache_tokens,
    max_cache_tokens,
    plan_encoder,
)
from ostinato.plan.fitting.costs import costs_of
from ostinato.plan.fitting.lower import shrink_to_fit
from ostinato.plan.fitting.reasons import (
    cache_decisions,
    even_if_lowered,
    explain,
    limit_decisions,
    why_graphs_are_smaller,
)
from ostinato.plan.fitting.settle import ResolvedConfig, resolve_config
from ostinato.plan.graphs.capture_plan import choose_ladders, ladder_decisions
from ostinato.plan.graphs.ladders import CaptureSizes, LadderLimit
from ostinato.plan.limits import Limits
from ostinato.plan.memory.cache_split import MemoryPlan, cache_need, fit_memory
from ostinato.plan.model import ModelSpec
from ostinato.plan.search import largest


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
    """Return the outcome.

    DoesNotFit if nothing fits, ConfigError if given values contradict each other or the model.
    """
    settled = resolve_config(config, model, device)
    limits, reach = shrink_to_fit(settled)
    budget, captured, even = settled.budget, settled.captured(limits, reach), even_if_lowered(settled.requested_limits, limits)
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


def fit_with(config: EngineConfig, model: ModelSpec, device: DeviceSpec, setting: str, value: Any) -> FitResult | None:
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
