"""Sampling noise as a pure function of (seed, position, token id), without generator state.

A token is sampled as the argmax of `logits / temperature + gumbel`. As the noise of one token at one position
of one request depends on nothing else, the sampled tokens do not depend on the rest of the batch, on how the
prompt was split, on which tokens were ruled out before, or on whether a token was first guessed by a proposer.

`key(seed, position)` is two 32-bit words from the splitmix64 finaliser (`ops/seeds.py`). Each token id is mixed with
both by 32-bit integer steps (the constants are in `ops/seeds.py`), which wrap around and are the same on every device;
only the logarithms at the end may differ in the last bit between devices.

Resolution: of the 32 bits, one picks the half of the unit interval and 31 the distance w = (m + 1/2) / 2^32
from its outer end, so both tails are resolved down to 2^-33. With E = -log(1 - w) or -log(w), the noise g =
-log(E) lies between `GUMBEL_MIN` = -3.13 and `GUMBEL_MAX` = 22.88: a token less likely than about 2^-32 is
sampled too rarely. Two tokens at one position never share a hash, as the mix is a bijection.
"""

from __future__ import annotations

import torch

from ostinato.ops.arrays import noise_keys
from ostinato.ops.seeds import HASH_MULTIPLIERS, HASH_SHIFTS

# torch's int32 needs signed integers.
_SIGNED_MULTIPLIERS = tuple(each - 2**32 if each >= 2**31 else each for each in HASH_MULTIPLIERS)


def key(seed: int, position: int) -> tuple[int, int]:
    """Return the two words that make the noise of one position, as signed 32-bit integers."""
    [(low, high)] = keys([(seed, position)]).tolist()
    return low, high


def keys(seeds_and_positions: list[tuple[int, int]], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return `key` of each (seed, position), [rows, 2] int32."""
    return torch.from_numpy(noise_keys(seeds_and_positions)).to(device)


def gumbel(row_keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32.

    `row_keys` is [..., 2] int32 (from `keys`) and `token_ids` int32. The result has the shape of `row_keys[..., 0]`
    broadcast with `token_ids`: for [rows, 2], pass tokens as [vocab] with `row_keys[:, None]`, or one pair each.
    """
    return _to_gumbel(mix(mix(token_ids ^ row_keys[..., 0]).add_(row_keys[..., 1])))


def mix(x: torch.Tensor) -> torch.Tensor:
    """Apply a bijection of the 32-bit integers that spreads every input bit, in place on int32."""
    scratch = torch.empty_like(x)
    for step, shift in enumerate(HASH_SHIFTS):
        # torch shifts signed integers arithmetically: the mask takes the copies of the sign bit away.
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_(2 ** (32 - shift) - 1))
        if step < len(_SIGNED_MULTIPLIERS):
            x.mul_(_SIGNED_MULTIPLIERS[step])
    return x


def _to_gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Return Gumbel variates from uniform 32-bit integers; a sign bit of 1 selects the half with E above log 2."""
    far = bits.lt(0).to(torch.float32)
    distance = (bits & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32)
    # Both logarithms are finite, so products with 0 and 1 select exactly; torch.where is several times
    # slower.
    log_far = distance.log().mul_(far)
    log_survival = distance.neg_().log1p_().mul_(far.neg_().add_(1)).add_(log_far)
    return log_survival.neg_().log_().neg_()
