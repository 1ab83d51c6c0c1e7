"""A request that moves gives the tokens of one that stays: for every architecture, whatever it does when it moves."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.runner.cache_memory import LayerCacheMemory
from ostinato.sampling.guide import Guide
from tests.support import vision_parity as vision
from tests.support.checkpoints import RECIPES, checkpoint
from tests.support.fake_files import note_writes
from tests.support.parity import (
    CACHING,
    PROMPT,
    Case,
    add,
    check,
    complete,
    decided_case,
    make_engine,
    run,
    sampled_case,
    shrink,
    warm,
)

AT = (1, 2, 4, 9, 40)
"""Steps after which requests move: in a prompt of 150 tokens, of which a step takes 64, at its end, and in the output
before and behind a block's end."""
CHUNK = 64


def move(source: EngineCore, target: EngineCore, request_id: str) -> RequestOutput:
    """The output at its new home. Nothing is left of it at the old one."""
    exported = source.export_request(request_id)
    assert exported is not None
    source.scheduler.check_integrity()
    output = target.output(target.import_request(exported))
    assert output is not None
    return output


def wander(engines: tuple[EngineCore, EngineCore], cases: list[Case], at: tuple[int, ...] = AT, **adding: Any) -> None:
    """Requests move to and fro, all of them after each of so many steps, and are compared with transformers."""
    here, there = engines
    outputs = [add(here, case, **adding) for case in cases]
    for step in range(1, at[-1] + 1):
        here.step()
        if step in at:
            outputs = [move(here, there, output.request_id) for output in outputs]
            assert {each.outputs[0].finish_reason for each in here.step()} == {"moved"}
            assert not here.has_unfinished
            usage = here.scheduler.cache.usage()
            assert usage.blocks_used == usage.slots_used == 0
            here, there = there, here
    run(here)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


def pair(name: str, **settings: Any) -> tuple[EngineCore, EngineCore]:
    settings = {"max_num_batched_tokens": CHUNK, **settings}
    return make_engine(name, **settings), make_engine(name, **settings)


def moves(engine: EngineCore) -> dict[str, int]:
    found: dict[str, int] = engine.stats()["moves"]
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_request_that_wanders_between_two_engines_gives_the_tokens_of_transformers(name: str) -> None:
    engines = pair(name)
    wander(engines, [decided_case(name, PROMPT), sampled_case(name, PROMPT)])
    for engine in engines:
        assert moves(engine)["carried_tokens"] > 0
        assert moves(engine)["recomputed_tokens"] == 0


def test_nothing_is_computed_twice() -> None:
    here, there = pair("nemotron_h")
    case = decided_case("nemotron_h", PROMPT)
    wander((here, there), [case])
    computed = here.stats()["computed_tokens"] + there.stats()["computed_tokens"]
    assert computed == PROMPT + len(case.tokens) - 1


@pytest.mark.parametrize(
    ("name", "mode"),
    [each for each in CACHING if each[0] in ("nemotron_h", "qwen3", "mamba2", "gemma3_text", "mistral")],
)
def test_what_was_carried_is_a_hit_for_others_and_a_right_one(name: str, mode: str) -> None:
    here, there = pair(name, state_cache_mode=mode)
    case = decided_case(name, PROMPT)
    wander((here, there), [case], at=(9,))
    output = complete(there, case)  # the blocks that came, and a checkpoint behind them that was taken there
    other = decided_case(name, 131, tuple(case.prompt[:96]))
    complete(there, other)
    assert output.cache is not None
    if not there.scheduler.cache.slots.count:
        assert output.cache.cached_tokens == 144


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nemotron_h", {"graph_mode": "none"}),
        ("nemotron_h", {"graph_mode": "full_and_piecewise"}),
        ("nemotron_h", {"overlap": "on"}),
        ("qwen3", {"overlap": "on"}),
        ("gemma3_text", {"overlap": "on"}),
        ("mistral", {"enable_prefix_caching": False}),
        ("gemma3_text", {"speculative": "ngram:2", "speculative_adaptive": "off"}),
        ("nemotron_h", {"enable_prefix_caching": False}),
        ("nemotron_h", {"state_cache_mode": "align"}),
        ("nemotron_h_head", {"speculative": "mtp:3", "speculative_adaptive": "off"}),
        ("mamba2", {"speculative": "ngram:2", "speculative_adaptive": "off"}),
        ("falcon_h1", {"speculative": "draft:nemotron_h:2", "speculative_adaptive": "off"}),
    ],
)
def test_in_every_mode(name: str, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    if settings.get("speculative", "").startswith("draft"):
        method, model, k = settings["speculative"].split(":")
        settings["speculative"] = f"{method}:{checkpoint(model)}:{k}"
    at = (1, 2, 4, 7) if "speculative" in settings else AT
    wander(pair(name, **settings), [decided_case(name, PROMPT), sampled_case(name, PROMPT)], at)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
def test_quantised_models_and_states_of_16_bits_too(name: str) -> None:
    """Against an engine of the same settings, since transformers has neither."""
    settings = {"quantization": "int8", "max_num_batched_tokens": CHUNK}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=50, ignore_eos=True)
    prompt = decided_case(name, PROMPT).prompt
    alone = make_engine(name, **settings)
    expected = alone.output(alone.add_request(prompt, params))
    run(alone)
    here, there = make_engine(name, **settings), make_engine(name, **settings)
    output = here.output(here.add_request(prompt, params))
    assert output is not None
    assert expected is not None
    for _ in range(12):
        here.step()
    output = move(here, there, output.request_id)
    run(there)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("at", AT)
