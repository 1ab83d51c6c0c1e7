"""How a checkpoint holds quantised weights, whatever its format: what its config.json says, and what it may run as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ostinato.plan.quantization import AnyQuantization, BlockQuantization, Quantization
from ostinato.plan.weights import Weight

Numbers = Literal["int8", "int4", "float8"]


@dataclass(frozen=True)
class StoredWeights:
    """Weights of `numbers` times scales, as `method` (a `quant_method` of config.json) writes them.

    A scale is for a row, or for `group_size` elements of one; of float8 it may also be for the whole matrix
    (`block` is (0, 0)) or for a `block` of (rows, elements of a row). `ignore` and `ignores_stacks` are those of
    `Quantization`.
    """

    method: str
    numbers: Numbers
    group_size: int | None = None
    ignore: tuple[str, ...] = ()
    ignores_stacks: bool = False
    is_packed: bool = True
    """Whether several integers lie in one int32."""
    has_zeros: bool = False
    """Whether each group has a zero point; without one it is the middle, 8 of 0 to 15."""
    zero_offset: int = 0
    """What is added to the zero points of the file."""
    in_groups_by_index: bool = False
    """Whether a tensor beside the weight says which group each element of a row belongs to (act-order)."""
    block: tuple[int, int] | None = None
    wants_small_activations: bool = False
    """Whether its config asks for activations of few bits too, which are left as they are here."""

    def quantization(self, reads_blocks: bool) -> AnyQuantization | None:
        """What such weights run as, without a change of their values; None: they are expanded.

        Where nothing `reads_blocks`, 4-bit integers less their zero points are 8-bit integers with the same scales.
        """
        if self.expands_because is not None:
            return None
        if self.numbers == "int4" and reads_blocks:
            return BlockQuantization((), self.block_format, self.ignore, self.ignores_stacks)
        return Quantization(self.group_size, self.ignore, self.ignores_stacks)

    @property
    def block_format(self) -> str:
        """Of 4-bit weights. One scale for a row is the same for each of its groups."""
        return f"int4_g{self.group_size or 128}"

    @property
    def expands_because(self) -> str | None:
        """Why no kernel reads such weights; None: they run as `quantization`."""
        if self.numbers == "float8":
            return "no kernel reads float8 weights yet"
        if self.in_groups_by_index:
            return "their groups are in act-order (g_idx), which no kernel follows yet"
        return None

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
        """Whether a row of the weight table is quantised in the checkpoint."""
        return Quantization(None, self.ignore, self.ignores_stacks).quantises(weight)

    def num_bytes(self, weight: Weight) -> int:
        """About what a quantised weight takes in the checkpoint, with scales of 16 bits and zero points of 4."""
        per_weight = 0.5 if self.numbers == "int4" else 1.0
        rows, columns = weight.out_size, weight.in_size
        if self.block is not None:
            high, wide = self.block if self.block != (0, 0) else (rows, columns)
            scales = -(-rows // high) * -(-columns // wide)
        else:
            scales = rows * (1 if self.group_size is None else -(-columns // self.group_size))
        return int(rows * columns * per_weight + scales * (2.5 if self.has_zeros else 2))
