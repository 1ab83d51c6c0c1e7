"""Persistent buffers: where every step's inputs lie when a graph reads them. Allocated once, as the plan says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from ostinato.graphs.errors import CaptureError
from ostinato.layers.step import StepInputs

TENSORS = tuple(field.name for field in fields(StepInputs) if field.type == "torch.Tensor")
"""The inputs of every step, which lie in buffers."""

OF_IMAGES = ("rope_positions", "media_cells")
"""Those for models that take images, both per token."""

PER_TOKEN = ("token_ids", "positions", "kv_cells")
PER_ROW = ("start_positions", "kv_lens", "read_slots", "write_slots", "block_tables")


class StepBuffers:
    """The inputs of one step, at addresses that never change.

    Buffers that are indexed per token have room for `max_tokens`, those per row for `max_rows`, and each is padded as
    it is indexed: with null cells and positions 0, and with null slots, null blocks and a context length of 0.
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_blocks: int,
        slots_per_request: int,
        device: torch.device,
        takes_images: bool = False,
    ) -> None:
        def of(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = of(max_tokens, dtype=torch.int64)
        self.positions = of(max_tokens, dtype=torch.int64)
        self.kv_cells = of(max_tokens, dtype=torch.int64)
        self.row_starts = of(max_rows + 1)
        self.start_positions = of(max_rows)
        self.kv_lens = of(max_rows)
        self.block_tables = of(max_rows, max(max_blocks, 1))
        self.read_slots = of(max_rows)
        self.write_slots = of(max_rows, slots_per_request)
        self.rope_positions = of(max_tokens, 3, dtype=torch.int64) if takes_images else None
        self.media_cells = of(max_tokens, dtype=torch.int64) if takes_images else None
        self._names = TENSORS + (OF_IMAGES if takes_images else ())
        self._per_token = PER_TOKEN + (OF_IMAGES if takes_images else ())
        self._table_columns = 0  # of block_tables: those behind are 0 in every row
        # On a CPU buffers are written through NumPy, whose small copies cost a fraction of torch's.
        self._arrays = {name: buffer.numpy() for name, buffer in self.named()} if device.type == "cpu" else None
        self._decode_views: dict[tuple[int, int], StepInputs] = {}
        # Steps that only decode lie in the same tensors again and again.
        self._source: StepInputs | None = None
        self._source_arrays: dict[str, Any] = {}

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._names:
            yield name, getattr(self, name)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for _, buffer in self.named())

    def view(
        self,
        rows: int,
        tokens: int,
        tokens_per_row: int,
        num_decode_rows: int,
        checkpoints: Sequence[tuple[int, int, int]] = (),
    ) -> StepInputs:
        """The first `rows` rows and `tokens` tokens as a step, whose rows write `tokens_per_row` slots each."""
        if num_decode_rows < rows or tokens != rows * tokens_per_row:
            return self._make_view(rows, tokens, tokens_per_row, num_decode_rows, checkpoints)
        # Steps that only decode have few shapes, and none of them a checkpoint on its way.
        key = (rows, tokens_per_row)
        view = self._decode_views.get(key)
        if view is None:
            view = self._make_view(rows, tokens, tokens_per_row, num_decode_rows, ())
            self._decode_views[key] = view
        return view

    def _make_view(
        self,
        rows: int,
        tokens: int,
        tokens_per_row: int,
        num_decode_rows: int,
        checkpoints: Sequence[tuple[int, int, int]],
    ) -> StepInputs:
        return StepInputs(
            token_ids=self.token_ids[:tokens],
            positions=self.positions[:tokens],
            row_starts=self.row_starts[: rows + 1],
            start_positions=self.start_positions[:rows],
            kv_lens=self.kv_lens[:rows],
            block_tables=self.block_tables[:rows],
            kv_cells=self.kv_cells[:tokens],
            read_slots=self.read_slots[:rows],
            write_slots=self.write_slots[:rows, :tokens_per_row],
            num_decode_rows=num_decode_rows,
            rope_positions=None if self.rope_positions is None else self.rope_positions[:tokens],
            media_cells=None if self.media_cells is None else self.media_cells[:tokens],
            checkpoints=checkpoints,
        )

    def clear(self) -> None:
        """Padding everywhere: a step of it reads and writes nothing but the null block and the null slot."""
        for _, buffer in self.named():
            buffer.zero_()
        self._table_columns = 0

    def fill(self, step: StepInputs, rows: int, tokens: int) -> None:
        """Write `step`, padded to `rows` rows and `tokens` tokens. Nothing of an earlier step is left in there."""
        real_rows, real_tokens = step.read_slots.shape[0], step.token_ids.shape[0]
        assert real_rows <= rows, "a step has more rows than it is padded to"
        assert real_tokens <= tokens, "a step has more tokens than it is padded to"
        # Long contexts make tables wide, so only the columns that were ever used are cleared.
        self._table_columns = max(self._table_columns, step.block_tables.shape[1])
        if self._arrays is not None and step is not self._source:
            self._source, self._source_arrays = step, {name: getattr(step, name).numpy() for name in self._names}
        for name, padded in (*((name, tokens) for name in self._per_token), *((name, rows) for name in PER_ROW)):
            buffer, value = self._pair(name, step)
            if name == "block_tables":
                buffer = buffer[:, : self._table_columns]
            _fill(buffer, value, padded)
        starts, values = self._pair("row_starts", step)
        starts[: real_rows + 1] = values
        starts[real_rows + 1 : rows + 1] = real_tokens

    def _pair(self, name: str, step: StepInputs) -> tuple[Any, Any]:
        """A buffer and what `step` has for it, both of one kind, torch's or NumPy's."""
        if self._arrays is not None:
            return self._arrays[name], self._source_arrays[name]
        return getattr(self, name), getattr(step, name)


def check_unmoved(captured: Mapping[int, str], now: Mapping[int, str]) -> None:
    """CaptureError if a persistent buffer is not where it was. Both map a storage to the name of its buffer."""
    places = {name: pointer for pointer, name in now.items()}
    moved = sorted(name for pointer, name in captured.items() if places.get(name) != pointer)
    if moved:
        raise CaptureError(
            f"{', '.join(moved[:8])} moved after graphs were captured, which would go on using the old memory. Write "
            "into persistent buffers, or capture again"
        )


def _fill(buffer: Any, value: Any, padded: int) -> None:
    """`value` at the begin of `buffer`, and zeros to its right and behind it up to `padded`; both of one kind, torch's
    or NumPy's."""
    length = value.shape[0]
    if buffer.ndim == 2:
        buffer[:length, : value.shape[1]] = value
        if value.shape[1] < buffer.shape[1]:
            buffer[:length, value.shape[1] :] = 0
    else:
        buffer[:length] = value
    if length < padded:
        buffer[length:padded] = 0
