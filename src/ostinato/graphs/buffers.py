"""Persistent buffers: fixed memory that models and graphs read their inputs from. Allocated once, as planned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from ostinato.errors import CaptureError
from ostinato.ops.arrays import Arrays, first_address, is_array, memory_address, numpy_dtype
from ostinato.ops.dispatch import Kernel
from ostinato.ops.step_inputs import (
    WINDOW,
    EncoderInputs,
    StepInputs,
    Table,
    encoder_sizes,
    encoder_table,
    step_sizes,
    step_table,
    table_bytes,
)

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array


class BufferedInputs(Protocol):
    """Inputs of a forward pass: a dataclass whose tensors are views of persistent buffers.

    Padding is added after the `length` real entries (tokens, patches) of each tensor that is indexed by them.
    """

    buffers: ClassVar[str]
    """Name of the buffers of such inputs."""

    @property
    def num_tokens(self) -> int: ...


class Buffers:
    """Memory for the inputs of a table, in one piece, at addresses that never change.

    Inputs are written into `arrays` on the host, and read from `tensors` on the device. On a CPU both are the same
    memory; on a GPU `pad` copies them to the device.
    """

    def __init__(self, table: Table, sizes: Mapping[str, int], arrays: Arrays) -> None:
        self.table = table
        self._maker = arrays
        self._host, self._memory = arrays.mirrored_bytes(table_bytes(table, sizes))
        self._offsets: dict[str, int] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Array] = {}
        offset = 0
        for name, field in table.items():
            self._offsets[name] = offset
            end, shape = offset + field.num_bytes(sizes), field.shape(sizes)
            self.arrays[name] = self._host[offset:end].view(numpy_dtype(field.dtype)).reshape(shape)
            self.tensors[name] = self._memory[offset:end].view(arrays.dtype(field.dtype)).reshape(shape)
            offset = end

    @property
    def num_bytes(self) -> int:
        return self._host.nbytes

    @property
    def storage(self) -> int:
        """Address of the memory that holds all inputs."""
        return memory_address(self._memory)

    def clear(self) -> None:
        """Fill everything with padding."""
        self._host.fill(0)
        if not self._maker.is_on_host:
            self._memory[:] = 0

    def _views(self, lengths: Mapping[str, int]) -> dict[str, Array]:
        """Return the first entries of every buffer; `lengths` has the number of entries of each kind."""
        return {name: self.tensors[name][: lengths[field.per] + field.ends] for name, field in self.table.items()}

    def _pad(self, per: str, real: int, padded: int, end: int) -> None:
        """Write padding into the entries `real` to `padded - 1` of one kind. `end` is where the last real row ends."""
        if real == padded:
            return
        for name, field in self.table.items():
            if field.per == per and field.is_padded:
                self.arrays[name][real + field.ends : padded + field.ends] = end if field.ends else 0


class StepBuffers(Buffers):
    """Inputs of one step, for up to `max_rows` rows and `max_tokens` tokens."""

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_blocks: int,
        slots_per_request: int,
        arrays: Arrays,
        takes_images: bool = False,
        max_window_blocks: int = 0,
        media_token_id: int | None = None,
        is_prefix_lm: bool = False,
    ) -> None:
        """Allocate the buffers. `media_token_id` is `VisionSpec.text_token_id`."""
        sizes = step_sizes(max_rows, max_tokens, max_blocks, slots_per_request, max_window_blocks)
        super().__init__(step_table(takes_images, max_window_blocks > 0, is_prefix_lm), sizes, arrays)
        self.takes_images, self.has_window_blocks = takes_images, max_window_blocks > 0
        self.media_token_id = media_token_id
        self.sees_ahead = takes_images or is_prefix_lm
        self.written_tables: list[Sequence[int]] = [()] * max_rows
        """Block tables that the rows hold now. Zeros follow them."""
        self.written_window_blocks: list[Sequence[int]] = [()] * max_rows
        """Tables of window blocks that the rows hold now, in a model that has some."""
        self._decode_views: dict[tuple[int, int], StepInputs] = {}
        self.incoming: Array | None = None
        """Token ids of the first rows of the step being written, on the device; `pad` copies them into the buffer."""

    def view(
        self,
        rows: int,
        tokens: int,
        tokens_per_row: int,
        num_decode_rows: int,
        checkpoints: Sequence[tuple[int, int, int]] = (),
    ) -> StepInputs:
        """Return the first `rows` rows and `tokens` tokens as a step whose rows write `tokens_per_row` slots each."""
        # Decode-only steps have few shapes and no checkpoints inside, so their views are reused.
        is_decode = num_decode_rows == rows and tokens == rows * tokens_per_row
        inputs = self._decode_views.get((rows, tokens_per_row)) if is_decode else None
        if inputs is None:
            views = self._views({"row": rows, "token": tokens})
            views["write_slots"] = views["write_slots"][:, :tokens_per_row]
            inputs = StepInputs(**views, num_decode_rows=num_decode_rows, checkpoints=checkpoints)
            if is_decode:
                self._decode_views[rows, tokens_per_row] = inputs
        return inputs

    def write_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """Write the block table of each row.

        A table that is already in its row is not written again: steps of long contexts would spend their time in
        copying.
        """
        self._write_tables(self.arrays["block_tables"], self.written_tables, tables)

    def write_window_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """Write the table of window blocks of each row, as `write_tables` does."""
        self._write_tables(self.arrays["window_block_tables"], self.written_window_blocks, tables)

    @staticmethod
    def _write_tables(array: np.ndarray, written: list[Sequence[int]], tables: Sequence[Sequence[int]]) -> None:
        for row, table in enumerate(tables):
            previous = written[row]
            # `is` first: comparing two tuples takes time even if they are the same object.
            if table is not previous and table != previous:
                first = bisect_left(table, 1)  # a long table is null before the window; numpy fills that faster
                array[row, :first] = 0
                array[row, first : len(table)] = table[first:]
                array[row, len(table) : len(previous)] = 0
                written[row] = table

    def pad(self, rows: int, tokens: int, to_rows: int, to_tokens: int) -> None:
        """Pad the written step of `rows` rows and `tokens` tokens to `to_rows` rows and `to_tokens` tokens.

        Padding tokens have null cells; padding rows have null slots, null blocks and a context length of 0.
        """
        assert rows <= to_rows, "a step has more rows than it is padded to"
        assert tokens <= to_tokens, "a step has more tokens than it is padded to"
        self._pad("token", tokens, to_tokens, 0)
        self._pad("row", rows, to_rows, tokens)
        for written in (self.written_tables, self.written_window_blocks):
            written[rows:to_rows] = [()] * (to_rows - rows)
        if not self._maker.is_on_host:
            # The tables come last and are by far the largest part, so only the rows in use are sent.
            begin = 0
            for name in ("block_tables", "window_block_tables") if self.has_window_blocks else ("block_tables",):
                end = self._offsets[name] + to_rows * self.arrays[name].strides[0]
                self._send(begin, end)
                begin = self._offsets[name] + self.arrays[name].nbytes
        if self.incoming is not None:
            self.tensors["token_ids"][: len(self.incoming)] = self.incoming
            self.incoming = None

    def _send(self, begin: int, end: int) -> None:
        """Copy these bytes to the device."""
        self._maker.send(self._host[begin:end], self._memory[begin:end])

    def clear(self) -> None:
        """Fill everything with padding: such a step reads and writes only the null block and the null slot."""
        super().clear()
        self.written_tables = [()] * len(self.written_tables)
        self.written_window_blocks = [()] * len(self.written_window_blocks)

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Fill everything with padding for the duration of the context, and restore the content afterwards."""
        content, tables, window_blocks = self._host.copy(), self.written_tables, self.written_window_blocks
        self.clear()
        try:
            yield
        finally:
            self._host[:] = content
            self.written_tables, self.written_window_blocks = tables, window_blocks


