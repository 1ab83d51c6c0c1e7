"""Outputs with a guide parse, in every way of running, and are the same in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from ostinato import LLM, Guide, RequestError, SamplingParams
from ostinato.engine.outputs import RequestOutput
from tests.support.checkpoints import checkpoint
from tests.support.guides import GUIDES, assert_follows
from tests.support.text_checkpoint import SETTINGS, text_checkpoint

NAME = "nemotron_h_dense_head"
PROMPT = "cafe: decade, 漢 and é; decade, "
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"graph_mode": "none"},
    "ngram": {"speculative": "ngram:3"},
    "mtp": {"speculative": "mtp:2"},
    "itself": {"speculative": "draft"},
    "no cache": {"enable_prefix_caching": False},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 2},
}


@cache
def make_llm(way: str = "plain") -> LLM:
    changes = dict(WAYS.get(way, {}))
    if "speculative" in changes:
        changes["speculative_adaptive"] = "off"
    if way == "itself":
        changes["speculative"] = f"draft:{text_checkpoint(NAME)}:3"
    return LLM(str(text_checkpoint(NAME)), **(SETTINGS | {"max_model_len": 400, "dtype": "float32"} | changes))


@cache
def demo(speculative: str | None = None) -> LLM:
    drafts = {} if speculative is None else {"speculative": speculative, "speculative_adaptive": "off"}
    return LLM("demo", dtype="float32", threads=1, max_model_len=400, max_num_seqs=8, cache_memory="64MiB", **drafts)


@pytest.fixture(scope="module", autouse=True)
def _forget_engines() -> Iterator[None]:
    yield
    make_llm.cache_clear()
    demo.cache_clear()


def greedy(guide: Guide, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 300, "guide": guide, **changes})


def hot(guide: Guide, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 2.5, "max_tokens": 300, "seed": 11, "guide": guide, **changes})


def everything() -> list[SamplingParams]:
    asked = [params(guide) for guide in GUIDES.values() for params in (greedy, hot)]
    asked.append(hot(GUIDES["numbers"], n=3, logprobs=1))
    asked.append(hot(GUIDES["references"], repetition_penalty=1.3, logit_bias={20: 4.0}, top_p=0.9))
    asked.append(greedy(GUIDES["choices"], stop=["e"]))
    return asked


def endings(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in output.outputs]
        for output in outputs
    ]


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("model", ["demo", "random"])
def test_outputs_parse_greedy_and_at_a_high_temperature(name: str, model: str) -> None:
    llm = demo() if model == "demo" else make_llm()
    asked = [greedy(GUIDES[name]), *(hot(GUIDES[name], seed=seed) for seed in range(6))]
    for output in llm.generate([PROMPT if model == "random" else "Ava has 17 apples."] * len(asked), asked):
        assert output.outputs[0].finish_reason == "stop"
        assert_follows(output.outputs[0].text, GUIDES[name])


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_running_gives_the_same_outputs(way: str) -> None:
    asked = everything()
    prompts = [PROMPT * (1 + i % 3) for i in range(len(asked))]
    expected = [make_llm().generate(*pair)[0] for pair in zip(prompts, asked, strict=True)]
    assert endings(make_llm(way).generate(prompts, asked)) == endings(expected)


@pytest.mark.parametrize("speculative", ["ngram:3", "mtp:2"])
def test_drafts_of_the_embedded_model_change_no_output(speculative: str) -> None:
    guide = Guide(
        json_schema={
            "type": "object",
            "properties": {"steps": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 4}},
            "required": ["steps"],
            "additionalProperties": False,
        }
    )
    free = Guide(regex=r"(.|\n){90,140}")
    asked = [greedy(guide), greedy(free), hot(guide, temperature=0.8), hot(guide, temperature=1.5, n=2)]
    prompts = ["Ava has 17 apples and buys 25 more. How many apples does she have?"] * len(asked)
    given = demo(speculative)
    assert endings(given.generate(prompts, asked)) == endings(demo().generate(prompts, asked))
    assert given.stats()["speculation"]["drafts_accepted"] > 0


def test_a_preempted_request_goes_on_within_its_guide() -> None:
    llm, asked = make_llm(), [greedy(GUIDES["nested objects"]), hot(GUIDES["patterns"])]
    expected = endings(llm.generate([PROMPT] * 2, asked))
    engine, ids = llm.engine, [llm.engine.add_request(PROMPT, params) for params in asked]
    outputs = {request_id: engine.output(request_id) for request_id in ids}
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
        if steps % 5 == 0:
            for request_id in ids:
                engine.scheduler.preempt(request_id)
    assert endings([outputs[request_id] for request_id in ids]) == expected  # type: ignore[misc]
    assert steps > 10


def test_the_samples_of_a_request_follow_the_guide_each_on_its_own() -> None:
    [output] = make_llm().generate(PROMPT, hot(GUIDES["a regex"], n=4, temperature=5.0))
    texts = [each.text for each in output.outputs]
    assert len(set(texts)) > 1
    for text in texts:
        assert_follows(text, GUIDES["a regex"])


def test_a_guide_that_was_compiled_before_is_taken_as_it_is() -> None:
    engine = make_llm().engine
    grammar = engine.compile_guide(GUIDES["choices"])
    request_id = engine.add_request(PROMPT, greedy(GUIDES["choices"]), grammar=grammar)
    output = engine.output(request_id)
    while engine.has_unfinished:
        engine.step()
    assert output is not None
    assert output.outputs[0].text in GUIDES["choices"].choice
    with pytest.raises(RequestError, match="not that of its guide"):
        engine.add_request(PROMPT, greedy(GUIDES["a regex"]), grammar=grammar)
    with pytest.raises(RequestError, match="not that of its guide"):
        engine.add_request(PROMPT, SamplingParams(), grammar=grammar)


def test_what_cannot_be_guided_is_refused_when_it_is_added_and_leaves_nothing_behind() -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match="Invalid type"):
        llm.generate(PROMPT, SamplingParams(guide={"json_schema": {"type": "thing"}}))
    assert not llm.engine.has_unfinished
    bare = LLM(str(checkpoint(NAME)), **SETTINGS)
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        bare.generate([5, 6], SamplingParams(guide={"regex": "a"}))
