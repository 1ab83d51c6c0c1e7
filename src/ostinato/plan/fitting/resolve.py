"""Resolved settings of a config on a device before its limits are known: everything that does not depend on memory."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.config import EngineConfig
from ostinato.kv_cache.checkpoints import StateCacheMode
from ostinato.plan.choose_quantization import with_quantization
from ostinato.plan.decision import Decision
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.effective_settings import (
    choose_dtype,
    choose_ssm_checkpoint_dtype,
    choose_ssm_state_dtype,
    choose_threads,
)
from ostinato.plan.encoder.encoder_plan import EncoderChoice, choose_budgets, choose_encoder
from ostinato.plan.graphs.capture_plan import choose_graph_mode, choose_ladders, largest_graphs
from ostinato.plan.graphs.capture_sizes import LadderLimit
from ostinato.plan.graphs.coverage import GraphMode
from ostinato.plan.kernels import KernelChoice, choose_kernels, graph_backend_of
from ostinato.plan.limits import DEFAULT_MAX_NUM_SEQS, Limits, wanted_limits
from ostinato.plan.memory.activations import with_distinct_layers
from ostinato.plan.memory.cache_modes import choose_kv_cache_dtype, choose_state_block_size, choose_state_cache_mode
from ostinato.plan.memory.graph_memory import LargestGraphs
from ostinato.plan.memory.split import (
    MemoryBudget,
    kv_block_bytes,
    longest_window,
    slots_per_request,
    state_slot_bytes,
    window_block_bytes,
)
from ostinato.plan.model import ModelSpec
from ostinato.plan.speculation import with_drafter
from ostinato.plan.tensor_parallel import without_graphs_of_ranks
from ostinato.units import GiB

DEFAULT_MEMORY_UTILIZATION = {"cuda": 0.9, "cpu": 1.0}
DEFAULT_CPU_CACHE = 4 * GiB


@dataclass(frozen=True)
class ResolvedConfig:
    """Config on a device, with everything that does not depend on the limits.

    `model` has its drafter, and its weights are quantised as asked; `kinds` has one of each kind of its layers.
    `wanted` are the limits asked for, or the defaults; `reach` says how far ladders go by default.
    """

    config: EngineConfig
    model: ModelSpec
    device: DeviceSpec
    distinct_layers: ModelSpec
    dtype: str
    ssm_state_dtype: str
    kv_cache_dtype: str
    """Dtype of keys and values: the model's, or `int8`."""
    state_cache_mode: StateCacheMode
    state_block_size: int
    slots_per_request: int
    kernels: dict[str, KernelChoice]
    graph_mode: GraphMode
    encoder: EncoderChoice | None
    budget: MemoryBudget
    requested_limits: Limits
    reach: LadderLimit
    decisions: tuple[Decision, ...]
    limit_decisions: tuple[Decision, ...]
    """Decisions by which `wanted` differs from what was asked for."""

    @property
    def threads(self) -> int | None:
        return choose_threads(self.config, self.device)

    def captured(self, limits: Limits, reach: LadderLimit) -> LargestGraphs:
        return largest_graphs(self.config, self.graph_mode, reach, limits, self.slots_per_request)


def resolve_config(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> ResolvedConfig:
    """Resolve settings that do not depend on the limits. ConfigError if values contradict each other or the model."""
    model = with_quantization(config, with_drafter(config, model), device.kind)
    dtype, of_dtype = choose_dtype(config, model)
    ssm_state_dtype, of_ssm_dtype = choose_ssm_state_dtype(config, model)
    packed_state, of_checkpoint_dtype = choose_ssm_checkpoint_dtype(config, model, device, dtype, ssm_state_dtype)
    kv_cache_dtype, of_kv_dtype = choose_kv_cache_dtype(config, model, dtype)
    mode = choose_state_cache_mode(config, model)
    state_block_size = choose_state_block_size(config, model)
    per_request = slots_per_request(config.num_speculative_tokens)
    wanted, of_limits = wanted_limits(config, model, device.kind, per_request)
    backend = graph_backend_of(device.kind)
    kernels = choose_kernels(
        model, device, config.kernels, config.deterministic, dtype=dtype, kv_cache_dtype=kv_cache_dtype
    )
    graph_mode, of_mode = choose_graph_mode(config, kernels, backend)
    graph_mode, of_mode = without_graphs_of_ranks(config, backend) or (graph_mode, of_mode)
    encoder = choose_encoder(config, model, dtype, kernels, backend, choose_threads(config, device) or 1)
    reach = LadderLimit(config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.kind])
    # Contradictions are reported before anything is fitted.
    choose_ladders(config, graph_mode, reach, wanted, per_request)
    if encoder is not None:
        choose_budgets(encoder, wanted)
    return ResolvedConfig(
        config=config,
        model=model,
        device=device,
        # A step's peak is that of its largest layer, so one of each kind is enough to find it.
        distinct_layers=with_distinct_layers(model),
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
            config,
            model,
            device,
            dtype,
            ssm_state_dtype,
            kv_cache_dtype,
            mode.effective,
            wanted.max_model_len,
            packed_state,
        ),
        requested_limits=wanted,
        reach=reach,
        decisions=(
            *of_dtype,
            *of_ssm_dtype,
            *of_checkpoint_dtype,
            *of_kv_dtype,
            *([mode] if mode.effective != config.state_cache_mode else []),
            *of_mode,
        ),
        limit_decisions=tuple(of_limits),
    )


def utilization(config: EngineConfig, device: DeviceSpec) -> float:
    """Return the share of the device's memory that the plan may use."""
    return config.memory_utilization or DEFAULT_MEMORY_UTILIZATION[device.kind]


def _budget(
    config: EngineConfig,
    model: ModelSpec,
    device: DeviceSpec,
    dtype: str,
    ssm_state_dtype: str,
    kv_cache_dtype: str,
    mode: StateCacheMode,
    max_model_len: int,
    packed_state: int,
) -> MemoryBudget:
    # Each rank has a separate GPU; on a CPU all share one memory.
    own_memory = device.memory_bytes // (model.ranks if device.kind == "cpu" else 1)
    cache_size = config.cache_memory
    if cache_size is None and device.kind == "cpu":
        cache_size = min(DEFAULT_CPU_CACHE, own_memory // 4)
    window = longest_window(model, max_model_len)
    window_block = window_block_bytes(model, config.block_size, kv_cache_dtype) if window else 0
    return MemoryBudget(
        available=int(own_memory * utilization(config, device)),
        weights=model.weight_bytes(dtype) + (model.drafter.weight_bytes(dtype) if model.drafter is not None else 0),
        cache_size=cache_size,
        cache_is_given=config.cache_memory is not None,
        block_size=config.block_size,
        kv_block=kv_block_bytes(model, config.block_size, kv_cache_dtype) - window_block,
        state_slot=state_slot_bytes(model, dtype, ssm_state_dtype),
        packed_state=packed_state,
        slots_per_request=slots_per_request(config.num_speculative_tokens),
        mapped_weights=model.mapped_bytes + (0 if model.drafter is None else model.drafter.mapped_bytes),
        # A model without state needs no checkpoints to hit.
        holds_prefixes=config.enable_prefix_caching and (mode != "none" or not model.keeps_state),
        expected_prefix_tokens=config.expected_prefix_tokens,
        window_block=window_block,
        window_block_window=window,
    )
