"""Drafters with layers: a second, smaller model, an assistant, or the model's own prediction head.

All use the same blocks and slots as the model. The second model has the same vocabulary. An assistant and the
prediction head are several deep by feeding them their own hidden state. The interface of all proposers is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ostinato.models.base import Assistant, CausalLM, PredictionHead
from ostinato.ops.arrays import dtype_name
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.sampling.sampler import SampleKernel
from ostinato.sampling.state import PendingToken
from ostinato.scheduler.batch import Batch, BatchRow

TokenSelector = Callable[["Array", Sequence[PendingToken], SampleKernel], dict[int, int]]
"""Function that samples tokens, with the signature of `sample.sampler.choose`."""

RunDraftBatch = Callable[[Batch], "Array"]
"""Function that runs a batch through a drafter -> hidden states of its tokens, [tokens or more, hidden]."""


class HeadStepRunner(Protocol):
    """Runner of consecutive steps of one token per row, through layers that have no slots."""

    def first(self, rows: Sequence[BatchRow], tokens: Sequence[int], depth: int) -> Array:
        """Run the first step, of `tokens`, `depth` positions after those of `rows`.

        Returns hidden states as `RunDraftBatch`.
        """

    def next(self, tokens: Sequence[int]) -> Array:
        """Run the next step of the same rows with these tokens; returns hidden states as `RunDraftBatch`."""


class Proposer(Protocol):
    """Source of draft tokens: it guesses, at the start of a step, the tokens that the step will verify."""

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        """Return the drafts of each row in the batch's order: up to `BatchRow.num_drafts`, none for a prefill row.

        Called before every step of the model, even one without drafts: a proposer with layers writes their part of the
        blocks and slots for the batch's tokens.
        """


def single_token_row(row: BatchRow, token: int, depth: int) -> BatchRow:
    """Return `row` for one token alone: its own at depth 0, else the draft `depth` positions after that.

    The state moves from write slot to write slot, beginning at the read slot.
    """
    slots = (row.read_slot, *row.write_slots)
    read, write = (slots[depth], slots[depth + 1]) if depth + 1 < len(slots) else (0, 0)
    return row._replace(token_ids=(token,), start=row.start + depth, read_slot=read, write_slots=(write,), num_drafts=0)


class DraftModelProposer:
    """Proposer that runs the draft model on every token that the target computes, and k tokens ahead of it.

    A step with k drafts takes 1 + k steps of one token each: the state after the last draft is needed too, in case all
    are kept. So the draft model's part of a row's read slot and blocks always covers the same tokens as the target's.
    """

    def __init__(self, model: CausalLM, forward: RunDraftBatch, choose: TokenSelector) -> None:
        """Propose drafts of `model`; `forward` runs it and `choose` samples its tokens."""
        self._model = model
        self._forward = forward
        self._choose = choose

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        drafts: list[list[int]] = [[] for _ in batch.rows]
        if batch.num_drafts == 0:
            self._forward(batch)
            return [()] * len(batch.rows)
        decode, prefill = batch.rows[: batch.num_decode_rows], batch.rows[batch.num_decode_rows :]
        if prefill:
            self._forward(Batch(prefill, 0))
        for depth in range(1 + batch.num_drafts):
            # A row takes one step more than it has drafts; after logits that are not finite it gets no more drafts.
            now = [i for i, row in enumerate(decode) if depth <= row.num_drafts and len(drafts[i]) == depth]
            if not now:
                break
            tokens = [drafts[i][-1] if depth else decode[i].token_ids[0] for i in now]
            steps = tuple(single_token_row(decode[i], token, depth) for i, token in zip(now, tokens, strict=True))
            hidden = self._forward(Batch(steps, len(steps)))
            ahead = [index for index, i in enumerate(now) if depth < decode[i].num_drafts]
            if not ahead:
                continue
            pending_tokens = [
                PendingToken(decode[i].sampling_state, decode[i].end + depth, tuple(drafts[i]))
                for i in map(now.__getitem__, ahead)
            ]
            chosen = self._choose(
                self._model.compute_logits(hidden[ahead]), pending_tokens, self._model.build.ops.sample
            )
            for index, token in chosen.items():
                drafts[now[ahead[index]]].append(token)
        return [tuple(each) for each in drafts]


class PredictionHeadForward:
    """Forward pass of a head or an assistant for one draft of each row, in the form that graphs capture.

    The hidden states that it starts from are in a persistent buffer.
    """

    def __init__(
        self, model: CausalLM, head: PredictionHead | Assistant | None, memory: Sequence[LayerCache], max_rows: int
    ) -> None:
        """Allocate the buffer. `memory` is the head's layers', then that of the model's last hidden states."""
        assert head is not None, "the model was built without a head"
        self._model = model
        self._head = head
        self.memory = memory
        embedding = model.embedding
        # A quantised weight's rows may be packed blocks, so its shape is not the hidden size.
        size = model.spec.hidden_size
        self.hidden = model.build.arrays.zeros((max_rows, size), dtype_name(embedding.dtype))
        """Hidden states to start from, [max_num_seqs, hidden]."""

    def __call__(self, inputs: StepInputs) -> Array:
        """Return the head's hidden states, [rows, hidden]."""
        embedded = self._model.embedding(inputs.token_ids)
        hidden: Array = self._head(self.hidden[: inputs.token_ids.shape[0]], embedded, inputs, self.memory)
        return hidden

    def next_hidden(self, hidden: Array) -> Array:
        """Return the hidden states that further drafts start from, of those that `__call__` returned."""
        return self._head.next_hidden(hidden) if isinstance(self._head, Assistant) else hidden

    def choose(self, hidden: Array, pending_tokens: Sequence[PendingToken], choose: TokenSelector) -> dict[int, int]:
        """Return the drafts that `choose` samples from the logits of the hidden states."""
        logits = (self._head.draft_logits if isinstance(self._head, Assistant) else self._model.compute_logits)(hidden)
        return choose(logits, pending_tokens, self._model.build.ops.sample)