class EncoderBuffers(Buffers):
    """Inputs of one pack of up to `max_images` images with up to `max_patches` patches."""

    def __init__(
        self,
        max_patches: int,
        max_images: int,
        patch_elements: int,
        arrays: Arrays,
        dtype: str,
        taps: int = 4,
        has_windows: bool = False,
    ) -> None:
        sizes = encoder_sizes(max_patches, max_images, patch_elements, taps)
        super().__init__(encoder_table(dtype, has_windows), sizes, arrays)
        self.has_windows = has_windows

    def view(self, patches: int) -> EncoderInputs:
        """Return the first `patches` patches, with the segments of all images that there is room for."""
        lengths = {"patch": patches, "image": len(self.arrays["starts"]) - 1, "window": patches // WINDOW}
        return EncoderInputs(**self._views(lengths))

    def pad(self, patches: int, images: int, to_patches: int) -> None:
        """Pad the written pack of `images` images with `patches` patches to `to_patches` patches.

        Padding patches have valid positions. Padding images and windows have no patches.
        """
        starts = self.arrays["starts"]
        assert patches <= to_patches, "a pack has more patches than it is padded to"
        assert images < len(starts), "a pack has more images than there is room for"
        self._pad("patch", patches, to_patches, 0)
        self._pad("image", images, len(starts) - 1, patches)
        if self.has_windows:
            windows = self.arrays["window_starts"]
            windows[:] = np.minimum(np.arange(0, WINDOW * len(windows), WINDOW), patches)
            self.arrays["merged_starts"][:] = starts // WINDOW
        if not self._maker.is_on_host:
            for name, field in self.table.items():
                count = {"patch": to_patches, "window": to_patches // WINDOW + 1}.get(field.per, len(starts))
                self._maker.write(self.tensors[name][:count], self.arrays[name][:count])


class BufferAddresses:
    """Addresses of the tensors of captured inputs. Absent tensors are not checked."""

    def __init__(self, captured: BufferedInputs) -> None:
        self._names = tuple(name for name, value in vars(captured).items() if is_array(value))
        self._captured = self._of(captured)
        self._checked: BufferedInputs | None = None
        """Inputs that were checked last: those of decode steps are the same objects again and again."""

    def check(self, inputs: BufferedInputs) -> None:
        """Raise CaptureError if `inputs` are at other addresses than the captured ones: a graph would not read them."""
        if inputs is self._checked:
            return
        now = self._of(inputs)
        if now == self._captured:
            self._checked = inputs
            return
        moved = [name for name, old, new in zip(self._names, self._captured, now, strict=True) if old != new]
        named = ", ".join(f"{inputs.buffers}.{name}" for name in moved)
        raise CaptureError(
            f"{named} moved or went after the graph was captured, and replays would read the old memory. Buffers are "
            "written in place, never replaced"
        )

    def _of(self, inputs: BufferedInputs) -> list[int | None]:
        tensors = (getattr(inputs, name, None) for name in self._names)
        return [first_address(tensor) if tensor is not None and is_array(tensor) else None for tensor in tensors]


def check_unmoved(captured: Mapping[int, str], now: Mapping[int, str]) -> None:
    """Raise CaptureError if a persistent buffer has moved. Both arguments map a storage to the name of its buffer."""
    pointer_of = {name: pointer for pointer, name in now.items()}
    moved_tensors = sorted(name for pointer, name in captured.items() if pointer_of.get(name) != pointer)
    if moved_tensors:
        raise CaptureError(
            f"{', '.join(moved_tensors[:8])} moved after graphs were captured, and they would use the old memory. "
            "Write into persistent buffers, or capture again"
        )


def check_same_step(other_args: Iterable[object], captured: BufferedInputs) -> None:
    """Raise CaptureError if a part that is left out gets a copy of the step: it would be the same in every replay."""
    for other in other_args:
        if isinstance(other, type(captured)) and other is not captured:
            raise CaptureError("a part that is left out gets a copy of the step, which a replay could not replace")


def eager_part(
    function: Kernel,
    tensors: tuple[Array, ...],
    other_args: tuple[object, ...],
    out: Array,
    captured: BufferedInputs,
) -> Callable[[BufferedInputs], None]:
    """Return a call of `function` on the real tokens alone, with the replay's step in place of the captured one.

    The call writes zeros for padding. `tensors` and `out` have one entry per padded token in their first dimension.
    """
    check_same_step(other_args, captured)

    def play(inputs: BufferedInputs) -> None:
        count = inputs.num_tokens
        now = [inputs if other is captured else other for other in other_args]
        out[:count] = function(*(tensor[:count] for tensor in tensors), *now)
        out[count:] = 0

    return play
