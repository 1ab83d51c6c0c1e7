"""Inputs that kernels and layers read in a step, its decode and prefill rows, and each layer's cache memory.

The fields of `StepInputs` and `EncoderInputs` are the table of inputs. The persistent buffers, their bytes in the plan,
and the views that layers read come from it. No torch is imported, so that the plan can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from ostinato.ops.sizes import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "torch.Tensor"
"""Array that layers and models compute with, of numpy or torch: they view it, and operations do all else.

What both have is written for one of them here, since a type checker knows no array that both are.
"""


@dataclass(frozen=True)
class InputSpec:
    """Facts of one input, a tensor with an entry per token, row, patch or image. Padding entries are 0."""

    per: str
    """Dimension with an entry each: token, row, patch or image."""
    dtype: str
    width: int | str | None = None
    """Elements of an entry, or the name of a size; None for an entry that is a single number."""
    ends: bool = False
    """True if entry i is the start of row i, and one more entry is the end of the last row.

    Padding entries are that end.
    """
    of_images: bool = False
    """True if only models that take images have it."""
    of_prefix_lms: bool = False
    """True if prefix LMs have it too."""
    for_windows: bool = False
    """True if only models that have window blocks have it, or encoders that have windows."""
    is_padded: bool = True
    """False if padding may keep its old values: no other entry depends on it."""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a tensor with `sizes["token"]` tokens, `sizes["row"]` rows and so on."""
        entries = sizes[self.per] + self.ends
        if self.width is None:
            return (entries,)
        return (entries, self.width if isinstance(self.width, int) else sizes[self.width])

    def num_bytes(self, sizes: Mapping[str, int]) -> int:
        return prod(self.shape(sizes)) * DTYPE_BYTES[self.dtype]


Table = Mapping[str, InputSpec]
"""Inputs by name, those of the widest dtype first, so that in one piece of memory each is aligned.

The pixels come last, in the dtype of the model.
"""


def _of(per: str, dtype: str, width: int | str | None = None, **facts: bool) -> Mapping[str, InputSpec]:
    """Return the metadata of a field that is an input."""
    return {"input": InputSpec(per, dtype, width, **facts)}


def _table(inputs: type) -> Table:
    return {each.name: each.metadata["input"] for each in fields(inputs) if each.metadata}


def table_bytes(table: Table, sizes: Mapping[str, int]) -> int:
    """Return the bytes of buffers for all inputs of a table."""
    return sum(each.num_bytes(sizes) for each in table.values())


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One batch, as the kernels read it. Decode rows come first, `write_slots.shape[1]` tokens each.

    Row r owns the tokens `row_starts[r]:row_starts[r + 1]`; those beyond position `kv_lens[r] - 1` are padding. Slot 0,
    block 0 and window block 0 are null: padding rows and tokens point at them, and a padding row has a `kv_len` of 0.
    """

    buffers: ClassVar[str] = "step buffers"

    token_ids: Array = field(metadata=_of("token", "int64"))
    """Token ids, [tokens]."""
    positions: Array = field(metadata=_of("token", "int64"))
    """Positions [tokens], counted from the request's first token."""
    kv_cells: Array = field(metadata=_of("token", "int64"))
    """Cells [tokens] for each token's key and value: block id * block_size + offset in the block."""
    rope_positions: Array | None = field(default=None, metadata=_of("token", "int64", 3, of_images=True))
    """Positions [tokens, 3] of each token in time, height and width, for models with images."""
    media_cells: Array | None = field(default=None, metadata=_of("token", "int64", of_images=True))
    """Encoder cache cell of each token, [tokens], 0 for tokens of text; for models with images."""
    window_kv_cells: Array | None = field(default=None, metadata=_of("token", "int64", for_windows=True))
    """Cells [tokens] like `kv_cells`, in the window blocks of layers with a window."""
    last_seen: Array | None = field(default=None, metadata=_of("token", "int32", of_images=True, of_prefix_lms=True))
    """Last position [tokens] that each token sees: its own, or the last one of its image or its prefix LM's prompt."""
    row_starts: Array = field(metadata=_of("row", "int32", ends=True))
    """First token of each row, and the end of the last one, [rows + 1]."""
    start_positions: Array = field(metadata=_of("row", "int32"))
    """Position of each row's first token, [rows]."""
    kv_lens: Array = field(metadata=_of("row", "int32"))
    """Context length of each row after the step, [rows]."""
    read_slots: Array = field(metadata=_of("row", "int32"))
    """Slot that each row reads, [rows]; 0 is the zero state."""
    write_slots: Array = field(metadata=_of("row", "int32", "slots"))
    """Slots that each row writes, [rows, 1 + k]."""
    block_tables: Array = field(metadata=_of("row", "int32", "blocks"))
    """Blocks of each row, [rows, max_blocks]."""
    window_block_tables: Array | None = field(
        default=None, metadata=_of("row", "int32", "window_blocks", for_windows=True)
    )
    """Window blocks of each row, like `block_tables`, for layers with a window.

    A block is null if no token of the row sees any of its positions.
    """
    num_decode_rows: int
    checkpoints: Sequence[tuple[int, int, int]] = ()
    """Checkpoints (row, offset, slot): the state after `offset` tokens of a prefill row also goes to `slot`."""

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.token_ids.shape[0]

    def kv_targets(self, window: int | None) -> tuple[Array, Array]:
        """Return (cells, block tables) of a layer with this attention window.

        They locate the layer's keys and values for writing and reading.
        """
        if window is None or self.window_kv_cells is None or self.window_block_tables is None:
            return self.kv_cells, self.block_tables
        return self.window_kv_cells, self.window_block_tables

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decode_rows * self.write_slots.shape[1]


