"""Requests and models small enough to be written down, sampled step by step with any drafts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache

import torch

from ostinato.sampling import sampler
from ostinato.sampling.grammar import Grammar
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.state import SamplingState
from ostinato.scheduler.batch import BatchRow, RowResult, TokenLogprobs
from tests.support.draws import draw
from tests.support.logit_table import LogitTable

Model = Callable[[tuple[int, ...]], torch.Tensor]
"""The tokens so far -> the logits [vocab] of the next one."""

VOCAB = 24
EOS = (1,)


def random_model(seed: int, vocab_size: int = VOCAB, scale: float = 2.0, step: float = 0.0) -> Model:
    """Logits that depend on every token of the prefix; multiples of `step`, where tokens shall tie."""

    @cache
    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, prefix)).encode()))
        values = torch.randn(vocab_size, generator=generator) * scale
        return (values / step).round() * step if step else values

    return logits


def successor(prefix: tuple[int, ...]) -> torch.Tensor:
    """Certain that the next token is the last one and 1 more."""
    logits = torch.zeros(VOCAB)
    logits[(prefix[-1] + 1) % VOCAB] = 99.0
    return logits


class Request:
    """What the scheduler would know of one request."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int = 7,
        name: str = "r",
        grammar: Grammar | None = None,
    ) -> None:
        self.name = name
        self.prompt = tuple(prompt)
        self.output: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.state = SamplingState(params, self.prompt, self.output, EOS, seed=params.seed or seed, grammar=grammar)

    @property
    def known(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    def row(self, num_drafts: int = 0) -> BatchRow:
        """The row that computes the last known token and leaves room for `num_drafts` drafts."""
        return BatchRow(
            self.name,
            self.known[-1:],
            len(self.known) - 1,
            block_table=(1,),
            num_drafts=num_drafts,
            num_logits=1 + num_drafts,
            samples=True,
            sampling_state=self.state,
        )


def step(
    model: Model, requests: Sequence[Request], drafts: Sequence[tuple[int, ...]] = (), num_drafts: int = 0
) -> list[RowResult]:
    """One step of all requests, whose outputs grow by what they gain."""
    given = drafts or [()] * len(requests)
    prefixes = [
        (*request.known, *of_row[:count])
        for request, of_row in zip(requests, given, strict=True)
        for count in range(len(of_row) + 1)
    ]
    logits = torch.stack([model(prefix) for prefix in prefixes])
    rows = [request.row(num_drafts) for request in requests]
    results = sampler.sample_rows(LogitTable(logits, rows, drafts), rows, drafts, kernel=draw)
    for request, result in zip(requests, results, strict=True):
        request.output += result.token_ids
        request.logprobs += result.logprobs or ()
    return results
