"""Drafters whose logits are not finite, and drafters with random weights: fewer drafts, and the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ostinato.runner import model_runner
from ostinato.sampling.sampler import SampleKernel, select_tokens
from ostinato.sampling.state import PendingToken
from tests.support.checkpoints import checkpoint, random_prompt
from tests.support.engines import greedy, make_engine, run, sampled
from tests.support.tensors import as_tensor

PROMPTS = [random_prompt(length, seed=length) for length in (16, 21, 40)]
METHODS = {"mtp": "mtp:3", "draft": {"method": "draft", "num_speculative_tokens": 3}}


def outputs(name: str, method: str | None, **settings: object) -> tuple[list[list[int]], list[int]]:
    """The tokens of greedy and sampled requests, and how many drafts were proposed at each position."""
    speculative = METHODS[method] if method is not None else None
    if isinstance(speculative, dict):
        speculative = {**speculative, "model": str(checkpoint(name))}
    engine = make_engine(name, speculative=speculative, speculative_adaptive="off", **settings)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS for params in (greedy(), sampled())]
    done = run(engine)
    tokens = [done[request_id].outputs[0].token_ids for request_id in ids]
    return tokens, [] if engine.speculation is None else engine.speculation.counters.proposed


@pytest.mark.parametrize("graph_mode", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("method", METHODS)
def test_a_row_whose_drafter_gives_no_finite_logits_gets_the_drafts_before_them(
    monkeypatch: pytest.MonkeyPatch, method: str, graph_mode: str
) -> None:
    plain, _ = outputs("nemotron_h_head", None)

    def choose_finite(
        logits: torch.Tensor, pending_tokens: Sequence[PendingToken], draw: SampleKernel
    ) -> dict[int, int]:
        logits = as_tensor(logits).clone()
        for row, pending in enumerate(pending_tokens):
            if pending.position % 3 == 0:
                logits[row] = torch.nan
        return select_tokens(logits, pending_tokens, draw)

    monkeypatch.setattr(model_runner, "select_tokens", choose_finite)
    tokens, proposed = outputs("nemotron_h_head", method, graph_mode=graph_mode)
    assert tokens == plain
    # Of three positions in a row one has none, so no row has three drafts.
    assert proposed[0] > proposed[1] > proposed[2] == 0


@pytest.mark.parametrize("method", METHODS)
def test_drafters_have_random_weights_where_the_model_has(method: str) -> None:
    plain, _ = outputs("nemotron_h_head", None, random_weights=True)
    tokens, proposed = outputs("nemotron_h_head", method, random_weights=True)
    assert tokens == plain
    assert min(proposed) > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_lone_prompt_whose_last_token_alone_is_not_cached_drafts_in_its_first_step(method: str) -> None:
    name, prompt = "nemotron_h_head", random_prompt(33, seed=3)
    speculative = METHODS[method]
    if isinstance(speculative, dict):
        speculative = {**speculative, "model": str(checkpoint(name))}
    engine = make_engine(name, speculative=speculative, speculative_adaptive="off")
    engine.add_request(prompt, greedy(max_tokens=1))
    run(engine)
    assert engine.speculation is not None
    assert engine.speculation.counters.rows_with_drafts == 0
    engine.add_request(prompt, greedy())
    engine.step()
    assert engine.speculation.counters.proposed == [1, 1, 1]
    run(engine)
