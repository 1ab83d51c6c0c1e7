"""Fast equals slow: every way of running a prompt gives the tokens and logits of transformers, for every architecture.

A new architecture is a recipe in recipes.py; a new mode is an entry in MODES. Every recipe runs in the modes of ALWAYS,
and takes turns in the others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ostinato import SamplingParams
from tests.support.checkpoints import RECIPES, oracle_logits, random_prompt
from tests.support.parity import PROMPT, add, check, decided_case, make_engine, run, run_with_preemptions, shrink
from tests.support.turns import in_turns

OTHER_LENGTHS = (3, 16, 47, 81)


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


def preempted(name: str, **settings: object) -> None:
    """Requests lose their memory in the middle of the prompt and twice while decoding."""
    engine = make_engine(name, max_num_batched_tokens=64, **settings)
    cases = [decided_case(name, length) for length in (PROMPT, 47)]
    outputs = [add(engine, case, prompt_logprobs=True) for case in cases]
    run_with_preemptions(engine, outputs)
    assert engine.scheduler.counters.preemptions >= 5
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


def short_of_blocks(name: str) -> None:
    """So few blocks that the requests can only take turns."""
    engine = make_engine(name)
    if engine.plan.memory.num_blocks == 0:
        pytest.skip("the model has no attention, so it never runs out of blocks")
    shrink(engine, num_blocks=17, num_slots=engine.plan.memory.num_slots)
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
    "preempted, without prefix caching": lambda name: preempted(name, enable_prefix_caching=False),
    "short of blocks": short_of_blocks,
    "state mode align": lambda name: alone(name, state_cache_mode="align"),
    "state mode align, chunks of 37": lambda name: alone(name, state_cache_mode="align", max_num_batched_tokens=37),
    "state mode none": lambda name: alone(name, state_cache_mode="none"),
    "batch without prefix caching": lambda name: batch_that_joins_and_leaves(name, enable_prefix_caching=False),
    "batch in state mode align": lambda name: batch_that_joins_and_leaves(name, state_cache_mode="align"),
    "whole prompts only": lambda name: batch_that_joins_and_leaves(name, enable_chunked_prefill=False),
}


ALWAYS = ("batch in chunks of 29", "preempted")
CELLS = in_turns(
    [(name, mode) for name in RECIPES for mode in MODES], "greedy", always=lambda name, mode: mode in ALWAYS
)


@pytest.mark.parametrize(("name", "mode"), CELLS)
def test_greedy_tokens_and_their_logprobs_equal_transformers(name: str, mode: str) -> None:
    MODES[mode](name)


@pytest.mark.parametrize("max_num_batched_tokens", [256, 41])
@pytest.mark.parametrize("name", RECIPES)
def test_prompt_logprobs_equal_transformers(name: str, max_num_batched_tokens: int) -> None:
    prompt = random_prompt(PROMPT, seed=3)
    engine = make_engine(name, max_num_batched_tokens=max_num_batched_tokens)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, logprobs=3)
    engine.add_request(prompt, params)
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
