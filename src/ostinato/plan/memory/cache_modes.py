"""Cache modes: the dtype of keys and values, and the mode and distance of checkpoints of states."""

from __future__ import annotations

import math

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.kv_cache.checkpoints import StateCacheMode
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.plan.decision import Decision, no_effect
from ostinato.plan.layer_specs import AttentionSpec
from ostinato.plan.model import ModelSpec

INT8 = "int8"
"""Dtype of integers from -127 to 127, with a float32 scale for each token's head (`ops/quant/quantize.py`)."""

SCALE_BYTES = DTYPE_BYTES["float32"]


def bytes_per_token(attention: AttentionSpec, dtype: str) -> int:
    """Return the bytes that one token adds to the cache in a layer: keys and values in `dtype`, with scales, if any."""
    elements = attention.kv_elements_per_token
    if dtype == INT8:
        return elements + attention.scales_per_token * SCALE_BYTES
    return elements * DTYPE_BYTES[dtype]


def bytes_while_read(dtype: str) -> int:
    """Return the bytes of one element of keys and values that a reference gathers: it converts integers to float32."""
    return DTYPE_BYTES[INT8] + DTYPE_BYTES["float32"] if dtype == INT8 else DTYPE_BYTES[dtype]


def choose_kv_cache_dtype(config: EngineConfig, model: ModelSpec, dtype: str) -> tuple[str, list[Decision]]:
    """Return the dtype of keys and values: `int8` if that is given, else the model's, which runs in `dtype`."""
    if config.kv_cache_dtype != INT8:
        return dtype, []
    layers = model.storing_layers
    if not layers:
        return INT8, [no_effect(config, "kv_cache_dtype", "the model has no attention, and keeps no keys")]
    if any(layer.indexer is not None and layer.indexer.is_gated for layer in layers):
        raise ConfigError(
            "kv_cache_dtype int8: the model's attention selects blocks by keys with gates, and these are not kept in 8 "
            "bits; use kv_cache_dtype auto",
            [Remedy("kv_cache_dtype", "auto")],
        )
    kept, plain = (sum(bytes_per_token(layer, kind) for layer in layers) for kind in (INT8, dtype))
    reason = (
        "rounded to 8 bits when they are written, with one scale for each token's head, and read so by every step: "
        f"{kept} bytes per token in place of {plain}; results differ slightly from those in {dtype}"
    )
    return INT8, [Decision("kv_cache_dtype", INT8, INT8, reason)]


MODES = ("auto", "none", "align", "all")
MIN_STATE_BLOCK_SIZE = 256
"""Minimum tokens between checkpoints by default: a slot takes as much memory as hundreds of tokens' keys and values."""


def resolve_state_cache_mode(
    requested: str | None,
    *,
    prefix_caching: bool,
    chunked_prefill: bool,
    supports_all: bool,
    num_speculative_tokens: int = 0,
    whole_prompts: bool = False,
) -> Decision:
    """Return the mode of a model with state layers: the requested one, or the result of `auto` (or None).

    `supports_all` is true if every state layer's scan can write states out, and `whole_prompts` if no prompt can be
    cut. ConfigError if the mode is unknown or needs
    something that is missing; each of its remedies works alone, with all else unchanged.
    """
    asked = "auto" if requested is None else requested
    if asked not in MODES:
        message = f"state_cache_mode = {asked!r} is unknown; the modes are {', '.join(MODES)}"
        raise ConfigError(message, [Remedy("state_cache_mode", "auto")])
    if asked == "auto":
        effective, reason = _automatic(prefix_caching, chunked_prefill, supports_all)
        if num_speculative_tokens > 0:
            reason += f"; num_speculative_tokens {num_speculative_tokens} makes no difference"
        return Decision("state_cache_mode", asked, effective, reason)
    problems = _problems(asked, prefix_caching, chunked_prefill, supports_all)
    if problems:
        raise _contradiction(asked, problems, prefix_caching, chunked_prefill, supports_all, whole_prompts)
    return Decision("state_cache_mode", asked, asked, "as given")


