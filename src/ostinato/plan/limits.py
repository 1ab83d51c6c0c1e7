"""Limits: rows, tokens of a step and tokens of a request. They are given or default, and lowered to what fits.

The largest or smallest value that works is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.plan.decision import Decision
from ostinato.plan.model import ModelSpec


def largest(low: int, high: int, works: Callable[[int], bool]) -> int | None:
    """Return the largest of `low` to `high` that works, if all smaller ones work too; None if not even `low` does."""
    if low > high or not works(low):
        return None
    if works(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if works(middle):
            low = middle
        else:
            high = middle
    return low


def smallest(low: int, high: int, works: Callable[[int], bool]) -> int | None:
    """Return the smallest of `low` to `high` that works, if all larger ones work too; None if not even `high` does."""
    negative = largest(-high, -low, lambda value: works(-value))
    return None if negative is None else -negative


DEFAULT_MAX_NUM_SEQS = {"cuda": 256, "cpu": 32}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cuda": 8192, "cpu": 1024}
DEFAULT_MAX_MODEL_LEN = 32768
"""Default where config.json names no maximum."""
LOWEST_BATCHED_TOKENS = 256
"""Bound below which an open `max_num_batched_tokens` is not lowered, since prefill would become slow."""


@dataclass(frozen=True)
class Limits:
    """The three settings that memory depends on and that may be lowered."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def min_batched_tokens(max_num_seqs: int, slots_per_request: int, block_size: int) -> int:
    """Return the smallest `max_num_batched_tokens`: a full decode step and one block of prefill tokens."""
    return max_num_seqs * slots_per_request + block_size


def lowest_batched_tokens(max_num_seqs: int, slots_per_request: int, block_size: int) -> int:
    """Return the smallest value that an open `max_num_batched_tokens` is lowered to."""
    return max(LOWEST_BATCHED_TOKENS, min_batched_tokens(max_num_seqs, slots_per_request, block_size))


def wanted_limits(
    config: EngineConfig, model: ModelSpec, kind: str, slots_per_request: int
) -> tuple[Limits, list[Decision]]:
    """Return the given values, and for open ones the defaults of a device of `kind`.

    ConfigError if given values contradict each other or the model.
    """
    max_model_len, decisions = _wanted_model_len(config, model)
    prefix = config.expected_prefix_tokens
    if prefix is not None and prefix > max_model_len:
        message = f"expected_prefix_tokens {prefix} is more than a request may have: max_model_len {max_model_len}"
        raise ConfigError(message, [Remedy("expected_prefix_tokens", max_model_len), Remedy("max_model_len", prefix)])
    _check_drafts(config, max_model_len)
    rows, tokens, row_decisions = _wanted_rows_and_tokens(config, kind, slots_per_request)
    longest = min(max_model_len, DEFAULT_MAX_NUM_BATCHED_TOKENS["cuda"])
    if model.is_prefix_lm and not config.is_given("max_num_batched_tokens") and tokens < longest:
        reason = "raised, since one step computes a prompt, whose tokens see each other in both directions"
        decisions.append(Decision("max_num_batched_tokens", tokens, longest, reason))
        tokens = longest
    return Limits(rows, tokens, max_model_len), [*row_decisions, *decisions]


def min_model_len(config: EngineConfig) -> int:
    """Return the smallest `max_model_len` that is compatible with the other settings.

    It has room for the expected prefix. With drafts it has room for a prompt token, the token that drafts follow, the
    drafts and the token after them.
    """
    least = 2 if config.speculative is None else config.num_speculative_tokens + 3
    return max(least, config.expected_prefix_tokens or 0)


def _check_drafts(config: EngineConfig, max_model_len: int) -> None:
    """Raise ConfigError if no request could ever have this number of drafts."""
    count, most = config.num_speculative_tokens, max_model_len - 3
    if config.speculative is None or count <= most:
        return
    message = (
        f"num_speculative_tokens {count} is more than a request of max_model_len {max_model_len} can have: its prompt, "
        "the token that drafts follow and the one behind them leave room for "
    )
    longer = Remedy("max_model_len", min_model_len(config))
    if most < 1:
        raise ConfigError(f"{message}none", [Remedy("speculative", None), longer])
    raise ConfigError(f"{message}{most}", [Remedy("speculative", config.speculative.with_tokens(most)), longer])


def lower_limits(
    config: EngineConfig, wanted: Limits, slots_per_request: int, fits: Callable[[Limits, int], bool]
) -> tuple[Limits, bool]:
    """Return (limits, whether they fit). Open values are lowered, only as far as needed; given ones are kept.

    `fits(limits, rows)` returns whether activations of `limits`, the slots of `rows` rows and the blocks of one request
    fit. First `max_num_seqs` is lowered, then `max_num_batched_tokens`, then `max_model_len`; the last two only while
    one request with the slots of one row does not fit. Then the earlier ones are raised again as far as the later
    reductions allow.
    """
    if fits(wanted, wanted.max_num_seqs):
        return wanted, True
    block_size = config.block_size
    limits = wanted if config.is_given("max_num_seqs") else replace(wanted, max_num_seqs=1)
    if not fits(limits, 1):
        limits = _lower_for_one_request(config, limits, slots_per_request, fits)
    if not config.is_given("max_num_seqs"):
        most = (limits.max_num_batched_tokens - block_size) // slots_per_request
        rows = largest(1, min(wanted.max_num_seqs, most), lambda rows: fits(replace(limits, max_num_seqs=rows), rows))
        limits = replace(limits, max_num_seqs=rows or 1)
    return limits, fits(limits, limits.max_num_seqs)


