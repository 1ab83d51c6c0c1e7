"""What kernels and layers read in a step: its inputs, and each layer's part of the cache memory.

The fields of `StepInputs` and `EncoderInputs` are the table of inputs: from it come the persistent buffers, their bytes
in the plan, and the views that layers read. No torch is imported, so that the plan can read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


_BYTES = {"int64": 8, "int32": 4, "float32": 4}


@dataclass(frozen=True)
class Input:
    """Facts of one input, a tensor with an entry per token, row, patch or image. Padding entries are 0."""

    per: str
    """token, row, patch or image"""
    dtype: str
    width: int | str | None = None
    """Elements of an entry, or the name of a size; None for an entry that is a single number."""
    ends: bool = False
    """Entry i is where row i begins, and one more entry is where the last one ends. Padding entries are that end."""
    of_images: bool = False
    """Only models that take images have it."""
    of_panes: bool = False
    """Only models that have panes have it."""
    is_padded: bool = True
    """False where padding may keep what stood there: no other entry depends on it."""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Of a tensor with `sizes["token"]` tokens, `sizes["row"]` rows and so on."""
        entries = sizes[self.per] + self.ends
        if self.width is None:
            return (entries,)
        return (entries, self.width if isinstance(self.width, int) else sizes[self.width])

    def num_bytes(self, sizes: Mapping[str, int]) -> int:
        return prod(self.shape(sizes)) * _BYTES[self.dtype]


Table = Mapping[str, Input]
"""Inputs by name, those of the widest dtype first, so that in one piece of memory each is aligned."""


def _of(per: str, dtype: str, width: int | str | None = None, **facts: bool) -> Mapping[str, Input]:
    """Metadata of a field that is an input."""
    return {"input": Input(per, dtype, width, **facts)}


def _table(inputs: type) -> Table:
    return {each.name: each.metadata["input"] for each in fields(inputs) if each.metadata}


