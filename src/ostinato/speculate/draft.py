"""Drafts by a second, smaller model of the same vocabulary, whose layers use the same blocks and slots."""

from __future__ import annotations

from ostinato.models.base import CausalLM
from ostinato.sample.state import PendingToken
from ostinato.schedule.batch import Batch
from ostinato.speculate.proposer import TokenSelector, RunDraftBatch, single_token_row


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
            ahead = [place for place, i in enumerate(now) if depth < decode[i].num_drafts]
            if not ahead:
                continue
            picks = [
                PendingToken(decode[i].sampling_state, decode[i].end + depth, tuple(drafts[i])) for i in map(now.__getitem__, ahead)
            ]
            chosen = self._choose(self._model.compute_logits(hidden[ahead]), picks, self._model.build.ops.sample)
            for place, token in chosen.items():
                drafts[now[ahead[place]]].append(token)
        return [tuple(each) for each in drafts]
