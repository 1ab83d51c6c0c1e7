"""What makes drafts, as transformers computes it: over the whole text at once, and without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pytest
import torch

from ostinato.engine.core import EngineCore
from ostinato.sampling.sampler import SampleKernel
from ostinato.sampling.state import PendingToken
from ostinato.scheduler.batch import Batch
from tests.support.checkpoints import head_oracle, oracle, oracle_logits
from tests.support.tensors import as_tensor


class Reference(Protocol):
    """The drafts behind the beginnings of one text."""

    def logits(self, length: int, ahead: Sequence[int] = ()) -> torch.Tensor:
        """[vocab]: of the draft behind the first `length` tokens of the text and the drafts `ahead`."""
        ...


class HeadReference:
    """The drafts of a model's prediction head.

    Its entry for token p is made of the model's hidden state at p - 1, after the final norm, and of token p, from
    p = 1 on. A draft's entry has the head's own result for the token before it in place of the hidden state.
    """

    @torch.inference_mode()
    def __init__(self, name: str, text: Sequence[int]) -> None:
        model, self._head = oracle(name), head_oracle(name)
        self._embed, self._lm_head = model.get_input_embeddings(), model.lm_head
        hidden = model.model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
        self._entries = self._head.join(hidden[:-1], self._embed(torch.tensor(text[1:])))

    @torch.inference_mode()
    def logits(self, length: int, ahead: Sequence[int] = ()) -> torch.Tensor:
        entries = self._entries[: length - 1]
        result = self._run(entries)
        for token in ahead:
            entry = self._head.join(result, self._embed(torch.tensor(token)))
            entries = torch.cat((entries, entry[None]))
            result = self._run(entries)
        return self._lm_head(result)

    def _run(self, entries: torch.Tensor) -> torch.Tensor:
        """[entries, hidden] -> the head's result for the last of them, [hidden]"""
        return self._head.model.model(inputs_embeds=entries[None], use_cache=False).last_hidden_state[0, -1]


class ModelReference:
    """The drafts of a second model."""

    def __init__(self, name: str, text: Sequence[int]) -> None:
        self._name, self._text = name, list(text)

    def logits(self, length: int, ahead: Sequence[int] = ()) -> torch.Tensor:
        return oracle_logits(self._name, [*self._text[:length], *ahead])[-1]


@dataclass(frozen=True)
class Proposal:
    """The logits of one draft, behind a request's text and the drafts `ahead`."""

    text: tuple[int, ...]
    ahead: tuple[int, ...]
    logits: torch.Tensor


class Recorder:
    """A proposer with a note of all its drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: EngineCore) -> None:
        self.proposals: list[Proposal] = []
        self._chosen: list[tuple[PendingToken, torch.Tensor]] = []
        self._choose = engine.runner.tensor_parallel.draft_selector
        assert engine.runner.drafter is not None
        self._proposer = engine.runner.drafter.proposer
        monkeypatch.setattr(engine.runner.tensor_parallel, "draft_selector", self._record)
        engine.runner.drafter = replace(engine.runner.drafter, proposer=self)

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        self._chosen.clear()
        found = self._proposer.propose(batch)
        for row, drafts in zip(batch.rows, found, strict=True):
            text = (*row.sampling_state.prompt_token_ids, *row.sampling_state.output_token_ids)
            own = [(pending.drafts, logits) for pending, logits in self._chosen if pending.state is row.sampling_state]
            # A row that has its drafts stays in the steps of the others, as padding.
            assert [ahead for ahead, _ in own[: len(drafts)]] == [drafts[:depth] for depth in range(len(drafts))]
            self.proposals += [Proposal(text, ahead, logits) for ahead, logits in own[: len(drafts)]]
        return found

    def _record(
        self, logits: torch.Tensor, pending_tokens: Sequence[PendingToken], draw: SampleKernel
    ) -> dict[int, int]:
        self._chosen += zip(pending_tokens, as_tensor(logits).clone(), strict=True)
        return self._choose(logits, pending_tokens, draw)
