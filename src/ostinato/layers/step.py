"""What the layers get in a step: the batch as tensors, and each layer's part of the cache memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class StepInputs:
    """One batch, as the kernels read it. Decode rows come first, `write_slots.shape[1]` tokens each.

    Row r owns the tokens `row_starts[r]:row_starts[r + 1]`, of which those beyond position `kv_lens[r] - 1` are
    padding. Slot 0 and block 0 are null: padding rows and tokens point at them, and a padding row has a `kv_len` of 0.
    """

    buffers: ClassVar[str] = "step buffers"

    token_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64, counted from the request's first token"""
    row_starts: torch.Tensor
    """[rows + 1] int32"""
    start_positions: torch.Tensor
    """[rows] int32: position of each row's first token"""
    kv_lens: torch.Tensor
    """[rows] int32: each row's context length after the step"""
    block_tables: torch.Tensor
    """[rows, max_blocks] int32"""
    kv_cells: torch.Tensor
    """[tokens] int64: block id * block_size + offset in the block, where a token's key and value go"""
    read_slots: torch.Tensor
    """[rows] int32, 0 being the zero state"""
    write_slots: torch.Tensor
    """[rows, 1 + k] int32"""
    num_decode_rows: int
    rope_positions: torch.Tensor | None = None
    """[tokens, 3] int64: where each token stands in time, height and width, for models with images"""
    media_cells: torch.Tensor | None = None
    """[tokens] int64: the cell of the encoder cache that a token takes, 0 for tokens of text; for models with images"""
    checkpoints: Sequence[tuple[int, int, int]] = ()
    """(row, offset, slot): the state after `offset` tokens of a prefill row also goes to `slot`."""

    @property
    def length(self) -> int:
        """Tokens."""
        return self.token_ids.shape[0]

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decode_rows * self.write_slots.shape[1]

    def to(self, device: torch.device) -> StepInputs:
        """The same inputs on another device."""
        if self.token_ids.device == device:
            return self
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in tensors.items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class LayerMemory:
    """The part of the cache that belongs to one layer; absent parts are None."""

    k_cache: torch.Tensor | None = None
    """[blocks, block_size, kv_heads, head_dim]"""
    v_cache: torch.Tensor | None = None
    """[blocks, block_size, kv_heads, head_dim]"""
    conv_states: torch.Tensor | None = None
    """[slots, width - 1, channels]: the last inputs of a convolution, or of a shift by one token"""
    ssm_states: torch.Tensor | None = None
    """[slots, heads, head_dim, state]"""
    media: torch.Tensor | None = None
    """[cells, rows, hidden]: what the vision encoder gave for each token of an image. Row 0 takes the place of the
    token's embedding, row i is added behind layer i - 1 (DeepStack). Not a layer's: it stands behind the layers'."""


@dataclass(frozen=True)
class EncoderInputs:
    """Images side by side, as the vision encoder reads them. Patches lie in the order of merging: the
    `merge_size ** 2` patches of an output token are neighbours.

    Segment s, one image or one temporal patch of a video, owns the patches `starts[s]:starts[s + 1]`; those from
    `starts[-1]` on are padding, and so are segments without patches.
    """

    buffers: ClassVar[str] = "encoder buffers"

    patches: torch.Tensor
    """[patches, patch_elements] float32"""
    taps: torch.Tensor
    """[patches, 4] int64: the learned position embeddings that a patch's own is made of"""
    tap_weights: torch.Tensor
    """[patches, 4] float32"""
    positions: torch.Tensor
    """[patches, 2] int64: row and column, in patches"""
    starts: torch.Tensor
    """[segments + 1] int32"""

    @property
    def length(self) -> int:
        """Patches."""
        return self.patches.shape[0]

    def to(self, device: torch.device) -> EncoderInputs:
        """The same inputs on another device."""
        if self.patches.device == device:
            return self
        return EncoderInputs(**{name: value.to(device) for name, value in vars(self).items()})
