"""Persistent buffers: where every step's inputs lie when a graph reads them. Allocated once, as large as the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch

from ostinato.layers.step import StepInputs


class StepBuffers:
    """The inputs of one step, at addresses that never change.

    Buffers that are indexed per token have room for `max_tokens`, those per row for `max_rows`, and each is padded as
    it is indexed: with null cells and positions 0, and with null slots, null blocks and a context length of 0.
    """

    def __init__(
        self, max_rows: int, max_tokens: int, max_blocks: int, slots_per_request: int, device: torch.device
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

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from vars(self).items()

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for _, buffer in self.named())

    def view(self, rows: int, tokens: int, tokens_per_row: int, num_decode_rows: int) -> StepInputs:
        """The first `rows` rows and `tokens` tokens as a step."""
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
        )

    def fill(self, step: StepInputs, rows: int, tokens: int) -> None:
        """Write `step`, padded to `rows` rows and `tokens` tokens."""
        real_rows, real_tokens = step.read_slots.shape[0], step.token_ids.shape[0]
        for field in fields(StepInputs):
            buffer, value = getattr(self, field.name, None), getattr(step, field.name)
            if buffer is None:
                continue
            length = value.shape[0]
            padded = tokens if length == real_tokens and field.name in _PER_TOKEN else rows
            if field.name == "row_starts":
                buffer[:length] = value
                buffer[length : rows + 1] = real_tokens
            elif buffer.ndim == 2:
                buffer[:length, : value.shape[1]] = value
                buffer[length:padded] = 0
            else:
                buffer[:length] = value
                buffer[length:padded] = 0
        assert real_rows <= rows and real_tokens <= tokens, "a step is larger than what it is padded to"


_PER_TOKEN = frozenset({"token_ids", "positions", "kv_cells"})
