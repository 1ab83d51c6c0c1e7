"""Drafts by the model's own prediction head, several deep by feeding it its own hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.models.base import CausalLM
from ostinato.ops.state.token_shift import first_inputs
from ostinato.ops.step import LayerMemory, StepInputs
from ostinato.sample.state import Pick
from ostinato.schedule.batch import Batch, Row
from ostinato.speculate.proposer import Choose, Steps, token_row


class HeadForward:
    """The head's part in one draft of each row, as graphs capture it: the hidden states that it starts from lie in a
    persistent buffer."""

    def __init__(self, model: CausalLM, memory: Sequence[LayerMemory], max_rows: int) -> None:
        """`memory` is the head's: its layers', and behind them that of the model's last hidden states."""
        assert model.head is not None, "the model was built without a head"
        self._model = model
        self._head = model.head
        self.memory = memory
        embedding = model.embedding
        # Rows of its weight may be blocks, which are of other sizes than what they stand for.
        size = model.spec.hidden_size
        self.hidden = torch.zeros(max_rows, size, dtype=embedding.dtype, device=embedding.weight.device)
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

    def __init__(self, model: CausalLM, head: HeadForward, steps: Steps, choose: Choose) -> None:
        """`steps` run `head`, on the hidden states in its buffer."""
        self._model = model
        self._head = head
        self._steps = steps
        self._choose = choose

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = [()] * len(batch.rows)
        if not batch.num_drafts:
            return found
        drafting = [i for i in range(batch.num_decode_rows) if batch.rows[i].num_drafts]
        rows = [batch.rows[i] for i in drafting]
        for i, drafts in zip(drafting, self._draft(rows) if rows else (), strict=True):
            found[i] = drafts
        return found

    def _draft(self, rows: Sequence[Row]) -> list[tuple[int, ...]]:
        states = self._head.memory[-1].states["hidden"]
        read_slots = torch.tensor([row.read_slot for row in rows], device=states.device)
        hidden = first_inputs(states, read_slots)
        drafts: list[tuple[int, ...]] = [()] * len(rows)
        now = list(range(len(rows)))
        for depth in range(max(row.num_drafts for row in rows)):
            # One whose logits were not finite gets no more drafts.
            going = [place for place, i in enumerate(now) if len(drafts[i]) == depth < rows[i].num_drafts]
            if not going:
                break
            is_same = len(going) == len(now)
            if not is_same:
                now, hidden = [now[place] for place in going], hidden[going]
            self._head.hidden[: len(now)] = hidden
            if depth and is_same:
                hidden = self._steps.next([drafts[i][-1] for i in now])[: len(now)]
            else:
                steps = tuple(token_row(rows[i], drafts[i][-1] if depth else rows[i].token_ids[0], depth) for i in now)
                hidden = self._steps.first(Batch(steps, len(steps)))[: len(now)]
            picks = [Pick(rows[i].payload, rows[i].end + depth, drafts[i]) for i in now]
            chosen = self._choose(self._model.logits(hidden), picks, self._model.build.ops.sample)
            for place, token in chosen.items():
                drafts[now[place]] += (token,)
        return drafts
