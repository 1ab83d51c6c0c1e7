"""What the engine samples: seeds, samples, bias, penalties and log-probabilities, through whole requests."""

from __future__ import annotations

import pytest
import torch

from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from tests.support.checkpoints import checkpoint, oracle_logits, random_prompt
from tests.support.engines import NAME, PROMPT, assert_empty, complete, greedy, make_engine, run, sampled, tokens_of


@pytest.fixture(scope="module")
def shared() -> EngineCore:
    return make_engine()


@pytest.fixture
def engine(shared: EngineCore) -> EngineCore:
    """An engine that the test before has left without requests."""
    assert_empty(shared)
    return shared


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_in_other_chunks_and_after_preemption() -> None:
    params = sampled(max_tokens=30, top_p=0.95)
    engine = make_engine()
    expected = tokens_of(engine, params)
    assert tokens_of(engine, params) == expected
    assert tokens_of(engine, params.replace(seed=8)) != expected

    for length in (3, 17, 60):
        engine.add_request(random_prompt(length, seed=length), sampled(seed=length))
    request_id = engine.add_request(PROMPT, params)
    assert run(engine)[request_id].outputs[0].token_ids == expected

    for chunk in (17, 23):
        assert tokens_of(make_engine(max_num_seqs=1, max_num_batched_tokens=chunk), params) == expected

    request_id = engine.add_request(PROMPT, params)
    done: dict[str, RequestOutput] = {}
    for step in range(200):
        if step in (1, 9, 10, 25):
            assert engine.scheduler.preempt(request_id)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if not engine.has_unfinished:
            break
    assert done[request_id].outputs[0].token_ids == expected


def test_samples_of_a_request_differ_and_the_first_is_that_of_a_request_for_one(engine: EngineCore) -> None:
    output = complete(engine, PROMPT, sampled(n=4, prompt_logprobs=0))
    assert [each.index for each in output.outputs] == [0, 1, 2, 3]
    assert output.outputs[0].token_ids == tokens_of(engine, sampled())
    assert len({tuple(each.token_ids) for each in output.outputs}) == 4
    assert output.prompt_logprobs is not None
    assert [None if p is None else p.token_id for p in output.prompt_logprobs] == [None, *PROMPT[1:]]


def test_greedy_samples_are_all_the_same(engine: EngineCore) -> None:
    output = complete(engine, PROMPT, greedy(n=3))
    assert len({tuple(each.token_ids) for each in output.outputs}) == 1


def test_without_a_seed_no_two_samples_of_equal_requests_are_alike() -> None:
    engine = make_engine()
    ids = [engine.add_request(PROMPT, sampled(seed=None, n=3)) for _ in range(3)]
    done = run(engine)
    samples = [tuple(each.token_ids) for request_id in ids for each in done[request_id].outputs]
    assert len(set(samples)) == 9


@pytest.mark.parametrize("seeds", [(3, 3), (3, 4)])
def test_the_seed_of_the_engine_decides_for_requests_without_one(seeds: tuple[int, int]) -> None:
    first, second = (tokens_of(make_engine(seed=seed), sampled(seed=None)) for seed in seeds)
    assert (first == second) == (seeds[0] == seeds[1])


def test_a_bias_rules_tokens_in_and_out(engine: EngineCore) -> None:
    plain = tokens_of(engine, greedy())
    assert tokens_of(engine, greedy(logit_bias={77: 100.0})) == [77] * 12
    without = tokens_of(engine, greedy(logit_bias=dict.fromkeys(plain, -100.0)))
    assert not set(plain) & set(without)


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.3, 0.0, 0.0), (1.0, 2.0, 0.0), (1.0, 0.0, 1.0), (0.9, -1.0, 0.5)]
)
def test_penalties_change_the_logits_as_their_formulas_say(
    engine: EngineCore, repetition: float, presence: float, frequency: float
) -> None:
    """Against the oracle's logits, with the formulas of the three penalties written out."""
    expected: list[int] = []
    for _ in range(12):
        logits = oracle_logits(NAME, [*PROMPT, *expected])[-1].clone()
        logits[77] += 2.0
        for token in {*PROMPT, *expected}:
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
            logits[token] -= presence * (token in expected) + frequency * expected.count(token)
        expected.append(int(logits.argmax()))
    penalties = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    assert tokens_of(engine, greedy(logit_bias={77: 2.0}, **penalties)) == expected
    assert tokens_of(engine, greedy(logit_bias={77: 2.0})) != expected


def test_logprobs_add_up_to_those_of_transformers(engine: EngineCore) -> None:
    params = greedy(logprobs=2, logit_bias={9: 3.0}, temperature=0)
    [output] = complete(engine, PROMPT, params).outputs
    expected = oracle_logits(NAME, [*PROMPT, *output.token_ids]).log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert output.logprobs is not None
    for given, row, token in zip(output.logprobs, expected, output.token_ids, strict=True):
        assert given.token_id == token
        assert given.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert given.rank == 1 + int((row > row[token]).sum())
        assert [token for token, _ in given.top] == row.topk(2).indices.tolist()
    total = sum(each.logprob for each in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(total)
    chosen = torch.tensor(output.token_ids)
    assert total == pytest.approx(expected[torch.arange(12), chosen].sum().item(), abs=1e-2)


@pytest.mark.parametrize("method", ["ngram:3", "draft:{model}:3"])
def test_drafts_change_neither_tokens_nor_logprobs_whatever_is_asked_of_sampling(
    engine: EngineCore, method: str
) -> None:
    asked = [
        greedy(logprobs=2),
        sampled(logprobs=0, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
        sampled(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, prompt_logprobs=1),
        greedy(repetition_penalty=0.8, logit_bias={77: 2.0}, logprobs=1),
        greedy(min_tokens=6, stop_token_ids=tuple(range(100)), logprobs=0),
        sampled(n=3, temperature=0.5),
    ]
    drafting = make_engine(speculative=method.format(model=checkpoint(NAME)), speculative_adaptive="off")
    for params in asked:
        expected, actual = (complete(each, PROMPT, params) for each in (engine, drafting))
        for right, given in zip(expected.outputs, actual.outputs, strict=True):
            assert (given.token_ids, given.finish_reason) == (right.token_ids, right.finish_reason)
            for scored, scored_right in zip(given.logprobs or (), right.logprobs or (), strict=True):
                assert scored.token_id == scored_right.token_id
                assert scored.logprob == pytest.approx(scored_right.logprob, abs=1e-4)
    counted = drafting.stats()["speculation"]
    assert counted["drafts_accepted"] > 0
    # The same model with the same noise guesses right.
    assert (counted["acceptance"] == 1) == method.startswith("draft")
    assert_empty(drafting)
