"""axial_angles and rotary_angles on a GPU.

Sine and cosine are reduced in float64: that is exact for any position, and needs no stack, which the library's
functions use for large angles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import rotary as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher


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
    positions: torch.Tensor,
    position_token: int,
    axes: torch.Tensor | None,
    frequencies: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Return the cosines and sines of angles, [2, tokens, half] float32; without `axes`, `positions` are [tokens]."""
    tokens, half = positions.shape[0], frequencies.shape[0]
    out = torch.empty((2, tokens, half), dtype=torch.float32, device=positions.device)
    (launch,) = launches.rotary_angles_launches(capability=launcher.capability(positions))
    launcher.run(
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
