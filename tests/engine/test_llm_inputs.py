"""What LLM takes for prompts, parameters and conversations, and what it refuses to guess."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
import torch
from pydantic import BaseModel, TypeAdapter

import ostinato
from ostinato import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineConfig,
    Guide,
    ModelError,
    RequestError,
    SamplingParams,
    errors,
    other_engines,
)
from ostinato.engine.outputs import RequestTimes, decode_logprobs
from ostinato.engine.text.chat_messages import ECHOED_KEYS, MESSAGE_KEYS
from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.errors import OstinatoError
from ostinato.serve.chat.conversation import Message as body_message
from ostinato.verify.verify import Trial
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


ODD_PROMPTS = [
    bytearray(b"ab"),
    memoryview(b"ab"),
    {5, 9},
    numpy.array(5),
    torch.tensor(5),
    [{5, 9}],
    [[True]],
    [[5.0]],
]


@pytest.mark.parametrize(
    "prompts", [b"ab", [b"ab"], None, 5, [None], ["ab", None], [torch.tensor([True])], *ODD_PROMPTS]
)
def test_what_is_neither_text_nor_token_ids_is_refused(llm: LLM, prompts: Any) -> None:
    message = "a prompt is text or a list of token ids"
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match=message):
        llm.embed(prompts)
    with pytest.raises(RequestError, match=message):
        AsyncLLM().generate(prompts, GREEDY).send(None)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("prompt", [{"prompt": IDS}, {"prompt_token_ids": "ab"}, {"prompt": 5}, {"prompt": b"ab"}])
def test_the_names_of_a_mapping_are_those_of_what_it_holds(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt is text, and prompt_token_ids is a list of token ids"):
        llm.generate(prompt, GREEDY)


def test_the_prompt_that_is_refused_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 2 of 3: a prompt is text or a list of token ids, not NoneType"):
        llm.generate(["ab", None, "cd"], GREEDY)  # type: ignore[list-item]


@pytest.mark.parametrize("ttl", [None, "60", True, [60], numpy.array([60])])
def test_a_time_to_keep_checkpoints_that_is_no_number_is_refused_without_checkpoints_too(llm: LLM, ttl: Any) -> None:
    with pytest.raises(RequestError, match=r"checkpoint_ttl .* should be a number of seconds"):
        llm.generate("ab", GREEDY, checkpoint_ttl=ttl)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"add_generation_prompt": None}, "add_generation_prompt None should be True or False"),
        ({"add_generation_prompt": 1}, "add_generation_prompt 1 should be True or False"),
        ({"continue_final_message": "yes"}, "continue_final_message 'yes' should be True or False"),
        ({"continue_final_message": numpy.array([5, 9])}, "continue_final_message .* should be True or False"),
        ({"tools": numpy.array([5, 9])}, "tools should be a list of objects"),
        ({"tools": {}}, "tools should be a list of objects, not {}"),
        ({"tools": [len]}, "tools should be a list of objects"),
        ({"documents": "a"}, "documents should be a list of objects, not 'a'"),
    ],
)
def test_arguments_of_the_template_have_their_types(llm: LLM, given: dict[str, Any], message: str) -> None:
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError, match=message):
            call([{"role": "user", "content": "hi"}], GREEDY, **given)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "text", "text": None}, r"content\[0\]: a part text needs text, a string"),
        ({"type": "text", "text": 5}, r"content\[0\]: a part text needs text, a string"),
        ({"type": "text"}, r"content\[0\]: a part text needs text, a string"),
        ({"type": "", "text": "a"}, r"message 0 has the type '' in content\[0\]"),
        ({"type": numpy.array([5, 9]), "text": "a"}, "message 0 has list for content"),
    ],
)
def test_parts_that_templates_pass_over_are_refused(llm: LLM, part: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": [part]}], GREEDY)


def test_a_part_may_have_a_type_that_the_template_names() -> None:
    template = "{% for part in messages[0].content %}{% if part.type == 'note' %}{{ part.note }}{% endif %}{% endfor %}"
    content = [{"type": "note", "note": "a"}, {"type": "image"}]
    assert ChatTemplate({"default": template}).render([{"role": "user", "content": content}]) == "a"


@pytest.mark.parametrize("messages", [None, 5, "ab", [{"role": "user", "content": "a"}, "ab"], [[], []]])
def test_a_stream_answers_one_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="a list of messages"):
        llm.stream_chat(messages, GREEDY)
    talk = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="several go to chat"):
        llm.stream_chat([talk, talk], GREEDY)  # type: ignore[list-item]
    assert "".join(llm.stream_chat(iter(talk), GREEDY)) == "".join(llm.stream_chat(talk, GREEDY))  # type: ignore[arg-type]


def test_the_tokenizer_decodes_integers_of_any_kind_and_refuses_others(llm: LLM) -> None:
    decode = llm.get_tokenizer().decode
    assert decode(torch.tensor(IDS)) == decode(numpy.array(IDS)) == decode(tuple(IDS)) == decode(IDS)  # type: ignore[arg-type]
    odd: Any
    for odd in (None, 5, "ab", {5}, [None], [5.0], [-1], [2**32], [[5]]):
        with pytest.raises(RequestError, match="token ids are a list of numbers from 0 to 4294967295"):
            decode(odd)


@pytest.mark.parametrize("name", ["params", "cache_salt", "priority", "checkpoints", "checkpoint_ttl", "tools"])
def test_a_value_nested_deeper_than_python_prints_is_refused_by_name(llm: LLM, name: str) -> None:
    value: Any = []
    for _ in range(5000):
        value = [value]
    call = llm.chat if name == "tools" else llm.generate
    asked: dict[str, Any] = {"params": SamplingParams(), name: value}
    prompt: Any = [{"role": "user", "content": "a"}] if name == "tools" else "a"
    with pytest.raises(RequestError, match=name.removesuffix("s")):
        call(prompt, **asked)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", ["greedy"], 0.5])
def test_parameters_that_are_no_sampling_params_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="params should be SamplingParams"):
        llm.generate(["ab"], params)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "ab"}, None, "ab", 5])
def test_what_is_no_list_is_no_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat(messages, GREEDY)


def test_a_conversation_may_come_from_a_generator_and_in_parts_of_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    [asked] = llm.chat([{"role": "user", "content": "ab\ncd"}], GREEDY)
    [made] = llm.chat(iter([{"role": "user", "content": parts}]), GREEDY)  # type: ignore[arg-type]
    assert made.prompt == asked.prompt


def test_the_conversation_that_is_refused_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 2 of 2: a conversation needs at least one message"):
        llm.chat([[{"role": "user", "content": "ab"}], []], GREEDY)


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


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tempreature": 3}, r"no variable of a chat template: .*SamplingParams\(temperature="),
        ({"max_tokens": 3}, r"no variable of a chat template: .*SamplingParams\(max_tokens="),
        ({"max_new_tokens": 3}, "SamplingParams, where it is max_tokens"),
        ({"stream": True}, "call stream or stream_chat"),
        ({"bogus": 1}, "bogus is no variable of this model's chat template, which knows none"),
        ({"budget": 1}, "budget is no variable"),
        ({"tools": [{"type": "function"}]}, "chat template takes no tools; leave them out, or let ToolChat"),
        ({"documents": [{"text": "a"}]}, "chat template takes no documents; leave them out"),
    ],
)
def test_a_keyword_of_chat_that_the_template_would_ignore_is_refused(
    llm: LLM, given: dict[str, Any], message: str
) -> None:
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError, match=message):
            call(MESSAGES, GREEDY, **given)
    with pytest.raises(RequestError, match=message):
        llm.engine.render_chat(MESSAGES, **given)
    assert llm.chat(MESSAGES, GREEDY, tools=None, add_generation_prompt=True)[0].outputs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_tqdm": False}, "has no keyword use_tqdm: leave it out"),
        ({"prompt_token_ids": [1]}, "token ids are a prompt"),
        ({"cache_slat": "a"}, "its keywords are .*cache_salt"),
        ({"max_tokens": 3}, "has no keyword max_tokens"),
    ],
)
def test_a_keyword_that_a_call_does_not_have_is_refused_with_advice(
    llm: LLM, given: dict[str, Any], message: str
) -> None:
    for call in (llm.generate, llm.embed, llm.stream, AsyncLLM().stream):
        with pytest.raises(RequestError, match=message):
            call("ab", **given)


@pytest.mark.parametrize(
    ("call", "args", "given", "message"),
    [
        ("generate", (), {"prompt_token_ids": IDS}, "generate has no keyword prompt_token_ids: token ids are a prompt"),
        ("embed", (), {"input": "ab"}, "embed has no keyword input: its keywords are prompts, "),
        ("stream", (), {}, "stream: missing a required argument: 'prompt'; its arguments are prompt, params, "),
        ("chat", (), {"prompts": "ab"}, "chat has no keyword prompts: its keywords are messages, "),
        ("generate", ("ab", GREEDY, True), {}, "generate: too many positional arguments; its arguments are prompts, "),
        ("stream_chat", ([], GREEDY), {"params": GREEDY}, "multiple values for argument 'params'"),
    ],
)
def test_arguments_that_a_call_does_not_have_or_lacks_are_named(
    llm: LLM, call: str, args: tuple[Any, ...], given: dict[str, Any], message: str
) -> None:
    def begin(model: LLM | AsyncLLM) -> None:
        found = getattr(model, call)(*args, **given)
        if inspect.iscoroutine(found):
            found.send(None)

    for model in (llm, AsyncLLM()):
        with pytest.raises(RequestError, match=message):
            begin(model)
    assert inspect.iscoroutinefunction(AsyncLLM().generate)


def test_messages_and_several_prompts_that_go_to_the_wrong_call_are_told_where_to_go(llm: LLM) -> None:
    for call, prompt in ((llm.stream, MESSAGES), (llm.generate, MESSAGES), (llm.generate, [MESSAGES, MESSAGES])):
        with pytest.raises(RequestError, match="go to chat or stream_chat"):
            call(prompt)
    with pytest.raises(RequestError, match="several prompts go to generate"):
        llm.stream(["ab", "cd"])  # type: ignore[list-item]


@pytest.mark.parametrize("role", ["usr", "", "Assistant"])
def test_a_role_that_no_template_has_is_refused_as_in_the_server(llm: LLM, role: str) -> None:
    with pytest.raises(RequestError, match=f"message 1 has the role '{role}'.*roles are system, developer, user"):
        llm.chat([*MESSAGES, {"role": role, "content": "ab"}], GREEDY)


@pytest.mark.parametrize(
    "changed",
    [
        {"tool_call": []},
        {"images": ["a.png"]},
        {"content": [{"type": "txt", "text": "Q1"}, {"type": "text", "text": "Q2"}]},
        {"content": [{"type": "file", "file": "a"}]},
        {"content": [{"type": "text", "txt": "Q1"}]},
    ],
)
def test_keys_and_parts_that_no_template_reads_are_refused_as_in_the_server(llm: LLM, changed: Any) -> None:
    messages = [{"role": "user", "content": "Q1", **changed}]
    with pytest.raises(RequestError):
        llm.chat(messages)
    with pytest.raises(RequestError):
        llm.stream_chat(messages)


def test_the_server_has_the_keys_of_messages_that_templates_have() -> None:
    refused = {"refusal", "function_call", "audio"}
    assert body_message.model_fields.keys() == {*MESSAGE_KEYS, *ECHOED_KEYS} | refused


def test_a_developer_is_a_system_to_a_template_that_does_not_know_developers(llm: LLM) -> None:
    assert llm.engine.render_chat([{"role": "developer", "content": "hi"}]) == "system: hi\nanswer:"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("guided_json", r"here it is guide=\{'json_schema'"),
        ("guided_decoding", "here it is guide="),
        ("logits_processors", "there are logit_bias"),
        ("best_of", "here it is n,"),
        ("max_new_tokens", "here it is max_tokens"),
        ("repeat_penalty", "here it is repetition_penalty"),
    ],
)
def test_other_engines_names_of_sampling_parameters_are_answered_with_ours(name: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is no sampling parameter: {message}"):
        SamplingParams(**{name: 1})  # type: ignore[typeddict-item]


def test_vllms_structured_outputs_are_a_guide() -> None:
    class Answer(BaseModel):
        sum: int

    class OfVllm:  # vLLM's StructuredOutputsParams has every field, most of them None
        def __init__(self, **fields: object) -> None:
            self.__dict__.update({"json": None, "regex": None, "choice": None, "grammar": None} | fields)

    schema = Guide(json_schema=Answer)
    for given, guide in (
        ({"json": Answer}, schema),
        ({"json": Answer.model_json_schema()}, schema),
        (OfVllm(json=json.dumps(Answer.model_json_schema())), schema),
        (OfVllm(regex="[0-9]+"), Guide(regex="[0-9]+")),
        ({"choice": ["yes", "no"]}, Guide(choice=["yes", "no"])),
        ({"json_object": True}, Guide(json_object=True)),
    ):
        params = SamplingParams(structured_outputs=given)  # type: ignore[typeddict-item]
        assert params.guide == guide
        assert params.replace(temperature=0).guide == guide
    assert SamplingParams(structured_outputs=None) == SamplingParams()
    params = SamplingParams(structured_outputs={"regex": "a"})
    assert params.replace(structured_outputs={"regex": "b"}).guide == Guide(regex="b")
    assert params.replace(structured_outputs=None).guide is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grammar": "start: A"}, "has grammar; here it may have json, json_object, regex, choice, and a grammar is"),
        ({"json": {"type": "object"}, "regex": "a"}, "exactly one"),
        ({}, "should be a mapping such as"),
        (1, "structured_outputs should be a mapping such as .* not 1; it may have json, json_object, regex, choice"),
        ("abc", "not 'abc'"),
        ({"choice": []}, r"^structured_outputs\.choice: it should have"),
    ],
)
def test_structured_outputs_that_are_no_guide_are_refused(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=given)
    with pytest.raises(RequestError, match="twice the same"):
        SamplingParams(structured_outputs={"regex": "a"}, guide={"regex": "a"})


def test_outputs_become_plain_data(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate("ab", params)
    tokenizer = llm.get_tokenizer()
    data = json.loads(json.dumps(output.to_dict(tokenizer)))
    assert data == output.to_dict(tokenizer)  # nothing in it changes in JSON
    [completion] = data["outputs"]
    assert completion["token_ids"] == output.outputs[0].token_ids
    assert "".join(each["text"] for each in completion["logprobs"]) == completion["text"]
    assert [len(each["top"]) for each in completion["logprobs"]] == [2, 2, 2]
    assert data["prompt_logprobs"][0] is None
    assert data["prompt_logprobs"][1]["token_id"] == output.prompt_token_ids[1]
    assert "text" not in output.to_dict()["outputs"][0]["logprobs"][0]


def test_settings_that_are_changed_in_place_are_answered_with_how_to_change_them() -> None:
    params, config = SamplingParams(temperature=0), EngineConfig()
    with pytest.raises(RequestError, match=r"replace\(max_tokens=...\) returns a changed copy"):
        params.max_tokens = 5  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"with_settings\(max_num_seqs=...\) returns a changed copy"):
        config.max_num_seqs = 4  # type: ignore[misc]
    assert (params, config) == (SamplingParams(temperature=0), EngineConfig())
    assert pickle.loads(pickle.dumps((params, config))) == copy.deepcopy((params, config)) == (params, config)


def test_every_error_is_the_same_after_it_was_pickled_as_between_processes() -> None:
    made: dict[type, BaseException] = {
        errors.MediaError: errors.MediaError("messages[0]", "broken", [errors.Remedy("n", 1)], "image"),
        errors.ForeignExport: errors.ForeignExport(["one", "two"]),
        errors.PromptsFailed: errors.PromptsFailed("some", [1, None]),
        errors.Overloaded: errors.Overloaded("full", 3),
        RequestError: RequestError.of_parts([("n", " is 0")], [errors.Remedy("n", 1)]),
    }
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(kinds) > 20
    for kind in kinds:
        error = made.get(kind) or kind("a message")
        error.add_note("a note")
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is kind
        assert (str(back), vars(back)) == (str(error), vars(error))


def test_an_llm_is_not_pickled(llm: LLM) -> None:
    with pytest.raises(TypeError, match="make one in the process that uses it"):
        pickle.dumps(llm)
    with pytest.raises(TypeError, match="an AsyncLLM cannot be pickled"):
        pickle.dumps(AsyncLLM("demo"))


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ({"json_schema": True}, "should be a dict, its text, or a type such as a pydantic model's class, not True"),
        ({"choice": "ab"}, "should be a list of texts, not 'ab'"),
        ({"regex": 5}, "should be a text, not 5"),
        ({"choice": []}, r"guide\.choice: it should have at least one text"),
    ],
)
def test_a_guide_of_another_type_is_answered_with_what_it_should_be(guide: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(guide=guide)


def test_an_error_of_vllms_form_of_a_guide_names_its_fields() -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs\.json: \$\.not cannot be enforced") as caught:
        SamplingParams(structured_outputs={"json": {"not": {"type": "string"}}})
    assert caught.value.setting == "structured_outputs"


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("kind", [Person, list[Person], Literal["red", "blue"]])
def test_a_type_is_a_schema_for_a_guide(llm: LLM, kind: Any) -> None:
    params = SamplingParams(max_tokens=1, guide={"json_schema": kind})
    assert params.guide == Guide(json_schema=TypeAdapter(kind).json_schema())
    assert llm.generate("ab", params)[0].outputs[0].finish_reason == "length"


def test_arrays_and_tensors_are_the_numbers_and_lists_that_they_hold() -> None:
    for make in (numpy.array, torch.tensor):
        params = SamplingParams(top_k=make(5), temperature=make(0.5), seed=make(7), stop_token_ids=make(IDS))
        assert params == SamplingParams(top_k=5, temperature=0.5, seed=7, stop_token_ids=IDS)
        assert [type(params.top_k), type(params.temperature)] == [int, float]
        assert EngineConfig(capture_sizes=make([1, 4]), max_num_seqs=make(4)).capture_sizes == (1, 4)
        for setting in ("temperature", "top_k", "n", "min_p"):
            for wrong in (make([1.0]), make(True), make([[1, 2]])):
                with pytest.raises(RequestError, match=f"^{setting}=.* should be a (whole )?number"):
                    SamplingParams(**{setting: wrong})  # type: ignore[typeddict-item]
        with pytest.raises(ConfigError, match="capture_sizes = 4 is not a list"):
            EngineConfig(capture_sizes=make(4))
    assert SamplingParams(ignore_eos=numpy.True_).ignore_eos is True
    with pytest.raises(ConfigError, match="is not a list of whole numbers"):
        EngineConfig(capture_sizes={1: 2})  # type: ignore[typeddict-item]


@pytest.mark.parametrize("device", [None, 5, b"cpu", ["cpu"], numpy.array([1]), Path("cpu-2")])
def test_a_device_of_another_type_is_refused_by_name(device: Any) -> None:
    with pytest.raises(ConfigError, match="is not known; "):
        ostinato.plan_model(device=device)


@pytest.mark.parametrize("setting", ["dtype", "ssm_state_dtype"])
def test_a_dtype_may_be_that_of_torch(setting: str) -> None:
    assert getattr(EngineConfig(**{setting: torch.float32}), setting) == "float32"  # type: ignore[typeddict-item]
    assert EngineConfig(device=torch.device("cpu")).device == "cpu"
    with pytest.raises(ConfigError, match="should be 'auto', 'bfloat16'"):
        EngineConfig(**{setting: torch.int8})  # type: ignore[typeddict-item]


def test_what_is_listed_of_the_package_is_what_it_exports_each_once() -> None:
    assert dir(ostinato) == sorted([*ostinato.__all__, "__version__"])
    assert all(getattr(ostinato, name) is not None for name in dir(ostinato))


def test_a_type_checker_sees_what_the_package_exports() -> None:
    tree = ast.parse(Path(ostinato.__file__).read_text())
    [checked] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    homes = {name.asname: node.module for node in imports for name in node.names if name.asname == name.name}
    assert homes == ostinato._HOMES
    assert homes.keys() == set(ostinato.__all__)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("encode", r"get_tokenizer\(\)\.encode"),
        ("score", "no rerankers"),
        ("llm_engine", "here it is engine"),
        ("create_chat_completion", r"chat\(MESSAGES\)"),
        ("genrate", "did you mean generate"),
    ],
)
def test_a_method_of_another_engine_is_answered_with_what_there_is(llm: LLM, name: str, advice: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=advice):
        getattr(llm, name)


def test_attributes_of_other_engines_outputs_are_answered_with_what_there_is(llm: LLM) -> None:
    [output] = llm.generate("ab", SamplingParams(max_tokens=1))
    for owner, name, advice in (
        (output, "metrics", "times"),
        (output, "text", r"outputs\[0\]\.text"),
        (output.outputs[0], "tokens", "token_ids"),
        (ostinato, "AsyncLLMEngine", "AsyncLLM"),
        (ostinato, "EngineArgs", "EngineConfig"),
    ):
        with pytest.raises(AttributeError, match=f"{name}.*here it is {advice}"):
            getattr(owner, name)
    assert llm.get_default_sampling_params() == llm.engine.default_params()


def test_what_other_engines_names_are_answered_with_exists() -> None:
    for owner in (LLM, ostinato.AsyncLLM, ostinato.RequestOutput, ostinato.CompletionOutput):
        for name in other_engines._each(other_engines._ATTRIBUTES[owner.__name__]):
            assert name.startswith("__") or not hasattr(owner, name), "the name is ours"


def test_log_probabilities_have_texts_and_are_read_as_those_of_vllm(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    [output] = llm.generate("What is 17 plus 25?", params)
    [sample] = output.outputs
    assert sample.logprobs is not None
    decode = llm.get_tokenizer().decode_token
    assert [entry.text for entry in sample.logprobs] == [decode(token, False) for token in sample.token_ids]
    for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert (entry[token_id].logprob, entry[token_id].rank) == (entry.logprob, entry.rank)
        assert {key: value.logprob for key, value in entry.items()} == dict(entry.top) | {token_id: entry.logprob}
        assert [value.decoded_token for value in entry.values()] == [decode(key, False) for key in entry]
        with pytest.raises(KeyError, match="a larger logprobs"):
            entry[-1]
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    assert [entry and entry.text for entry in others] == [decode(token, False) for token in output.prompt_token_ids[1:]]
    pickled = pickle.dumps(output)
    assert b"okenizer" not in pickled
    back = pickle.loads(pickled).outputs[0].logprobs
    assert back == copy.deepcopy(sample.logprobs) == sample.logprobs
    assert [entry.texts for entry in back] == [entry.texts for entry in sample.logprobs]
    assert str(sample.logprobs[0].texts) in repr(back[0])


def test_texts_of_log_probabilities_are_decoded_when_they_are_read() -> None:
    decoded = []

    class Texts:
        def decode_token(self, token_id: int, skip_special_tokens: bool) -> str:
            decoded.append((token_id, skip_special_tokens))
            return f"<{token_id}>"

    scored = ostinato.TokenLogprobs(7, -2.0, 3, ((5, -0.5), (9, -1.0)))
    sample = ostinato.CompletionOutput(0, logprobs=[scored])
    times = RequestTimes(0.0)
    output = ostinato.RequestOutput("a", None, [1, 2], [sample], times, prompt_logprobs=[None, scored])
    decode_logprobs(output, Texts())
    assert decoded == []
    assert sample.logprobs is not None
    [entry] = sample.logprobs
    assert output.prompt_logprobs == [None, entry]
    assert entry.text == entry[7].text == "<7>"
    assert entry[9].text == "<9>"
    assert decoded == [(7, False), (7, False), (9, False)], "one token's text decodes no other's"
    assert entry.texts == ["<7>", "<5>", "<9>"]


def test_plans_for_any_device_come_from_python() -> None:
    plan = ostinato.plan_model("demo", device="l4-24gb", max_num_seqs=64)
    assert (plan.device.name, plan.settings.max_num_seqs) == ("l4-24gb", 64)
    with pytest.raises(ostinato.CapacityError) as caught:
        ostinato.plan_model("demo", device="l4-24gb", device_memory="1MiB")
    [least] = [remedy.value for remedy in caught.value.remedies if remedy.setting == "device_memory"]
    assert ostinato.plan_model("demo", device="l4-24gb", device_memory=least).memory.num_slots
    with pytest.raises(ConfigError, match="device_memory 'lots' is not a size"):
        ostinato.plan_model("demo", device_memory="lots")


@pytest.mark.slow
def test_a_model_is_verified_from_python() -> None:
    one_way = {"state_cache_mode": "align", "speculative": None, "graph_mode": "none", "overlap": "off"}
    report = ostinato.verify_model("demo", extent="quick", num_prompts=0, max_tokens=2, **one_way)
    assert report["passed"], report["summary"]
    assert report["summary"]["cells"] == len(report["cells"]) > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"extent": "all"}, "should be quick, pairs, full"),
        ({"extent": ["quick"]}, "should be quick, pairs, full"),
        ({"num_prompts": None}, "num_prompts = None: should be a whole number of at least 0"),
        ({"max_tokens": 0}, "max_tokens = 0: should be a whole number of at least 1"),
        ({"max_tokens": 2.0}, r"max_tokens = 2\.0: should be a whole number of at least 1"),
        ({"seed": True}, "seed = True: should be a whole number of at least 0"),
        ({"prompts": [5]}, r"prompts = \[5\]: should be a list of texts"),
        ({"prompts": None}, "prompts = None: should be a list of texts"),
    ],
)
def test_arguments_of_a_verification_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OstinatoError, match=message):
        ostinato.verify_model(str(text_checkpoint()), **given)


def test_a_verification_takes_a_text_as_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(_settings: object, trial: Trial, _progress: object) -> None:
        raise RequestError(str(trial.lines))

    monkeypatch.setattr("ostinato.verify.verify.verify", verify)
    with pytest.raises(RequestError, match=r"^\('a prompt',\)$"):
        ostinato.verify_model(prompts="a prompt")


def test_all_errors_that_a_program_may_catch_are_in_one_module_and_the_main_ones_in_the_package() -> None:
    main = [getattr(ostinato, name) for name in ostinato.__all__ if name.endswith(("Error", "Failed", "Stopped"))]
    assert len(main) > 8
    assert all(getattr(errors, kind.__name__) is kind for kind in main)
    raised = [kind for base in (OstinatoError, RequestError) for kind in base.__subclasses__()]
    inner = {"FitError", "TemplateTooExpensive", "UnknownMember"}
    assert {kind.__name__ for kind in raised if kind.__module__ != "ostinato.errors"} <= inner


class Sink:
    """A stream of a program's own, with no more than what `print` needs."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def closed_stream() -> TextIOWrapper:
    stream = TextIOWrapper(BytesIO())
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Sink(), closed_stream()], ids=["none", "of its own", "closed"])
def test_models_load_and_answer_where_stderr_is_none_closed_or_of_the_programs_own(
    monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", stream)
        with LLM(str(text_checkpoint()), **SETTINGS) as llm:
            assert len(llm.generate(["ab", "cd"], GREEDY)) == 2
