"""The weight table: one row for each tensor of a model, with all that is to be known of it before it is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Role = Literal["linear", "router", "experts", "embedding", "norm", "bias", "convolution", "per_head"]

EACH = "*"
"""In place of an expert's number in the name of a checkpoint's tensor, where a file has those of all experts as one."""

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def of_all_experts(name: str) -> str:
    """`mlp.experts.3.up_proj.weight` -> `mlp.experts.*.up_proj.weight`; other names as they are."""
    return _EXPERT.sub(EACH, name)


@dataclass(frozen=True)
class Weight:
    """One tensor of a model, which may hold several of a checkpoint's.

    `names` are the checkpoint's tensors that lie in it, one behind the other along the first dimension that they have
    there. `sizes` says how much each takes of it; without it all take the same. Experts are stacked:
    [experts, out, in].
    """

    shape: tuple[int, ...]
    role: Role
    names: tuple[str, ...] = ("weight",)
    sizes: tuple[int, ...] = ()
    in_float32: bool = False
    """Whether it is float32 whatever the model's dtype is."""
    is_less_one: bool = False
    """Whether it is a norm's that multiplies by it and 1."""
    can_be_quantised: bool = False
    beside: tuple[str, ...] = ()
    """Names of tensors that lie elsewhere and are quantised only together with this one: the experts' other matrix."""
    in_size_beside: int = 0
    """Elements of a row of these."""
    is_lm_head: bool = False
    """Whether it gives the logits, as its own matrix or as the embedding that is tied to it."""
    is_stack: bool = False
    """Whether the checkpoint too has experts as one tensor, which is no linear there."""
    whole_name: str = ""
    """The name under which a checkpoint may have one tensor in place of those of `names`."""
    is_gated: bool = False
    """Whether the first half of its outputs are the gates of the others, so that both are read at a time."""
    interleaved: tuple[int, ...] = ()
    """Sizes of parts whose rows take turns in the checkpoint: so many of the first, of the second, and so on, and then
    again. Here all rows of a part lie together."""
    turns_first: bool = False
    """Whether the first part of those is a stack of matrices, one for each turn, that lie transposed here."""
    segments: tuple[int, ...] = ()
    """Sizes of the parts that are each cut for themselves among ranks: of what all of its tensors have of the dimension
    that is cut, one behind the other, or each of them. Without segments a tensor is cut as one."""
    stored_shape: tuple[int, ...] = ()
    """In the checkpoint, where that differs."""
    stored_transposed: bool = False
    """Whether the checkpoint has the first dimension last."""

    @property
    def can_be_blocks(self) -> bool:
        """Whether it may lie in blocks: what can be quantised can, and the embedding, of which rows are looked up."""
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
        return self.num_elements // self.shape[-1]

    @property
    def names_of_all_experts(self) -> tuple[str, ...]:
        """`names`, those of all experts as one."""
        return self._of_all_experts(self.names)

    @property
    def beside_of_all_experts(self) -> tuple[str, ...]:
        """`beside` likewise."""
        return self._of_all_experts(self.beside)

    def _of_all_experts(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if self.role != "experts" or self.is_stack:
            return names
        return tuple(map(of_all_experts, names[: len(names) // self.shape[0]]))

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """The checkpoint's names for the linear layers that are quantised together here, or not at all."""
        if self.is_lm_head:
            return ("lm_head",)
        return tuple(name.removesuffix(".weight") for name in (*self.names, *self.beside))

    def under(self, prefix: str) -> Weight:
        """The same with a prefix before each name."""
        names, beside = (tuple(prefix + name for name in each) for each in (self.names, self.beside))
        return replace(self, names=names, beside=beside, whole_name=self.whole_name and prefix + self.whole_name)


def num_elements(weights: Iterable[Weight], in_float32: bool | None = None) -> int:
    """Of all weights together, or of those that are float32 whatever the model's dtype is, or of the others."""
    return sum(weight.num_elements for weight in weights if in_float32 in (None, weight.in_float32))
