"""The engine's promises to each request: what it gives, when it ends, and that nobody else is disturbed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ostinato import EngineConfig, RequestError, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.errors import RankError, Remedy
from ostinato.scheduler.batch import Batch, StepResult
from tests.support.checkpoints import EOS, VOCAB_SIZE, checkpoint, random_prompt
from tests.support.engines import NAME, PROMPT, assert_empty, complete, greedy, make_engine, run, sampled, tokens_of


@pytest.fixture(scope="module")
def shared() -> EngineCore:
    return make_engine()


@pytest.fixture
def engine(shared: EngineCore) -> EngineCore:
    """An engine that the test before has left without requests."""
    assert_empty(shared)
    return shared


# Requests that cannot be served


BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "empty prompt; give at least one token"),
    "too long": ([5] * 96, {}, "max_model_len is 96.*shorten the prompt to 95"),
    "id too high": ([5, VOCAB_SIZE], {}, f"such as {VOCAB_SIZE}; they must be from 0 to {VOCAB_SIZE - 1}"),
    "id below 0": ([5, -1], {}, f"such as -1; they must be from 0 to {VOCAB_SIZE - 1}"),
    "not integers": ([5, 1.5], {}, "token ids, which are integers"),
    "truth values": ([5, True], {}, "True and False are none"),
    "no list": (17, {}, "a prompt is text or a list of token ids"),
    "text": ("hello", {}, "no tokenizer.json: give the prompt as token ids"),
    "bias": ([5], {"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias .* between 0 and {VOCAB_SIZE - 1}"),
    "stop id": ([5], {"stop_token_ids": [-3]}, f"stop_token_ids .* between 0 and {VOCAB_SIZE - 1}"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_request_that_cannot_be_served_is_refused_and_the_others_go_on(engine: EngineCore, case: str) -> None:
    prompt, settings, message = BAD_REQUESTS[case]
    expected = tokens_of(engine, greedy())
    before = engine.stats()["requests"]
    good = engine.add_request(PROMPT, greedy())
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, SamplingParams(**settings))
    assert run(engine)[good].outputs[0].token_ids == expected
    assert engine.stats()["requests"] == before + 1


# Steps that fail


def fail_once(
    monkeypatch: pytest.MonkeyPatch, engine: EngineCore, call: int, error: BaseException, before: bool
) -> None:
    """Makes the `call`-th step raise, before or after it wrote to the cache."""
    run_batch, calls = engine.runner.execute, 0

    def flaky(batch: Batch) -> StepResult:
        nonlocal calls
        calls += 1
        if calls != call:
            return run_batch(batch)
        if not before:
            run_batch(batch)
        raise error

    monkeypatch.setattr(engine.runner, "execute", flaky)


@pytest.mark.parametrize("before", [True, False], ids=["before writing", "after writing"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_step_that_fails_ends_its_requests_and_frees_their_memory_for_those_that_wait(
    monkeypatch: pytest.MonkeyPatch, call: int, before: bool
) -> None:
    engine = make_engine(max_num_seqs=2)
    prompts = [random_prompt(length, seed=length) for length in (20, 33, 27, 5)]
    expected = [tokens_of(engine, greedy(), prompt) for prompt in prompts]
    boom = RuntimeError("boom")
    fail_once(monkeypatch, engine, call, boom, before)
    ids = [engine.add_request(prompt, greedy()) for prompt in prompts]
    done = run(engine)
    for request_id in ids[:2]:
        assert done[request_id].error is boom
        assert done[request_id].outputs[0].finish_reason == "error"
    for request_id, tokens in zip(ids[2:], expected[2:], strict=True):
        assert done[request_id].error is None
        assert done[request_id].outputs[0].token_ids == tokens
    assert engine.stats()["failed_steps"] == 1


def test_a_result_that_does_not_match_its_batch_ends_the_requests_and_is_counted_nowhere() -> None:
    engine = make_engine(speculative="ngram:2")
    engine.add_request(PROMPT, greedy())
    for _ in range(2):
        engine.step()
    expected = engine.stats()["speculation"]
    engine.runner.execute = lambda batch: StepResult(())  # type: ignore[method-assign]
    [output] = engine.step()
    assert isinstance(output.error, AssertionError)
    assert_empty(engine)
    assert engine.stats()["failed_steps"] == 1
    assert engine.stats()["speculation"] == expected


def test_an_interrupted_step_ends_its_requests_and_leaves_the_engine_able_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(max_num_seqs=1)
    expected = tokens_of(engine, greedy())
    fail_once(monkeypatch, engine, 3, KeyboardInterrupt(), before=False)
    interrupted = engine.add_request(PROMPT, greedy())
    output = engine.output(interrupted)
    waiting = engine.add_request(PROMPT, greedy())
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert output is not None
    assert output.outputs[0].finish_reason == "error"
    assert run(engine)[waiting].outputs[0].token_ids == expected


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("error", [RankError("lost"), RuntimeError("boom"), KeyboardInterrupt()], ids=type)
def test_after_a_step_that_fails_nothing_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, overlap: str
) -> None:
    """A lost rank and an interrupt are raised, any other error is the outputs'."""
    engine = make_engine(overlap=overlap)
    method = "launch" if overlap == "on" else "execute"
    compute, calls = getattr(engine.runner, method), 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error
        return compute(*args)

    monkeypatch.setattr(engine.runner, method, failing)
    output = engine.output(engine.add_request(PROMPT, greedy()))
    if type(error) is RuntimeError:
        run(engine)
    else:
        with pytest.raises(type(error)):
            run(engine)
    assert output is not None
    assert output.outputs[0].finish_reason == "error"
    assert output.error is error or "interrupted: KeyboardInterrupt" in str(output.error)
    assert engine._in_flight is None
    assert engine.stats()["failed_steps"] == 1
    engine.finish_in_flight()
    engine.step()
    assert_empty(engine)
    engine.close()


