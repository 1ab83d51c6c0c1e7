"""What makes drafts knows the accepted text and nothing else: whatever was drafted, rejected, preempted or found in the
cache before, its logits are those that transformers computes for that text at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from ostinato.engine.core import EngineCore
from tests.support.checkpoints import checkpoint
from tests.support.heads import HeadReference, ModelReference, Proposal, Recorder, Reference
from tests.support.parity import (
    BLOCK,
    NEW,
    TOLERANCE,
    Case,
    add,
    cached,
    check,
    decided_case,
    run,
    run_with_preemptions,
    sampled_case,
)
from tests.support.speculation import Watched, at_random, drafting_engine, outputs_of, script

GRAPHS = {"none": {}, "full_and_piecewise": {"capture_sizes": (16, 40), "capture_rows": (2, 4)}}

HIT = 64

HEADS = [
    ("nemotron_h_head", "all", 4, "full_and_piecewise"),
    ("nemotron_h_head", "align", 2, "none"),
    ("nemotron_h_dense_head", "all", 2, "none"),
    ("nemotron_h_dense_head", "none", 3, "full_and_piecewise"),
    ("nemotron_h_deep_head", "align", 3, "full_and_piecewise"),
    ("nemotron_h_deep_head", "all", 1, "none"),
    ("nemotron_h_stateless_head", "all", 3, "full_and_piecewise"),
    ("nemotron_h_stateless_head", "align", 4, "none"),
    ("nemotron_h_flat_head", "all", 4, "none"),
    ("qwen3_5_text_head", "align", 3, "none"),
    ("qwen3_5_text_head", "all", 2, "full_and_piecewise"),
    ("qwen3_next_head", "all", 3, "full_and_piecewise"),
    ("qwen3_next_head", "none", 2, "none"),
]
"""Recipe, mode of the state cache, k, graph mode."""

DRAFT_MODELS = [
    ("llama", "nemotron_h_dense", "all", 3, "full_and_piecewise"),
    ("mamba2", "llama", "align", 2, "none"),
    ("falcon_h1_normed", "falcon_h1_normed", "all", 4, "none"),
    ("bamba", "mamba2", "none", 1, "full_and_piecewise"),
]
"""Recipe, that of the draft model, and as above."""


def serve(engine: EngineCore, cases: Sequence[Case]) -> None:
    """Two requests in chunks of 40 tokens that are preempted; the first one again with one that has its beginning; the
    next turn of its conversation; and beside this its beginning, of which all but the last token is found."""
    first, second, related, turn, beginning = cases
    outputs = [add(engine, first), add(engine, second)]
    run_with_preemptions(engine, outputs, (3, 9))
    outputs += [add(engine, first), add(engine, related)]
    run(engine)
    outputs.append(add(engine, turn))
    while not outputs[-1].outputs[0].token_ids:
        assert not outputs[-1].finished
        engine.step()
    outputs.append(add(engine, beginning))
    run(engine)
    for case, output in zip((first, second, first, related, turn, beginning), outputs, strict=True):
        check(case, output)
    hits = [HIT, 32, (len(first.prompt) + NEW - 1) // BLOCK * BLOCK, HIT]
    assert [cached(output) for output in outputs[2:]] == (hits if finds(engine) else [0] * 4)


def finds(engine: EngineCore) -> bool:
    """Whether prompts hit."""
    return not engine.spec.keeps_state or engine.plan.settings.state_cache_mode != "none"


@cache
def cases_of(name: str) -> tuple[Case, ...]:
    first = sampled_case(name, HIT + 6)
    return (
        first,
        decided_case(name, 47),
        sampled_case(name, 61, tuple(first.prompt[:40])),
        sampled_case(name, HIT + 6 + NEW + 13, (*first.prompt, *first.tokens)),
        sampled_case(name, HIT + 1, tuple(first.prompt[: HIT + 1])),
    )


def check_proposals(
    proposals: Sequence[Proposal],
    k: int,
    reference: Callable[[str, Sequence[int]], Reference],
    name: str,
    cases: Sequence[Case],
    finds: bool,
) -> None:
    """All drafts have the reference's logits; there are some of every depth, behind every case."""
    assert {len(proposal.ahead) for proposal in proposals} == set(range(k))
    texts = [(*case.prompt, *case.tokens) for case in cases]
    oracles = [reference(name, text) for text in texts]
    seen = set[tuple[int, int]]()
    for proposal in proposals:
        length = len(proposal.text)
        of = next(
            i
            for i, case in enumerate(cases)
            if len(case.prompt) <= length <= len(texts[i]) and texts[i][:length] == proposal.text
        )
        expected = oracles[of].logits(length, proposal.ahead)
        atol = TOLERANCE * expected.abs().max().item()
        torch.testing.assert_close(proposal.logits, expected, atol=atol, rtol=0)
        seen.add((of, length))
    for i, case in enumerate(cases):
        lengths = {length for of, length in seen if of == i}
        assert len(lengths) >= NEW // (1 + k) - 1
        # Behind a prompt itself, where all but its last token was found.
        assert (len(case.prompt) in lengths) == (finds and len(case.prompt) == HIT + 1)


@pytest.mark.parametrize(("name", "mode", "k", "graph_mode"), HEADS)
def test_drafts_of_a_head_follow_from_the_accepted_text_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, mode: str, k: int, graph_mode: str
) -> None:
    cases = cases_of(name)
    engine = drafting_engine(
        name, f"mtp:{k}", state_cache_mode=mode, graph_mode=graph_mode, max_num_batched_tokens=40,
        **GRAPHS[graph_mode],
    )  # fmt: skip
    recorder, watched = Recorder(monkeypatch, engine), Watched(engine)
    # Its own drafts are thrown away for some of which any number is right.
    script(engine, outputs_of(cases), at_random(k), keep=True)
    serve(engine, cases)
    assert {accepted for given, accepted in watched.verdicts() if given == k} == set(range(k + 1))
    check_proposals(recorder.proposals, k, HeadReference, name, cases, finds(engine))


@pytest.mark.parametrize(("name", "draft_name", "mode", "k", "graph_mode"), DRAFT_MODELS)
@pytest.mark.slow
def test_drafts_of_a_model_follow_from_the_accepted_text_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, draft_name: str, mode: str, k: int, graph_mode: str
) -> None:
    cases = cases_of(name)
    engine = drafting_engine(
        name, f"draft:{checkpoint(draft_name)}:{k}", state_cache_mode=mode, graph_mode=graph_mode,
        max_num_batched_tokens=40, **GRAPHS[graph_mode],
    )  # fmt: skip
    recorder = Recorder(monkeypatch, engine)
    serve(engine, cases)
    check_proposals(recorder.proposals, k, ModelReference, draft_name, cases, finds(engine))
