"""RopeSpec: rotary position embedding, and its frequencies, fixed for the longest request."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.plan.decision import Decision


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the checkpoint.

    `kind` is one of `default`, `linear`, `llama3`, `yarn`, `dynamic`, `longrope`, `proportional`, `factors`;
    `parameters` holds that kind's own factors under the names that config.json uses. `rotary_dim` is the number of
    rotated elements of each head, those of an angle of 0 included.
    """

    kind: str
    theta: float
    rotary_dim: int
    original_max_position: int
    parameters: JsonObject
    sections: tuple[int, int, int] | None = None
    """Numbers of angles for time, height and width (M-RoPE, interleaved by `plan.rope.axes`); None: one position."""


@dataclass(frozen=True)
class LayerRope:
    """Rotary embedding of the layers with these numbers, counted from 0."""

    layers: tuple[int, ...]
    rope: RopeSpec


def axes(rope: RopeSpec) -> list[int]:
    """Return, for each angle, which of a token's positions it uses: 0 time, 1 height, 2 width.

    With sections, height and width have every third angle, until they have as many as their section says, or there are
    no more (the interleaved M-RoPE of Qwen3-VL, arXiv 2511.21631, section 2.1); all others are time's.
    """
    if rope.sections is None:
        return [0] * (rope.rotary_dim // 2)
    return [i % 3 if i < 3 * rope.sections[i % 3] else 0 for i in range(rope.rotary_dim // 2)]


def resolve_ropes(ropes: Iterable[RopeSpec], max_model_len: int) -> tuple[tuple[RopeSpec, ...], list[Decision]]:
    """Return `resolve_rope` of each of a model's embeddings, with the decisions."""
    resolved = [resolve_rope(rope, max_model_len) for rope in ropes]
    decisions = dict.fromkeys(decision for _, decision in resolved if decision is not None)
    return tuple(rope for rope, _ in resolved), list(decisions)


def resolve_rope(rope: RopeSpec, max_model_len: int) -> tuple[RopeSpec, Decision | None]:
    """Return the embedding that serves requests of up to `max_model_len` tokens, with frequencies that stay fixed.

    `longrope` (LongRoPE, arXiv 2402.13753) has two lists of divisors, for requests within the original length and for
    longer ones. Apart from it, only `dynamic` depends on length. Up to its original length it equals `default`; beyond
    that, theta is enlarged for the longest request and used for all: theta * (factor * length / original - (factor -
    1)) ** (dim / (dim - 2)), the NTK-aware scaling that transformers computes for a sequence of that length.
    """
    if rope.kind == "longrope":
        is_long = max_model_len > rope.original_max_position
        chosen = "long_factor" if is_long else "short_factor"
        where = "beyond" if is_long else "within"
        reason = (
            f"max_model_len {max_model_len} is {where} the original {rope.original_max_position} positions; all "
            "requests have the same frequencies, so that cached keys stay valid while a request grows"
        )
        of_chosen = {"factors": rope.parameters[chosen], "attention_factor": rope.parameters["attention_factor"]}
        return replace(rope, kind="factors", parameters=of_chosen), Decision("rope", "longrope", chosen, reason)
    if rope.kind != "dynamic":
        return rope, None
    original, factor, dim = rope.original_max_position, rope.parameters["factor"], rope.rotary_dim
    plain = replace(rope, kind="default", parameters={})
    if max_model_len <= original:
        reason = f"max_model_len {max_model_len} is within the original {original} positions"
        return plain, Decision("rope", "dynamic", "default", reason)
    theta = rope.theta * (factor * max_model_len / original - (factor - 1)) ** (dim / (dim - 2))
    reason = (
        f"max_model_len {max_model_len} is beyond the original {original} positions: theta is fixed for that "
        "length, for all requests, so that cached keys stay valid while a request grows"
    )
    return replace(plain, theta=theta), Decision("rope", "dynamic", f"default with theta {theta:.6g}", reason)


def inverse_frequencies(rope: RopeSpec) -> tuple[list[float], float]:
    """Return (radians per position for each pair of rotated elements, factor on cosine and sine).

    `dynamic` and `longrope` have those of their original length until they are resolved: a sketch is made before the
    longest request is known. The definitions are those of transformers: linear divides all frequencies; llama3 (Llama
    3.1) divides the low ones and blends in between by wavelength; yarn (Peng et al. 2023, arXiv 2309.00071, section 3)
    blends by the rotations within the original length. `proportional` (Gemma 4, LFM3) pairs all elements of a head, and
    rotates the first pairs only, as many as its `partial_rotary_factor` says. `factors` divides each frequency by its
    own.
    """
    dim = rope.rotary_dim
    plain = [rope.theta ** (-i / dim) for i in range(0, dim, 2)]
    if rope.kind == "proportional":
        rotated = int(rope.parameters["partial_rotary_factor"] * dim // 2)
        factor = rope.parameters.get("factor", 1.0)
        return [frequency / factor if i < rotated else 0.0 for i, frequency in enumerate(plain)], 1.0
    if rope.kind == "linear":
        return [frequency / rope.parameters["factor"] for frequency in plain], 1.0
    if rope.kind in ("factors", "longrope"):
        factors = rope.parameters["factors" if rope.kind == "factors" else "short_factor"]
        scaling = rope.parameters.get("attention_factor", 1.0)
        return [frequency / factor for frequency, factor in zip(plain, factors, strict=True)], scaling
    if rope.kind == "llama3":
        return [_llama3_frequency(frequency, rope) for frequency in plain], 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(plain, rope), _yarn_attention_factor(rope.parameters)
    return plain, 1.0


def _llama3_frequency(frequency: float, rope: RopeSpec) -> float:
    factor: float = rope.parameters["factor"]
    low: float = rope.parameters["low_freq_factor"]
    high: float = rope.parameters["high_freq_factor"]
    rotations = rope.original_max_position * frequency / (2 * math.pi)
    if rotations > high:
        return frequency
    if rotations < low:
        return frequency / factor
    blend = (rotations - low) / (high - low)
    return (1 - blend) * frequency / factor + blend * frequency


def _yarn_frequencies(plain: list[float], rope: RopeSpec) -> list[float]:
    low, high = _yarn_ramp(rope)
    factor = rope.parameters["factor"]
    frequencies = []
    for i, frequency in enumerate(plain):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(frequency / factor * ramp + frequency * (1 - ramp))
    return frequencies


def _yarn_ramp(rope: RopeSpec) -> tuple[float, float]:
    """Return the pairs between which extrapolation turns into interpolation: those that make beta rotations."""

    def pair_with(rotations: float) -> float:
        wavelength_ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    low = pair_with(rope.parameters.get("beta_fast") or 32)
    high = pair_with(rope.parameters.get("beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    # A ramp of width 0 would divide by zero.
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(parameters: JsonMapping) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor: float = parameters["factor"]

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)
