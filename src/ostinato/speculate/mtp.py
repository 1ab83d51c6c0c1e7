"""Drafts by the model's own prediction head, several deep by feeding it its own hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.models.base import CausalLM
from ostinato.ops.state.token_shift import first_inputs
from ostinato.ops.step import LayerCache, StepInputs
from ostinato.sample.state import PendingToken
from ostinato.schedule.batch import Batch, BatchRow
from ostinato.speculate.proposer import TokenSelector, HeadStepRunner, single_token_row


class PredictionHeadForward:
    """Forward pass of the head for one draft of each row, in the form that graphs capture.

    The hidden states that it starts from are in a persistent buffer.
    """

    def __init__(self, model: CausalLM, memory: Sequence[LayerCache], max_rows: int) -> None:
        """Allocate the buffer.

        `memory` is that of the head's layers, followed by that of the model's last hidden states.
        """
        assert model.head is not None, "the model was built without a head"
        self._model = model
        self._head = model.head
        self.memory = memory
        embedding = model.embedding
        # A quantised weight's rows may be packed blocks, so its shape is not the hidden size.
        size = model.spec.hidden_size
        self.hidden = torch.zeros(max_rows, size, dtype=embedding.dtype, device=embedding.weight.device)
        """Hidden states to start from, [max_num_seqs, hidden]."""

    def __call__(self, step: StepInputs) -> torch.Tensor:
        """Return the head's hidden states, [rows, hidden]."""
        embedded = self._model.embedding(step.token_ids)
        return self._head(self.hidden[: step.token_ids.shape[0]], embedded, step, self.memory)


class MtpProposer:
    """Proposer that runs the prediction head for k steps of one token per row.

    The first step starts from the model's last hidden state and token, each later one from the head's own. The head's
    keys and values go into the cells that the step will write. Those of accepted drafts are written again from the
    model's own hidden states, once the step has computed them (`PredictionHead.update_head_cache`).
    """

    def __init__(self, model: CausalLM, head: PredictionHeadForward, steps: HeadStepRunner, choose: TokenSelector) -> None:
        """Propose drafts of the model's `head`; `steps` runs it on the hidden states in its buffer."""
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

    def _draft(self, rows: Sequence[BatchRow]) -> list[tuple[int, ...]]:
        states = self._head.memory[-1].states["hidden"]
        read_slots = torch.tensor([row.read_slot for row in rows], device=states.device)
        hidden = first_inputs(states, read_slots)
        drafts: list[tuple[int, ...]] = [()] * len(rows)
        now = list(range(len(rows)))
        for depth in range(max(row.num_drafts for row in rows)):
            # A row whose logits were not finite gets no more drafts.
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
                steps = tuple(single_token_row(rows[i], drafts[i][-1] if depth else rows[i].token_ids[0], depth) for i in now)
                hidden = self._steps.first(Batch(steps, len(steps)))[: len(now)]
            picks = [PendingToken(rows[i].sampling_state, rows[i].end + depth, drafts[i]) for i in now]
            chosen = self._choose(self._model.compute_logits(hidden), picks, self._model.build.ops.sample)
            for place, token in chosen.items():
                drafts[now[place]] += (token,)
        return drafts
