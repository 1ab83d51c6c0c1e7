"""Fast equals slow: every way of running a prompt gives the tokens and logits of transformers, for every architecture.

A new architecture is a recipe in checkpoints.py; a new mode is an entry in MODES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.engine import Engine
from ostinato.engine.outputs import RequestOutput
from tests.checkpoints import RECIPES, checkpoint, oracle_generate, oracle_logits, random_prompt

PROMPT = 150
NEW = 64
GAP = 1e-3
"""Of the largest logit: what the two best tokens of every oracle step must differ by, so that the test decides."""
TOLERANCE = 1e-4
"""Of the largest logit: what log-probabilities may differ by."""
TOP = 3
OTHER_LENGTHS = (3, 16, 47, 81)


@dataclass(frozen=True)
class Case:
    """A prompt, its 64 greedy tokens by transformers, and the logits of each position but the last."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


@cache
def decided_case(name: str, length: int) -> Case:
    """A prompt whose tokens do not depend on rounding.

    transformers proposes the tokens with its cache, and its logits of the whole text at once decide: each token must
    be the best there. Prompts with a step that is too close to call are passed over.
    """
    for seed in range(40):
        prompt = random_prompt(length, seed)
        tokens = oracle_generate(name, prompt, NEW)
        whole = oracle_logits(name, prompt + tokens)[:-1]
        logits = whole[length - 1 :]
        best, second = logits.topk(2).values.unbind(-1)
        decided = (best - second > GAP * logits.abs().amax(-1)).all().item()
        if decided and logits.argmax(-1).tolist() == tokens:
            return Case(prompt, tokens, whole)
    raise AssertionError(f"no prompt of {length} tokens is decided at every step for {name}")


def make_engine(name: str, **settings: object) -> Engine:
    defaults = {"max_model_len": 256, "max_num_seqs": 4, "cache_memory": "64MiB", "threads": 1}
    return Engine(EngineConfig(model=str(checkpoint(name)), dtype="float32", **(defaults | settings)))


def add(engine: Engine, case: Case, prompt_logprobs: bool = False) -> RequestOutput:
    """A request for the case's tokens and log-probabilities -> its output, which steps update."""
    params = SamplingParams(
        temperature=0,
        max_tokens=NEW,
        ignore_eos=True,
        logprobs=TOP,
        prompt_logprobs=TOP if prompt_logprobs else None,
    )
    output = engine.output(engine.add(case.prompt, params))
    assert output is not None
    return output


def run(engine: Engine) -> None:
    """Steps until nothing is left."""
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()


def check(case: Case, output: RequestOutput) -> None:
    """The tokens, and the log-probabilities of each position that has them, are those of the whole text at once."""
    assert output.error is None
    [only] = output.outputs
    assert only.token_ids == case.tokens
    scored = [*(output.prompt_logprobs or [])[1:], *(only.logprobs or [])]
    assert len(scored) == NEW + (0 if output.prompt_logprobs is None else len(case.prompt) - 1)
    given = [each for each in scored if each is not None]
    text = (case.prompt + case.tokens)[-len(scored) :]
    assert [each.token_id for each in given] == text
    logits = case.logits[-len(scored) :]
    expected, atol = logits.log_softmax(-1), TOLERANCE * logits.abs().max().item()
    own = torch.tensor([each.logprob for each in given])
    torch.testing.assert_close(own, expected[torch.arange(len(text)), text], atol=atol, rtol=0)
    top = torch.tensor([[logprob for _, logprob in each.top] for each in given])
    torch.testing.assert_close(top, expected.topk(TOP).values, atol=atol, rtol=0)


def alone(name: str, **settings: object) -> None:
    case = decided_case(name, PROMPT)
    engine = make_engine(name, **settings)
    output = add(engine, case)
    run(engine)
    check(case, output)


def batch_that_joins_and_leaves(name: str, **settings: object) -> None:
    """Unequal prompts arrive one by one, some of them while others decode, and one is aborted."""
    engine = make_engine(name, **settings)
    cases = [decided_case(name, length) for length in (PROMPT, *OTHER_LENGTHS)]
    outputs = []
    for case in cases:
        outputs.append(add(engine, case, prompt_logprobs=True))
        aborted = add(engine, case)
        for _ in range(4):
            engine.step()
        engine.abort(aborted.request_id)
    run(engine)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


def preempted(name: str) -> None:
    """Requests lose their memory in the middle of the prompt and twice while decoding."""
    engine = make_engine(name, max_num_batched_tokens=64)
    cases = [decided_case(name, length) for length in (PROMPT, 47)]
    outputs = [add(engine, case, prompt_logprobs=True) for case in cases]
    step = 0
    while engine.has_unfinished:
        engine.step()
        step += 1
        if step in (2, 20, 33):
            for output in outputs:
                engine.scheduler.preempt(output.request_id)
        engine.scheduler.check_integrity()
    assert engine.scheduler.counters.preemptions >= 5
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


def short_of_blocks(name: str) -> None:
    """So few blocks that the requests can only take turns."""
    engine = make_engine(name)
    memory = engine.plan.memory
    if memory.num_blocks == 0:
        pytest.skip("the model has no attention, so it never runs out of blocks")
    small = memory.kv_block * 18 + memory.state_slot * memory.num_slots
    engine = make_engine(name, cache_memory=small)
    cases = [decided_case(name, length) for length in (PROMPT, 47, 81)]
    outputs = [add(engine, case) for case in cases]
    run(engine)
    assert engine.scheduler.counters.preemptions > 0
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


MODES: dict[str, Callable[[str], None]] = {
    "whole": alone,
    "chunks of 37": lambda name: alone(name, max_num_batched_tokens=37),
    "chunks of 21": lambda name: alone(name, max_num_batched_tokens=21),
    "blocks of 32": lambda name: alone(name, block_size=32),
    "batch": batch_that_joins_and_leaves,
    "batch in chunks of 29": lambda name: batch_that_joins_and_leaves(name, max_num_batched_tokens=29),
    "preempted": preempted,
    "short of blocks": short_of_blocks,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECIPES)
def test_greedy_tokens_and_their_logprobs_equal_transformers(name: str, mode: str) -> None:
    MODES[mode](name)


@pytest.mark.parametrize("max_num_batched_tokens", [256, 41])
@pytest.mark.parametrize("name", RECIPES)
def test_prompt_logprobs_equal_transformers(name: str, max_num_batched_tokens: int) -> None:
    prompt = random_prompt(PROMPT, seed=3)
    engine = make_engine(name, max_num_batched_tokens=max_num_batched_tokens)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, logprobs=3)
    engine.add(prompt, params)
    outputs = []
    while engine.has_unfinished:
        outputs = engine.step() or outputs
    [output] = outputs
    expected = oracle_logits(name, prompt).log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for position, given in enumerate(output.prompt_logprobs[1:]):
        assert given is not None
        assert given.token_id == prompt[position + 1]
        assert given.logprob == pytest.approx(expected[position, given.token_id].item(), abs=1e-4)
        values = torch.tensor([logprob for _, logprob in given.top])
        torch.testing.assert_close(values, expected[position].topk(3).values, atol=1e-4, rtol=0)
    [last] = output.outputs[0].logprobs or []
    assert last.logprob == pytest.approx(expected[-1].max().item(), abs=1e-4)
    assert last.rank == 1