def _lower_for_one_request(
    config: EngineConfig, wanted: Limits, slots_per_request: int, fits: Callable[[Limits, int], bool]
) -> Limits:
    """Return `wanted` with the open ones of its two token limits lowered until one request fits, if it ever does."""
    block_size, limits = config.block_size, wanted
    floor = lowest_batched_tokens(wanted.max_num_seqs, slots_per_request, block_size)
    if not config.is_given("max_num_batched_tokens"):
        limits = replace(limits, max_num_batched_tokens=min(floor, wanted.max_num_batched_tokens))
    if not config.is_given("max_model_len") and not fits(limits, 1):
        blocks = largest(
            1,
            -(-wanted.max_model_len // block_size) - 1,
            lambda blocks: fits(replace(limits, max_model_len=blocks * block_size), 1),
        )
        limits = replace(limits, max_model_len=min((blocks or 1) * block_size, wanted.max_model_len))
    if not config.is_given("max_num_batched_tokens"):
        tokens = largest(
            limits.max_num_batched_tokens,
            wanted.max_num_batched_tokens,
            lambda tokens: fits(replace(limits, max_num_batched_tokens=tokens), 1),
        )
        limits = replace(limits, max_num_batched_tokens=tokens or limits.max_num_batched_tokens)
    return limits


def _wanted_rows_and_tokens(config: EngineConfig, kind: str, slots_per_request: int) -> tuple[int, int, list[Decision]]:
    default_rows, default_tokens = DEFAULT_MAX_NUM_SEQS[kind], DEFAULT_MAX_NUM_BATCHED_TOKENS[kind]
    rows, tokens = config.max_num_seqs or default_rows, config.max_num_batched_tokens or default_tokens
    least = min_batched_tokens(rows, slots_per_request, config.block_size)
    if tokens >= least:
        return rows, tokens, []
    most_rows = (tokens - config.block_size) // slots_per_request
    of_each = "one token" if slots_per_request == 1 else f"1 + {slots_per_request - 1} tokens"
    rule = (
        f"max_num_batched_tokens holds {of_each} of each of max_num_seqs requests and a block of "
        f"{config.block_size} tokens for prefill"
    )
    if not config.is_given("max_num_batched_tokens"):
        decision = Decision("max_num_batched_tokens", default_tokens, least, f"raised, since {rule}")
        return rows, least, [decision]
    if not config.is_given("max_num_seqs") and most_rows >= 1:
        return (most_rows, tokens, [Decision("max_num_seqs", default_rows, most_rows, f"lowered, since {rule}")])
    given_rows = rows if config.is_given("max_num_seqs") else 1
    least = min_batched_tokens(given_rows, slots_per_request, config.block_size)
    remedies = [Remedy("max_num_batched_tokens", least)]
    if config.is_given("max_num_seqs") and most_rows >= 1:
        remedies.append(Remedy("max_num_seqs", most_rows))
    most_drafts = (tokens - config.block_size) // given_rows - 1
    if config.speculative is not None and most_drafts >= 0:
        remedies.append(Remedy("speculative", config.speculative.with_tokens(most_drafts) if most_drafts else None))
    raise ConfigError(f"max_num_batched_tokens {tokens} is too small for max_num_seqs {given_rows}: {rule}", remedies)


def _wanted_model_len(config: EngineConfig, model: ModelSpec) -> tuple[int, list[Decision]]:
    maximum = model.max_position_embeddings
    if maximum is None:
        if config.max_model_len is not None:
            return config.max_model_len, []
        reason = "the checkpoint names no maximum"
        return DEFAULT_MAX_MODEL_LEN, [Decision("max_model_len", None, DEFAULT_MAX_MODEL_LEN, reason)]
    if config.max_model_len is None:
        return maximum, []
    highest, of_what = maximum, "max_position_embeddings"
    if model.rope is not None and model.rope.kind in ("dynamic", "yarn"):
        scaled = int(model.rope.parameters["factor"] * model.rope.original_max_position)
        if scaled > maximum:
            highest, of_what = scaled, f"the original length times the factor of its {model.rope.kind} rope"
    if config.max_model_len > highest:
        message = f"max_model_len {config.max_model_len} is beyond what the model can do: {highest}, {of_what}"
        raise ConfigError(message, [Remedy("max_model_len", highest)])
    return config.max_model_len, []
