"""LLM and the prefix cache: what `generate` and `chat` say of it, and what keeps callers apart."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato import LLM, RequestError, SamplingParams
from ostinato.plan.traffic import Traffic
from tests.support.parity import cached, misses
from tests.support.text_checkpoint import SETTINGS, text_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SYSTEM = {"role": "system", "content": "answer in one word, please"}
TEXT = "a text of some 50 tokens that comes more than once"


@pytest.fixture
def llm() -> LLM:
    """With nothing in its cache."""
    return LLM(str(text_checkpoint()), **SETTINGS)


def boundary(num_tokens: int) -> int:
    return (num_tokens - 1) // 16 * 16


def test_a_prompt_that_is_generated_from_again_comes_from_the_cache(llm: LLM) -> None:
    [cold], [warm] = llm.generate(TEXT, PARAMS), llm.generate(TEXT, PARAMS)
    num_tokens = len(cold.prompt_token_ids)
    assert (cached(cold), cached(warm)) == (0, boundary(num_tokens))
    assert misses(warm) == {"recomputed_tail": num_tokens - boundary(num_tokens)}
    assert warm.outputs == cold.outputs


def test_prompts_of_one_call_find_each_other_s_beginnings(llm: LLM) -> None:
    texts = [TEXT + end for end in ("", "!", " again", "?")]
    outputs = llm.generate(texts, PARAMS)
    assert sum(map(cached, outputs)) == 0  # all of them begin in one step
    assert llm.stats()["prefix_cache"]["shared_blocks"] > 0
    assert [output.outputs for output in llm.generate(texts, PARAMS)] == [output.outputs for output in outputs]
    prefix = llm.stats()["prefix_cache"]
    assert prefix["cached_tokens"] == sum(boundary(len(output.prompt_token_ids)) for output in outputs)
    assert prefix["cached_tokens"] + sum(prefix["misses"].values()) == llm.stats()["prompt_tokens"]


def test_the_next_turn_of_a_chat_begins_where_the_last_one_ended(llm: LLM) -> None:
    first = [SYSTEM, {"role": "user", "content": "hi"}]
    [output] = llm.chat(first, PARAMS)
    assert cached(output) == 0
    [same] = llm.chat(first, PARAMS)
    assert cached(same) == boundary(len(output.prompt_token_ids))
    # The template puts the roles' names before the texts, so the second turn goes on as the first one's text did.
    text = output.outputs[0].text
    [following] = llm.generate(llm.engine.render_chat(first) + text + "\nuser: so?\nanswer:", PARAMS)
    assert cached(following) >= boundary(len(output.prompt_token_ids))


def test_a_history_that_is_rewritten_after_a_checkpoint_hits_up_to_it(llm: LLM) -> None:
    [first] = llm.generate(TEXT, PARAMS, checkpoints=[20])
    assert first.cache is not None
    assert (first.cache.marks, first.cache.created_tokens) == ({16: True}, 16)
    rewritten = [*first.prompt_token_ids[:21], *first.prompt_token_ids[25:]]
    [output] = llm.generate([rewritten], PARAMS)
    assert cached(output) == 16
    assert llm.stats()["prefix_cache"]["pinned_checkpoints"] == 1
    llm.reset_prefix_cache()
    [cold] = llm.generate([rewritten], PARAMS)
    assert (cached(cold), cold.outputs) == (0, output.outputs)


def test_a_conversation_that_is_rewritten_after_a_breakpoint_hits_up_to_it(llm: LLM) -> None:
    def conversation(answer: str) -> list[dict[str, str]]:
        turn = {"role": "assistant", "content": answer}
        return [SYSTEM, turn, {"role": "user", "content": "why?"}]

    [first] = llm.chat(conversation("yes"), PARAMS, cache_breakpoints=[{"after": 0, "ttl": 60}])
    assert first.cache is not None
    [(position, kept)] = first.cache.marks.items()
    assert (kept, first.cache.created_tokens, position % 16) == (True, position, 0)
    alone = llm.engine.chat_template.render([SYSTEM], add_generation_prompt=False)
    assert position == len(llm.get_tokenizer().encode(alone, add_special_tokens=False)) // 16 * 16
    [output] = llm.chat(conversation("no"), PARAMS)
    assert cached(output) == position
    llm.reset_prefix_cache()
    [cold] = llm.chat(conversation("no"), PARAMS)
    assert (cached(cold), cold.outputs) == (0, output.outputs)


@pytest.mark.parametrize(
    ("breakpoints", "words"),
    [
        ([0, 1], r"cache_breakpoints\[1\] should be an index of messages \(0 to 0"),
        ([{"after": "tools"}], r"cache_breakpoints\[0\] should be an index"),
        ([{"after": 0, "ttl": "1d"}], r"cache_breakpoints\[0\].ttl should be 5m or 1h"),
        ([{"after": 0, "for": 60}], "known are after and ttl"),
        ([0] * 5, "a request may have 4"),
        (5, "cache_breakpoints should be a list, not int"),
        ("0", "cache_breakpoints should be a list, not str"),
        ({0: 1}, "cache_breakpoints should be a list, not dict"),
    ],
)
def test_a_breakpoint_that_is_not_in_a_conversation_is_refused(llm: LLM, breakpoints: list[Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.chat([{"role": "user", "content": TEXT}], PARAMS, cache_breakpoints=breakpoints)
    assert llm.stats()["steps"] == 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"checkpoints": [0]}, "positions are from 1 to"),
        ({"checkpoints": [1000]}, "positions are from 1 to"),
        ({"checkpoints": [1, 2, 3, 4, 5]}, "may have 4"),
        ({"checkpoints": [20], "checkpoint_ttl": 3601}, "max_checkpoint_ttl allows up to 3600"),
        ({"checkpoints": [20], "checkpoint_ttl": 0}, "max_checkpoint_ttl allows up to 3600"),
    ],
)
def test_checkpoints_that_cannot_be_kept_are_refused_before_anything_runs(
    llm: LLM, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(TEXT, PARAMS, **asked)
    assert llm.stats()["steps"] == 0


@pytest.mark.parametrize("wrong", [5, "5", b"5", {5: 1}, math.nan, iter([20]), np.array(20)], ids=type)
def test_checkpoints_that_are_no_list_are_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="checkpoints should be a list, not"):
        llm.generate(TEXT, PARAMS, checkpoints=wrong)


def test_checkpoints_may_be_integers_of_any_kind_and_none(llm: LLM) -> None:
    [output] = llm.generate(TEXT, PARAMS, checkpoints=np.array([20]), checkpoint_ttl=np.float32(30))
    assert output.cache is not None
    assert output.cache.marks == {16: True}
    llm.generate(TEXT, PARAMS, checkpoints=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("breakpoints", [np.array([-1]), [{"after": np.int64(-1)}]], ids=type)
def test_breakpoints_may_be_integers_of_any_kind(llm: LLM, breakpoints: Any) -> None:
    messages = [{"role": "user", "content": TEXT}]
    of_array, of_list = (llm.chat(messages, PARAMS, cache_breakpoints=each)[0] for each in (breakpoints, [-1]))
    assert of_array.cache is not None
    assert of_list.cache is not None
    assert of_array.cache.marks == of_list.cache.marks != {}


def test_a_position_of_another_kind_is_refused_as_it_was_given(llm: LLM) -> None:
    for wrong in (np.array([True]), np.array([[1]]), np.array([1.5])):
        with pytest.raises(RequestError, match="is no position of the prompt"):
            llm.generate(TEXT, PARAMS, checkpoints=wrong)


def test_without_a_prefix_cache_checkpoints_are_refused_with_the_setting_that_would_keep_them() -> None:
    llm = LLM(str(text_checkpoint()), **{**SETTINGS, "enable_prefix_caching": False})
    with llm, pytest.raises(RequestError, match="enable_prefix_caching"):
        llm.generate(TEXT, PARAMS, checkpoints=[20])


def test_callers_of_different_salts_share_nothing(llm: LLM) -> None:
    messages = [SYSTEM, {"role": "user", "content": "hi"}]
    hits = []
    for salt in (None, "one", "two", "one", None):
        [generated], [chat] = (
            llm.generate(TEXT, PARAMS, cache_salt=salt),
            llm.chat(messages, PARAMS, cache_salt=salt),
        )
        hits.append((cached(generated) > 0, cached(chat) > 0))
    assert hits == [(False, False)] * 3 + [(True, True)] * 2


def test_an_empty_salt_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="cache_salt"):
        llm.generate([TEXT, TEXT], PARAMS, cache_salt="")
    assert llm.stats()["steps"] == 0


def test_a_stream_s_salt_keeps_it_apart_too(llm: LLM) -> None:
    messages = [SYSTEM, {"role": "user", "content": "hi"}]
    for salt in (None, "one", "one", None):
        list(llm.stream(TEXT, PARAMS, cache_salt=salt))
        list(llm.stream_chat(messages, PARAMS, cache_salt=salt))
    hits = [cached(llm.generate(TEXT, PARAMS, cache_salt=salt)[0]) > 0 for salt in (None, "one", "two")]
    assert hits == [True, True, False]
    assert cached(llm.chat(messages, PARAMS, cache_salt="one")[0]) > 0
    with pytest.raises(RequestError, match="cache_salt"):
        llm.stream(TEXT, PARAMS, cache_salt="")


def test_after_a_reset_the_same_prompt_begins_cold(llm: LLM) -> None:
    [cold] = llm.generate(TEXT, PARAMS)
    assert (cold.num_cached_tokens, llm.generate(TEXT, PARAMS)[0].num_cached_tokens) == (
        0,
        boundary(len(cold.prompt_token_ids)),
    )
    stream = llm.stream(TEXT + "!", PARAMS)
    next(stream)
    assert not llm.reset_prefix_cache()
    stream.close()
    assert llm.reset_prefix_cache()
    usage = llm.stats()["cache"]
    assert (usage["blocks_cached"], usage["slots_cached"], usage["blocks_used"], usage["slots_used"]) == (0, 0, 0, 0)
    [again] = llm.generate(TEXT, PARAMS)
    assert again.cache == cold.cache
    assert again.outputs == cold.outputs


def test_lengths_of_requests_are_counted_with_what_the_cache_had(llm: LLM, tmp_path: Path) -> None:
    [cold] = llm.generate(TEXT, PARAMS)
    llm.generate(TEXT, PARAMS.model_copy(update={"n": 2, "max_tokens": 3}))
    llm.save_traffic(tmp_path / "traffic.json")
    traffic = Traffic.load(tmp_path / "traffic.json")
    prompt = len(cold.prompt_token_ids)
    assert traffic.has_steps
    assert traffic.requests is not None
    assert traffic.requests.prompt_tokens == {prompt: 3}
    assert traffic.requests.output_tokens == {4: 1, 3: 2}
    assert traffic.requests.cached_tokens == boundary(prompt) + prompt
    assert llm.stats()["request_lengths"] == traffic.requests.to_json()


# Engines that are not closed

PROGRAM = """
import asyncio, os, sys
from ostinato import AsyncLLM, LLM, SamplingParams
model, directory, how, text, settings = *sys.argv[1:5], eval(sys.argv[5])
params = SamplingParams(temperature=0, max_tokens=4)

