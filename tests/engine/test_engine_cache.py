"""The engine's prefix cache as a caller sees it: what outputs and statistics say, and what keeps requests apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ostinato import RequestError
from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.startup import make_scheduler
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.scheduler.batch import RowResult, StepResult
from ostinato.scheduler.request import Request, StopConditions
from ostinato.scheduler.scheduler import Scheduler
from tests.support.checkpoints import random_prompt
from tests.support.engines import assert_empty, complete, greedy, make_engine, run, sampled
from tests.support.parity import cached, misses
from tests.support.plan_cases import ATTENTION, GIB, MIB, attention_layer, cpu, hybrid, mamba2_layer, mlp_layer, model

PROMPT = random_prompt(70, seed=9)
MODES = ("none", "align", "all")


def assert_sums(engine: EngineCore, outputs: list[RequestOutput]) -> None:
    """The statistics are the sums of what the outputs say, and these the prompts."""
    prefix = engine.stats()["prefix_cache"]
    assert prefix["cached_tokens"] == sum(map(cached, outputs))
    for cause, tokens in prefix["misses"].items():
        assert tokens == sum(misses(output).get(cause, 0) for output in outputs)
    for output in outputs:
        assert cached(output) + sum(misses(output).values()) == len(output.prompt_token_ids)
    assert prefix["cached_tokens"] + sum(prefix["misses"].values()) == engine.stats()["prompt_tokens"]


@pytest.mark.parametrize("mode", MODES)
def test_the_statistics_add_up_to_the_prompts(mode: str) -> None:
    engine = make_engine(state_cache_mode=mode, state_block_size=16)
    prompts = [PROMPT, PROMPT, PROMPT[:40], PROMPT[:64], PROMPT[:32] + random_prompt(30, seed=3), PROMPT[:1]]
    outputs = [complete(engine, prompt, greedy()) for prompt in prompts]
    for prompt in prompts:
        engine.add_request(prompt, greedy())
    outputs += run(engine).values()
    assert_sums(engine, outputs)
    assert (engine.stats()["prefix_cache"]["cached_tokens"] > 0) == (mode != "none")


def test_a_hit_is_told_with_its_causes_of_misses() -> None:
    engine = make_engine(state_block_size=32)
    outputs = [complete(engine, prompt, greedy(max_tokens=1)) for prompt in (PROMPT, PROMPT, PROMPT[:60], PROMPT[:16])]
    told = [(cached(output), misses(output)) for output in outputs]
    assert told == [
        (0, {"never_seen": 64, "recomputed_tail": 6}),
        (64, {"recomputed_tail": 6}),
        (32, {"no_checkpoint": 16, "recomputed_tail": 12}),
        (0, {"recomputed_tail": 16}),
    ]
    assert [output.cache.checkpoint_spacing for output in outputs if output.cache] == [32] * 4


WINDOWED = replace(ATTENTION, window=100)
LAWS: dict[str, tuple[ModelSpec, dict[str, Any], str]] = {
    "all": (
        hybrid(),
        {},
        "prompts that share at least 256 tokens hit; then every 256; so do those that continue a whole prompt, from "
        "its last multiple of 16; the second that leaves an earlier prompt at the same place hits from 16 tokens on, "
        "then every 16",
    ),
    "close": (
        hybrid(),
        {"state_block_size": 32, "checkpoint_policy": "boundaries"},
        "share at least 32 tokens hit; then every 32",
    ),
    "blocks": (hybrid(), {"block_size": 64}, "hits from 64 tokens on, then every 64"),
    "align": (
        hybrid(),
        {"state_cache_mode": "align", "state_block_size": 64},
        "each step of 1024 tokens leaves the last",
    ),
    "steps": (
        hybrid(),
        {"state_cache_mode": "align", "state_block_size": 32, "max_num_batched_tokens": 112, "max_num_seqs": 2},
        "each step of 112 tokens leaves the last",
    ),
    "few slots": (
        hybrid(),
        {"state_block_size": 32, "cache_memory": 24 * MIB, "max_num_seqs": 2, "max_model_len": 512},
        "every 32 of a prompt of at most 64 tokens, and wider spaced in longer ones",
    ),
    "none": (hybrid(), {"state_cache_mode": "none"}, "no prompt hits"),
    "off": (hybrid(), {"enable_prefix_caching": False}, "no prompt hits"),
    "attention": (
        model(attention_layer(), mlp_layer()),
        {},
        "prompts that share at least 16 tokens hit; then every 16",
    ),
    "windows": (
        model(attention_layer(), attention_layer(WINDOWED), mlp_layer()),
        {"block_size": 32},
        "prompts that share at least 32 tokens hit; then every 32",
    ),
    "state": (model(mamba2_layer(), mlp_layer()), {"state_block_size": 64}, "share at least 64 tokens hit"),
}


def serve(scheduler: Scheduler, name: str, prompt: Sequence[int]) -> int:
    """Compute a prompt and one token, without a model; returns how many of its tokens were cached."""
    request = Request(name, prompt, StopConditions(1))
    scheduler.add(request)
    while scheduler.has_unfinished:
        rows = scheduler.schedule().rows
        scheduler.update(StepResult(tuple([RowResult(row.request_id, (1,) if row.samples else ()) for row in rows])))
    assert request.cache_report is not None
    return request.cache_report.cached_tokens


@pytest.mark.parametrize("name", LAWS)
def test_prompts_hit_at_every_shared_length_as_the_plan_says(name: str) -> None:
    spec, given, words = LAWS[name]
    plan = make_plan(EngineConfig(model="made up", kernels="reference", **given), spec, cpu(4 * GIB))
    law = plan.hit_law
    assert words in str(law)
    scheduler = make_scheduler(plan)
    earlier = [number % 997 for number in range(420)]
    firsts: list[int] = []
    hits: list[int] = []
    for shared in range(401):
        scheduler.cache.store.clear()
        assert serve(scheduler, "earlier", earlier) == 0
        for again in range(2):
            prompt = [*earlier[:shared], *([998 + again] * 30)]
            hit = serve(scheduler, f"{shared} {again}", prompt)
            assert hit == law.hit(shared, len(earlier), len(prompt), is_repeated=again > 0), (shared, again)
            firsts += [hit] if again == 0 else []
        hits.append(hit)
        # One that is no longer than what it shares computes its last token.
        assert (
            shared == 0
            or serve(scheduler, "shorter", earlier[:shared]) <= (shared - 1) // law.block_size * law.block_size
        )
    lengths = [shared for shared, hit in enumerate(hits) if hit]
    assert min(lengths, default=0) == law.min_repeated
    if law.mode != "align":
        assert all(hits[length] == length for length in range(0, 401, law.repeated_step or 1000))
        # With two checkpoints per prompt, the one of 420 tokens has one inside, at 256.
        step, last = law.step if name != "few slots" else 256, 419 // law.block_size * law.block_size
        inside = [shared // step * step if step else 0 for shared in range(401)]
        assert firsts == [last if step and shared >= last else hit for shared, hit in enumerate(inside)]


def test_a_model_s_engine_hits_as_its_plan_says() -> None:
    engine = make_engine(state_block_size=32)
    law = engine.plan.hit_law
    for shared in (0, 15, 16, 31, 32, 50, 64, 69):
        engine.reset_prefix_cache()
        complete(engine, PROMPT, greedy(max_tokens=1))
        for again in range(2):
            prompt = [*PROMPT[:shared], *random_prompt(20, seed=shared + 100 * again + 100)]
            hit = cached(complete(engine, prompt, greedy(max_tokens=1)))
            assert hit == law.hit(shared, len(PROMPT), len(prompt), is_repeated=again > 0)


def test_nothing_is_told_before_the_request_has_begun() -> None:
    engine = make_engine(max_num_seqs=1)
    first, second = (engine.output(engine.add_request(PROMPT, greedy())) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.cache is None
    engine.step()
    assert cached(first) == 0
    assert second.cache is None
    run(engine)
    assert cached(second) == 64


def test_what_a_preempted_request_finds_again_does_not_change_what_was_told_of_its_prompt() -> None:
    engine = make_engine()
    output = engine.output(engine.add_request(PROMPT, greedy()))
    assert output is not None
    for _ in range(5):
        engine.step()
    engine.scheduler.preempt(output.request_id)
    run(engine)
    assert (cached(output), misses(output)) == (0, {"never_seen": 64, "recomputed_tail": 6})
    assert engine.stats()["prefix_cache"]["restored_tokens"] == 64
    assert_sums(engine, [output])


def test_requests_of_different_salts_share_nothing() -> None:
    engine = make_engine()
    outputs = []
    for salt in (None, "a", "b", None, "a", "b"):
        output = engine.output(engine.add_request(PROMPT, greedy(), cache_salt=salt))
        assert output is not None
        run(engine)
        outputs.append(output)
    assert [cached(output) for output in outputs] == [0, 0, 0, 64, 64, 64]
    assert all(output.outputs == outputs[0].outputs for output in outputs)


@pytest.mark.parametrize("salt", ["", 5, b"a"])
def test_a_salt_that_is_no_text_is_refused(salt: object) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=r"cache_salt .* should be text that is not empty"):
        engine.add_request(PROMPT, greedy(), cache_salt=salt)  # type: ignore[arg-type]
    assert_empty(engine)
    assert engine.stats()["requests"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_of_a_prompt_that_is_cached_are_those_of_one_that_is_not(mode: str) -> None:
    """They are computed, since the cache has none; the other samples of the request need not compute the prompt."""
    engine = make_engine(state_cache_mode=mode, state_block_size=16)
    params = sampled(prompt_logprobs=2, n=2)
    cold = complete(make_engine(enable_prefix_caching=False), PROMPT, params)
    complete(engine, PROMPT, greedy())
    warm = complete(engine, PROMPT, params)
    assert (cached(warm), misses(warm)) == (0, {"not_wanted": len(PROMPT)})
    assert [each.token_ids for each in warm.outputs] == [each.token_ids for each in cold.outputs]
    assert warm.prompt_logprobs is not None
    assert cold.prompt_logprobs is not None
    for given, wanted in zip(warm.prompt_logprobs[1:], cold.prompt_logprobs[1:], strict=True):
        assert given is not None
        assert wanted is not None
        assert given.token_id == wanted.token_id
        assert given.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    samples = engine.stats()["prefix_cache"]
    assert samples["misses"]["not_wanted"] == len(PROMPT)
    assert samples["cached_tokens"] == (0 if mode == "none" else 64)


def test_preempted_log_probabilities_of_a_prompt_go_on_where_they_were_delivered() -> None:
    """What was delivered need not be computed again, so so much may be taken from the cache."""
    engine = make_engine(max_num_batched_tokens=20, max_num_seqs=1, state_cache_mode="align", state_block_size=16)
    expected = complete(make_engine(), PROMPT, greedy(prompt_logprobs=1))
    output = engine.output(engine.add_request(PROMPT, greedy(prompt_logprobs=1)))
    assert output is not None
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(output.request_id)
    run(engine)
    assert engine.stats()["prefix_cache"]["restored_tokens"] == 48
    assert output.outputs == expected.outputs
    assert output.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    given, wanted = output.prompt_logprobs[1:], expected.prompt_logprobs[1:]
    assert [each.logprob for each in given if each] == pytest.approx(
        [each.logprob for each in wanted if each], abs=1e-4
    )
    assert len(given) == len(wanted) == len(PROMPT) - 1


def test_a_failed_step_leaves_nothing_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def fail(batch: object) -> None:
        raise RuntimeError(f"boom in {batch}")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", fail)
        engine.add_request(PROMPT, greedy())
        run(engine)
    usage = engine.scheduler.cache.usage()
    assert usage.blocks_cached == usage.slots_cached == 0
    assert cached(complete(engine, PROMPT, greedy())) == 0


def test_an_aborted_request_leaves_what_it_has_computed() -> None:
    engine = make_engine()
    request_id = engine.add_request(PROMPT, greedy())
    engine.step()
    engine.abort(request_id)
    assert_empty(engine)
    assert cached(complete(engine, PROMPT, greedy())) == 64
