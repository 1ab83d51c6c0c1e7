"""rotate on a GPU: a program rotates some heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import rotary as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.integers import larger, rounded_to_integer, scale_of
from ostinato.ops.triton.launcher import to_dtype


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
        num_heads=heads, head_dim=head_dim, rotated=2 * angles.shape[-1], capability=launcher.capability(x)
    )
    launcher.run(
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
