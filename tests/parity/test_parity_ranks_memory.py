"""Ranks that keep their heads' keys and values in 8 bits, or in window blocks, give the tokens that one process does.

`make ranks` runs the tests marked `ranks` too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato.engine.core import EngineCore
from tests.support.checkpoints import checkpoint, random_prompt
from tests.support.int8_cache import INT8_TOLERANCE, LENGTH, int8_case, int8_engine
from tests.support.parity import (
    BLOCK,
    Case,
    add,
    cached,
    check,
    complete,
    decided_case,
    has_state,
    run,
    run_with_preemptions,
    sampled_case,
)
from tests.support.speculation import Watched, drafting_engine

PLACES = {"none": {"graph_mode": "none"}, "graphs": {"graph_mode": "full_and_piecewise", "capture_sizes": (16, 61)}}
CHUNKS = {"max_num_batched_tokens": 61}

INT8 = [("nemotron_h", 2), ("llama", 4), ("llama", 2), ("gemma3_text", 2), ("gemma3_text", 4), ("qwen3_5_text", 2)]
"""A hybrid; a transformer whose two heads of keys are on two ranks each; one with window blocks; one with delta rules.
"""


@pytest.mark.parametrize(
    ("name", "ranks"), [pytest.param(*case, marks=() if case == INT8[0] else pytest.mark.ranks) for case in INT8]
)
def test_ranks_with_8_bit_keys_give_the_tokens_of_transformers_that_rounds_alike(name: str, ranks: int) -> None:
    """In chunks, from graphs, preempted, and from the prefix cache."""
    engine = int8_engine(name, tensor_parallel_size=ranks, **CHUNKS, **PLACES["graphs"])
    try:
        assert _key_dtypes(engine) == {torch.int8}
        cases = [int8_case(name), int8_case(name, 40)]
        outputs = [add(engine, case) for case in cases]
        run_with_preemptions(engine, outputs)
        again = add(engine, cases[0])
        run(engine)
        for case, output in zip([*cases, cases[0]], [*outputs, again], strict=True):
            check(case, output, INT8_TOLERANCE)
        assert cached(again) >= LENGTH // 2
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("name", "speculative"),
    [
        ("qwen3_5_text_head", "mtp:2"),
        ("qwen3_5_text", "draft:llama:2"),
        ("nemotron_h", "ngram:3"),
    ],
)
@pytest.mark.ranks
def test_ranks_with_8_bit_keys_and_drafts_give_them_too(name: str, speculative: str) -> None:
    engine = int8_engine(
        name, tensor_parallel_size=2, speculative=_of_checkpoints(speculative), speculative_adaptive="off", **CHUNKS
    )
    try:
        output = add(engine, int8_case(name))
        run(engine)
        check(int8_case(name), output, INT8_TOLERANCE)
        assert engine.stats()["speculation"]["drafts_proposed"] > 0
    finally:
        engine.close()


@pytest.mark.ranks
def test_ranks_that_all_have_latents_of_8_bits_give_the_tokens_of_one_process() -> None:
    """transformers has no such cache to compare with."""
    outputs = []
    for ranks in (1, 2):
        engine = int8_engine("kimi_linear", tensor_parallel_size=ranks, **CHUNKS)
        try:
            assert _key_dtypes(engine) == {torch.int8}
            outputs.append(add(engine, Case(random_prompt(LENGTH, seed=1), [], torch.empty(0))))
            run(engine)
        finally:
            engine.close()
    alone, shared = (output.outputs[0] for output in outputs)
    assert shared.token_ids == alone.token_ids
    given, wanted = (torch.tensor([each.logprob for each in one.logprobs or ()]) for one in (shared, alone))
    torch.testing.assert_close(given, wanted, atol=0.05, rtol=0)


PANES: list[tuple[str, int, str]] = [
    ("gemma3_text", 2, "draft:gemma3_text:3"),
    ("gemma3_text", 2, "ngram:2"),
    ("gemma3_text", 4, "draft:llama:2"),
    ("llama", 2, "draft:gemma3_text:3"),
    ("mistral", 2, "draft:mistral:2"),
    ("mistral", 4, "ngram:3"),
    ("nemotron_h", 2, "draft:mistral:2"),
    ("qwen2", 2, "draft:mistral:2"),
]
"""Windows of the model, of its draft model, and of both, of other lengths."""


@pytest.mark.parametrize(
    ("name", "ranks", "speculative"),
    [pytest.param(*case, marks=() if case == PANES[0] else pytest.mark.ranks) for case in PANES],
)
def test_drafts_of_ranks_with_window_blocks_change_nothing(name: str, ranks: int, speculative: str) -> None:
    """In chunks, past every window, preempted, and from the prefix cache, greedy and sampled."""
    engine = drafting_engine(
        name, _of_checkpoints(speculative), tensor_parallel_size=ranks, **CHUNKS, **PLACES["graphs"]
    )
    try:
        assert engine.plan.memory.num_window_blocks > 0
        watched = Watched(engine)
        greedy, sampled = decided_case(name, 150), sampled_case(name, 47)
        outputs = [add(engine, greedy), add(engine, sampled)]
        run_with_preemptions(engine, outputs, (3, 7, 11))
        check(greedy, outputs[0])
        check(sampled, outputs[1])
        assert cached(complete(engine, greedy)) >= (64 if has_state(name) else 150 // BLOCK * BLOCK)
        assert any(accepted for _, accepted in watched.verdicts())
    finally:
        engine.close()


def _of_checkpoints(speculative: str) -> str:
    method, *draft, k = speculative.split(":")
    return ":".join((method, *(str(checkpoint(each)) for each in draft), k))


def _key_dtypes(engine: EngineCore) -> set[Any]:
    return {layer.k_cache.dtype for layer in engine.runner.layer_memory if layer.k_cache is not None}