@dataclass(frozen=True)
class LayerCache:
    """Part of the cache memory that belongs to one layer; absent parts are None."""

    k_cache: Array | None = None
    """Keys, [blocks, block_size, kv_heads, head_dim]; in window blocks if `in_window_blocks`."""
    v_cache: Array | None = None
    """Values, like `k_cache`; None if a token's values are part of its keys."""
    k_scales: Array | None = None
    """Scales [blocks, block_size, kv_heads] float32 of keys that are 8-bit integers (`ops/quant/quantize.py`).

    `v_scales` are the same for values.
    """
    v_scales: Array | None = None
    index_cache: Array | None = None
    """Keys of an indexer, with their gates if it has some, [blocks, block_size, 1, entry_size]."""
    index_scales: Array | None = None
    """Scales [blocks, block_size, 1] of an indexer's keys that are 8-bit integers."""
    states: Mapping[str, Array] = field(default_factory=dict)
    """Arrays of the layer's state, [slots, *shape] each, by their names in its `StateSpec`."""
    in_window_blocks: bool = False
    """True if its keys and values are in window blocks: it has a window, and the model has window blocks."""
    noise: int | None = None
    """Number that makes this layer's noise differ from other layers', if states are rounded stochastically."""
    packed_states: tuple[str, ...] = ()
    """Arrays of `states` that are rounded to 8 bits at block boundaries, so that packing checkpoints loses nothing."""
    media: Array | None = None
    """Outputs of the vision encoder for each token of an image, [cells, rows, hidden].

    Row 0 replaces the token's embedding, row i is added after layer i - 1 (DeepStack). It belongs to no layer: it is
    stored after the layers' parts.
    """

    @property
    def packable(self) -> bool:
        """True if states are rounded at block boundaries."""
        return bool(self.packed_states)

    @property
    def block_tensors(self) -> dict[str, Array]:
        """Tensors in blocks, or in window blocks in a layer with a window, by name: [blocks, block_size, ...] each."""
        whole = {"k_cache": self.k_cache, "v_cache": self.v_cache, "k_scales": self.k_scales, "v_scales": self.v_scales}
        whole |= {"index_cache": self.index_cache, "index_scales": self.index_scales}
        return {name: tensor for name, tensor in whole.items() if tensor is not None}

    @property
    def tensors(self) -> dict[str, Array]:
        """All tensors of the layer, by name."""
        of_images = {} if self.media is None else {"media": self.media}
        return {**self.block_tensors, **of_images, **self.states}


