"""The logits of a step: all ranks derive the same chunks, and the sampler asks for each of them once."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.distributed.rank_messages import RankStep
from ostinato.kv_cache.request_cache import RequestCache
from ostinato.ops.reference.sample import sample
from ostinato.plan.memory.activations import PROMPT_POSITIONS
from ostinato.runner.step_logits import LogitPositions, Logits, logit_positions
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.sampler import sample_rows
from ostinato.sampling.state import SamplingState
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.scheduler.request import Request, StopConditions, make_row

VOCAB_SIZE = 12
NUM_DRAFTS = 3


class Model:
    """Counts hidden states: the logits of token i of the step are those of i, and each call is noted."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.chunks.append(hidden[:, 0].int().tolist())
        return torch.sin(hidden + torch.arange(VOCAB_SIZE))


def logits_of(batch: Batch, drafts: Any, group: object = None) -> tuple[Model, Logits]:
    model = Model()
    num_tokens = sum(len(row.token_ids) for row in batch.rows) + batch.num_decode_rows * batch.num_drafts + 5
    ranks = cast(Any, SimpleNamespace(group=group, logits=nullcontext))
    hidden = torch.arange(num_tokens, dtype=torch.float32)[:, None]
    return model, Logits(cast(Any, model), hidden, logit_positions(batch, drafts), ranks)


@st.composite
def requests(draw: st.DrawFn, decodes: bool) -> tuple[Request, int]:
    """A request, and the number of its tokens to compute. One that does not decode may have been preempted."""
    prompt = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=90))
    output = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=int(decodes), max_size=4))
    wants = draw(st.booleans())
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7])),
        logprobs=draw(st.sampled_from([None, 1])),
        prompt_logprobs=1 if wants else None,
    )
    state = SamplingState(params, prompt, output, seed=3)
    request = Request("r", prompt, StopConditions(99), wants_prompt_logprobs=wants, sampling_state=state)
    request.restore(output, draw(st.integers(0, len(prompt) - 1)) if wants else 0, 0)
    if decodes:
        request.num_prompt_logprobs = len(prompt) - 1
    request.num_computed_tokens = request.num_tokens - 1 if decodes else draw(st.integers(0, len(prompt) - 2))
    state.output_token_ids = request.output_token_ids
    return request, 1 if decodes else draw(st.integers(1, request.num_tokens - request.num_computed_tokens))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Batch, list[tuple[int, ...]]]:
    """A batch, and what its rows were given for drafts."""
    cache = RequestCache(block_table=(1,), write_slots=(1, 2, 3, 4))
    decoding = draw(st.lists(requests(decodes=True), max_size=3))
    prompts = draw(st.lists(requests(decodes=False), min_size=not decoding, max_size=3))
    num_drafts = draw(st.sampled_from([0, NUM_DRAFTS])) if decoding else 0
    room = [draw(st.integers(0, num_drafts)) for _ in decoding]
    rows = [make_row(request, cache, count, most) for (request, count), most in zip(decoding, room, strict=True)]
    rows += [make_row(request, cache, count) for request, count in prompts]
    batch = Batch(tuple(rows), len(decoding), num_drafts)
    token = st.integers(0, VOCAB_SIZE - 1)
    drafts = [tuple(draw(st.lists(token, max_size=row.num_drafts))) for row in rows]
    return batch, drafts if num_drafts else []


@given(steps())
def test_all_ranks_compute_the_chunks_that_the_sampler_asks_for(step: tuple[Batch, list[tuple[int, ...]]]) -> None:
    batch, drafts = step
    first, logits = logits_of(batch, drafts)
    results = sample_rows(logits, batch.rows, drafts, kernel=sample)
    for row, result in zip(batch.rows, results, strict=True):
        assert bool(result.token_ids) == row.samples
        assert len(result.prompt_logprobs) == row.num_scored
    sent = pickle.loads(pickle.dumps(RankStep.of(batch, drafts)))
    other, of_follower = logits_of(sent.batch, sent.drafts, group="others")
    of_follower.finish()
    assert other.chunks == first.chunks
    logits.finish()
    assert other.chunks == first.chunks


def test_positions_are_the_last_known_token_with_its_drafts_and_those_before_prompt_tokens() -> None:
    rows = (
        BatchRow("a", (5,), 9, (), num_drafts=3, num_logits=4, samples=True),
        BatchRow("b", (6,), 9, (), num_drafts=2, num_logits=3, samples=True),
        BatchRow("c", (1, 2, 3), 4, (), num_logits=2, num_scored=2),
        BatchRow("d", (1, 2, 3), 4, ()),
        BatchRow("e", (1, 2, 3), 4, (), num_logits=3, num_scored=2, samples=True),
    )
    batch = Batch(rows, 2, 3)
    assert logit_positions(batch, [(7, 7), (), (), (), ()]) == ([0, 1, 2, 4, 16], [9, 10, 14, 15])
    assert logit_positions(batch) == ([0, 1, 10], [3, 4, 8, 9])


def test_prompt_positions_come_in_parts_after_what_is_sampled() -> None:
    scored = list(range(2 * PROMPT_POSITIONS + 1))
    sizes = [len(chunk) for chunk in LogitPositions([4, 9], scored).chunks()]
    assert sizes == [
        2,
        PROMPT_POSITIONS,
        PROMPT_POSITIONS,
        1,
    ]
    assert not list(LogitPositions([], []).chunks())


def test_a_rank_alone_computes_no_chunk_that_nobody_asked_for() -> None:
    batch = Batch((BatchRow("a", (5,), 9, (), num_logits=1, samples=True),), 1)
    model, logits = logits_of(batch, ())
    logits.finish()
    assert not model.chunks
    model, logits = logits_of(batch, (), group="others")
    logits.finish()
    logits.finish()
    assert model.chunks == [[0]]


def test_after_an_error_in_a_chunk_no_rank_waits_for_the_next() -> None:
    row = BatchRow("a", (1,) * 50, 0, (), num_logits=50, num_scored=49, samples=True)
    model, logits = logits_of(Batch((row,), 0), (), group="others")
    compute = model.compute_logits

    def interrupted(hidden: torch.Tensor) -> torch.Tensor:
        compute(hidden)
        raise KeyboardInterrupt

    model.compute_logits = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        logits.next_chunk()
    logits.finish()
    assert len(model.chunks) == 1
