"""`rotary`, `rotate`, `rotary_angles` and `axial_angles` on a GPU.

A program rotates some query heads of one token, or some of its key heads; with key heads `rotary` also writes keys and
values into the token's cell of the cache. Sine and cosine are reduced in float64: that is exact for any position, and
needs no stack, which the library's functions use for large angles. `rotary_angles` is `axial_angles` of one axis.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables import pointwise as launches
from ostinato.ops.launch_tables.launch import cdiv
from ostinato.ops.triton import common
from ostinato.ops.triton.common import larger, rounded_to_integer, scale_of, to_dtype


@triton.jit
def sine_cosine(angle):
    """Return (sine, cosine) of float32 `angle`, by their series around the nearest multiple of a quarter turn."""
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * 0.6366197723675814 + 0.5)
    # pi / 2 is split into two parts; the first has few enough bits that its multiples are exact.
    x = (wide - quarters * 1.5707963267341256) - quarters * 6.077100506506192e-11
    y = x * x
    sine = x * (1 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880 + y * (-1 / 39916800))))))
    cosine = 1 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 + y * (-1 / 3628800)))))
    quarter = quarters.to(tl.int64) & 3
    swapped = (quarter & 1) == 1
    of_sine = tl.where(swapped, cosine, sine)
    of_cosine = tl.where(swapped, sine, cosine)
    sine = tl.where(quarter >= 2, -of_sine, of_sine)
    cosine = tl.where((quarter == 1) | (quarter == 2), -of_cosine, of_cosine)
    return sine.to(tl.float32), cosine.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def write_angles(
    positions,
    axes,
    frequencies,
    out,
    scaling,
    tokens,
    half,
    position_token,
    position_axis,
    HAS_AXES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_own = place < tokens * half
    token, element = place // half, place % half
    axis = tl.load(axes + element, mask=is_own, other=0) if HAS_AXES else element * 0
    position = tl.load(positions + token * position_token + axis * position_axis, mask=is_own, other=0)
    frequency = tl.load(frequencies + element, mask=is_own, other=0.0)
    sine, cosine = sine_cosine(position.to(tl.float32) * frequency)
    tl.store(out + place, cosine * scaling, mask=is_own)
    tl.store(out + tokens * half + place, sine * scaling, mask=is_own)


def axial_angles(
    positions: torch.Tensor, axes: torch.Tensor, frequencies: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Compute `ops.axial_angles`; its reference documents arguments and result."""
    return angles_of(positions, positions.stride(0), axes, frequencies, scaling)


