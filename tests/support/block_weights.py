"""Weights in blocks of every format, made for tests, and what they stand for."""

from __future__ import annotations

import math

import numpy as np
import torch

from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks
from ostinato.ops.quant.dequantize import pack_float8, pack_int4

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where float16 stand in a block; at its beginning alone if it is not named."""


def block_rows(name: str, rows: int, in_size: int, generator: torch.Generator) -> torch.Tensor:
    """uint8 [rows, bytes of a row]: any integers, with scales that make weights of about 1 / sqrt(in_size)."""
    kind = BLOCK_FORMATS[name]
    if name.startswith("fp8"):
        values = torch.randint(256, (rows, in_size), generator=generator).to(torch.uint8)
        values[values & 0x7F == 0x7F] = 0  # NaN
        scale = torch.rand(rows, in_size // kind.elements, generator=generator) * in_size**-0.5 / 64
        return pack_float8(values.view(torch.float8_e4m3fn), scale)
    if name.startswith("int4"):
        whole = torch.randint(16, (rows, in_size), generator=generator)
        groups = in_size // kind.elements
        dtype = torch.bfloat16 if rows % 2 else torch.float16
        scale = (torch.rand(rows, groups, generator=generator) * in_size**-0.5 / 8).to(dtype).float()
        return pack_int4(whole, scale, torch.randint(16, (rows, groups), generator=generator))
    raw = torch.randint(256, (rows, in_size // kind.elements, kind.num_bytes), generator=generator).to(torch.uint8)
    if name == "MXFP4":
        exponent = 124 - int(math.log2(in_size) / 2)
        raw[..., 0] = torch.randint(exponent - 3, exponent + 1, raw.shape[:2], generator=generator).to(torch.uint8)
        return raw.flatten(1)
    largest = {"Q8_0": 128, "IQ4_NL": 128, "IQ4_XS": 128 * 32, "Q6_K": 32 * 128, "Q4_K": 16 * 64, "Q5_K": 32 * 64}
    for begin in HALVES.get(name, (0,)):
        size = in_size**-0.5 / (1 if (name, begin) in (("Q4_1", 2), ("Q5_1", 2)) else largest.get(name, 16))
        halves = torch.randn(*raw.shape[:2], 1, generator=generator) * size
        raw[..., begin : begin + 2] = halves.half().view(torch.uint8).view(*raw.shape[:2], 2)
    return raw.flatten(1)


def packed(blocks: Blocks, in_size: int, generator: torch.Generator) -> torch.Tensor:
    """uint8: [rows, bytes of a row] of one format, or [bytes] of several."""
    parts = [block_rows(name, rows, in_size, generator) for name, rows in blocks]
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])


def expanded(weight: torch.Tensor, blocks: Blocks, in_size: int) -> torch.Tensor:
    """float64 [rows, in]: what the `gguf` package says, or for our own formats their definition, weight by weight."""
    import gguf

    flat, begin, found = weight.reshape(-1).numpy(), 0, []
    for name, rows in blocks:
        size = rows * BLOCK_FORMATS[name].row_bytes(in_size)
        part = flat[begin : begin + size].reshape(rows, -1)
        begin += size
        if name.startswith("int4"):
            found.append(_int4(part, BLOCK_FORMATS[name].elements))
        elif name.startswith("fp8"):
            found.append(_float8(part, BLOCK_FORMATS[name].elements))
        else:
            found.append(gguf.dequantize(part, gguf.GGMLQuantizationType[name]).astype(np.float64))
    return torch.from_numpy(np.concatenate(found))


def _int4(rows: np.ndarray, group: int) -> np.ndarray:
    out = []
    for row in rows:
        values: list[float] = []
        for block in row.reshape(-1, 4 + group // 2):
            scale = float(np.frombuffer(bytes([0, *block[1:4]]), dtype="<f4")[0])
            for part in block[4:].reshape(-1, 16):
                values += [scale * (int(byte & 15) - int(block[0])) for byte in part]
                values += [scale * (int(byte >> 4) - int(block[0])) for byte in part]
        out.append(values)
    return np.array(out, dtype=np.float64).reshape(len(rows), -1)


FLOAT8 = np.array(
    [
        (-1) ** (byte >> 7) * 2.0 ** (max(byte >> 3 & 15, 1) - 7) * ((byte & 7) / 8 + ((byte >> 3 & 15) > 0))
        for byte in range(256)
    ]
)
"""What each byte stands for, but for the two of NaN."""


def _float8(rows: np.ndarray, group: int) -> np.ndarray:
    blocks = rows.reshape(len(rows), -1, 4 + group)
    scale = np.ascontiguousarray(blocks[:, :, :4]).view("<f4").astype(np.float64)
    return np.asarray((scale * FLOAT8[blocks[:, :, 4:]]).reshape(len(rows), -1))