@dataclass(frozen=True, kw_only=True)
class EncoderInputs:
    """Images side by side, as the vision encoder reads them.

    Patches are in the order of merging: the `merge_size ** 2` patches of an output token are neighbours. Segment s, one
    image or one temporal patch of a video, owns the patches `starts[s]:starts[s + 1]`; those from `starts[-1]` on are
    padding, and so are segments without patches. If the encoder has a prefix (`VisionSpec.num_prefix`), an image's rows
    begin with a segment of padding that makes it whole output tokens, and with its vectors, whose pixels are 0.
    """

    buffers: ClassVar[str] = "encoder buffers"

    taps: Array = field(metadata=_of("patch", "int64", "taps"))
    """Learned position embeddings that a patch's own is computed from, [patches, 4].

    Of an encoder with convolutions: the patches that each patch sees, [patches, size ** 2] (`runner.image_encoder`).
    """
    positions: Array = field(metadata=_of("patch", "int64", 2))
    """Row and column of each patch, in patches, [patches, 2]."""
    tap_weights: Array = field(metadata=_of("patch", "float32", "taps"))
    """Weights of the `taps`, of the same shape."""
    starts: Array = field(metadata=_of("image", "int32", ends=True))
    """First patch of each segment, and the end of the last one, [segments + 1]."""
    merged_starts: Array | None = field(default=None, metadata=_of("image", "int32", ends=True, for_windows=True))
    """Starts like `starts` of the segments' merged windows, in windows."""
    window_starts: Array | None = field(default=None, metadata=_of("window", "int32", ends=True, for_windows=True))
    """First patch of each window, and the end of the last one, [windows + 1]; those of padding have none."""
    patches: Array = field(metadata=_of("patch", "model", "patch_elements", is_padded=False))
    """Pixels of the patches, [patches, patch_elements], in the model's dtype."""

    @cached_property
    def num_tokens(self) -> int:
        """Number of patches."""
        return self.patches.shape[0]


WINDOW = 4
"""Patches of an encoder's window: two rows of two."""


def encoder_table(dtype: str, has_windows: bool = False) -> Table:
    """Return the inputs of an encoder whose model has this dtype."""
    return {
        name: replace(each, dtype=dtype) if each.dtype == "model" else each
        for name, each in _table(EncoderInputs).items()
        if has_windows or not each.for_windows
    }


@lru_cache(maxsize=8)
def step_table(takes_images: bool, has_window_blocks: bool = False, is_prefix_lm: bool = False) -> Table:
    """Return the inputs of a step; those of models of one kind only if asked for."""
    return {
        name: each
        for name, each in _table(StepInputs).items()
        if (takes_images or not each.of_images or (is_prefix_lm and each.of_prefix_lms))
        and (has_window_blocks or not each.for_windows)
    }


def step_sizes(rows: int, tokens: int, blocks: int, slots: int, window_blocks: int = 0) -> dict[str, int]:
    """Return the sizes of buffers for steps of `rows` rows and `tokens` tokens.

    A row has `blocks` blocks, `window_blocks` window blocks and `slots` write slots. A model without blocks has a
    column of null blocks.
    """
    return {"row": rows, "token": tokens, "blocks": max(blocks, 1), "slots": slots, "window_blocks": window_blocks}