def angles_of(
    positions: torch.Tensor, position_token: int, axes: torch.Tensor | None, frequencies: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return the cosines and sines of angles, [2, tokens, half] float32; without `axes`, `positions` are [tokens]."""
    tokens, half = positions.shape[0], frequencies.shape[0]
    out = torch.empty((2, tokens, half), dtype=torch.float32, device=positions.device)
    (launch,) = launches.rotary_angles_launches(capability=common.capability(positions))
    common.run(
        write_angles,
        (cdiv(tokens * half, launch.blocks["BLOCK"]),),
        launch,
        positions=positions,
        axes=axes,
        frequencies=frequencies,
        out=out,
        scaling=scaling,
        tokens=tokens,
        half=half,
        position_token=position_token,
        position_axis=0 if axes is None else positions.stride(1),
        HAS_AXES=axes is not None,
    )
    return out


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute `ops.rotary_angles`; its reference documents arguments and result."""
    return angles_of(positions, positions.stride(0), None, frequencies, scaling)


@triton.jit
def rotate_heads(
    x,
    out,
    scales,
    angles,
    token,
    tokens,
    first_head,
    heads,
    x_token,
    x_head,
    out_token,
    out_head,
    scale_token,
    multiplier,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate `HEADS` heads of one token from `x` into `out`, at the token's cell, all times `multiplier`.

    The first `2 * HALF` elements are rotated by the token's angles, the rest pass through. With `scales`, in which the
    token's begin at `scale_token`, the heads are rounded to integers.
    """
    head = first_head + tl.arange(0, HEADS)
    is_head = head < heads
    from_head = token.to(tl.int64) * x_token + head[:, None] * x_head
    to_head = out_token + head[:, None] * out_head
    dtype = x.dtype.element_ty
    largest = tl.zeros([HEADS], tl.float32)
    if HALF > 0:
        element = tl.arange(0, HALF_WIDTH)
        cos = tl.load(angles + token * HALF + element, mask=element < HALF, other=0.0)[None, :]
        sin = tl.load(angles + (tokens + token) * HALF + element, mask=element < HALF, other=0.0)[None, :]
        is_own = is_head[:, None] & (element < HALF)[None, :]
        first = tl.load(x + from_head + element[None, :], mask=is_own, other=0.0).to(tl.float32) * multiplier
        second = tl.load(x + from_head + HALF + element[None, :], mask=is_own, other=0.0).to(tl.float32) * multiplier
        turned = to_dtype(first * cos - second * sin, dtype)
        other = to_dtype(second * cos + first * sin, dtype)
        if scales is not None:
            largest = larger(larger(largest, turned), other)
    if 2 * HALF < HEAD_DIM:
        behind = 2 * HALF + tl.arange(0, REST_WIDTH)
        is_rest = is_head[:, None] & (behind < HEAD_DIM)[None, :]
        rest = tl.load(x + from_head + behind[None, :], mask=is_rest, other=0.0).to(tl.float32) * multiplier
        rest = to_dtype(rest, dtype)
        if scales is not None:
            largest = larger(largest, rest)
    if scales is not None:
        scale = scale_of(largest)
        tl.store(scales + scale_token + head, scale, mask=is_head)
        if HALF > 0:
            turned = rounded_to_integer(turned, scale)
            other = rounded_to_integer(other, scale)
        if 2 * HALF < HEAD_DIM:
            rest = rounded_to_integer(rest, scale)
    if HALF > 0:
        tl.store(out + to_head + element[None, :], turned, mask=is_own)
        tl.store(out + to_head + HALF + element[None, :], other, mask=is_own)
    if 2 * HALF < HEAD_DIM:
        tl.store(out + to_head + behind[None, :], rest, mask=is_rest)


@triton.jit(do_not_specialize=["tokens"])
def rotate_tokens(
    x,
    out,
    angles,
    tokens,
    heads,
    x_token,
    x_head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0)
    rotate_heads(
        x,
        out,
        None,
        angles,
        token,
        tokens,
        tl.program_id(1) * HEADS,
        heads,
        x_token,
        x_head,
        token.to(tl.int64) * heads * HEAD_DIM,
        HEAD_DIM,
        0,
        1.0,
        HEAD_DIM,
        HALF,
        HALF_WIDTH,
        REST_WIDTH,
        HEADS,
    )


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Compute `ops.encoder.rotate`; its reference documents arguments and result."""
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (launch,) = launches.rotate_launches(
        num_heads=heads, head_dim=head_dim, rotated=2 * angles.shape[-1], capability=common.capability(x)
    )
    common.run(
        rotate_tokens,
        (tokens, cdiv(heads, launch.blocks["HEADS"])),
        launch,
        x=x,
        out=out,
        angles=angles,
        tokens=tokens,
        heads=heads,
        x_token=x.stride(0),
        x_head=x.stride(1),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def rotate_and_store(
    q,
    k,
    v,
    angles,
    k_cache,
    v_cache,
    kv_cells,
    k_scales,
    v_scales,
    out,
    key_multiplier,
    tokens,
    heads,
    kv_heads,
    q_programs,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    key_cell,
    key_head,
    value_cell,
    value_head,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate queries in the first `q_programs` programs of a token, keys in the others, which also copy values."""
    token = tl.program_id(0)
    program = tl.program_id(1)
    if program < q_programs:
        rotate_heads(
            q,
            out,
            None,
            angles,
            token,
            tokens,
            program * HEADS,
            heads,
            q_token,
            q_head,
            token.to(tl.int64) * heads * HEAD_DIM,
            HEAD_DIM,
            0,
            1.0,
            HEAD_DIM,
            HALF,
            HALF_WIDTH,
            REST_WIDTH,
            HEADS,
        )
    else:
        first = (program - q_programs) * HEADS
        cell = tl.load(kv_cells + token)
        rotate_heads(
            k,
            k_cache,
            k_scales,
            angles,
            token,
            tokens,
            first,
            kv_heads,
            k_token,
            k_head,
            cell * key_cell,
            key_head,
            cell * kv_heads,
            key_multiplier,
            HEAD_DIM,
            HALF,
            HALF_WIDTH,
            REST_WIDTH,
            HEADS,
        )
        if v is not None:
            head = (first + tl.arange(0, HEADS))[:, None]
            element = tl.arange(0, WIDTH)[None, :]
            is_own = (head < kv_heads) & (element < HEAD_DIM)
            value = tl.load(v + token.to(tl.int64) * v_token + head * v_head + element, mask=is_own, other=0.0)
            if v_scales is not None:
                scale = scale_of(larger(tl.zeros([HEADS], tl.float32), value))
                of_head = first + tl.arange(0, HEADS)
                tl.store(v_scales + cell * kv_heads + of_head, scale, mask=of_head < kv_heads)
                value = rounded_to_integer(value, scale)
            tl.store(v_cache + cell * value_cell + head * value_head + element, value, mask=is_own)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    angles: torch.Tensor | None,
    key_multiplier: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    kv_cells: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `ops.rotary`; its reference documents arguments and result."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # Without angles the result is the queries, unchanged.
    out = q if angles is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    (launch,) = launches.rotary_launches(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotated=0 if angles is None else 2 * angles.shape[-1],
        capability=common.capability(q),
    )
    at_once = launch.blocks["HEADS"]
    q_programs = 0 if angles is None else cdiv(heads, at_once)
    common.run(
        rotate_and_store,
        (tokens, q_programs + cdiv(kv_heads, at_once)),
        launch,
        q=q,
        k=k,
        v=v,
        angles=angles,
        k_cache=k_cache,
        v_cache=v_cache,
        kv_cells=kv_cells,
        k_scales=k_scales,
        v_scales=v_scales,
        out=out,
        key_multiplier=key_multiplier,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        q_programs=q_programs,
        q_token=q.stride(0),
        q_head=q.stride(1),
        k_token=k.stride(0),
        k_head=k.stride(1),
        v_token=0 if v is None else v.stride(0),
        v_head=0 if v is None else v.stride(1),
        key_cell=k_cache.stride(1),
        key_head=k_cache.stride(2),
        value_cell=0 if v_cache is None else v_cache.stride(1),
        value_head=0 if v_cache is None else v_cache.stride(2),
    )
    return out