def test_prompt_log_probabilities_are_given_once(at: int) -> None:
    wander(pair("nemotron_h"), [decided_case("nemotron_h", PROMPT)], (at,), prompt_logprobs=True)


@pytest.mark.parametrize("name", ["nemotron_h", "gemma3_text"])
def test_where_there_is_no_room_requests_wait_with_what_came_and_are_preempted_as_others_are(name: str) -> None:
    here, there = pair(name, max_num_seqs=4)
    shrink(there, num_blocks=24, num_slots=4)
    there.scheduler.cache.memory = make_memory(there)
    cases = [decided_case(name, length) for length in (PROMPT, 130, 144)]
    outputs = [add(here, case, salt=str(number)) for number, case in enumerate(cases)]  # that share no block
    for _ in range(12):
        here.step()
    outputs = [move(here, there, output.request_id) for output in outputs]
    waited = 0
    while there.has_unfinished:
        there.step()
        there.scheduler.check_integrity()
        waited += any(each.kv_snapshot is not None for each in there.scheduler.queues.waiting)
    assert waited > 0
    assert there.scheduler.counters.preemptions > 0
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_who_loses_what_came_computes_it_again_and_moves_on(name: str) -> None:
    here, there = pair(name)
    cases = [decided_case(name, PROMPT), sampled_case(name, PROMPT)]
    outputs = [add(here, case) for case in cases]
    for _ in range(20):
        here.step()
    outputs = [move(here, there, output.request_id) for output in outputs]
    there.step()
    assert moves(there)["recomputed_tokens"] == 0
    for output in outputs:
        assert there.scheduler.preempt(output.request_id)
    for _ in range(2):
        there.step()
        there.scheduler.check_integrity()
    outputs = [move(there, here, output.request_id) for output in outputs]
    run(here)
    assert there.scheduler.counters.preemptions == 2
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


def make_memory(engine: EngineCore) -> Any:
    """Of an engine whose scheduler was made anew."""
    return LayerCacheMemory(engine.runner.layer_memory, engine.plan.settings.block_size)


def test_beyond_the_bytes_that_may_wait_tokens_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.engine.migration.export_import.MAX_WAITING_BYTES", 0)
    here, there = pair("nemotron_h")
    case = decided_case("nemotron_h", PROMPT)
    wander((here, there), [case], (9,))
    assert moves(there)["recomputed_tokens"] == PROMPT + 9 - 3
    assert moves(there)["carried_tokens"] == 0


def test_a_prefix_that_is_there_already_is_shared_and_not_written() -> None:
    here, there = pair("nemotron_h")
    case = decided_case("nemotron_h", PROMPT)
    warm(there, case.prompt)
    run(there)
    output = add(here, case)
    for _ in range(9):
        here.step()
    exported = here.export_request(output.request_id)
    assert exported is not None
    name = there.import_request(exported)
    written: list[int] = []
    memory = there.scheduler.cache.memory
    assert memory is not None
    note_writes(memory, "block", written)
    output = there.output(name)  # type: ignore[assignment]
    run(there)
    check(case, output)
    assert len(written) == 1  # that of the last tokens


@pytest.mark.slow
def test_samples_guides_penalties_and_stop_strings_go_on_as_they_would_have() -> None:
    wishes = [
        SamplingParams(temperature=0.9, n=3, max_tokens=40, ignore_eos=True, logprobs=2),
        SamplingParams(
            temperature=0.9, max_tokens=60, guide=Guide(regex="( [0-9]{2}){30}"), stop=[" 1"], min_tokens=20
        ),
        SamplingParams(temperature=1.2, max_tokens=60, repetition_penalty=1.4, presence_penalty=0.4, min_tokens=50),
        SamplingParams(temperature=0.7, max_tokens=60, stop=["a"], min_tokens=30, include_stop_str_in_output=True),
        SamplingParams(temperature=1.0, max_tokens=60, frequency_penalty=0.5, logit_bias={300: 2.0}, top_p=0.9),
    ]
    prompt = "Q: Ava has 17 apples and buys 25 more. How many apples has she?\nA:"

    def engine() -> EngineCore:
        return EngineCore(EngineConfig(model="demo", dtype="float32", threads=1, max_num_seqs=8, max_model_len=256))

    alone = engine()
    expected = [alone.output(alone.add_request(prompt, wish, client="a")) for wish in wishes]
    run(alone)
    for steps in (1, 11, 33):
        here, there = engine(), engine()
        names = [here.add_request(prompt, wish, client="a") for wish in wishes]
        found = [here.output(name) for name in names]
        for _ in range(steps):
            here.step()
        for index, name in enumerate(names):
            exported = here.export_request(name)
            if exported is not None:
                found[index] = there.output(there.import_request(exported))
        run(here)
        run(there)
        assert there.stats()["moves"]["imported"] > 3
        assert [results(output) for output in found] == [results(output) for output in expected]


def results(output: RequestOutput | None) -> list[tuple[list[int], str, str | None, int | str | None]]:
    assert output is not None
    assert output.error is None
    return [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in output.outputs]


def test_images_move_with_their_request_in_the_midst_of_one_and_behind() -> None:
    name = "qwen3_vl"
    case = vision.decided_case(name, (vision.text(20), vision.images((8, 8), seed=1), vision.text(60)))
    for steps in (1, 2, 3, 12):
        here, there = (vision.make_engine(name, max_num_batched_tokens=24) for _ in range(2))
        output = vision.add(here, case)
        for _ in range(steps):
            here.step()
        output = move(here, there, output.request_id)
        vision.run(there)
        vision.check(case, output)
