"""sample on a GPU, in blocks of logits whose best tokens give the row's best.

Between two such passes, a program finds the threshold of each row. The host reads nothing. Thresholds are found bit by
bit: scaled logits are at most 0, and the bits of their magnitudes are in the magnitudes' order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables import pointwise as launches
from ostinato.ops.reference.sample import MAX_TEMPERATURE, MIN_TEMPERATURE
from ostinato.ops.triton import common
from ostinato.ops.triton.common import noise_bits, to_gumbel


@triton.jit
def best_of_blocks(
    logits,
    settings,
    keys,
    row_best,
    thresholds,
    best,
    places,
    vocab_size,
    blocks,
    logits_row,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best value of one block of one row, NaN before all others, and the lowest token that has this value.

    With `DRAWS`, rows with a temperature use values for sampling: scaled by it, -inf below the row's threshold, and
    with noise.
    """
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    value = tl.load(logits + row.to(tl.int64) * logits_row + token, mask=is_token, other=float("-inf"))
    if DRAWS:
        temperature = tl.load(settings + row * 3)
        if temperature > 0:
            value = tl.div_rn(value - tl.load(row_best + row), temperature)
            value = tl.where(value < tl.load(thresholds + row), float("-inf"), value)
            low = tl.load(keys + row * 2).to(tl.uint32, bitcast=True)
            high = tl.load(keys + row * 2 + 1).to(tl.uint32, bitcast=True)
            value += to_gumbel(noise_bits(token.to(tl.uint32), low, high))
            value = tl.where(is_token, value, float("-inf"))
    of_block, place = _best(value, token, is_token)
    tl.store(best + row * blocks + tl.program_id(1), of_block)
    tl.store(places + row * blocks + tl.program_id(1), place)


@triton.jit
def _best(value, token, is_token):
    """Return (best value, its lowest token), NaN being better than all others."""
    LAST: tl.constexpr = 2147483647
    is_nan = value != value
    any_nan = tl.max(is_nan.to(tl.int32), 0)
    best = tl.max(tl.where(is_nan, float("-inf"), value), 0)
    at_best = tl.where(any_nan == 1, is_nan, (value == best) & is_token)
    place = tl.min(tl.where(at_best, token, LAST), 0)
    return tl.where(any_nan == 1, float("nan"), best), place