def table_bytes(table: Table, sizes: Mapping[str, int]) -> int:
    """Bytes of buffers for all inputs of a table."""
    return sum(each.num_bytes(sizes) for each in table.values())


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One batch, as the kernels read it. Decode rows come first, `write_slots.shape[1]` tokens each.

    Row r owns the tokens `row_starts[r]:row_starts[r + 1]`, of which those beyond position `kv_lens[r] - 1` are
    padding. Slot 0, block 0 and pane 0 are null: padding rows and tokens point at them, and a padding row has a
    `kv_len` of 0.
    """

    buffers: ClassVar[str] = "step buffers"

    token_ids: torch.Tensor = field(metadata=_of("token", "int64"))
    """[tokens]"""
    positions: torch.Tensor = field(metadata=_of("token", "int64"))
    """[tokens], counted from the request's first token"""
    kv_cells: torch.Tensor = field(metadata=_of("token", "int64"))
    """[tokens]: block id * block_size + offset in the block, where a token's key and value go"""
    rope_positions: torch.Tensor | None = field(default=None, metadata=_of("token", "int64", 3, of_images=True))
    """[tokens, 3]: where each token stands in time, height and width, for models with images"""
    media_cells: torch.Tensor | None = field(default=None, metadata=_of("token", "int64", of_images=True))
    """[tokens]: the cell of the encoder cache that a token takes, 0 for tokens of text; for models with images"""
    pane_cells: torch.Tensor | None = field(default=None, metadata=_of("token", "int64", of_panes=True))
    """[tokens]: as `kv_cells`, in the panes of layers with a window"""
    row_starts: torch.Tensor = field(metadata=_of("row", "int32", ends=True))
    """[rows + 1]"""
    start_positions: torch.Tensor = field(metadata=_of("row", "int32"))
    """[rows]: position of each row's first token"""
    kv_lens: torch.Tensor = field(metadata=_of("row", "int32"))
    """[rows]: each row's context length after the step"""
    read_slots: torch.Tensor = field(metadata=_of("row", "int32"))
    """[rows], 0 being the zero state"""
    write_slots: torch.Tensor = field(metadata=_of("row", "int32", "slots"))
    """[rows, 1 + k]"""
    block_tables: torch.Tensor = field(metadata=_of("row", "int32", "blocks"))
    """[rows, max_blocks]"""
    pane_tables: torch.Tensor | None = field(default=None, metadata=_of("row", "int32", "panes", of_panes=True))
    """As `block_tables`, for layers with a window; null where no token of the row sees any position"""
    num_decode_rows: int
    checkpoints: Sequence[tuple[int, int, int]] = ()
    """(row, offset, slot): the state after `offset` tokens of a prefill row also goes to `slot`."""

    @cached_property
    def length(self) -> int:
        """Tokens."""
        return self.token_ids.shape[0]

    def places(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(cells, tables) of a layer whose attention has this window: where its keys and values go and are found."""
        if window is None or self.pane_cells is None or self.pane_tables is None:
            return self.kv_cells, self.block_tables
        return self.pane_cells, self.pane_tables

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decode_rows * self.write_slots.shape[1]


@dataclass(frozen=True)
class LayerMemory:
    """The part of the cache that belongs to one layer; absent parts are None."""

    k_cache: torch.Tensor | None = None
    """[blocks, block_size, kv_heads, head_dim]; panes where `is_paned`"""
    v_cache: torch.Tensor | None = None
    """As `k_cache`; None where a token's values are part of its keys"""
    k_scales: torch.Tensor | None = None
    """[blocks, block_size, kv_heads] float32, where keys and values are 8-bit integers (`ops/int8.py`)"""
    v_scales: torch.Tensor | None = None
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[slots, *shape] each: the arrays of the layer's state, by their names in its `StateSpec`"""
    is_paned: bool = False
    """Whether its keys and values are in panes: it has a window, and the model has panes."""
    noise: int | None = None
    """What makes this layer's noise another one than that of others, where states are rounded stochastically."""
    media: torch.Tensor | None = None
    """[cells, rows, hidden]: what the vision encoder gave for each token of an image. Row 0 takes the place of the
    token's embedding, row i is added behind layer i - 1 (DeepStack). Not a layer's: it stands behind the layers'."""

    @property
    def in_blocks(self) -> dict[str, torch.Tensor]:
        """What lies in blocks, or in panes where `is_paned`, by name: [blocks, block_size, ...] each."""
        whole = {"k_cache": self.k_cache, "v_cache": self.v_cache, "k_scales": self.k_scales, "v_scales": self.v_scales}
        return {name: tensor for name, tensor in whole.items() if tensor is not None}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it has, by name."""
        of_images = {} if self.media is None else {"media": self.media}
        return {**self.in_blocks, **of_images, **self.states}


@dataclass(frozen=True, kw_only=True)
class EncoderInputs:
    """Images side by side, as the vision encoder reads them. Patches lie in the order of merging: the
    `merge_size ** 2` patches of an output token are neighbours.

    Segment s, one image or one temporal patch of a video, owns the patches `starts[s]:starts[s + 1]`; those from
    `starts[-1]` on are padding, and so are segments without patches.
    """

    buffers: ClassVar[str] = "encoder buffers"

    taps: torch.Tensor = field(metadata=_of("patch", "int64", 4))
    """[patches, 4]: the learned position embeddings that a patch's own is made of"""
    positions: torch.Tensor = field(metadata=_of("patch", "int64", 2))
    """[patches, 2]: row and column, in patches"""
    patches: torch.Tensor = field(metadata=_of("patch", "float32", "patch_elements", is_padded=False))
    """[patches, patch_elements]"""
    tap_weights: torch.Tensor = field(metadata=_of("patch", "float32", 4))
    """[patches, 4]"""
    starts: torch.Tensor = field(metadata=_of("image", "int32", ends=True))
    """[segments + 1]"""

    @cached_property
    def length(self) -> int:
        """Patches."""
        return self.patches.shape[0]


ENCODER_TABLE = _table(EncoderInputs)


def step_table(takes_images: bool, has_panes: bool = False) -> Table:
    """The inputs of a step of a model; of every model, or of one that takes images, or has panes."""
    return {
        name: each
        for name, each in _table(StepInputs).items()
        if (takes_images or not each.of_images) and (has_panes or not each.of_panes)
    }


def step_sizes(rows: int, tokens: int, blocks: int, slots: int, panes: int = 0) -> dict[str, int]:
    """Sizes of buffers for steps of so many rows and tokens, with `blocks` blocks, `panes` panes and `slots` write
    slots per row. A model without blocks has a column of null blocks."""
    return {"row": rows, "token": tokens, "blocks": max(blocks, 1), "slots": slots, "panes": panes}


def encoder_sizes(patches: int, images: int, patch_elements: int) -> dict[str, int]:
    """Sizes of buffers for packs of so many patches and images."""
    return {"patch": patches, "image": images, "patch_elements": patch_elements}
