"""Engine settings that all ways have in common. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.config import EngineConfig
from ostinato.config_fields import Speculative
from ostinato.errors import CapacityError, ConfigError, Remedy
from ostinato.json_io import JsonObject
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.limits import min_batched_tokens
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.units import format_bytes

ROWS = 4
SMALL_MODEL = 20_000_000
"""Parameters below which threads wait for each other longer than they compute."""
CAPTURE_SIZES = (8, 24, 64)
"""Sizes of piecewise graphs. The largest step has a graph too, unless it has more than `LARGEST_GRAPH` tokens."""
LARGEST_GRAPH = 256
CHECKPOINTS = 8
"""Checkpoints of each request that the cache has room for."""
LARGEST_PART = 8
"""Divisor of the memory that bounds the cache; running requests get what they need in any case."""
LADDER_SETTINGS = ("capture_sizes", "capture_rows", "max_capture_size", "performance_mode")


def base_config(settings: JsonObject) -> EngineConfig:
    """Return the config of `settings`, with verification's own choices for open ones.

    They are float32, few rows, so that requests wait for each other, checkpoints close together, and drafts in every
    step. A small model has one thread.
    """
    config = EngineConfig(**settings)
    is_small = load_spec(config).num_parameters < SMALL_MODEL
    chosen: JsonObject = {
        "dtype": "float32",
        "max_num_seqs": ROWS,
        "state_block_size": 2 * config.block_size,
        "speculative_adaptive": "off",
        **({"threads": 1} if is_small else {}),
    }
    return config.with_settings(**{name: value for name, value in chosen.items() if not config.is_given(name)})


def way_config(config: EngineConfig, **axes: object) -> EngineConfig:
    """Return the settings of one way; `axes` are its values. Its graphs are few unless their sizes are given."""
    config = config.with_settings(**axes)
    if any(config.is_given(name) for name in LADDER_SETTINGS):
        return config
    rows, tokens = config.max_num_seqs or 1, config.max_num_batched_tokens or 0
    sizes = {*CAPTURE_SIZES, *((tokens,) if 0 < tokens <= LARGEST_GRAPH else ())}
    reachable = tuple(sorted(size for size in sizes if size <= tokens))
    return config.with_settings(capture_sizes=reachable or (tokens,), capture_rows=tuple(sorted({-(-rows // 2), rows})))


def plain_config(config: EngineConfig, longest: int) -> EngineConfig:
    """Return the plain path's settings for texts of `longest` tokens: one process, without tensor parallelism."""
    return config.with_settings(
        tensor_parallel_size=1,
        graph_mode="none",
        enable_prefix_caching=False,
        state_cache_mode="none",
        speculative=None,
        overlap="off",
        max_num_seqs=1,
        max_num_batched_tokens=min_batched_tokens(1, 1, config.block_size) + longest,
    )


def check_length(config: EngineConfig, model: ModelSpec, longest: int) -> EngineConfig:
    """Return `config` with room for texts of `longest` tokens. ConfigError if it, or the model, has none."""
    most = model.max_position_embeddings
    if most is not None and longest > most:
        message = f"the longest text has {longest} tokens, and the model can do {most}; lower --max-tokens"
        raise ConfigError(f"{message}, leave out long prompts, or lower state_block_size")
    if not config.is_given("max_model_len"):
        return config.with_settings(max_model_len=longest)
    if config.max_model_len is not None and config.max_model_len < longest:
        message = f"max_model_len is {config.max_model_len}, and the longest text has {longest} tokens"
        raise ConfigError(message, [Remedy("max_model_len", longest)])
    return config


def with_cache(config: EngineConfig, methods: Sequence[Speculative | None], num_requests: int) -> EngineConfig:
    """Return `config` with a cache for all requests and their checkpoints, if its size is open and there is room.

    Two engines run at the same time, so neither may take all the memory.
    """
    if config.is_given("cache_memory"):
        return config
    wanted = needed = part = 0
    for method in methods:
        asked = config.with_settings(speculative=method)
        memory = make_plan(asked, load_spec(asked), detect(config.device)).memory
        blocks = -(-(config.max_model_len or 0) // config.block_size) * (memory.kv_block + memory.window_block)
        working = memory.slots_per_request * memory.state_slot
        null = memory.kv_block + memory.window_block + memory.state_slot
        needed = max(needed, null + (config.max_num_seqs or 1) * (blocks + working))
        wanted = max(wanted, null + num_requests * (blocks + working + CHECKPOINTS * memory.state_slot))
        part = memory.available // LARGEST_PART
    return config.with_settings(cache_memory=max(needed, min(wanted, part)))


def check_memory(plain: EngineConfig, ways: Sequence[EngineConfig]) -> None:
    """Raise CapacityError if the plain path's engine and that of some way do not fit together."""
    device = detect(plain.device)
    memories = [make_plan(config, load_spec(config), device).memory for config in (plain, *ways)]
    plain_bytes, most = memories[0].used, max(memory.used for memory in memories[1:])
    available = memories[0].available
    if plain_bytes + most > available:
        raise CapacityError(
            f"the plain path takes {format_bytes(plain_bytes)} and the largest engine beside it {format_bytes(most)}; "
            f"together that is more than the {format_bytes(available)} there are"
        )