@triton.jit
def best_of_rows(best, places, tokens, row_best, blocks, BLOCKS: tl.constexpr):
    """Find the row's best value and its token, -1 if the value is not finite."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    value = tl.load(best + row * blocks + block, mask=block < blocks, other=float("-inf"))
    place = tl.load(places + row * blocks + block, mask=block < blocks, other=0)
    of_row, token = _best(value, place, block < blocks)
    is_finite = (of_row == of_row) & (of_row < float("inf")) & (of_row > float("-inf"))
    tl.store(tokens + row, tl.where(is_finite, token, -1))
    tl.store(row_best + row, tl.where(is_finite, of_row, float("nan")))


@triton.jit
def find_thresholds(
    logits,
    settings,
    top_p,
    row_best,
    thresholds,
    vocab_size,
    logits_row,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the least scaled logit that one row may sample, by top-k, then top-p among these, and min-p."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_row
    temperature = tl.load(settings + row * 3)
    best = tl.load(row_best + row)
    threshold = tl.load(settings + row * 3 + 2)
    # Other rows sample nothing: their best logit is not finite, or they are greedy.
    if (temperature > 0) & (best == best):
        # The largest magnitude, as bits, that may be sampled; infinity allows all.
        reach = 0x7F800000
        if HAS_TOP_K:
            wanted = tl.load(settings + row * 3 + 1)
            if (wanted > 0) & (wanted < vocab_size):
                reach = 0
                for i in range(31):
                    # Set this bit if too few tokens are within reach without it.
                    below = reach + ((1 << (30 - i)) - 1)
                    count = 0
                    for base in range(0, vocab_size, BLOCK):
                        bits = _magnitudes(logits, base, vocab_size, best, temperature, BLOCK)
                        count += tl.sum((bits <= below).to(tl.int32), 0)
                    reach = tl.where(count < wanted, reach + (1 << (30 - i)), reach)
        if HAS_TOP_P:
            wanted_share = tl.load(top_p + row)
            if wanted_share < 1:
                total = best.to(tl.float64) * 0
                for base in range(0, vocab_size, BLOCK):
                    bits = _magnitudes(logits, base, vocab_size, best, temperature, BLOCK)
                    total += _mass(bits, reach)
                wanted_mass = wanted_share * total
                least = 0
                for i in range(31):
                    below = least + ((1 << (30 - i)) - 1)
                    mass = total * 0
                    for base in range(0, vocab_size, BLOCK):
                        bits = _magnitudes(logits, base, vocab_size, best, temperature, BLOCK)
                        mass += _mass(bits, tl.minimum(below, reach))
                    least = tl.where(mass < wanted_mass, least + (1 << (30 - i)), least)
                reach = tl.minimum(least, reach)
        threshold = tl.maximum(threshold, -reach.to(tl.float32, bitcast=True))  # type: ignore[attr-defined]
    tl.store(thresholds + row, threshold)


@triton.jit
def _magnitudes(logits, base, vocab_size, best, temperature, BLOCK: tl.constexpr):
    """Return the bits of the magnitudes of scaled logits; beyond infinity where there is no token."""
    token = base + tl.arange(0, BLOCK)
    value = tl.load(logits + token, mask=token < vocab_size, other=0.0)
    bits = tl.abs(tl.div_rn(value - best, temperature)).to(tl.int32, bitcast=True)
    return tl.where(token < vocab_size, bits, 0x7FFFFFFF)


@triton.jit
def _mass(bits, reach):
    """Sum the exponentials of the logits whose bits are at most `reach`."""
    value = tl.exp(-bits.to(tl.float32, bitcast=True))
    return tl.sum(tl.where(bits <= reach, value, 0.0).to(tl.float64), 0)


def sample(
    logits: torch.Tensor, settings: torch.Tensor | None = None, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `ops.sample`; its reference documents arguments and result."""
    rows, vocab_size = logits.shape
    device = logits.device
    of_blocks, of_rows, search = launches.sample_launches(vocab_size=vocab_size, capability=common.capability(logits))
    blocks = launches.num_blocks(vocab_size)
    tokens, row_best = (torch.empty(rows, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    best, places = (torch.empty((rows, blocks), dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))

    def find_best(**drawn: torch.Tensor) -> None:
        """Find the best tokens of the logits, or of the values for sampling."""
        common.run(
            best_of_blocks,
            (rows, blocks),
            of_blocks,
            logits=logits,
            **drawn or dict.fromkeys(("settings", "keys", "row_best", "thresholds"), row_best),
            best=best,
            places=places,
            vocab_size=vocab_size,
            blocks=blocks,
            logits_row=logits.stride(0),
            DRAWS=bool(drawn),
        )
        common.run(
            best_of_rows, (rows,), of_rows, best=best, places=places, tokens=tokens, row_best=row_best, blocks=blocks
        )

    find_best()
    # The settings are in the CPU's memory, so reading them waits for nothing.
    if settings is None or keys is None or not bool((settings[:, 0] != 0).any()):
        return tokens
    temperature, top_k, top_p, min_p = settings.unbind(1)
    scaled = torch.where(temperature == 0, 0, temperature.clamp(MIN_TEMPERATURE, MAX_TEMPERATURE))
    least = torch.where(min_p > 0, min_p, 0).log()
    numbers = common.sent(torch.stack((scaled, top_k, least), dim=1).float(), device)
    thresholds = torch.empty_like(row_best)
    common.run(
        find_thresholds,
        (rows,),
        search,
        logits=logits,
        settings=numbers,
        top_p=common.sent(top_p.contiguous(), device),
        row_best=row_best,
        thresholds=thresholds,
        vocab_size=vocab_size,
        logits_row=logits.stride(0),
        HAS_TOP_K=bool(((top_k > 0) & (top_k < vocab_size)).any()),
        HAS_TOP_P=bool((top_p < 1).any()),
    )
    find_best(settings=numbers, keys=common.sent(keys, device), row_best=row_best, thresholds=thresholds)
    return tokens