def encoder_sizes(patches: int, images: int, patch_elements: int, taps: int = 4) -> dict[str, int]:
    """Return the sizes of buffers for packs of `patches` patches and `images` images."""
    sizes = {"patch": patches, "image": images, "patch_elements": patch_elements, "taps": taps}
    return {**sizes, "window": patches // WINDOW}


@dataclass(frozen=True)
class DecodeRows:
    """Slots and positions of decode rows, for the update of a recurrence."""

    read_slots: Array
    """Slots to read, [rows]."""
    write_slots: Array
    """Slots for the state after each token, [rows, tokens of a row]."""
    start_positions: Array
    """Position of each row's first token, [rows]."""


@dataclass(frozen=True)
class PrefillRows:
    """Slots and positions of prefill rows, for the scan of a recurrence, which gets only their tokens."""

    row_starts: Array
    """First token of each row in the whole step, and the end of the last one, [rows + 1].

    These rows' tokens begin with `row_starts[0]`.
    """
    start_positions: Array
    """Position of each row's first token, [rows]."""
    read_slots: Array
    """Slots to read, [rows]."""
    write_slots: Array
    """Slots for the state after the last token, [rows]."""
    checkpoints: list[tuple[int, int, int]]
    """Further states to keep: (row, offset, slot)."""


def split_rows(inputs: StepInputs) -> tuple[DecodeRows | None, PrefillRows | None]:
    """Return the decode rows of a step, which come first, and its prefill rows; None for a kind without rows."""
    count = inputs.num_decode_rows
    if count == inputs.read_slots.shape[0]:
        return DecodeRows(inputs.read_slots, inputs.write_slots, inputs.start_positions), None
    prefill = PrefillRows(
        inputs.row_starts[count:],
        inputs.start_positions[count:],
        inputs.read_slots[count:],
        inputs.write_slots[count:, 0],
        [(row - count, offset, slot) for row, offset, slot in inputs.checkpoints],
    )
    if count == 0:
        return None, prefill
    return DecodeRows(inputs.read_slots[:count], inputs.write_slots[:count], inputs.start_positions[:count]), prefill


def apply_recurrence(
    inputs: StepInputs,
    parts: Sequence[Array],
    update: Callable[..., Array],
    scan: Callable[..., Array],
    concat: Callable[..., Array],
) -> Array:
    """Apply a recurrence along each row: `update(DecodeRows, *parts)` to decode rows, `scan(PrefillRows, *parts)` else.

    Each call gets its own rows' tokens of `parts`, [tokens, ...] each. Their results are joined by `concat`, the
    operation of the model. -> [tokens, ...].
    """
    decode, prefill = split_rows(inputs)
    if prefill is None:
        return update(decode, *parts)
    if decode is None:
        return scan(prefill, *parts)
    tokens = inputs.num_decode_tokens
    decoded = update(decode, *(part[:tokens] for part in parts))
    scanned = scan(prefill, *(part[tokens:] for part in parts))
    joined = concat(decoded.reshape(1, -1), scanned.reshape(1, -1))
    return joined.reshape(parts[0].shape[0], *decoded.shape[1:])


def apply_selective_recurrence(
    inputs: StepInputs,
    memory: LayerCache,
    parts: tuple[Array, Array, Array, Array],
    weights: tuple[Array, Array, Array],
    update: Callable[..., Array],
    scan: Callable[..., Array],
    concat: Callable[..., Array],
    options: tuple[object, ...] = (),
    scan_options: tuple[object, ...] = (),
) -> Array:
    """Apply a selective recurrence along each row: `update` to decode rows, `scan` to prefill rows.

    `parts` are x, dt, B and C of each token, `weights` A_log, D and dt_bias. Both operations take `options` after
    them, and `scan` also `scan_options`. -> [tokens, ...].
    """
    decode = partial(_run_selective, update, memory, weights, options)
    prefill = partial(_run_selective, scan, memory, weights, options + scan_options)
    return apply_recurrence(inputs, parts, decode, prefill, concat)


def _run_selective(
    op: Callable[..., Array],
    memory: LayerCache,
    weights: tuple[Array, Array, Array],
    options: tuple[object, ...],
    rows: DecodeRows | PrefillRows,
    *parts: Array,
) -> Array:
    x, dt, B, C = parts
    A_log, D, dt_bias = weights
    arguments = (x, dt, A_log, B, C, D, dt_bias, *options, memory.states["ssm"])
    if isinstance(rows, DecodeRows):
        return op(*arguments, rows.read_slots, rows.write_slots, rows.start_positions, memory.noise, memory.packable)
    starts = rows.row_starts, rows.start_positions
    rounding = {"noise": memory.noise, "packable": memory.packable}
    return op(*arguments, *starts, rows.read_slots, rows.write_slots, rows.checkpoints, **rounding)
