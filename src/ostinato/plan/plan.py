"""Plan: everything that the engine will do, decided before any weight is loaded, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError
from ostinato.json_io import JsonObject, from_plain, load_json, save_json, to_json_data
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.plan.cache_files import CacheFilesPlan, plan_cache_files
from ostinato.plan.choose_quantization import expansion_decisions, quantization_decisions
from ostinato.plan.decision import Decision
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.effective_settings import EffectiveSettings, choose_chunks, choose_overlap, text_decisions
from ostinato.plan.encoder.encoder_plan import EncoderPlan
from ostinato.plan.fitting.fit import FitError, FitResult, fit, graph_cost
from ostinato.plan.fitting.resolve import utilization
from ostinato.plan.graphs.capture_plan import CapturePlan, choose_capture, plan_capture
from ostinato.plan.kernel_costs import StateCachePlan, prefill_flops
from ostinato.plan.kernels import KernelChoice, graph_backend_of
from ostinato.plan.launches import capture_time, planned_step_sizes, with_launches
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.memory.prefix_plan import HitLaw, PinLimits, hit_law, pin_limits, prefix_decisions
from ostinato.plan.memory.split import MemoryPlan, kv_block_bytes, state_slot_bytes, window_decisions
from ostinato.plan.mixers import StateDtype
from ostinato.plan.model import ModelSpec
from ostinato.plan.prediction import Prediction, plan_prediction
from ostinato.plan.remedies import advice, capacity_remedies, min_memory, working_remedies
from ostinato.plan.render.html import plan_html
from ostinato.plan.rope import resolve_ropes
from ostinato.plan.speculation import SpeculativePlan, draft_capture, plan_speculation
from ostinato.plan.tensor_parallel import rank_decisions


@dataclass(frozen=True)
class VisionSummary:
    """Sizes of a vision encoder.

    An output token represents `token_side` pixels along both sides, and takes `hidden_rows` vectors of the text model's
    size. The model's smallest image has `smallest_item` tokens.
    """

    parameters: int
    layers: int
    hidden_size: int
    token_side: int
    hidden_rows: int
    smallest_item: int


@dataclass(frozen=True)
class StateSummary:
    """One array of a kind of state layer and its bytes in a slot. `dtype` is the one it runs with."""

    layer: str
    array: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """Sizes of the model, without its drafter.

    `layers` counts the layers of the text part by kind; the byte counts are in the dtypes that it runs with.
    """

    architecture: str
    checkpoint_dtype: str
    parameters: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    layers: dict[str, int]
    kv_bytes_per_token: int
    state_bytes_per_request: int
    states: tuple[StateSummary, ...]
    """Arrays of each kind of state layer."""
    vision: VisionSummary | None
    is_prefix_lm: bool = False
    """True if the tokens of a prompt see each other in both directions, so that one step computes all of them."""


@dataclass(frozen=True)
class Plan:
    """Everything that the engine does. `measured` is empty until start-up has measured; the rest never changes."""

    model: ModelSummary
    device: DeviceSpec
    settings: EffectiveSettings
    capture: CapturePlan
    memory: MemoryPlan
    state_cache: StateCachePlan
    hit_law: HitLaw
    """Law by which prompts hit the prefix cache."""
    pins: PinLimits
    """Limits of the checkpoints that applications pin in it."""
    cache_files: CacheFilesPlan | None
    """The cache on disk; None without one."""
    speculative: SpeculativePlan | None
    encoder: EncoderPlan | None
    """Plan of the vision encoder; None for models that take text alone."""
    kernels: dict[str, KernelChoice]
    prediction: Prediction
    """Predicted times of steps."""
    decisions: tuple[Decision, ...]
    measured: JsonObject = field(default_factory=dict)

    def to_json(self) -> JsonObject:
        """Return the plan as plain data, ready for `json.dumps`. A section that the engine does not have is null."""
        data: JsonObject = to_json_data(self)
        return data

    def _repr_html_(self) -> str:
        """Return the plan as HTML, for notebooks."""
        return plan_html(self.to_json())

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Plan:
        """Return the plan from the result of `to_json`."""
        return from_plain(cls, data)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. ConfigError if the file cannot be written."""
        save_json(self, path, "the plan")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote. ConfigError if the file holds none."""
        return load_json(cls, path, "the plan")


def make_plan(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> Plan:
    """Return the plan for a model on a device. The function is pure: it needs no weights, GPU or torch.

    `model` may be the unchanged result of `models.checkpoint.load_spec`; only a draft model must have been attached to
    it, and it must be one rank's part if several share it. All bytes are those of one rank.

    CapacityError if the given settings do not fit, with the nearest value of each setting that alone would do.
    ConfigError if they contradict each other or the model.
    """
    assert model.ranks == config.tensor_parallel_size, "the model is one rank's part"
    try:
        config, of_chunks = choose_chunks(config, model)
        settled_overlap = choose_overlap(config, device)
        fitted = fit(config, model, device)
        flops = prefill_flops(fitted.settled.model)
        cache_files, of_files = plan_cache_files(config, fitted, device, flops)
    except FitError as failure:
        remedies = capacity_remedies(failure, config, model, device)
        least = None if remedies else min_memory(config, model, device)
        raise CapacityError(f"{failure.message}; {advice(failure, remedies, least)}", remedies) from None
    except ConfigError as error:
        raise ConfigError(error.message, working_remedies(error.remedies, config, model, device)) from None
    settled = fitted.settled
    model, dtype, ssm_state_dtype = settled.model, settled.dtype, settled.ssm_state_dtype
    decisions = [*of_chunks, *fitted.decisions, *prefix_decisions(fitted), *of_files]
    decisions += quantization_decisions(config, model, dtype, settled.kernels, device.kind)
    decisions += expansion_decisions(config, model, dtype, settled.kernels, device.kind)
    if not config.enable_chunked_prefill and fitted.limits.max_num_batched_tokens < fitted.limits.max_model_len:
        reason = (
            f"without chunked prefill a prompt of more than {fitted.limits.max_num_batched_tokens} tokens "
            "(max_num_batched_tokens) is refused when it arrives, whatever max_model_len"
        )
        decisions.append(Decision("enable_chunked_prefill", False, False, reason))
    if device.kind == "cpu" and settled.threads is not None and settled.threads > device.cores:
        reason = (
            f"as given, though the process may use {device.cores} cores: threads that wait for each other at every "
            "kernel take turns on them, so steps take longer"
        )
        decisions.append(Decision("threads", settled.threads, settled.threads, reason))
    ropes, of_ropes = resolve_ropes(model.ropes, fitted.limits.max_model_len)
    decisions += of_ropes
    decisions += text_decisions(config, model)
    decisions += window_decisions(
        model, fitted.memory, fitted.limits.max_model_len, config.block_size, fitted.limits.max_num_batched_tokens
    )
    speculative, of_drafts = plan_speculation(
        config, model, dtype, ssm_state_dtype, settled.kv_cache_dtype, fitted.limits.max_model_len
    )
    decisions += of_drafts
    overlap, of_overlap = settled_overlap
    decisions += of_overlap
    decisions += rank_decisions(model, device)
    capture = _capture(fitted)
    kernels = with_launches(
        settled.kernels,
        model,
        planned_step_sizes(capture, fitted.limits, settled.slots_per_request),
        dtype=dtype,
        capability=device.capability,
        max_model_len=fitted.limits.max_model_len,
        block_size=config.block_size,
    )
    return Plan(
        model=_summary(fitted),
        # The prediction contains the rates that it is based on.
        device=replace(device, rates=()),
        settings=EffectiveSettings.from_config(
            config,
            ropes=model.with_layers(ropes),
            quantization=model.quantization,
            dtype=dtype,
            ssm_state_dtype=ssm_state_dtype,
            kv_cache_dtype=settled.kv_cache_dtype,
            device=device.kind,
            **vars(fitted.limits),
            memory_utilization=utilization(config, device),
            state_cache_mode=settled.state_cache_mode,
            state_block_size=settled.state_block_size,
            graph_mode=settled.graph_mode,
            capture=choose_capture(config, graph_backend_of(device.kind), fitted.encoder is not None),
            overlap=overlap,
            threads=settled.threads,
        ),
        capture=_timed(fitted, capture, kernels),
        memory=fitted.memory,
        state_cache=StateCachePlan(flops),
        hit_law=hit_law(config, fitted),
        pins=pin_limits(config, fitted),
        cache_files=cache_files,
        speculative=speculative,
        encoder=fitted.encoder,
        kernels=kernels,
        prediction=plan_prediction(
            model,
            device,
            kernels,
            dtype=dtype,
            ssm_state_dtype=ssm_state_dtype,
            kv_cache_dtype=settled.kv_cache_dtype,
            threads=settled.threads,
            deterministic=config.deterministic,
            limits=fitted.limits,
        ),
        decisions=tuple(decisions),
    )


def _summary(fitted: FitResult) -> ModelSummary:
    model, dtype = fitted.settled.model, fitted.settled.dtype
    target = replace(model, drafter=None)
    return ModelSummary(
        architecture=model.architecture,
        checkpoint_dtype=model.dtype,
        parameters=model.num_parameters,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        layers=dict(Counter(layer.kind for layer in model.layers)),
        kv_bytes_per_token=kv_block_bytes(target, 1, fitted.settled.kv_cache_dtype),
        state_bytes_per_request=state_slot_bytes(target, dtype, fitted.settled.ssm_state_dtype)
        * fitted.memory.slots_per_request,
        states=_states(model, {"model": dtype, "state": fitted.settled.ssm_state_dtype}),
        vision=None if model.vision is None else _vision_summary(model.vision),
        is_prefix_lm=model.is_prefix_lm,
    )


def _states(model: ModelSpec, dtypes: Mapping[StateDtype, str]) -> tuple[StateSummary, ...]:
    layers = [(layer.kind, layer.mixer) for layer in model.layers]
    kinds = dict.fromkeys((kind, mixer.state) for kind, mixer in layers if mixer is not None)
    return tuple(
        StateSummary(
            kind, array.name, array.shape, dtypes[array.dtype], array.num_elements * DTYPE_BYTES[dtypes[array.dtype]]
        )
        for kind, state in kinds
        for array in state.arrays
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


def _capture(fitted: FitResult) -> CapturePlan:
    settled, limits = fitted.settled, fitted.limits
    return plan_capture(
        settled.config,
        settled.kernels,
        graph_backend_of(settled.device.kind),
        settled.graph_mode,
        fitted.ladders,
        limits,
        settled.slots_per_request,
        partial(graph_cost, settled, limits),
    )


def _timed(fitted: FitResult, planned: CapturePlan, kernels: Mapping[str, KernelChoice]) -> CapturePlan:
    """Return the capture plan with the time that capturing takes on a GPU."""
    settled, limits = fitted.settled, fitted.limits
    budgets = 0 if fitted.encoder is None else len(fitted.encoder.token_budgets)
    if planned.backend == "tape" or not (planned.max_tokens or budgets):
        return planned
    drafter = settled.model.drafter
    of_drafts = None
    if drafter is not None:
        of_drafts = draft_capture(planned, drafter.method, limits.max_num_seqs, limits.max_num_batched_tokens)
    return replace(planned, time=capture_time(settled.model, planned, of_drafts, budgets, kernels))
