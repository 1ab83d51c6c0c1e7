"""The types of tensors in GGUF files, as ggml numbers them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.ops.blocks.formats import BLOCK_FORMATS


@dataclass(frozen=True)
class BlockType:
    """Type of a tensor: a row is a sequence of blocks of `elements` weights in `num_bytes` bytes each."""

    name: str
    elements: int
    num_bytes: int
    is_supported: bool = False
    """True if `blocks.dequantize` knows it."""

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.num_bytes / self.elements


def _supported(name: str) -> BlockType:
    known = BLOCK_FORMATS[name]
    return BlockType(name, known.elements, known.num_bytes, True)


TYPES = {
    0: BlockType("F32", 1, 4, True),
    1: BlockType("F16", 1, 2, True),
    2: _supported("Q4_0"),
    3: _supported("Q4_1"),
    6: _supported("Q5_0"),
    7: _supported("Q5_1"),
    8: _supported("Q8_0"),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: _supported("Q4_K"),
    13: _supported("Q5_K"),
    14: _supported("Q6_K"),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: _supported("IQ4_NL"),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: _supported("IQ4_XS"),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, True),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}
"""Types by ggml's number. The missing numbers were types that ggml has dropped."""

SUPPORTED = tuple(each.name for each in TYPES.values() if each.is_supported)
