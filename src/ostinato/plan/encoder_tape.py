"""The tape of a vision encoder in numbers: what each of its calls computes, and so the arena that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ostinato.plan.graphs.first_fit import first_fit
from ostinato.plan.model import DTYPE_BYTES, VisionSpec


@dataclass(frozen=True)
class Computed:
    """What one call computes: `size` bytes, from what the calls numbered `reads` computed, beside buffers and
    weights."""

    size: int
    reads: tuple[int, ...]


def encoder_tape(vision: VisionSpec, dtype: str, tokens: int) -> list[Computed]:
    """The calls of `layers/vision.py` for `tokens` output tokens, as a recorder notes them; the last gives the result.

    A kernel is one call, whichever implementation runs: what it allocates meanwhile is its own. Views are none.
    """
    width, patches = DTYPE_BYTES[dtype], tokens * vision.patches_per_token
    stream, inner = patches * vision.hidden_size * width, patches * vision.intermediate_size * width
    merged = tokens * vision.out_hidden_size * width
    calls: list[Computed] = []

    def call(size: int, *reads: int) -> int:
        calls.append(Computed(size, reads))
        return len(calls) - 1

    def merge(x: int) -> int:
        return call(merged, call(stream, call(stream, x)))  # the norm, and two products

    positions = call(stream)
    # Pixels are float32, and need no call to become that.
    pixels = () if dtype == "float32" else (call(patches * vision.patch_elements * width),)
    x = call(stream, positions, *pixels)
    angles = call(patches * vision.hidden_size // vision.num_heads * 4)
    results = []
    for layer in range(vision.num_layers):
        qkv = call(3 * stream, call(stream, x))
        rotated = call(2 * stream, qkv, angles)
        x = call(stream, call(stream, rotated, qkv), x)
        x = call(stream, call(inner, call(stream, x)), x)
        if layer in vision.deepstack_layers:
            results.append(merge(x))
    results.append(merge(x))
    call(len(results) * merged, *results)
    return calls


@lru_cache(maxsize=256)
def encoder_arena_bytes(vision: VisionSpec, dtype: str, tokens: int) -> int:
    """Bytes of the arena that the tape of this many tokens is laid out in. Kept, as a plan tries the same again and
    again while it looks for values that fit."""
    calls = encoder_tape(vision, dtype, tokens)
    lives = {number: (number, number) for number in range(len(calls))}
    for number, computed in enumerate(calls):
        lives |= {read: (read, number) for read in computed.reads}
    # The result is there until the next replay.
    lives[len(calls) - 1] = (len(calls) - 1, len(calls))
    return first_fit({number: computed.size for number, computed in enumerate(calls)}, lives).size
