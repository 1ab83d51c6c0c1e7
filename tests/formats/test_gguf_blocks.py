"""Blocks of GGUF files: the same numbers, to the bit, as the `gguf` package gives."""

from __future__ import annotations

import numpy as np
import pytest

from ostinato.formats.gguf.reader import SUPPORTED, TYPES
from ostinato.models.gguf_loader import dequantize

SCALES = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Where float16 stand in a block; at its beginning alone if it is not named."""

gguf = pytest.importorskip("gguf", reason="the package that is the definition comes with the test extra")


@pytest.mark.parametrize("number", [number for number, each in TYPES.items() if each.is_supported])
def test_blocks_are_what_the_gguf_package_makes_of_them(number: int) -> None:
    kind = TYPES[number]
    rows, blocks = 5, 7
    raw = np.random.default_rng(number).integers(0, 256, (rows, blocks * kind.num_bytes), dtype=np.uint8)
    if kind.elements > 1:
        # Scales that are not finite say nothing.
        halves = raw.reshape(rows, blocks, kind.num_bytes)
        scales = np.random.default_rng(1).normal(size=(rows, blocks, 1)).astype("<f2").view("u1")
        for begin in SCALES.get(kind.name, (0,)):
            halves[..., begin : begin + 2] = scales
    elif kind.name != "F32":
        raw[:, 1::2] &= 0x3F
    else:
        raw[:, 3::4] &= 0x3F
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(number))
    assert np.array_equal(dequantize(kind, raw), expected)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_that_the_gguf_package_has_quantised_come_back(name: str) -> None:
    weights = np.random.default_rng(2).normal(size=(3, 256)).astype(np.float32)
    number = gguf.GGMLQuantizationType[name]
    raw = gguf.quantize(weights, number)
    found = dequantize(TYPES[number], raw)
    assert np.array_equal(found, gguf.dequantize(raw, number))
    assert np.abs(found - weights).max() < 0.5


def test_the_types_and_their_sizes_are_those_of_the_gguf_package() -> None:
    sizes = {int(number): (number.name, *size) for number, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (each.name, each.elements, each.num_bytes) for number, each in TYPES.items()} == sizes
    assert set(SUPPORTED) <= {name for name, *_ in sizes.values()}