class MtpProposer:
    """Proposer that runs the prediction head, or an assistant, for k steps of one token per row.

    The first step starts from the model's last hidden state and token, each later one from the head's own. The head's
    keys and values go into the cells that the step will write. Those of accepted drafts are written again from the
    model's own hidden states, once the step has computed them (`PredictionHead.update_head_cache`). An assistant has
    no keys and values.
    """

    def __init__(self, head: PredictionHeadForward, steps: HeadStepRunner, choose: TokenSelector) -> None:
        """Propose drafts of `head`; `steps` runs it on the hidden states in its buffer."""
        self._head = head
        self._steps = steps
        self._choose = choose

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        all_drafts: list[tuple[int, ...]] = [()] * len(batch.rows)
        if not batch.num_drafts:
            return all_drafts
        drafting = [i for i in range(batch.num_decode_rows) if batch.rows[i].num_drafts]
        rows = [batch.rows[i] for i in drafting]
        for i, drafts in zip(drafting, self._draft(rows) if rows else (), strict=True):
            all_drafts[i] = drafts
        return all_drafts

    def _draft(self, rows: Sequence[BatchRow]) -> list[tuple[int, ...]]:
        states = self._head.memory[-1].states["hidden"]
        hidden = states[[row.read_slot for row in rows], 0]
        for index, row in enumerate(rows):
            if row.read_slot == 0:  # its content is not read
                hidden[index] = 0
        drafts: list[tuple[int, ...]] = [()] * len(rows)
        now = list(range(len(rows)))
        for depth in range(max(row.num_drafts for row in rows)):
            # A row whose logits were not finite gets no more drafts.
            going = [index for index, i in enumerate(now) if len(drafts[i]) == depth < rows[i].num_drafts]
            if not going:
                break
            is_same = len(going) == len(now)
            if not is_same:
                now, hidden = [now[index] for index in going], hidden[going]
            self._head.hidden[: len(now)] = hidden
            tokens = [drafts[i][-1] if depth else rows[i].token_ids[0] for i in now]
            if depth and is_same:
                result = self._steps.next(tokens)[: len(now)]
            else:
                result = self._steps.first([rows[i] for i in now], tokens, depth)[: len(now)]
            pending_tokens = [PendingToken(rows[i].sampling_state, rows[i].end + depth, drafts[i]) for i in now]
            chosen = self._head.choose(result, pending_tokens, self._choose)
            for index, token in chosen.items():
                drafts[now[index]] += (token,)
            hidden = self._head.next_hidden(result)
        return drafts
