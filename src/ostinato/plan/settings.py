"""EffectiveSettings: what the engine runs with, after every open setting has its value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ostinato.config import EngineConfig
from ostinato.errors import ModelError
from ostinato.plan.decision import Decision
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.graphs.coverage import GraphMode
from ostinato.plan.model import DTYPE_BYTES, ModelSpec, RopeSpec
from ostinato.plan.quantization import Quantization


@dataclass(frozen=True)
class EffectiveSettings:
    """`device` is `cpu` or `cuda`. `threads` is None where it is left to torch (on a GPU); `rope` is
    resolved for `max_model_len`, and None for a model without rotary embedding."""

    dtype: str
    ssm_state_dtype: str
    quantization: Quantization | None
    device: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    state_cache_mode: Literal["none", "align", "all"]
    state_block_size: int
    checkpoint_policy: Literal["boundaries", "boundaries+branches"]
    eviction_policy: Literal["marconi", "lru"]
    deterministic: bool
    graph_mode: GraphMode
    capture: Literal["startup", "lazy"]
    prefer_graph_sizes: bool
    strict: bool
    check_replay: bool
    scheduling_policy: Literal["fcfs", "priority"]
    seed: int
    threads: int | None
    rope: RopeSpec | None


def choose_dtype(config: EngineConfig, model: ModelSpec) -> tuple[str, list[Decision]]:
    """The dtype of weights and activations: the given one, else the checkpoint's."""
    if config.dtype in ("auto", model.dtype):
        return model.dtype, []
    reason = f"as given, though the checkpoint's weights are {model.dtype}: they are converted while loading"
    return config.dtype, [Decision("dtype", config.dtype, config.dtype, reason)]


def choose_ssm_state_dtype(config: EngineConfig, model: ModelSpec) -> tuple[str, list[Decision]]:
    """The dtype of SSM states in slots: the given one, else the checkpoint's wish, else float32.

    ModelError if the checkpoint wishes for one that is not supported.
    """
    given = config.ssm_state_dtype != "auto"
    dtype = config.ssm_state_dtype if given else model.ssm_state_dtype or "float32"
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ModelError(f"config.json has mamba_ssm_cache_dtype {dtype!r}; the supported ones are {known}")
    if not model.state_layers or DTYPE_BYTES[dtype] >= DTYPE_BYTES["float32"]:
        return dtype, []
    origin = "as given" if given else "as the checkpoint asks"
    reason = f"{origin}; below float32 the state is rounded after each chunk, so chunking changes results"
    return dtype, [Decision("ssm_state_dtype", config.ssm_state_dtype, dtype, reason)]


def choose_threads(config: EngineConfig, device: DeviceSpec) -> int | None:
    """CPU threads: the given number, else all cores that the process may use; on a GPU torch's own choice."""
    if config.threads is not None:
        return config.threads
    return max(1, device.cores) if device.kind == "cpu" else None
