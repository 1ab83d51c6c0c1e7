"""Plan: all that the engine will do, decided before any weight is loaded, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError
from ostinato.plain_data import from_plain, load_json, save_json, to_plain
from ostinato.plan.decision import Decision
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.encoder.choice import EncoderPlan
from ostinato.plan.fit import DoesNotFit, Fit, fit, utilization
from ostinato.plan.graphs.capture_plan import CapturePlan, plan_capture
from ostinato.plan.graphs.coverage import FULL_MODES
from ostinato.plan.kernels import KernelChoice, backend_of, not_capturable_in_decode, splits_of
from ostinato.plan.memory.cache_split import MemoryPlan, kv_block_bytes, state_slot_bytes
from ostinato.plan.memory.flops import StateCachePlan, prefill_flops
from ostinato.plan.memory.graph_memory import Capture, LargestGraphs, graph_bytes
from ostinato.plan.memory.prefixes import prefix_decisions
from ostinato.plan.model import ModelSpec, VisionSpec
from ostinato.plan.quantization_setting import quantization_decisions, with_quantization
from ostinato.plan.remedies import advice, capacity_remedies, working_remedies
from ostinato.plan.rope import resolve_rope
from ostinato.plan.settings import EffectiveSettings, choose_threads
from ostinato.plan.speculation.speculative import SpeculativePlan, plan_speculation, with_drafter


@dataclass(frozen=True)
class VisionSummary:
    """A vision encoder in figures. An output token stands for `token_side` pixels along both sides, and takes
    `hidden_rows` vectors of the text model's size; the model's smallest image has `smallest_item` tokens."""

    parameters: int
    layers: int
    hidden_size: int
    token_side: int
    hidden_rows: int
    smallest_item: int


@dataclass(frozen=True)
class ModelSummary:
    """The model in figures, without what makes drafts. `layers` counts those of the text part by kind; the byte counts
    are in the dtypes that it runs with."""

    architecture: str
    checkpoint_dtype: str
    parameters: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    layers: dict[str, int]
    kv_bytes_per_token: int
    state_bytes_per_request: int
    vision: VisionSummary | None


@dataclass(frozen=True)
class Plan:
    """What the engine does. `measured` is empty until start-up has measured; nothing else changes
    afterwards."""

    model: ModelSummary
    device: DeviceSpec
    settings: EffectiveSettings
    capture: CapturePlan
    memory: MemoryPlan
    state_cache: StateCachePlan
    speculative: SpeculativePlan | None
    encoder: EncoderPlan | None
    """None for models that take text alone."""
    kernels: dict[str, KernelChoice]
    decisions: tuple[Decision, ...]
    measured: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, ready for `json.dumps`. A section that the engine does not have is null."""
        data: dict[str, Any] = to_plain(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` gave."""
        return from_plain(cls, data)

    def save(self, path: Path) -> None:
        """Writes the plan as JSON."""
        save_json(self, path)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Reads what `save` wrote."""
        return load_json(cls, path)


JSON_SECTIONS = tuple(section.name for section in fields(Plan))
"""The top level of a plan's JSON."""


def make_plan(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> Plan:
    """The plan for a model on a device: pure, without weights, GPU or torch.

    `model` may be as `models.checkpoint.load_spec` gives it; only a draft model must have been attached to it.
    Raises CapacityError if what was given does not fit, with the nearest value of each setting that alone
    would do; ConfigError if what was given contradicts itself or the model.
    """
    model = with_quantization(config, with_drafter(config, model))
    try:
        fitted = fit(config, model, device)
    except DoesNotFit as failure:
        remedies = capacity_remedies(failure, config, model, device)
        raise CapacityError(f"{failure.message}; {advice(failure, remedies)}", remedies) from None
    except ConfigError as error:
        raise ConfigError(error.message, working_remedies(error.remedies, config, model, device)) from None
    decisions = [*fitted.decisions, *prefix_decisions(config, model, device, fitted)]
    decisions += quantization_decisions(config, model, fitted.dtype, fitted.kernels)
    if not config.enable_chunked_prefill and fitted.limits.max_num_batched_tokens < fitted.limits.max_model_len:
        reason = (
            f"without chunked prefill a prompt of more than {fitted.limits.max_num_batched_tokens} tokens "
            "(max_num_batched_tokens) is refused when it arrives, whatever max_model_len"
        )
        decisions.append(Decision("enable_chunked_prefill", False, False, reason))
    rope = model.rope
    if rope is not None:
        rope, decision = resolve_rope(rope, fitted.limits.max_model_len)
        decisions += [decision] if decision is not None else []
    speculative, of_drafts = plan_speculation(
        config, model, fitted.dtype, fitted.ssm_state_dtype, fitted.limits.max_model_len
    )
    decisions += of_drafts
    return Plan(
        model=_summary(model, fitted),
        device=device,
        settings=EffectiveSettings.of(
            config,
            rope=rope,
            quantization=model.quantization,
            dtype=fitted.dtype,
            ssm_state_dtype=fitted.ssm_state_dtype,
            device=device.kind,
            **vars(fitted.limits),
            memory_utilization=utilization(config, device),
            state_cache_mode=fitted.state_cache_mode,
            state_block_size=fitted.state_block_size,
            graph_mode=fitted.graph_mode,
            threads=choose_threads(config, device),
        ),
        capture=_capture(model, config, device, fitted),
        memory=fitted.memory,
        state_cache=StateCachePlan(prefill_flops(model)),
        speculative=speculative,
        encoder=fitted.encoder,
        kernels=fitted.kernels,
        decisions=tuple(decisions),
    )


def _summary(model: ModelSpec, fitted: Fit) -> ModelSummary:
    own = replace(model, drafter=None)
    slot = state_slot_bytes(own, fitted.dtype, fitted.ssm_state_dtype)
    return ModelSummary(
        architecture=model.architecture,
        checkpoint_dtype=model.dtype,
        parameters=model.num_parameters,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        layers=dict(Counter(layer.kind for layer in model.layers)),
        kv_bytes_per_token=kv_block_bytes(own, 1, fitted.dtype),
        state_bytes_per_request=slot * fitted.memory.slots_per_request,
        vision=None if model.vision is None else _vision_summary(model.vision),
    )


def _vision_summary(vision: VisionSpec) -> VisionSummary:
    return VisionSummary(
        parameters=vision.parameters,
        layers=vision.num_layers,
        hidden_size=vision.hidden_size,
        token_side=vision.token_side,
        hidden_rows=vision.hidden_rows,
        smallest_item=vision.smallest_item,
    )


def _capture(model: ModelSpec, config: EngineConfig, device: DeviceSpec, fitted: Fit) -> CapturePlan:
    mode = fitted.graph_mode
    # Without graphs, what would cover a batch is a mode with full graphs, if their kernels can be captured.
    full = mode in FULL_MODES or (mode == "none" and not not_capturable_in_decode(fitted.kernels))

    backend = backend_of(device.kind)
    gathers_states = device.kind == "cuda" and full
    capture = Capture(backend, frozenset(splits_of(fitted.kernels)), gathers_states)

    def bytes_for(largest: LargestGraphs) -> int:
        return graph_bytes(
            model,
            fitted.dtype,
            largest,
            limits=fitted.limits,
            block_size=config.block_size,
            capture=capture,
        )

    slots_per_request = fitted.memory.slots_per_request
    return plan_capture(
        config, fitted.kernels, backend, mode, fitted.ladders, fitted.limits, slots_per_request, bytes_for
    )