def choose_state_cache_mode(config: EngineConfig, model: ModelSpec) -> Decision:
    """Return the mode of `config` on `model`.

    ConfigError as `resolve_state_cache_mode`, but never without state layers, where there is nothing to keep.
    """
    if not model.keeps_state:
        reason = "the model has no state layers, so there is no state to keep"
        return Decision("state_cache_mode", config.state_cache_mode, "none", reason)
    return resolve_state_cache_mode(
        config.state_cache_mode,
        prefix_caching=config.enable_prefix_caching,
        chunked_prefill=config.enable_chunked_prefill,
        supports_all=model.supports_all_checkpoints,
        num_speculative_tokens=config.num_speculative_tokens,
        whole_prompts=model.is_prefix_lm,
    )


def choose_state_block_size(config: EngineConfig, model: ModelSpec) -> int:
    """Return the tokens between checkpoints: the given number, else a default.

    The default is the smallest common multiple of `block_size` and the state layers' chunk sizes that is at least 256:
    at multiples of the chunk size the scan has the state anyway. ConfigError if the given number is no multiple of
    `block_size`.
    """
    block_size, given = config.block_size, config.state_block_size
    if given is None:
        unit = math.lcm(block_size, *(mixer.chunk_size for mixer in model.state_layers if mixer.chunk_size))
        return _round_up(MIN_STATE_BLOCK_SIZE, unit)
    if given % block_size == 0:
        return given
    above = _round_up(given, block_size)
    below = above - block_size
    nearest = below if below and given - below <= above - given else above
    multiples = f"multiples are {below} and {above}" if below else f"multiple is {above}"
    message = (
        f"state_block_size {given} is not a multiple of block_size {block_size}: states are kept at block boundaries; "
        f"the nearest {multiples}"
    )
    raise ConfigError(message, [Remedy("state_block_size", nearest)])


def _automatic(prefix_caching: bool, chunked_prefill: bool, supports_all: bool) -> tuple[StateCacheMode, str]:
    """Return the mode that `auto` chooses, and why."""
    if not prefix_caching:
        return "none", "without enable_prefix_caching no checkpoint would be found again"
    if supports_all:
        return "all", "every state layer can write its state out inside a prefill chunk"
    if chunked_prefill:
        return "align", "a state layer cannot write its state out inside a prefill chunk, but chunks can be cut"
    return "none", (
        "a state layer cannot write its state out inside a prefill chunk, and without enable_chunked_prefill no chunk "
        "can be cut"
    )


def _problems(mode: str, prefix_caching: bool, chunked_prefill: bool, supports_all: bool) -> list[str]:
    """Return the requirements of a mode that are not met, each as the end of a sentence."""
    problems = []
    if mode != "none" and not prefix_caching:
        problems.append("needs enable_prefix_caching, which is off, so that its checkpoints are found again")
    if mode == "align" and not chunked_prefill:
        problems.append("needs enable_chunked_prefill, which is off, since its checkpoints stand where chunks are cut")
    if mode == "all" and not supports_all:
        problems.append("needs state layers that can write their state out inside a prefill chunk, and one cannot")
    return problems


def _contradiction(
    mode: str,
    problems: list[str],
    prefix_caching: bool,
    chunked_prefill: bool,
    supports_all: bool,
    whole_prompts: bool,
) -> ConfigError:
    """Return the error, with each change of one setting that solves all problems at once."""
    remedies = []
    if not prefix_caching and not _problems(mode, True, chunked_prefill, supports_all):
        remedies.append(Remedy("enable_prefix_caching", True))
    if not (chunked_prefill or whole_prompts or _problems(mode, prefix_caching, True, supports_all)):
        remedies.append(Remedy("enable_chunked_prefill", True))
    # Choose the mode that keeps most; `none` always works.
    other = next(
        mode for mode in ("all", "align", "none") if not _problems(mode, prefix_caching, chunked_prefill, supports_all)
    )
    remedies.append(Remedy("state_cache_mode", other))
    ways = ", or ".join(str(remedy) for remedy in remedies)
    return ConfigError(f"state_cache_mode {mode} {', and '.join(problems)}; {ways}", remedies)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
