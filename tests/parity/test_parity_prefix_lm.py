"""A prefix LM's prompt is computed whole, and found again whole: every way of running gives transformers' tokens."""

from __future__ import annotations

import itertools

import pytest
import torch

from ostinato import EngineConfig, RequestError, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.errors import ConfigError
from ostinato.sampling.pooler import POOLING_PARAMS, PoolingKind
from tests.support.checkpoints import checkpoint, oracle, random_prompt
from tests.support.parity import (
    BLOCK,
    NEW,
    PROMPT,
    add,
    cached,
    check,
    complete,
    decided_case,
    make_engine,
    misses,
    run,
    run_with_preemptions,
    sampled_case,
    shrink,
    warm,
)
from tests.support.recipes import PREFIX_LMS

LENGTHS = (PROMPT, 3, 16, 47, 81)

SETTINGS = {
    "eager": {"graph_mode": "none"},
    "graphs": {"max_num_batched_tokens": 160, "capture_sizes": (16, 160), "capture_rows": (2, 4)},
    "piecewise": {"graph_mode": "piecewise", "max_num_batched_tokens": 160, "capture_sizes": (30, 100)},
    "blocks of 32": {"block_size": 32},
    "overlap": {"overlap": "on"},
    "reference kernels": {"kernels": "reference"},
    "deterministic": {"deterministic": True},
    "ngram drafts": {"speculative": "ngram:3"},
}

pytestmark = pytest.mark.parametrize("name", PREFIX_LMS)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=what, marks=[pytest.mark.slow] if what == "reference kernels" else ())
        for what, settings in SETTINGS.items()
    ],
)
def test_requests_that_join_and_leave_get_the_tokens_of_transformers(name: str, settings: dict[str, object]) -> None:
    engine = make_engine(name, **settings)
    cases = [decided_case(name, length) for length in LENGTHS] + [sampled_case(name, 70)]
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


@pytest.mark.slow
def test_ranks_get_the_prompt_whole_too(name: str) -> None:
    engine = make_engine(name, tensor_parallel_size=2)
    cases = [decided_case(name, length) for length in (PROMPT, 47)]
    outputs = [add(engine, case, prompt_logprobs=True) for case in cases]
    run_with_preemptions(engine, outputs, at=(3, 20))
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)
    engine.close()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("tokens", [PROMPT, PROMPT + 7, 256])
def test_preempted_requests_compute_their_prompt_whole_again(name: str, tokens: int, caching: bool) -> None:
    """With fewer tokens in a step than in the text, what was generated is computed in parts behind the prompt."""
    engine = make_engine(name, max_num_batched_tokens=tokens, enable_prefix_caching=caching)
    cases = [decided_case(name, length) for length in (PROMPT, 47)]
    outputs = [add(engine, case, prompt_logprobs=True) for case in cases]
    run_with_preemptions(engine, outputs, at=(1, 20, 41, 55))
    assert engine.scheduler.counters.preemptions >= 6
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


def test_requests_short_of_blocks_take_turns(name: str) -> None:
    engine = make_engine(name)
    shrink(engine, num_blocks=17, num_slots=0)
    cases = [decided_case(name, length) for length in (PROMPT, 47, 81)]
    outputs = [add(engine, case) for case in cases]
    run(engine)
    assert engine.scheduler.counters.preemptions > 0
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


