"""Drafts by the model's own prediction head, several deep by feeding it its own hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.graphs.graphs import Graphs
from ostinato.layers.step import LayerMemory, StepInputs
from ostinato.models.base import CausalLM
from ostinato.ops.token_shift import first_inputs
from ostinato.sample.choose import choose
from ostinato.sample.state import Pick
from ostinato.schedule.batch import Batch, Row


class HeadForward:
    """The head's part in one draft of each row, as graphs capture it: the hidden states that it starts from lie in a
    persistent buffer."""

    def __init__(self, model: CausalLM, memory: Sequence[LayerMemory], max_rows: int) -> None:
        """`memory` is the head's: its layers', and behind them that of the model's last hidden states."""
        assert model.head is not None, "the model was built without a head"
        self._model = model
        self._head = model.head
        self.memory = memory
        weight = model.embedding.weight
        self.hidden = torch.zeros(max_rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        """[max_num_seqs, hidden]"""

    def __call__(self, step: StepInputs) -> torch.Tensor:
        """-> [rows, hidden]"""
        embedded = self._model.embedding(step.token_ids)
        return self._head(self.hidden[: step.token_ids.shape[0]], embedded, step, self.memory)


class MtpProposer:
    """Feeds the head the model's last hidden state and token, and then its own: k steps of one token per row.

    Their keys and values go where the step will write: those of drafts that are kept are written anew, from the
    model's own hidden states, when the step has computed these (`PredictionHead.follow`).
    """

    def __init__(self, model: CausalLM, forward: HeadForward, graphs: Graphs, block_size: int) -> None:
        self._model = model
        self._forward = forward
        self._graphs = graphs
        self._block_size = block_size

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        drafting = [i for i in range(batch.num_decode_rows) if batch.rows[i].num_drafts]
        rows = [batch.rows[i] for i in drafting]
        found: list[tuple[int, ...]] = [()] * len(batch.rows)
        for i, drafts in zip(drafting, self._draft(rows) if rows else (), strict=True):
            found[i] = drafts
        return found

    def _draft(self, rows: Sequence[Row]) -> list[tuple[int, ...]]:
        count = len(rows)
        states = self._forward.memory[-1].conv_states
        assert states is not None, "a head has a part in slots"
        read_slots = torch.tensor([row.read_slot for row in rows], device=states.device)
        hidden = first_inputs(states, read_slots)
        tokens = [row.token_ids[0] for row in rows]
        tables = _block_tables(rows)
        drafts: list[tuple[int, ...]] = [()] * count
        for depth in range(max(row.num_drafts for row in rows)):
            self._forward.hidden[:count] = hidden
            step = _step(rows, tokens, depth, tables, self._block_size)
            hidden = self._graphs.run(step)[:count]
            picks = [Pick(row.payload, row.end + depth, ahead) for row, ahead in zip(rows, drafts, strict=True)]
            chosen = choose(self._model.logits(hidden), picks)
            for place, token in chosen.items():
                # One whose logits were not finite gets no more drafts.
                if len(drafts[place]) == depth < rows[place].num_drafts:
                    drafts[place] += (token,)
                    tokens[place] = token
        return drafts


def _block_tables(rows: Sequence[Row]) -> torch.Tensor:
    """[rows, max_blocks] int32"""
    width = max(1, *(len(row.block_table) for row in rows)) if rows else 1
    tables = [row.block_table + (0,) * (width - len(row.block_table)) for row in rows]
    return torch.tensor(tables, dtype=torch.int32)


def _step(rows: Sequence[Row], tokens: Sequence[int], depth: int, tables: torch.Tensor, block_size: int) -> StepInputs:
    """One token per row, at its position `start + depth`; rows that have room for fewer drafts are padding."""
    positions = [row.start + depth if depth < row.num_drafts else 0 for row in rows]
    lengths = [position + 1 if depth < row.num_drafts else 0 for position, row in zip(positions, rows, strict=True)]
    cells = [
        row.block_table[position // block_size] * block_size + position % block_size
        if length and row.block_table
        else 0
        for row, position, length in zip(rows, positions, lengths, strict=True)
    ]
    zeros = torch.zeros(len(rows), 1, dtype=torch.int32)
    starts = torch.tensor(positions, dtype=torch.int32)
    return StepInputs(
        token_ids=torch.tensor(tokens),
        positions=starts.long(),
        row_starts=torch.arange(len(rows) + 1, dtype=torch.int32),
        start_positions=starts,
        kv_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        kv_cells=torch.tensor(cells),
        read_slots=zeros[:, 0],
        write_slots=zeros,
        num_decode_rows=len(rows),
    )
