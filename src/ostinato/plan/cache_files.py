"""The cache on disk: what goes to files, how much of it, and when reading a file is faster than computing."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.plan.decision import Decision
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.fitting.fit import FitResult
from ostinato.plan.kernel_costs import PrefillFlops
from ostinato.plan.limits import smallest
from ostinato.plan.memory.split import sliding_window_spec
from ostinato.units import GiB, format_bytes

DEFAULT_LIMIT = 8 * GiB
READ_RATE = 500e6
"""Assumed bytes per second of a slow solid-state disk. Files just written come from memory, ten times as fast."""
CORE_RATE = 256e9
"""Assumed FLOP/s of a CPU core, where nothing was measured.

No core computes prompts faster, so reading may pay sooner than the plan says, but never later.
"""
MAX_WAITING = 256 * 2**20
"""Bytes that may wait in memory to be written."""


@dataclass(frozen=True)
class CacheFilesPlan:
    """Plan of the files for evicted blocks, window blocks and checkpoints: up to `limit` bytes in `directory`.

    They are read back where that takes less time than computing at these rates. A cold prefix of `min_tokens_to_read`
    tokens or more is read rather than computed (None: no prefix is).
    """

    directory: str | None
    """Directory of the files. None: the user's own, `~/.cache/ostinato/prefixes`."""
    limit: int
    block_bytes: int
    window_block_bytes: int
    slot_bytes: int
    bytes_per_second: float
    flops_per_second: float
    min_tokens_to_read: int | None


def plan_cache_files(
    config: EngineConfig, fitted: FitResult, device: DeviceSpec, flops: PrefillFlops
) -> tuple[CacheFilesPlan | None, list[Decision]]:
    """Return the plan of cache files and the decisions on it; None if neither `cache_offload` nor `cache_dir` is given.

    ConfigError if no prompt could hit a file, if the device is not a CPU, or if `cache_offload` is too small for two
    files.
    """
    if config.cache_offload is None and config.cache_dir is None:
        return None, []
    settled, memory = fitted.settled, fitted.memory
    asked = "cache_offload" if config.cache_offload is not None else "cache_dir"
    if memory.expected_prefix_tokens is None:
        raise ConfigError(
            f"{asked} keeps what the prefix cache evicts, and no prompt can hit that: enable_prefix_caching is "
            f"{'on' if config.enable_prefix_caching else 'off'}, state_cache_mode is {settled.state_cache_mode}",
            [Remedy(asked, None), Remedy("enable_prefix_caching", True)],
        )
    if device.kind != "cpu":
        message = f"{asked}: files are written from the memory of a CPU, and not yet from a GPU's"
        raise ConfigError(message, [Remedy(asked, None)])
    decisions = []
    limit = config.cache_offload
    if limit is None:
        limit = DEFAULT_LIMIT
        reason = f"cache_dir is given; at most {format_bytes(limit)} of files are kept there"
        decisions.append(Decision("cache_offload", None, limit, reason))
    # A file has all ranks' shards of a block, a window block or a slot.
    block_bytes, window_block_bytes, slot_bytes = (
        config.tensor_parallel_size * each
        for each in (memory.kv_block, memory.window_block, memory.packed_state or memory.state_slot)
    )
    least = max(block_bytes, window_block_bytes, slot_bytes)
    if limit < 2 * least:
        message = f"cache_offload {format_bytes(limit)} has no room for two files of {format_bytes(least)}"
        raise ConfigError(message, [Remedy("cache_offload", 64 * least)])
    rates = next((kernel_rate for kernel_rate in device.rates if kernel_rate.threads == settled.threads), None)
    rate = CORE_RATE * (settled.threads or device.cores) if rates is None else rates.product_rate
    size, rules = config.block_size, sliding_window_spec(memory, config.block_size, 1)

    def pays(blocks: int) -> bool:
        window_blocks = 0 if rules is None else min(blocks, rules.blocks_per_window)
        num_bytes = blocks * block_bytes + window_blocks * window_block_bytes + slot_bytes
        return num_bytes / READ_RATE < flops.until(blocks * size) / rate

    most = fitted.limits.max_model_len // size
    from_blocks = smallest(1, most, pays) if most else None
    planned = CacheFilesPlan(
        directory=config.cache_dir,
        limit=limit,
        block_bytes=block_bytes,
        window_block_bytes=window_block_bytes,
        slot_bytes=slot_bytes,
        bytes_per_second=READ_RATE,
        flops_per_second=rate,
        min_tokens_to_read=None if from_blocks is None else from_blocks * size,
    )
    return planned, decisions