async def main():
    llm = await AsyncLLM(model, cache_dir=directory, **settings).start()
    await llm.generate(text, params)

if how == "AsyncLLM":
    asyncio.run(main())
    sys.exit()
llm = LLM(model, cache_dir=directory, **settings)
llm.generate(text, params)
if os.fork() == 0:
    sys.exit()  # a fork leaves the files to the process that made the LLM
os.wait()
assert not [each for _, _, files in os.walk(directory) for each in files if each != "about.json"]
raise SystemExit("an error that nobody handles")
"""


def cached_files(directory: Path) -> list[Path]:
    return [file for file in directory.rglob("*.*") if file.is_file() and file.name != "about.json"]


@pytest.mark.parametrize("how", ["LLM", "AsyncLLM"])
@pytest.mark.slow
def test_a_program_that_ends_without_closing_leaves_its_prefix_cache_in_files(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(text_checkpoint()), str(tmp_path), how, TEXT, repr(SETTINGS)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ("an error that nobody handles" if how == "LLM" else ""), done.stderr
    assert cached_files(tmp_path)


def test_an_llm_that_nobody_holds_any_more_leaves_its_prefix_cache_in_files(tmp_path: Path) -> None:
    llm = LLM(str(text_checkpoint()), cache_dir=tmp_path, **SETTINGS)
    llm.generate(TEXT, PARAMS)
    assert not cached_files(tmp_path)
    del llm
    assert cached_files(tmp_path)