def test_a_result_that_cannot_be_used_up_is_raised_and_leaves_nothing_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    update = engine.scheduler.update

    def mistaken(result: StepResult) -> Any:
        update(result)
        raise AssertionError("a bug")

    engine.add_request(PROMPT, greedy())
    monkeypatch.setattr(engine.scheduler, "update", mistaken)
    with pytest.raises(AssertionError, match="a bug"):
        engine.step()
    assert engine._in_flight is None
    assert engine.stats()["failed_steps"] == 0


def test_a_model_whose_logits_are_not_finite_is_an_error_that_names_the_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    logits = engine.runner.model.compute_logits
    monkeypatch.setattr(engine.runner.model, "compute_logits", lambda hidden: logits(hidden) * float("nan"))
    failed = engine.add_request(PROMPT, greedy())
    error = run(engine)[failed].error
    assert "overflow in this dtype" in str(error)


# When an output ends


def test_an_end_token_ends_the_output_unless_it_is_to_be_ignored(engine: EngineCore) -> None:
    forced = {"logit_bias": {EOS: 100.0}}
    [output] = complete(engine, PROMPT, greedy(ignore_eos=False, **forced)).outputs
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([EOS], "stop", EOS)
    [output] = complete(engine, PROMPT, greedy(**forced)).outputs
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([EOS] * 12, "length", None)


def test_a_stop_token_of_the_request_ends_the_output_even_if_end_tokens_are_ignored(engine: EngineCore) -> None:
    tokens = tokens_of(engine, sampled())
    stop = tokens[5]
    [output] = complete(engine, PROMPT, sampled(stop_token_ids=[stop])).outputs
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_min_tokens_holds_end_and_stop_tokens_back(engine: EngineCore) -> None:
    params = greedy(min_tokens=5, ignore_eos=False, logit_bias={EOS: 100.0, 9: 90.0}, stop_token_ids=[9])
    [output] = complete(engine, PROMPT, params).outputs
    assert len(output.token_ids) == 6
    assert output.token_ids[5] == EOS
    assert not {EOS, 9} & set(output.token_ids[:5])


@pytest.mark.parametrize("max_tokens", [500, None])
def test_an_output_ends_where_the_model_length_is_reached(engine: EngineCore, max_tokens: int | None) -> None:
    prompt = random_prompt(90, seed=1)
    [output] = complete(engine, prompt, greedy(max_tokens=max_tokens)).outputs
    assert len(output.token_ids) == 6
    assert output.finish_reason == "length"


@pytest.mark.parametrize("outside", [VOCAB_SIZE + 2, -1])
def test_an_end_token_outside_the_vocabulary_of_the_model_disturbs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, outside: int
) -> None:
    """A tokenizer may have more tokens than the model, and -1 is none in old files; `min_tokens` rules the end tokens
    out, and -1 is the last place of an array. What is left out is said."""
    directory = tmp_path / "model"
    shutil.copytree(checkpoint(NAME), directory)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(config | {"eos_token_id": [EOS, outside]}))
    settings = {"max_model_len": 96, "max_num_seqs": 4, "cache_memory": "8MiB", "threads": 1}
    engine = EngineCore(EngineConfig(model=str(directory), **settings))
    assert f"end tokens [{outside}] are none of its {VOCAB_SIZE} tokens; outputs end at [{EOS}]" in caplog.text
    last = VOCAB_SIZE - 1
    favourite = greedy(ignore_eos=False, logit_bias={last: 100.0})
    held_back = engine.add_request(PROMPT, favourite.replace(min_tokens=8))
    other = engine.add_request(PROMPT, favourite)
    done = run(engine)
    assert done[held_back].outputs[0].token_ids == done[other].outputs[0].token_ids == [last] * 12


