"""The weight table: one row for each tensor of a model, with everything that is known of it before it is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Role = Literal["linear", "router", "experts", "embedding", "table", "norm", "bias", "convolution", "per_head"]

EACH = "*"
"""Placeholder for an expert's number in a tensor's name, where a file has the tensors of all experts as one."""

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def of_all_experts(name: str) -> str:
    """Return `mlp.experts.*.up_proj.weight` for `mlp.experts.3.up_proj.weight`; other names are unchanged."""
    return _EXPERT.sub(EACH, name)


@dataclass(frozen=True)
class Weight:
    """One tensor of a model, which may consist of several of a checkpoint's.

    `names` are the checkpoint's tensors that it consists of, concatenated along their first dimension. `sizes` are
    their parts of this dimension; without it all parts are equal. Experts are stacked: [experts, out, in].
    """

    shape: tuple[int, ...]
    role: Role
    names: tuple[str, ...] = ("weight",)
    sizes: tuple[int, ...] = ()
    in_float32: bool = False
    """True if it is float32 whatever the model's dtype is."""
    stored_minus_one: bool = False
    """True for a norm's weight w that multiplies by 1 + w."""
    can_be_quantised: bool = False
    quantized_with: tuple[str, ...] = ()
    """Names of other tensors that are quantised only together with this one: the experts' other matrix."""
    quantized_with_in_size: int = 0
    """Elements of a row of these."""
    is_lm_head: bool = False
    """True if it computes the logits, as a separate matrix or as the embedding that is tied to it."""
    is_stack: bool = False
    """True if the checkpoint has experts as one tensor too, which is no linear there."""
    whole_name: str = ""
    """Name under which a checkpoint may have one tensor in place of those of `names`."""
    is_gated: bool = False
    """True if the first half of its outputs are the gates of the second, so that a kernel reads both together."""
    row_interleave: tuple[int, ...] = ()
    """Sizes of parts whose rows are interleaved in the checkpoint: this many rows of each part in turn, repeatedly.

    In this tensor all rows of a part are contiguous.
    """
    first_part_transposed: bool = False
    """True if the first of these parts is a stack of matrices, one per repetition, that are transposed here."""
    neighbours: tuple[int, int, int, int] | None = None
    """(begin, end, size, rotated): these rows are heads of `size`, whose last `rotated` rows turn with positions.

    In the checkpoint two rows that are rotated together are neighbours; in this tensor they are `rotated / 2` apart.
    """
    segments: tuple[int, ...] = ()
    """Sizes of the parts that are sharded separately among ranks. Without segments a tensor is sharded as one.

    They divide the sharded dimension of all its tensors together, or of each of them.
    """
    stored_shape: tuple[int, ...] = ()
    """Shape in the checkpoint, if it differs."""
    stored_transposed: bool = False
    """True if the checkpoint has the first dimension last."""

    @property
    def stays_on_disk(self) -> bool:
        """True for a table: its rows are looked up where the file is mapped, in the file's dtype."""
        return self.role == "table"

    @property
    def can_be_blocks(self) -> bool:
        """True if it may be in blocks: all that can be quantised, and the embedding, whose rows are looked up."""
        return (self.can_be_quantised or self.role == "embedding") and not self.stored_shape

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def in_size(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def out_size(self) -> int:
        """Rows, of all experts together."""
        return math.prod(self.shape[:-1])

    @property
    def names_of_all_experts(self) -> tuple[str, ...]:
        """Names like `names`, with those of all experts as one."""
        return self._of_all_experts(self.names)

    @property
    def quantized_with_of_all_experts(self) -> tuple[str, ...]:
        """Names like `quantized_with`, with those of all experts as one."""
        return self._of_all_experts(self.quantized_with)

    def _of_all_experts(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if self.role != "experts" or self.is_stack:
            return names
        return tuple(map(of_all_experts, names[: len(names) // self.shape[0]]))

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """The checkpoint's names for the linear layers that are quantised together here, or not at all."""
        if self.is_lm_head:
            return ("lm_head",)
        return tuple(name.removesuffix(".weight") for name in (*self.names, *self.quantized_with))

    def with_prefix(self, prefix: str) -> Weight:
        """Return the weight with a prefix before each name."""
        names, quantized_with = (tuple(prefix + name for name in each) for each in (self.names, self.quantized_with))
        return replace(
            self, names=names, quantized_with=quantized_with, whole_name=self.whole_name and prefix + self.whole_name
        )


def num_elements(weights: Iterable[Weight], in_float32: bool | None = None) -> int:
    """Return the number of elements of all weights in memory, or of those with (without) `in_float32`."""
    in_memory = (weight for weight in weights if not weight.stays_on_disk)
    return sum(weight.num_elements for weight in in_memory if in_float32 in (None, weight.in_float32))


def elements_on_disk(weights: Iterable[Weight]) -> int:
    """Return the number of elements of all tables."""
    return sum(weight.num_elements for weight in weights if weight.stays_on_disk)
