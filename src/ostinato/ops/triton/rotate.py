"""rotate on a GPU: a program rotates some heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import rotary as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.launcher import to_dtype


@triton.jit
def rotate_heads(
    x,
    out,
    angles,
    token,
    tokens,
    first_head,
    heads,
    x_token,
    x_head,
    out_token,
    out_head,
    multiplier,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """`HEADS` heads of one token from `x` into `out`, which begins at the token's cell; all times `multiplier`.

    The first `2 * HALF` elements are rotated by the token's angles, the rest pass through.
    """
    head = first_head + tl.arange(0, HEADS)
    from_head = token.to(tl.int64) * x_token + head[:, None] * x_head
    to_head = out_token + head[:, None] * out_head
    if HALF > 0:
        element = tl.arange(0, HALF_WIDTH)
        cos = tl.load(angles + token * HALF + element, mask=element < HALF, other=0.0)[None, :]
        sin = tl.load(angles + (tokens + token) * HALF + element, mask=element < HALF, other=0.0)[None, :]
        is_own = (head < heads)[:, None] & (element < HALF)[None, :]
        first = tl.load(x + from_head + element[None, :], mask=is_own, other=0.0).to(tl.float32) * multiplier
        second = tl.load(x + from_head + HALF + element[None, :], mask=is_own, other=0.0).to(tl.float32) * multiplier
        dtype = out.dtype.element_ty
        tl.store(out + to_head + element[None, :], to_dtype(first * cos - second * sin, dtype), mask=is_own)
        tl.store(out + to_head + HALF + element[None, :], to_dtype(second * cos + first * sin, dtype), mask=is_own)
    if 2 * HALF < HEAD_DIM:
        element = 2 * HALF + tl.arange(0, REST_WIDTH)
        is_own = (head < heads)[:, None] & (element < HEAD_DIM)[None, :]
        rest = tl.load(x + from_head + element[None, :], mask=is_own, other=0.0).to(tl.float32) * multiplier
        tl.store(out + to_head + element[None, :], to_dtype(rest, out.dtype.element_ty), mask=is_own)


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
        angles,
        token,
        tokens,
        tl.program_id(1) * HEADS,
        heads,
        x_token,
        x_head,
        token.to(tl.int64) * heads * HEAD_DIM,
        HEAD_DIM,
        1.0,
        HEAD_DIM,
        HALF,
        HALF_WIDTH,
        REST_WIDTH,
        HEADS,
    )


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As `ops.encoder.rotate`."""
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (launch,) = launches.rotate(
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