@pytest.mark.parametrize("length", [PROMPT, 144, 17])
def test_the_same_prompt_hits_and_no_other_does(name: str, length: int) -> None:
    engine, case = make_engine(name, max_model_len=320), decided_case(name, length)
    for other in (case.prompt[:-1], [*case.prompt, 5], case.prompt[: length // 2]):
        warm(engine, other)
    run(engine)
    assert cached(complete(engine, case)) == 0
    expected = (length - 1) // BLOCK * BLOCK
    assert cached(complete(engine, case)) == expected == engine.plan.hit_law.hit(length, length, length)
    assert cached(complete(engine, case, salt="mine")) == 0
    longer = decided_case(name, length + NEW + 9, (*case.prompt, *case.tokens))
    output = complete(engine, longer)
    tail = len(longer.prompt) % BLOCK
    assert (cached(output), misses(output)) == (0, {"never_seen": len(longer.prompt) - tail, "recomputed_tail": tail})
    assert engine.plan.hit_law.hit(length, length, len(longer.prompt)) == 0


def test_a_hit_of_part_of_a_prompt_computes_the_rest_whole(name: str) -> None:
    """Blocks at the end are evicted first: what is left was computed with the whole prompt in view."""
    case = decided_case(name, PROMPT)
    engine = make_engine(name)
    shrink(engine, num_blocks=14, num_slots=0)
    complete(engine, case)
    hits = set()
    for count in itertools.count(1):
        warm(engine, random_prompt(40 * count, seed=count))
        run(engine)
        hits.add(cached(complete(engine, case)))
        if count == 4:
            break
    assert any(0 < hit < (PROMPT - 1) // BLOCK * BLOCK for hit in hits)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embeddings_are_of_prompts_that_see_all_of_themselves(name: str, kind: PoolingKind) -> None:
    """Beside a request that decodes, and again with what the first has left in the cache."""
    engine, prompt = make_engine(name), random_prompt(PROMPT, seed=3)
    with torch.inference_mode():
        types = torch.ones(1, PROMPT, dtype=torch.long)
        hidden = oracle(name).model(torch.tensor([prompt]), use_cache=False, token_type_ids=types).last_hidden_state[0]
    expected = (hidden[-1] if kind == "last" else hidden.mean(0)).numpy()
    case = decided_case(name, 47)
    beside = add(engine, case)
    for _ in range(2):
        output = engine.output(engine.add_request(prompt, POOLING_PARAMS, pooling=kind))
        run(engine)
        assert output is not None
        assert output.embedding is not None
        assert abs(output.embedding - expected).max() < 1e-4 * max(1, abs(expected).max())
        assert cached(output) in ({0} if kind == "mean" else {0, (PROMPT - 1) // BLOCK * BLOCK})
    check(case, beside)


def test_drafts_of_a_second_model_change_nothing(name: str) -> None:
    for draft in ("llama", name):
        speculative = {"method": "draft", "model": str(checkpoint(draft)), "num_speculative_tokens": 2}
        engine = make_engine(name, speculative=speculative, speculative_adaptive="off")
        cases = [decided_case(name, length) for length in (PROMPT, 47)]
        outputs = [add(engine, case) for case in cases]
        run_with_preemptions(engine, outputs, at=(3, 9))
        for case, output in zip(cases, outputs, strict=True):
            check(case, output)
    # Its own drafts are right, except where a preemption or the end leaves room for none.
    assert engine.stats()["speculation"]["acceptance"] > 0.9


def test_a_model_with_causal_prompts_takes_no_such_drafts(name: str) -> None:
    speculative = {"method": "draft", "model": str(checkpoint(name)), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"\(prefix_lm\), and this model's prompts are computed in parts"):
        make_engine("llama", speculative=speculative)


def test_prompts_are_not_cut(name: str) -> None:
    """The plan says so, and makes steps as long as prompts; a prompt that is longer is refused."""
    plan = make_engine(name).plan
    assert not plan.settings.enable_chunked_prefill
    assert "see each other in both directions" in next(
        each.reason for each in plan.decisions if each.topic == "enable_chunked_prefill"
    )
    assert plan.settings.max_num_batched_tokens >= plan.settings.max_model_len
    assert str(plan.hit_law) == "the same prompt hits, up to its last multiple of 16 tokens; no other does"
    with pytest.raises(ConfigError, match="with this model none can be cut") as error:
        make_engine(name, enable_chunked_prefill=True)
    assert [(each.setting, each.value) for each in error.value.remedies] == [("enable_chunked_prefill", False)]
    short = make_engine(name, max_num_batched_tokens=40)
    with pytest.raises(RequestError, match="raise max_num_batched_tokens to 41"):
        short.add_request(random_prompt(41, seed=1), SamplingParams(max_tokens=2))
    short.add_request(random_prompt(40, seed=1), SamplingParams(max_tokens=2))
    run(short)


def test_online_checks_compute_the_prompt_whole(name: str) -> None:
    engine = EngineCore(EngineConfig(model=str(checkpoint(name)), dtype="float32", threads=1, cache_memory="16MiB"))
    from ostinato.verify.online_checks import OnlineChecks

    engine.online_checks = checks = OnlineChecks(engine, 1.0)
    case = decided_case(name, PROMPT)
    complete(engine, case)
    while checks.advance():
        pass
    assert (checks.counts.checked, checks.counts.different, checks.counts.failed) == (1, 0, 0)
