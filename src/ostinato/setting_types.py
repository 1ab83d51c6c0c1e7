"""The keywords of LLM, EngineConfig, SamplingParams and Guide, for editors and type checkers.

`tools/settings_types.py` makes this file from the fields of the last three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ostinato.config_fields import Speculative

if TYPE_CHECKING:
    import torch


class LLMSettings(TypedDict, total=False):
    """All settings but `model`; docs/settings.md says what they mean."""

    revision: str | None
    download_dir: str | PathLike[str] | None
    tokenizer: str | PathLike[str] | None
    chat_template: str | PathLike[str] | None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | torch.dtype
    quantization: Literal["auto", "none", "int8", "int8_g128", "int4", "int4_g64", "int4_g32"] | None
    activation_dtype: Literal["auto", "int8"] | torch.dtype
    ssm_state_dtype: Literal["auto", "bfloat16", "float16", "float32"] | torch.dtype
    ssm_state_rounding: Literal["nearest", "stochastic"]
    ssm_checkpoint_dtype: Literal["auto", "int8"] | torch.dtype
    kv_cache_dtype: Literal["auto", "int8"] | torch.dtype
    device: Literal["auto", "cpu", "cuda"] | torch.device
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    block_size: int
    enable_chunked_prefill: bool
    memory_utilization: float | None
    cache_memory: int | str | None
    enable_prefix_caching: bool
    state_cache_mode: Literal["auto", "none", "align", "all"]
    state_block_size: int | None
    checkpoint_policy: Literal["boundaries", "boundaries+branches"]
    eviction_policy: Literal["marconi", "lru"]
    expected_prefix_tokens: int | None
    max_pinned_checkpoints: int | None
    max_checkpoint_ttl: int
    cache_offload: int | str | None
    cache_dir: str | PathLike[str] | None
    kernels: Literal["auto", "native", "triton", "reference"]
    deterministic: bool
    graph_mode: Literal["none", "piecewise", "full_decode_only", "full_and_piecewise"]
    capture_sizes: Sequence[int] | str | None
    capture_rows: Sequence[int] | str | None
    max_capture_size: int | None
    performance_mode: Literal["balanced", "interactivity"]
    capture: Literal["auto", "startup", "lazy"]
    prefer_graph_sizes: bool
    strict: bool
    check_replay: bool
    overlap: Literal["auto", "on", "off"]
    speculative: Speculative | Mapping[str, Any] | str | None
    speculative_adaptive: Literal["on", "off"]
    encoder_graph_mode: Literal["auto", "always", "none"]
    encoder_token_budgets: Sequence[int] | str | None
    encoder_max_items_per_batch: int | None
    encoder_cache_tokens: int | None
    video_pruning_rate: float
    allow_remote_images: bool
    scheduling_policy: Literal["fcfs", "priority"]
    tensor_parallel_size: int
    seed: int
    record: str | None
    record_limit: int
    record_images: bool
    threads: int | None
    random_weights: bool
    # vLLM's names.
    mamba_ssm_cache_dtype: Literal["auto", "bfloat16", "float16", "float32"] | torch.dtype
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | str | None
    mamba_cache_mode: Literal["auto", "none", "align", "all"]
    mamba_block_size: int | None
    cudagraph_capture_sizes: Sequence[int] | str | None
    max_cudagraph_capture_size: int | None
    speculative_config: Speculative | Mapping[str, Any] | str | None
    encoder_cudagraph_token_budgets: Sequence[int] | str | None
    encoder_cudagraph_max_vision_items_per_batch: int | None


class EngineSettings(LLMSettings, total=False):
    """All settings."""

    model: str | PathLike[str]


class GuideSettings(TypedDict, total=False):
    """Fields of Guide, in the forms that it takes."""

    json_schema: dict[str, Any] | str | type | None
    json_object: bool
    regex: str | None
    choice: list[str] | tuple[str, ...]
    lark: str | None


class SamplingSettings(TypedDict, total=False):
    """Fields of SamplingParams but `guide`, in the forms that it takes."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float] | dict[str, float] | None
    seed: int | None
    stop: str | list[str] | tuple[str, ...] | None
    stop_token_ids: list[int] | tuple[int, ...] | set[int] | frozenset[int] | None
    min_tokens: int
    max_tokens: int | None
    ignore_eos: bool
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool
    include_stop_str_in_output: bool
