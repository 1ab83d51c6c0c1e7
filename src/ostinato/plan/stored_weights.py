"""Quantised weights as a checkpoint stores them, in any format: what its config.json says, and what they may run as."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from ostinato.ops.blocks.formats import BLOCK_FORMATS
from ostinato.plan.quantization import FLOAT8, INT4, AnyQuantization, BlockQuantization, Quantization
from ostinato.plan.weights import Weight

Numbers = Literal["int8", "int4", "float8"]


@dataclass(frozen=True)
class StoredWeights:
    """Weights of `numbers` times scales, as `method` (a `quant_method` of config.json) writes them.

    A scale is for a row, or for `group_size` elements of one; for float8 it may also be for the whole matrix (`block`
    is (0, 0)) or for a `block` of (rows, elements of a row). `ignore` and `ignores_stacks` are those of `Quantization`.
    """

    method: str
    numbers: Numbers
    group_size: int | None = None
    ignore: tuple[str, ...] = ()
    ignores_stacks: bool = False
    is_packed: bool = True
    """True if several integers are packed into one int32."""
    has_zeros: bool = False
    """True if each group has a zero point; without one it is the middle, 8 of 0 to 15."""
    zero_offset: int = 0
    """Number that is added to the zero points of the file."""
    in_groups_by_index: bool = False
    """True if a second tensor says which group each element of a row belongs to (act-order)."""
    block: tuple[int, int] | None = None
    wants_small_activations: bool = False
    """True if its config also asks for quantised activations, which stay unquantised here."""

    def quantization(self, read: Collection[str]) -> AnyQuantization | None:
        """Return the quantization that such weights run as without a change of their values.

        None: they are dequantized. `read` are the block formats that kernels read. If their format is not among them,
        4-bit integers minus their zero points become 8-bit integers with the same scales.
        """
        if self.expands_because(read) is not None:
            return None
        if self.block_format is not None and self.block_format in read:
            return BlockQuantization((), self.block_format, self.ignore, self.ignores_stacks, has_act_order=self.has_order)
        return Quantization(self.group_size, self.ignore, self.ignores_stacks)

    @property
    def block_format(self) -> str | None:
        """Block format of the weights, where kernels read blocks; None: there is none.

        One scale for a row, or for all rows, is repeated for each of its groups.
        """
        if self.numbers == "int4":
            return f"int4_g{self.group_size or 128}"
        if self.numbers == "float8":
            wide = self.block[1] if self.block is not None else 0
            return next((name for name in FLOAT8 if wide % BLOCK_FORMATS[name].elements == 0), None)
        return None

    def expands_because(self, read: Collection[str]) -> str | None:
        """Return why no kernel reads such weights; None: they run as `quantization`."""
        if self.numbers == "float8" and not {*FLOAT8} & {*read}:
            return "no kernel here reads float8 weights"
        if self.numbers == "float8" and self.block_format is None:
            return f"kernels read float8 weights with one scale for multiples of {BLOCK_FORMATS[FLOAT8[-1]].elements}"
        if self.has_order and self.block_format not in read:
            return "their groups are in act-order (g_idx), which no kernel of 8-bit weights follows"
        return None

    @property
    def has_order(self) -> bool:
        """True if elements with one scale are not adjacent.

        If a whole row shares one scale, the order does not matter.
        """
        return self.in_groups_by_index and self.group_size is not None

    def fits(self, blocks: str | None) -> bool:
        """Return whether the weights can be stored in this form without a change of their values.

        `blocks` is a block format, or None for 8-bit integers with a scale for each row or group.
        """
        if blocks is None and self.has_order:
            return False
        alike = {"int4": (*INT4, None), "float8": FLOAT8, "int8": (None,)}[self.numbers]
        return blocks in alike

    @property
    def name(self) -> str:
        of = {"int8": "8-bit", "int4": "4-bit", "float8": "float8"}[self.numbers]
        return f"{of} weights of {self.method}, {self.granularity}"

    @property
    def granularity(self) -> str:
        if self.block == (0, 0):
            return "one scale per matrix"
        if self.block is not None:
            return f"one scale per {self.block[0]} x {self.block[1]} elements"
        return "one scale per row" if self.group_size is None else f"one scale per {self.group_size} elements of a row"

    def covers(self, weight: Weight) -> bool:
        """Return whether a row of the weight table is quantised in the checkpoint."""
        return Quantization(None, self.ignore, self.ignores_stacks).quantises(weight)

    def num_bytes(self, weight: Weight) -> int:
        """Return the approximate bytes of a quantised weight in the checkpoint.

        Scales count as 16 bits and zero points as 4.
        """
        per_weight = 0.5 if self.numbers == "int4" else 1.0
        rows, columns = weight.out_size, weight.in_size
        if self.block is not None:
            high, wide = self.block if self.block != (0, 0) else (rows, columns)
            scales = -(-rows // high) * -(-columns // wide)
        else:
            scales = rows * (1 if self.group_size is None else -(-columns // self.group_size))
        return int(rows * columns * per_weight + scales * (2.5 if self.has_zeros else 2))
