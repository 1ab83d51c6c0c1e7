"""Groups of flags by subject, which order `--help`."""

from __future__ import annotations

from functools import cache

from ostinato.config import EngineConfig
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams
from ostinato.serve.settings import ServeSettings
from ostinato.setting_names import ALIASES

COMMON_FLAGS = ("model", "max_tokens", "temperature", "host", "port", "max_model_len")
"""Settings that `--help` explains; it only names the others."""

ENGINE_GROUPS = {
    "model": (
        "model", "revision", "download_dir", "tokenizer", "chat_template", "dtype", "quantization", "device",
        "tensor_parallel_size", "threads", "random_weights",
    ),
    "memory": (
        "max_num_seqs", "max_num_batched_tokens", "max_model_len", "memory_utilization", "cache_memory", "block_size",
        "kv_cache_dtype", "ssm_state_dtype", "ssm_state_rounding",
    ),
    "cache": (
        "enable_prefix_caching", "state_cache_mode", "state_block_size", "checkpoint_policy", "eviction_policy",
        "expected_prefix_tokens", "cache_offload", "cache_dir",
    ),
    "steps": ("enable_chunked_prefill", "scheduling_policy", "overlap", "seed", "speculative", "speculative_adaptive"),
    "kernels and graphs": (
        "kernels", "deterministic", "graph_mode", "capture_sizes", "capture_rows", "max_capture_size",
        "performance_mode", "capture", "prefer_graph_sizes", "strict", "check_replay",
    ),
    "images": (
        "encoder_graph_mode", "encoder_token_budgets", "encoder_max_items_per_batch", "encoder_cache_tokens",
        "video_pruning_rate", "allow_remote_images",
    ),
}  # fmt: skip
OWN = "this command"


@cache
def groups() -> dict[str, str]:
    """Return each setting's subject, in the order of help. Settings without one are a command's own."""
    found = {name: title for title, names in ENGINE_GROUPS.items() for name in names}
    assert found.keys() == EngineConfig.model_fields.keys(), "every setting of the engine has its place in help"
    found |= {alias: found[name] for alias, name in ALIASES.items()}
    found |= dict.fromkeys(SamplingParams.model_fields.keys() - found.keys(), "sampling")
    found |= {f"guide_{name}": "sampling" for name in Guide.model_fields}
    return found | dict.fromkeys(ServeSettings.model_fields.keys() - found.keys(), "server")
