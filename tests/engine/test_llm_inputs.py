"""What LLM takes for prompts, parameters and conversations, and what it refuses to guess."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ostinato import LLM, ModelError, RequestError, SamplingParams
from tests.support.text_checkpoint import SETTINGS, text_checkpoint

IDS = [5, 9, 7]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(text_checkpoint()), **SETTINGS)


def prompts_of(llm: LLM, prompts: Any) -> list[list[int]]:
    return [output.prompt_token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("make", [list, tuple, numpy.array, torch.tensor, lambda ids: [numpy.int64(i) for i in ids]])
def test_token_ids_may_be_integers_of_any_kind(llm: LLM, make: Callable[[list[int]], Any]) -> None:
    assert prompts_of(llm, make(IDS)) == [IDS]
    assert prompts_of(llm, [make(IDS), make(IDS[:1])]) == [IDS, IDS[:1]]


def test_the_rows_of_an_array_are_prompts(llm: LLM) -> None:
    assert prompts_of(llm, numpy.array([IDS, IDS])) == [IDS, IDS]
    assert prompts_of(llm, numpy.array([[5], [9]])) == [[5], [9]]


def test_no_prompt_of_a_generator_is_lost(llm: LLM) -> None:
    assert [output.prompt for output in llm.generate((text for text in ("ab", "ef")), GREEDY)] == ["ab", "ef"]


def test_a_prompt_may_be_a_mapping(llm: LLM) -> None:
    assert prompts_of(llm, {"prompt": "ab"}) == prompts_of(llm, [{"prompt": "ab"}]) == prompts_of(llm, "ab")
    assert prompts_of(llm, [{"prompt": None, "prompt_token_ids": IDS}, {"prompt_token_ids": IDS[:1]}]) == [IDS, IDS[:1]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "either prompt, its text, or prompt_token_ids"),
        ({"prompt": "ab", "prompt_token_ids": IDS}, "either prompt, its text, or prompt_token_ids"),
        ({"prompt": "ab", "multi_modal_data": {}}, "not multi_modal_data; images go into the messages of chat"),
        ({"text": "ab"}, "and not text; leave it out"),
    ],
)
def test_a_mapping_of_another_form_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("prompts", [b"ab", [b"ab"], None, 5])
def test_what_is_neither_text_nor_token_ids_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is text or a list of token ids"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", ["greedy"], 0.5])
def test_parameters_that_are_no_sampling_params_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="params should be SamplingParams"):
        llm.generate(["ab"], params)


def test_one_message_is_no_conversation(llm: LLM) -> None:
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat({"role": "user", "content": "ab"}, GREEDY)  # type: ignore[arg-type]


def test_a_priority_that_has_no_order_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="priority 'high' should be a whole number"):
        llm.engine.add_request(IDS, GREEDY, priority="high")  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    "settings",
    [{"eos_token_id": "</s>"}, {"eos_token_id": [1, None]}, {"do_sample": True, "temperature": "hot"}],
)
def test_generation_defaults_that_make_no_sense_are_a_model_error_at_start_up(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    directory = shutil.copytree(text_checkpoint(), tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"eos_token_id|generation_config\.json.*temperature"):
        LLM(str(directory), **SETTINGS)


def test_sampling_params_is_another_name_of_params(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [named] = llm.generate("ab", sampling_params=GREEDY)
    assert len(named.outputs[0].token_ids) == 4
    assert [len(each.outputs[0].token_ids) for each in llm.generate(["ab", "cd"], sampling_params=[GREEDY] * 2)] == [
        4,
        4,
    ]
    assert len(llm.chat(messages, sampling_params=GREEDY)[0].outputs[0].token_ids) == 4
    for stream in (llm.stream("ab", sampling_params=GREEDY), llm.stream_chat(messages, sampling_params=GREEDY)):
        assert len("".join(stream)) > 0
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match="two names of one thing"):
            call("ab", GREEDY, sampling_params=GREEDY)
    with pytest.raises(RequestError, match="params should be SamplingParams, not"):
        llm.stream("ab", {"temperature": 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["chat_template_kwargs", "use_tqdm", "lora_request"])
def test_names_that_are_no_variables_of_a_template_are_not_handed_to_it(llm: LLM, name: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError, match=f"{name} is no variable of a chat template"):
            call(messages, GREEDY, **{name: None})
