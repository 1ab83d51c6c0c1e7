"""Persistent buffers: where every step's inputs lie when a graph reads them. Allocated once, as large as the plan says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    def view(
        self,
        rows: int,
        tokens: int,
        tokens_per_row: int,
        num_decode_rows: int,
        checkpoints: Sequence[tuple[int, int, int]] = (),
    ) -> StepInputs:
        """The first `rows` rows and `tokens` tokens as a step, whose rows write `tokens_per_row` slots each."""
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
            checkpoints=checkpoints,
        )

    def clear(self) -> None:
        """Padding everywhere: a step of it reads and writes nothing but the null block and the null slot."""
        for _, buffer in self.named():
            buffer.zero_()

    def fill(self, step: StepInputs, rows: int, tokens: int) -> None:
        """Write `step`, padded to `rows` rows and `tokens` tokens."""
        real_rows, real_tokens = step.read_slots.shape[0], step.token_ids.shape[0]
        assert real_rows <= rows, "a step has more rows than it is padded to"
        assert real_tokens <= tokens, "a step has more tokens than it is padded to"
        for name in ("token_ids", "positions", "kv_cells"):
            _fill(getattr(self, name), getattr(step, name), tokens)
        for name in ("start_positions", "kv_lens", "read_slots", "block_tables", "write_slots"):
            _fill(getattr(self, name), getattr(step, name), rows)
        self.row_starts[: real_rows + 1] = step.row_starts
        self.row_starts[real_rows + 1 : rows + 1] = real_tokens


def _fill(buffer: torch.Tensor, value: torch.Tensor, padded: int) -> None:
    """`value` at the begin of `buffer`, and zeros behind it up to `padded`; columns beyond its own are not read."""
    length = value.shape[0]
    if buffer.ndim == 2:
        buffer[:length, : value.shape[1]] = value
    else:
        buffer[:length] = value
    buffer[length:padded] = 0
