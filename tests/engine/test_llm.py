"""LLM, the engine for use from Python: text in and out, streams, and requests that go wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, PromptsFailed, RequestError, SamplingParams
from ostinato.scheduler.batch import Batch, RowResult, StepResult
from tests.support.checkpoints import VOCAB_SIZE, random_prompt
from tests.support.text_checkpoint import SETTINGS, text_checkpoint

PROMPT = "A bag of 漢 and é: "


@pytest.fixture(scope="module")
def shared() -> LLM:
    return LLM(str(text_checkpoint()), **SETTINGS)


@pytest.fixture
def llm(shared: LLM) -> LLM:
    """An LLM that the test before has left without requests."""
    assert_empty(shared)
    return shared


def assert_empty(llm: LLM) -> None:
    assert not llm.engine.has_unfinished
    cache = llm.stats()["cache"]
    assert cache["blocks_used"] == cache["slots_used"] == 0


def sampled(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "seed": seed, **changes})


def text_of(llm: LLM, params: SamplingParams, prompt: str = PROMPT) -> str:
    [output] = llm.generate(prompt, params)
    return output.outputs[0].text


# Text


def test_text_is_the_decoded_tokens_and_a_prompt_may_be_its_token_ids(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, sampled(1))
    assert output.prompt == PROMPT
    assert output.prompt_token_ids == llm.engine.tokenizer.encode(PROMPT)
    assert output.outputs[0].text == llm.engine.tokenizer.decode(output.outputs[0].token_ids)
    [of_ids] = llm.generate(output.prompt_token_ids, sampled(1))
    assert of_ids.prompt is None
    assert of_ids.outputs == output.outputs


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_own_parameters(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(9)]
    params = [sampled(i, max_tokens=30 - 3 * i) for i in range(9)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30 - 3 * i for i in range(9)]
    assert outputs[4].outputs[0].text == text_of(llm, params[4], prompts[4])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_stop_string_ends_the_output_wherever_its_tokens_begin(llm: LLM, seed: int, keep: bool) -> None:
    """Four characters are two tokens or more. Another stop string begins like the output and never ends it."""
    text = text_of(llm, sampled(seed))
    starts = [i for i in range(3, len(text) - 8) if text[i : i + 4].isascii()]
    for start in starts[:: max(1, len(starts) // 4)]:
        stop = text[start : start + 4]
        params = sampled(seed, stop=[stop, text[:2] + "?!"], include_stop_str_in_output=keep)
        [output] = llm.generate(PROMPT, params)[0].outputs
        expected = text[: text.index(stop)]
        assert output.text == (expected + stop if keep else expected)
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.token_ids) < 40
    assert_empty(llm)


def test_a_stop_string_counts_only_after_min_tokens(llm: LLM) -> None:
    params = sampled(0, logit_bias={llm.engine.tokenizer.encode("a")[0]: 100.0}, stop="aa")
    [early], [late] = (llm.generate(PROMPT, each)[0].outputs for each in (params, params.replace(min_tokens=7)))
    assert (early.text, len(early.token_ids)) == ("", 2)
    assert 7 <= len(late.token_ids) <= 8
    assert late.text == "a" * (len(late.token_ids) - 2)


def test_log_probabilities_are_those_of_the_tokens_before_a_stop_string(llm: LLM) -> None:
    text = text_of(llm, sampled(2))
    [output] = llm.generate(PROMPT, sampled(2, stop=text[6:9], logprobs=1))[0].outputs
    assert output.logprobs is not None
    assert [each.token_id for each in output.logprobs] == output.token_ids


def test_a_chat_is_the_rendered_template_continued(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [chat] = llm.chat(messages, sampled(3))
    assert chat.prompt == "user: hi\nanswer:"
    [plain] = llm.generate(chat.prompt, sampled(3))
    assert chat.outputs == plain.outputs
    assert "".join(llm.stream_chat(messages, sampled(3))) == plain.outputs[0].text
    assert [each.outputs for each in llm.chat([messages, messages], sampled(3))] == [plain.outputs] * 2


def test_without_parameters_generation_config_decides(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(text_checkpoint(), directory)
    greedy = LLM(str(directory), **SETTINGS).generate(PROMPT)[0].outputs
    assert greedy == LLM(str(directory), **SETTINGS).generate(PROMPT, SamplingParams(temperature=0))[0].outputs
    config = {"do_sample": True, "temperature": 0.7, "top_k": 3, "eos_token_id": 1}
    (directory / "generation_config.json").write_text(json.dumps(config))
    llm = LLM(str(directory), **SETTINGS)
    params = llm.engine.default_params()
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 3, 1.0)
    assert llm.generate(PROMPT)[0].outputs != greedy


def test_an_output_that_the_context_ends_says_so(llm: LLM) -> None:
    [full, cut] = llm.generate([PROMPT] * 2, [sampled(0, max_tokens=1000), sampled(0, max_tokens=3)])
    assert (full.outputs[0].finish_reason, full.outputs[0].stop_reason) == ("length", "max_model_len")
    assert len(full.prompt_token_ids) + len(full.outputs[0].token_ids) == 96
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("length", None)
    [open_ended] = llm.generate(PROMPT, sampled(0, max_tokens=None))
    assert open_ended.outputs == full.outputs


# Streams


@pytest.mark.parametrize("seed", range(6))
def test_the_pieces_of_a_stream_joined_are_the_text(llm: LLM, seed: int) -> None:
    pieces = list(llm.stream(PROMPT, sampled(seed)))
    assert "".join(pieces) == text_of(llm, sampled(seed))
    assert len(pieces) > 10
    assert all(pieces)


def test_a_stream_cuts_no_character_and_holds_back_what_may_be_a_stop_string(llm: LLM) -> None:
    """Bias makes the model spell characters of several bytes."""
    bias = dict.fromkeys(llm.engine.tokenizer.encode("é漢"), 100.0)
    for seed in range(4):
        params = sampled(seed, logit_bias=bias, temperature=3.0)
        tokens = llm.generate(PROMPT, params)[0].outputs[0].token_ids
        text = "".join(llm.stream(PROMPT, params))
        assert text == llm.engine.tokenizer.decode(tokens)
        assert {"é", "漢"} & set(text)
    text = text_of(llm, sampled(0))
    assert "".join(llm.stream(PROMPT, sampled(0, stop=text[10:14]))) == text[: text.index(text[10:14])]


def test_leaving_a_stream_early_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream(PROMPT, sampled(0))
    next(stream)
    assert llm.engine.has_unfinished
    stream.close()
    assert_empty(llm)


def test_a_stream_that_nobody_reads_is_a_request_until_it_is_left(llm: LLM) -> None:
    stream = llm.stream(PROMPT, sampled(0))
    assert llm.engine.has_unfinished
    del stream
    assert_empty(llm)


def test_streams_can_be_read_side_by_side_and_generate_be_called_between(llm: LLM) -> None:
    expected = [text_of(llm, sampled(seed, max_tokens=10 + 8 * seed)) for seed in range(3)]
    streams = [llm.stream(PROMPT, sampled(seed, max_tokens=10 + 8 * seed)) for seed in range(3)]
    texts = ["", "", ""]
    for number, pieces in enumerate(zip_longest(*streams, fillvalue="")):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        if number == 4:
            assert text_of(llm, sampled(1, max_tokens=18)) == expected[1]
    assert texts == expected
    assert_empty(llm)


def test_a_stream_ends_when_its_request_is_aborted_from_elsewhere(llm: LLM) -> None:
    stream = llm.stream(PROMPT, sampled(0))
    begin = next(stream)
    [request_id] = llm.engine.output_processor.request_states
    llm.engine.abort(request_id)
    assert text_of(llm, sampled(0)).startswith(begin + "".join(stream))


# Errors


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "empty prompt; give at least one token"),
    "no ids": ({"prompt_token_ids": []}, "empty prompt; give at least one token"),
    "too long": ("a b " * 60, "max_model_len is 96.*shorten the prompt to 95 tokens"),
    "id out of range": ([3, VOCAB_SIZE], f"from 0 to {VOCAB_SIZE - 1}"),
    "not unicode": ("a\ud800", "UTF-8"),
    "neither text nor ids": (None, "a prompt is text or a list of token ids"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_among_others_is_refused_before_any_runs(llm: LLM, case: str) -> None:
    prompt, message = BAD_PROMPTS[case]
    steps = llm.stats()["steps"]
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT, prompt, PROMPT], sampled(0))
    assert_empty(llm)
    assert llm.stats()["steps"] == steps
    with pytest.raises(RequestError, match=message):
        llm.stream(prompt, sampled(0))
    assert_empty(llm)
    assert len(text_of(llm, sampled(0))) > 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n="),
        ({"min_tokens": 9, "max_tokens": 3}, r"min_tokens \(9\) is above max_tokens \(3\)"),
        ({"temprature": 1.0}, "did you mean temperature"),
    ],
)
def test_illegal_sampling_parameters_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


def test_as_many_parameters_as_prompts_are_needed(llm: LLM) -> None:
    with pytest.raises(RequestError, match="3 prompts came with 2 sampling parameters"):
        llm.generate([PROMPT] * 3, [sampled(0)] * 2)


def test_a_stream_gives_one_output_only(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n is 2"):
        llm.stream(PROMPT, sampled(0, n=2))


def test_a_prompt_without_room_for_an_answer_says_how_long_it_may_be(llm: LLM) -> None:
    prompt = random_prompt(95, seed=0)
    assert len(llm.generate(prompt, sampled(0))[0].outputs[0].token_ids) == 1
    with pytest.raises(RequestError, match="shorten the prompt to 95 tokens"):
        llm.generate([*prompt, 5], sampled(0))


def test_a_failed_step_is_raised_and_the_next_call_is_served(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = text_of(llm, sampled(0))
    run_batch = llm.engine.runner.execute

    def fail_at(step: int, error: BaseException) -> Callable[[Batch], StepResult]:
        calls = iter(range(1, 1000))

        def run(batch: Batch) -> StepResult:
            if next(calls) == step:
                raise error
            return run_batch(batch)

        return run

    for error in (RuntimeError("boom"), KeyboardInterrupt()):
        for step in (1, 3):
            for call in (lambda: llm.generate([PROMPT] * 4, sampled(0)), lambda: list(llm.stream(PROMPT))):
                monkeypatch.setattr(llm.engine.runner, "execute", fail_at(step, error))
                with pytest.raises(type(error)):
                    call()
                monkeypatch.undo()
                assert_empty(llm)
                assert text_of(llm, sampled(0)) == expected


def fail_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """In the next call, the requests with these numbers end with an error in their first step."""
    run_batch = llm.engine.runner.execute
    first = llm.engine._num_added
    broken = {f"request-{first + number}": RuntimeError(f"broken {number}") for number in numbers}

    def run(batch: Batch) -> StepResult:
        rows = run_batch(batch).rows
        return StepResult(
            tuple(
                RowResult(row.request_id, error=broken[row.request_id]) if row.request_id in broken else row
                for row in rows
            )
        )

    monkeypatch.setattr(llm.engine.runner, "execute", run)


def test_a_prompt_that_fails_while_it_runs_does_not_lose_the_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [f"prompt {i}" for i in range(10)]
    expected = [text_of(llm, sampled(0, max_tokens=4), prompt) for prompt in prompts]
    fail_rows(llm, monkeypatch, 3, 7)
    outputs = llm.generate(prompts, sampled(0, max_tokens=4))
    for number, output in enumerate(outputs):
        if number in (3, 7):
            assert output.outputs[0].finish_reason == "error"
            assert str(output.error) == f"broken {number}"
            assert f"prompt {number + 1} of 10 failed" in caplog.text
        else:
            assert (output.error, output.outputs[0].text) == (None, expected[number])
    assert_empty(llm)
    monkeypatch.undo()
    fail_rows(llm, monkeypatch, 0, 1)
    with pytest.raises(RuntimeError, match="broken 0"):
        llm.generate(prompts[:2], sampled(0))
    monkeypatch.undo()
    fail_rows(llm, monkeypatch, 1)
    with pytest.raises(PromptsFailed, match="1 of 3 prompts failed, the first of them prompt 2: broken 1") as failed:
        llm.embed(prompts[:3])
    assert [vector is None for vector in failed.value.outputs] == [False, True, False]
    assert_empty(llm)
