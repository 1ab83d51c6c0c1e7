"""Quantised weights: what a checkpoint stores, what the plan quantises, and their bytes.

A weight is 8-bit integers or in blocks. A checkpoint's config.json says what its weights are and may run as.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal

from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks, formats_of, merge_adjacent
from ostinato.ops.quant.block_formats import num_bytes as bytes_of_blocks
from ostinato.ops.sizes import DTYPE_BYTES, INT8_MAX_K
from ostinato.plan.weights import Weight

SCALE_BYTES = DTYPE_BYTES["float32"]
"""Bytes of a scale."""

ORDER_BYTES = DTYPE_BYTES["int32"]
"""Bytes of an input's index."""


@dataclass(frozen=True)
class Quantization:
    """Weights as 8-bit integers times a scale, one for each row or for every `group_size` elements of a row.

    The last group of a row is shorter where `group_size` does not divide it. `ignore` names linears that stay
    unquantised, each by its name, or by `re:` and a pattern that its name begins with. With `ignores_stacks`, experts
    that are stacked in the checkpoint stay unquantised too. With `int8_activations` linears quantise their inputs too
    (`quantises_inputs`).
    """

    group_size: int | None = None
    ignore: tuple[str, ...] = ()
    ignores_stacks: bool = False
    storage: Literal["int8"] = "int8"
    int8_activations: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        """Name that the setting uses."""
        return "int8" if self.group_size is None else f"int8_g{self.group_size}"

    @property
    def has_act_order(self) -> bool:
        """False: only weights in blocks may be in act-order."""
        return False

    @property
    def granularity(self) -> str:
        return "one scale per row" if self.group_size is None else f"one scale per {self.group_size} elements of a row"

    def quantises(self, weight: Weight) -> bool:
        return weight.can_be_quantised and self.covers(weight.linears, weight.is_stack)

    def quantises_inputs(self, weight: Weight) -> bool:
        """Return whether the weight is multiplied with inputs in 8 bits: a linear's, but not the LM head's."""
        is_inner = weight.role == "linear" and not weight.is_lm_head and weight.in_size <= INT8_MAX_K
        return self.int8_activations and is_inner and self.quantises(weight)

    def covers(self, names: Iterable[str], is_stack: bool = False) -> bool:
        """Return whether linears that share a weight are quantised: only if none of them is ignored."""
        if is_stack and self.ignores_stacks:
            return False
        return not self.ignore or not any(is_named(name, self.ignore) for name in names)

    def num_bytes(self, weight: Weight) -> int:
        """Return the bytes of a quantised weight with its scales."""
        groups = 1 if self.group_size is None else -(-weight.in_size // self.group_size)
        return weight.out_size * (weight.in_size + SCALE_BYTES * groups)


@dataclass(frozen=True)
class BlockQuantization:
    """Weights in blocks (`ops/quant/block_formats.py`).

    `formats` are those of a file, by its tensors' names in the checkpoint's spelling (stacked experts as in
    `Weight.names_of_all_experts`): tensors that are not named there are not in blocks.

    Alternatively every matrix that may be quantised has the `format`, or the one with the next smaller groups whose
    blocks fill its rows. Exceptions are the names in `ignore`, as in `Quantization`, matrices whose rows no blocks
    fill, and those with fewer than `least_rows` rows. The LM head has the format `head`, if that is given.

    With `has_act_order` the elements of a row are sorted by their groups, and a matmul also reads the order of its
    inputs, `ORDER_BYTES` for each. Experts are not in blocks then, as one input goes to several.

    `runs` are tensors that directly follow one another in the file, in the layout that kernels read: a weight whose
    tensors are a part of one run may be read from the mapped file (`is_mapped`).
    """

    formats: tuple[tuple[str, str], ...] = ()
    format: str | None = None
    ignore: tuple[str, ...] = ()
    ignores_stacks: bool = False
    head: str | None = None
    least_rows: int = 0
    contiguous_tensors: tuple[tuple[str, ...], ...] = ()
    has_act_order: bool = False
    storage: Literal["blocks"] = "blocks"

    @property
    def name(self) -> str:
        """Name that the setting uses, or the formats, the most frequent first."""
        if self.format is not None:
            return self.format
        kinds = [name for _, name in self.formats]
        return ", ".join(sorted(set(kinds), key=lambda name: (-kinds.count(name), name)))

    @property
    def used(self) -> frozenset[str]:
        """Names of all formats."""
        if self.format is None:
            return frozenset(kind for _, kind in self.formats)
        return frozenset((*_with_smaller(self.format), *(() if self.head is None else (self.head,))))

    @property
    def group_size(self) -> None:
        """None: the blocks contain the scales."""
        return

    @property
    def granularity(self) -> str:
        if self.format is None:
            return "blocks as they lie in the file"
        made = BLOCK_FORMATS[self.format]
        of = "one scale and zero point" if made.family == "int4" else "one scale"
        return f"{of} per {made.elements} elements of a row"

    def quantises(self, weight: Weight) -> bool:
        return self.blocks_of(weight) is not None

    def covers(self, names: Iterable[str], is_stack: bool = False) -> bool:
        """Return whether linears that share a weight are to be in blocks."""
        if self.format is None:
            return all(self._formats.get(f"{name}.weight") is not None for name in names)
        return not (is_stack and self.ignores_stacks) and not any(is_named(name, self.ignore) for name in names)

    def num_bytes(self, weight: Weight) -> int:
        """Return the bytes of a weight in blocks."""
        blocks = self.blocks_of(weight)
        assert blocks is not None, "it is in blocks"
        of_order = ORDER_BYTES * weight.in_size if self.has_act_order else 0
        return bytes_of_blocks(blocks, weight.in_size) * (weight.out_size // sum(rows for _, rows in blocks)) + of_order

    def blocks_of(self, weight: Weight) -> Blocks | None:
        """Return the blocks of its rows, or of those of each matrix in a stack.

        None for weights that stay in the model's dtype: those that the file has so, even in part; gated matrices whose
        parts have different formats, and the other matrix of such experts.
        """
        if self.has_act_order and weight.role == "experts":
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
            others = {self._formats.get(name) for name in weight.quantized_with_of_all_experts}
            each_has_one = len(set(kinds)) == len(others) == 1 and None not in others
            return ((str(kinds[0]), rows),) if each_has_one else None
        sizes = weight.sizes or (rows // len(kinds),) * len(kinds)
        blocks = merge_adjacent(tuple((str(kind), size) for kind, size in zip(kinds, sizes, strict=True)))
        return None if weight.is_gated and len(blocks) > 1 else blocks

    def is_mapped(self, weight: Weight) -> bool:
        """Return whether it stays in the file's pages, which all processes share.

        The plan, the memory split and the loader call this: a weight that must be laid out anew while loading, for
        whatever reason, must return False here.
        """
        if weight.role == "experts" or weight.row_interleave or weight.neighbours or not self.quantises(weight):
            return False
        places = [self._places.get(name) for name in weight.names]
        first = places[0]
        return first is not None and places == list(range(first, first + len(places)))

    def mapped_bytes(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of the weights that are mapped."""
        return sum(self.num_bytes(weight) for weight in weights if self.is_mapped(weight))

    def _fitting(self, weight: Weight) -> str | None:
        """Return the format whose blocks fill the rows of a weight and of the weights quantised together with it."""
        assert self.format is not None, "it is for all matrices"
        if weight.is_lm_head and self.head is not None:
            names: tuple[str, ...] = (self.head,)
        else:
            names = _with_smaller(self.format)
        sizes = (weight.in_size, weight.quantized_with_in_size)
        return next((name for name in names if not any(size % BLOCK_FORMATS[name].elements for size in sizes)), None)

    @cached_property
    def _formats(self) -> dict[str, str]:
        """Formats under each spelling of the tensors' names."""
        return {spelling: kind for name, kind in self.formats for spelling in spellings(name)}

    @cached_property
    def _places(self) -> dict[str, int]:
        """Position numbers of the tensors of `runs`, by all their spellings, one apart within a run, two between."""
        numbers: dict[str, int] = {}
        number = 0
        for run in self.contiguous_tensors:
            for name in run:
                numbers |= dict.fromkeys(spellings(name), number)
                number += 1
            number += 1
        return numbers


def _with_smaller(name: str) -> tuple[str, ...]:
    """Return a format, followed by those that differ only in smaller groups, the largest first."""
    family = BLOCK_FORMATS[name].family
    kin = (name,) if family == "gguf" else formats_of(family)
    return kin[kin.index(name) :]


AnyQuantization = Quantization | BlockQuantization
"""Both kinds. They say which weights are quantised (`quantises`), their bytes (`num_bytes`) and their names."""


def weights_alone(quantization: AnyQuantization | None) -> AnyQuantization | None:
    """Return the same quantization with activations in the model's dtype."""
    if isinstance(quantization, Quantization):
        return replace(quantization, int8_activations=False)
    return quantization


_TEXT_PARTS = ("", "model.", "backbone.", "language_model.", "model.language_model.", "language_model.model.")
"""Prefixes that releases of libraries have given the same text model, whose names a quantised checkpoint keeps."""


@cache
def is_named(name: str, entries: tuple[str, ...]) -> bool:
    """Return whether one of the entries is this name, or `re:` and a pattern that it begins with.

    The text part of the model may have any of the prefixes that libraries give it.
    """
    bare = re.sub(r"^(?:model\.|backbone\.|language_model\.)*", "", name)
    names = {name, *(prefix + bare for prefix in _TEXT_PARTS)}
    patterns, others = _split_entries(entries)
    return not names.isdisjoint(others) or any(pattern.match(each) for pattern in patterns for each in names)


@cache
def _split_entries(entries: tuple[str, ...]) -> tuple[list[re.Pattern[str]], frozenset[str]]:
    """Return the patterns among the entries, and the names."""
    patterns = [re.compile(entry.removeprefix("re:")) for entry in entries if entry.startswith("re:")]
    return patterns, frozenset(entries)


def spellings(name: str) -> tuple[str, ...]:
    """Return the spellings of a name: checkpoints use two names for the backbone of a hybrid."""
    return name, re.sub(r"^model\.", "backbone.", name), re.sub(r"^backbone\.", "model.", name)


Numbers = Literal["int8", "int4", "float8", "mxfp4"]


@dataclass(frozen=True)
class StoredWeights:
    """Weights of `storage` times scales, as `method` (a `quant_method` of config.json) writes them.

    A scale is for a row, or for `group_size` elements of one; for float8 it may also be for the whole matrix (`block`
    is (0, 0)) or for a `block` of (rows, elements of a row). `ignore` and `ignores_stacks` are those of `Quantization`.
    """

    method: str
    storage: Numbers
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
            return BlockQuantization(
                (), self.block_format, self.ignore, self.ignores_stacks, has_act_order=self.has_order
            )
        return Quantization(self.group_size, self.ignore, self.ignores_stacks)

    @property
    def block_format(self) -> str | None:
        """Block format of the weights, where kernels read blocks; None: there is none.

        One scale for a row, or for all rows, is repeated for each of its groups.
        """
        if self.storage == "int8":
            return None
        if self.storage == "mxfp4":
            return "MXFP4"
        if self.storage == "int4":
            wide = self.group_size or 0
            return next((name for name in formats_of("int4") if wide in (0, BLOCK_FORMATS[name].elements)), None)
        wide = self.block[1] if self.block is not None else 0
        return next((name for name in formats_of("float8") if wide % BLOCK_FORMATS[name].elements == 0), None)

    def expands_because(self, read: Collection[str]) -> str | None:
        """Return why no kernel reads such weights; None: they run as `quantization`."""
        float8 = formats_of("float8")
        if self.storage == "float8" and not {*float8} & {*read}:
            return "no kernel here reads float8 weights"
        if self.storage == "float8" and self.block_format is None:
            return f"kernels read float8 weights with one scale for multiples of {BLOCK_FORMATS[float8[-1]].elements}"
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
        if blocks is None:
            return self.storage in ("int4", "int8")
        return BLOCK_FORMATS[blocks].family == self.storage

    @property
    def name(self) -> str:
        of = {"int8": "8-bit", "int4": "4-bit", "float8": "float8", "mxfp4": "4-bit"}[self.storage]
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
        """Return a quantised weight's approximate bytes in the checkpoint, with 16 bits a scale, 4 a zero point."""
        per_weight = 0.5 if self.storage in ("int4", "mxfp4") else 1.0
        rows, columns = weight.out_size, weight.in_size
        if self.block is not None:
            high, wide = self.block if self.block != (0, 0) else (rows, columns)
            scales = -(-rows // high) * -(-columns // wide)
        else:
            scales = rows * (1 if self.group_size is None else -(-columns // self.group_size))
        return int(rows * columns * per_weight + scales * (2.5 if self.has_zeros else 2))