# Who runs, and who leaves


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("steps", range(6))
def test_a_request_can_be_aborted_at_any_time(n: int, steps: int) -> None:
    """While it waits, between the chunks of its prompt, and while it decodes."""
    engine = make_engine(max_num_batched_tokens=24)
    expected = tokens_of(engine, greedy())
    other = engine.add_request(PROMPT, greedy())
    victim = engine.add_request(PROMPT, greedy(n=n))
    for _ in range(steps):
        engine.step()
    output = engine.abort(victim)
    assert output is not None
    assert output.finished
    assert {each.finish_reason for each in output.outputs} == {"abort"}
    assert all(each.token_ids == expected[: len(each.token_ids)] for each in output.outputs)
    assert engine.abort(victim) is None
    assert run(engine).keys() == {other}


def test_a_request_can_be_aborted_while_a_step_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    expected = tokens_of(engine, greedy())
    other, victim = engine.add_request(PROMPT, greedy()), engine.add_request(PROMPT, greedy())
    run_batch: Callable[[Batch], StepResult] = engine.runner.execute

    def run_and_abort(batch: Batch) -> StepResult:
        engine.abort(victim)
        return run_batch(batch)

    monkeypatch.setattr(engine.runner, "execute", run_and_abort)
    done = run(engine)
    assert done.keys() == {other}
    assert done[other].outputs[0].token_ids == expected


def test_under_the_priority_policy_lower_ones_are_served_first_then_as_they_came() -> None:
    """Who runs is not interrupted."""
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    engine.add_request(PROMPT, greedy(), request_id="a", priority=9)
    engine.step()
    for request_id, priority in (("b", 5), ("c", -1), ("d", -1)):
        engine.add_request(PROMPT, greedy(), request_id=request_id, priority=priority)
    assert "".join(run(engine)) == "acdb"


def test_a_priority_that_would_have_no_effect_is_refused(engine: EngineCore) -> None:
    with pytest.raises(RequestError, match="no effect") as caught:
        engine.add_request(PROMPT, greedy(), priority=3)
    assert caught.value.remedies == (Remedy("scheduling_policy", "priority"),)


def test_an_id_can_be_used_again_only_when_its_request_has_ended(engine: EngineCore) -> None:
    engine.add_request(PROMPT, greedy(n=2), request_id="a")
    for taken in ("a", "a/0"):
        with pytest.raises(RequestError, match="choose another"):
            engine.add_request(PROMPT, greedy(), request_id=taken)
    run(engine)
    assert engine.add_request(PROMPT, greedy(), request_id="a") == "a"
    run(engine)


def test_the_id_of_an_ended_sample_stays_in_use_until_its_request_ends(engine: EngineCore) -> None:
    """One sample meets its stop token early; the other goes on."""
    tokens = [each.token_ids for each in complete(engine, PROMPT, sampled(n=2)).outputs]
    early = next(token for token in tokens[0][:6] if token not in tokens[1])
    engine.add_request(PROMPT, sampled(n=2, stop_token_ids=[early]), request_id="a")
    output = engine.output("a")
    assert output is not None
    while not output.outputs[0].finished:
        engine.step()
    assert not output.finished
    with pytest.raises(RequestError, match="choose another"):
        engine.add_request(PROMPT, greedy(), request_id="a/0")
    run(engine)
    assert output.outputs[1].token_ids == tokens[1]


def test_a_generated_id_avoids_those_that_callers_chose() -> None:
    engine = make_engine()
    first = engine.add_request(PROMPT, greedy(), request_id="request-1")
    second = engine.add_request(PROMPT, greedy())
    assert run(engine).keys() == {first, second}


def test_stats_count_what_was_done() -> None:
    engine = make_engine(max_num_batched_tokens=24)
    engine.add_request(PROMPT, greedy())
    engine.add_request(PROMPT, greedy(n=2), request_id="aborted")
    engine.step()
    running = engine.stats()
    assert running["running"] + running["waiting"] == 3
    assert running["cache"]["blocks_used"] > 0
    engine.abort("aborted")
    run(engine)
    stats = json.loads(json.dumps(engine.stats()))
    assert stats.keys() == {
        *("requests", "prompt_tokens", "generated_tokens", "computed_tokens", "decode_rows", "prefill_rows"),
        *(
            "step_seconds",
            "bookkeeping_seconds",
            "steps",
            "failed_steps",
            "preemptions",
            "yielded_rows",
            "recomputed_tokens",
            "cut_recomputations",
            "steps_ahead",
            "steps_not_ahead",
            "void_rows",
        ),
        *("finished", "waiting", "running", "cache", "prefix_cache", "graphs", "speculation", "encoder"),
        *("request_lengths", "cache_files", "moves", "record", "verify"),
    }
    assert stats["requests"] == 2
    assert stats["prompt_tokens"] == 2 * len(PROMPT)
    assert stats["generated_tokens"] == 12
    assert stats["computed_tokens"] == len(PROMPT) + 11
    assert stats["decode_rows"] == 11
    assert stats["prefill_rows"] == 2
    assert stats["finished"] == {"stop": 0, "length": 1, "abort": 2, "moved": 0, "error": 0}
    assert stats["cache"] == asdict(engine.scheduler.cache.usage())
    assert stats["step_seconds"] > 0
