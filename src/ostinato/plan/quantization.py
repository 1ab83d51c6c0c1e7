"""Quantised weights: which matrices are 8-bit integers or lie in blocks, and what they take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ostinato.ops.blocks.formats import BLOCK_FORMATS, Blocks, merged
from ostinato.ops.blocks.formats import num_bytes as bytes_of_blocks
from ostinato.plan.weights import Weight

INT4 = ("int4_g128", "int4_g64", "int4_g32")
"""Formats of 4 bits, each with groups that divide those of the one before."""

FLOAT8 = ("fp8_g128", "fp8_g64", "fp8_g32")
"""Formats of float8 likewise."""

SCALE_BYTES = 4
"""Scales are float32."""

ORDER_BYTES = 4
"""Numbers of inputs are int32."""


@dataclass(frozen=True)
class Quantization:
    """Weights as 8-bit integers times a scale, one for each row, or for every `group_size` elements of a row, the last
    group being shorter where that does not divide it.

    `ignore` names linears that stay as they are, each by its name or by `re:` and a pattern that its name begins with.
    With `ignores_stacks` experts do that are stacked in the checkpoint.
    """

    group_size: int | None = None
    ignore: tuple[str, ...] = ()
    ignores_stacks: bool = False
    numbers: Literal["int8"] = "int8"

    @property
    def name(self) -> str:
        """As the setting has it."""
        return "int8" if self.group_size is None else f"int8_g{self.group_size}"

    @property
    def in_order(self) -> bool:
        """As `BlockQuantization` has it."""
        return False

    @property
    def granularity(self) -> str:
        return "one scale per row" if self.group_size is None else f"one scale per {self.group_size} elements of a row"

    def quantises(self, weight: Weight) -> bool:
        return weight.can_be_quantised and self.covers(weight.linears, weight.is_stack)

    def covers(self, names: Iterable[str], is_stack: bool = False) -> bool:
        """Whether linears that share a weight are quantised: only if none of them is to stay as it is."""
        if is_stack and self.ignores_stacks:
            return False
        return not self.ignore or not any(self._ignores(name) for name in names)

    def num_bytes(self, weight: Weight) -> int:
        """Of a quantised weight with its scales."""
        groups = 1 if self.group_size is None else -(-weight.in_size // self.group_size)
        return weight.out_size * (weight.in_size + SCALE_BYTES * groups)

    def _ignores(self, name: str) -> bool:
        return is_named(name, self.ignore)


@dataclass(frozen=True)
class BlockQuantization:
    """Weights that lie in blocks (`ops/blocks/formats.py`).

    `formats` are those of a file, by its tensors' names in the checkpoint's spelling (of experts that lie together
    there, as `Weight.names_of_all_experts` has them): what is not named there is no block. Or every matrix that may be
    quantised has the `format`, or the one with the next smaller groups whose blocks fill its rows; but for those to
    `ignore`, as `Quantization` has it, for those whose rows no blocks fill, and for those with fewer than `least_rows`.
    The LM head has the format `head`, where that is given.

    With `in_order` the elements of a row are sorted by their groups, and a product has the order of its inputs beside
    it, in `ORDER_BYTES` each; experts are not in blocks then, as one input goes to several.

    `runs` are tensors of the file that lie one directly behind the other, as kernels read them: a weight whose tensors
    are a part of one may be read where the file is mapped (`is_mapped`).
    """

    formats: tuple[tuple[str, str], ...] = ()
    format: str | None = None
    ignore: tuple[str, ...] = ()
    ignores_stacks: bool = False
    head: str | None = None
    least_rows: int = 0
    runs: tuple[tuple[str, ...], ...] = ()
    in_order: bool = False
    numbers: Literal["blocks"] = "blocks"

    @property
    def name(self) -> str:
        """As the setting has it, or the formats, the most frequent first."""
        if self.format is not None:
            return self.format
        kinds = [name for _, name in self.formats]
        return ", ".join(sorted(set(kinds), key=lambda name: (-kinds.count(name), name)))

    @property
    def used(self) -> frozenset[str]:
        """The names of all formats."""
        if self.format is None:
            return frozenset(kind for _, kind in self.formats)
        return frozenset((*_with_smaller(self.format), *(() if self.head is None else (self.head,))))

    @property
    def group_size(self) -> None:
        """Scales lie in the blocks."""
        return

    @property
    def granularity(self) -> str:
        if self.format is None:
            return "blocks as they lie in the file"
        of = "one scale" if self.format in FLOAT8 else "one scale and zero point"
        return f"{of} per {BLOCK_FORMATS[self.format].elements} elements of a row"

    def quantises(self, weight: Weight) -> bool:
        return self.blocks_of(weight) is not None

    def covers(self, names: Iterable[str], is_stack: bool = False) -> bool:
        """Whether linears that share a weight are to be in blocks."""
        if self.format is None:
            return all(self._formats.get(f"{name}.weight") is not None for name in names)
        return not (is_stack and self.ignores_stacks) and not any(is_named(name, self.ignore) for name in names)

    def num_bytes(self, weight: Weight) -> int:
        """Of a weight in blocks."""
        blocks = self.blocks_of(weight)
        assert blocks is not None, "it is in blocks"
        of_order = ORDER_BYTES * weight.in_size if self.in_order else 0
        return bytes_of_blocks(blocks, weight.in_size) * (weight.out_size // sum(rows for _, rows in blocks)) + of_order

    def blocks_of(self, weight: Weight) -> Blocks | None:
        """How its rows lie, or those of each matrix in a stack; None for what stays in the model's dtype: what the file
        has so, even if in part; gated matrices whose parts have different formats, and the other one of such experts.
        """
        if self.in_order and weight.role == "experts":
            return None
        rows = weight.shape[-2] if weight.role == "experts" else weight.out_size
        if self.format is not None:
            covered = weight.can_be_quantised and self.covers(weight.linears, weight.is_stack)
            name = self._fitting(weight) if covered and rows >= self.least_rows else None
            return None if name is None else ((name, rows),)
        kinds = [self._formats.get(name) for name in weight.names_of_all_experts]
        if not weight.can_be_blocks or None in kinds or not kinds:
            return None
        if weight.role == "experts":
            others = {self._formats.get(name) for name in weight.beside_of_all_experts}
            each_has_one = len(set(kinds)) == len(others) == 1 and None not in others
            return ((str(kinds[0]), rows),) if each_has_one else None
        sizes = weight.sizes or (rows // len(kinds),) * len(kinds)
        blocks = merged(tuple((str(kind), size) for kind, size in zip(kinds, sizes, strict=True)))
        return None if weight.is_gated and len(blocks) > 1 else blocks

    def is_mapped(self, weight: Weight) -> bool:
        """Whether it stays in the file's pages, which all processes share. The plan, the memory and the loader ask
        here: what is to be laid out anew while loading, for whatever reason, is not to be named."""
        if weight.role == "experts" or weight.interleaved or not self.quantises(weight):
            return False
        places = [self._places.get(name) for name in weight.names]
        first = places[0]
        return first is not None and places == list(range(first, first + len(places)))

    def mapped_bytes(self, weights: Iterable[Weight]) -> int:
        """Of the weights that are mapped."""
        return sum(self.num_bytes(weight) for weight in weights if self.is_mapped(weight))

    def _fitting(self, weight: Weight) -> str | None:
        """The format whose blocks fill the rows of a weight, and of what is quantised together with it."""
        assert self.format is not None, "it is for all matrices"
        if weight.is_lm_head and self.head is not None:
            names: tuple[str, ...] = (self.head,)
        else:
            names = _with_smaller(self.format)
        sizes = (weight.in_size, weight.in_size_beside)
        return next((name for name in names if not any(size % BLOCK_FORMATS[name].elements for size in sizes)), None)

    @cached_property
    def _formats(self) -> dict[str, str]:
        """Under each spelling of the tensors' names."""
        return {spelling: kind for name, kind in self.formats for spelling in spellings(name)}

    @cached_property
    def _places(self) -> dict[str, int]:
        """Of the tensors of `runs`, under each spelling of their names: numbers, one higher from each to the next in
        its run, two higher between runs."""
        numbers: dict[str, int] = {}
        number = 0
        for run in self.runs:
            for name in run:
                numbers |= dict.fromkeys(spellings(name), number)
                number += 1
            number += 1
        return numbers


def _with_smaller(name: str) -> tuple[str, ...]:
    """A format, and those of smaller groups that are alike otherwise, the largest first."""
    kin = next((kin for kin in (INT4, FLOAT8) if name in kin), (name,))
    return kin[kin.index(name) :]


AnyQuantization = Quantization | BlockQuantization
"""Both say which weights are quantised (`quantises`), what these take (`num_bytes`), and what they are called."""


def is_named(name: str, entries: Iterable[str]) -> bool:
    """Whether one of the entries is this name, or `re:` and a pattern that it begins with."""
    for entry in entries:
        if entry.startswith("re:"):
            if any(re.match(entry.removeprefix("re:"), spelling) for spelling in spellings(name)):
                return True
        elif entry in spellings(name):
            return True
    return False


def spellings(name: str) -> tuple[str, ...]:
    """The backbone of a hybrid has two names among checkpoints."""
    return name, re.sub(r"^model\.", "backbone.", name), re.sub(r"^backbone\.", "model.", name)
