"""Chat templates render as transformers renders them, and cannot do harm."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ostinato.engine.text.chat_template import (
    MAX_TEMPLATE_SOURCE,
    ChatTemplate,
    TemplateTooExpensive,
    load_chat_template,
)
from ostinato.engine.text.template_sandbox import PROBE_BUDGET, MeteredEnvironment, TemplateBudget
from ostinato.engine.text.tokenizer import load_tokenizer
from ostinato.errors import ModelError, RequestError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'assistant' and not loop.last %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {% else %}
        {%- set content = message['content'] %}
    {% endif %}
    {%- generation %}
    {{- '<|im_start|>' ~ message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endgeneration %}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}
{% endif %}
"""

PRESERVING = """\
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.reasoning_content and (preserve_thinking or loop.last) %}
        {{- '<think>' ~ message.reasoning_content ~ '</think>' }}
    {%- endif %}
    {{- message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if reasoning_effort is defined %}{{- '[effort: ' ~ reasoning_effort ~ ']' }}{% endif %}
{%- endif %}
"""
"""With the variables of Qwen 3.6 and 3.8: whether earlier turns keep their thoughts, and how long to think."""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|header|>system<|end|>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{{- system + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ "}<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- else %}
        {{- '<|header|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if documents %}
    {%- for document in documents %}{{ document.title }}: {{ document.text }};{% endfor %}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

MACROS = """\
{% macro turn(role, text, tag='turn') -%}
<{{ tag }} {{ role }}>{{ caller() if caller else '' }}{{ text | upper }}</{{ tag }}>
{%- endmacro %}
{% set ns = namespace(users=0, seen=[]) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if message.role not in ['user', 'assistant'] %}
        {{ raise_exception('Unknown role: ' + message.role) }}
    {% endif %}
    {% if (message.role == 'user') != (ns.users % 2 == 0) %}
        {{ raise_exception('Roles must alternate') }}
    {% endif %}
    {% set ns.users = ns.users + 1 %}
    {% if ns.users > 3 %}{% break %}{% endif %}
    {% set options = dict(number=ns.users, role=message.role) %}
{{ turn(options.role, message.content) }}{{ options | tojson(sort_keys=true, separators=(',', ':')) }}
{% endfor %}{{ eos_token }}
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather <b>today</b> & "tomorrow" in Zürich\'s lanes',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "  Hello <you> & 🎼\n"}
ANSWER = {"role": "assistant", "content": "<think>hm</think>\n\nHi."}
THOUGHTFUL = {"role": "assistant", "content": "Hello.", "reasoning_content": "It greets me."}
SYSTEM = {"role": "system", "content": " Be kind. "}
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich", "n": 1.5}}}],
}
REPLY = {"role": "tool", "content": {"sky": "<blue>"}}


def oracle(template: str, messages: list[Any], **settings: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[])), **SPECIAL
    )
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **settings)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("template", "messages", "settings"),
    [
        (CHATML, [USER], {}),
        (CHATML, [SYSTEM, USER, ANSWER, USER], {}),
        (CHATML, [USER], {"enable_thinking": False}),
        (CHATML, [USER, ANSWER], {"add_generation_prompt": False}),
        (CHATML, [USER, ANSWER], {"add_generation_prompt": False, "continue_final_message": True}),
        (PRESERVING, [USER, THOUGHTFUL, USER], {}),
        (PRESERVING, [USER, THOUGHTFUL, USER], {"preserve_thinking": True, "reasoning_effort": "low"}),
        (LLAMA, [SYSTEM, USER, ANSWER], {}),
        (LLAMA, [USER], {"date_string": "26 Jul 2024"}),
        (LLAMA, [USER, CALL, REPLY], {"tools": [WEATHER]}),
        (LLAMA, [USER], {"documents": [{"title": "A", "text": "b"}]}),
        (
            LLAMA,
            [SYSTEM, {"role": "assistant", "content": "So far "}],
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
        (MACROS, [SYSTEM, USER, ANSWER, USER, ANSWER], {}),
    ],
)
def test_a_template_renders_as_in_transformers(
    template: str, messages: list[dict[str, Any]], settings: dict[str, Any]
) -> None:
    settings = {"add_generation_prompt": True, **settings}
    text = ChatTemplate({"default": template}, SPECIAL).render(messages, **settings)
    assert text == oracle(template, messages, **settings)
    assert "Hello" in text.title() or "So far" in text


def test_variables_of_later_qwen_templates_reach_them() -> None:
    template, messages = ChatTemplate({"default": PRESERVING}), [USER, THOUGHTFUL, USER]
    template.check_variables(["preserve_thinking", "reasoning_effort"])
    text = template.render(messages, preserve_thinking=True, reasoning_effort="low")
    assert "<think>It greets me.</think>" in text
    assert text.endswith("[effort: low]")
    assert "greets" not in template.render(messages)
    with pytest.raises(RequestError, match="preserve_thoughts"):
        template.check_variables(["preserve_thoughts"])


def test_a_list_of_content_parts_is_continued_after_its_last_text() -> None:
    template = ChatTemplate({"default": "{% for p in messages[-1].content %}[{{ p.text }}]{% endfor %}"})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "assistant", "content": parts}]
    assert template.render(messages, add_generation_prompt=False) == "[one][two]"
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "[one][two"
    assert parts[1]["text"] == "two"


def test_a_template_says_itself_why_it_refuses() -> None:
    template = ChatTemplate({"default": MACROS}, SPECIAL)
    with pytest.raises(RequestError, match="Roles must alternate"):
        template.render([USER, USER])
    with pytest.raises(RequestError, match="Unknown role: owl"):
        template.render([{"role": "owl", "content": "hoo"}])
    assert "HI." in template.render([USER, ANSWER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "not valid, at line 1"),
        ("{{ messages[0].content.undefined.deeper }}", "has no attribute 'undefined'"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ no_function() }}", "'no_function' is undefined"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "leave its sandbox.*__class__"),
        ("{{ messages.append(1) }}", "leave its sandbox.*append"),
        ("{{ messages[0].update(role='x') }}", "leave its sandbox.*update"),
        ("{{ dict.__subclasses__() }}", "leave its sandbox|refused"),
        ("{{ raise_exception.__globals__['__builtins__'] }}", "leave its sandbox"),
        ("{{ '%s'.__mod__.__self__.__class__() }}", "leave its sandbox"),
        ("{% for i in range(999999999) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_broken_or_malicious_template_is_an_error_of_the_request(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate({"default": template}).render([USER])


@pytest.mark.parametrize(
    "messages",
    ["Hello", [], [{"content": "Hello"}], ["Hello"], [{"role": "user", "content": object()}], [{"role": "user"}]],
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError):
        ChatTemplate({"default": CHATML}).render(messages)


def test_a_continued_message_and_a_new_answer_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="add_generation_prompt"):
        ChatTemplate({"default": CHATML}).render([USER, ANSWER], continue_final_message=True)
    with pytest.raises(RequestError, match="cannot be continued"):
        ChatTemplate({"default": "nothing"}).render([USER], add_generation_prompt=False, continue_final_message=True)


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path) -> None:
    def rendered(**settings: Any) -> str:
        return load_chat_template(tmp_path, SPECIAL).render([USER], **settings)

    with pytest.raises(RequestError, match="has no chat template"):
        rendered()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "text {{ bos_token }}"}))
    assert rendered() == "text <s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert rendered() == "plain"
    assert rendered(tools=[WEATHER]) == "with tools"
    assert rendered(template_name="tool_use") == "with tools"
    with pytest.raises(RequestError, match="'rag'; it has default, tool_use"):
        rendered(template_name="rag")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "rag.jinja").write_text("{{ documents[0].text }}")
    assert rendered() == "from the file"
    assert rendered(template_name="rag", documents=[{"text": "facts"}]) == "facts"
    config.write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        rendered()


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/rag.jinja", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_text_file_that_is_a_link_out_of_the_checkpoint_is_refused_by_name(tmp_path: Path, name: str) -> None:
    secret, model = tmp_path / "secret", tmp_path / "model"
    secret.write_text("a password")
    (model / name).parent.mkdir(parents=True)
    (model / name).symlink_to(secret)
    with pytest.raises(ModelError, match=rf"{model / name} leads to {secret}, out of the checkpoint's directory"):
        load_chat_template(model, load_tokenizer(model).special_tokens)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for item in [[[[]]]] recursive %}{{ loop(item) }}{% for i in range(99999) %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 'ab' * 999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    ],
)
def test_a_template_that_does_too_much_is_an_error_of_the_request(template: str) -> None:
    with pytest.raises(TemplateTooExpensive, match=r"more than 300,000 steps, 10 seconds or 33,554,432 characters"):
        ChatTemplate({"default": template}).render(
            [{"role": "user", "content": "Hm?"}], budget=TemplateBudget(steps=300_000)
        )


LISTS = "{% set ns = namespace(a=['x'], b=['x']) %}{% for i in range(30) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
TUPLES = LISTS.replace("['x']", "('x',)").replace("[ns.a, ns.a]", "(ns.a, ns.a)")
TEXTS = "{% set ns = namespace(s='ab', n=9) %}{% for i in range(60) %}STEP{% endfor %}"
ROUNDS = "{% set s = 'a ' * 10**5 %}{% for i in range(999) %}{% set t = STEP %}{% endfor %}"
WITH_ITSELF = ["ns.a", "ns", "ns.a ~ 1", "ns.a|tojson", "ns.a|trim", "{1: ns.a}.items()", "ns.a == ns.b", "ns.a in [1]"]
WITH_KEYS = ["{ns.a: 1}", "{}[ns.a]", "{}.get(ns.a)", "dict([(ns.a, 1)])", "[ns.a, 1]|unique|list", "1 < 2 < ns.a"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x'|center(10**9) }}",
        "{{ range(10**5)|list|sort|tojson(indent=9999) }}",
        *(f"{{{{ 'x'.{name}(10**9) }}}}" for name in ("center", "ljust", "rjust", "zfill", "expandtabs")),
        *(f"{{{{ ('a ' * 999)|{name} }}}}" for name in ("wordwrap(1)", "urlize", "striptags", "truncate(9)", "pprint")),
        *(
            f"{{{{ range(9)|{name} }}}}"
            for name in ("batch(10**9, 1)|list", "slice(10**9)|list", "sum", "groupby('real')")
        ),
        "{{ lipsum(10**6) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%999999999d' is odd }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ {1: 2}.keys() - {1: 2}.keys() }}",
        "{{ 1.5|round(10**7, 'ceil') }}",
        "{{ (5).to_bytes(10**9) }}",
        "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
        "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
        "{{ range(10**5)|join('b' * 10**6) }}",
        "{{ ('b' * 10**6).join(['a'] * 10**5) }}",
        "{{ ('\\n' * 10**6)|indent(10**6) }}",
        "{{ [1, 2]|tojson(indent=10**9) }}",
        "{{ ([1] * 10**5)|tojson(separators=(',' * 10**6, ':')) }}",
        *(LISTS + f"{{{{ {use} }}}}" for use in [*WITH_ITSELF, "[1].index(ns.a)", "ns.a is eq 1"]),
        *(TUPLES + f"{{{{ {use} }}}}" for use in WITH_KEYS),
        TEXTS.replace("STEP", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
        "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}" + TEXTS.replace("STEP", "{% set ns.s = f(ns.s) %}"),
        TEXTS.replace("STEP", "{% set ns.s = [ns.s, ns.s]|join %}"),
        TEXTS.replace("STEP", "{% set ns.s = ns.s.replace('a', 'aa') %}"),
        TEXTS.replace("STEP", "{% set ns.s = '{0}{0}'.format(ns.s) %}"),
        "{{ '{:>9}{}'.format('a', 'b') }}",
        "{{ '{0.__class__}'.format('a') }}",
        "{{ '{a}'.format(a='b') }}",
        TEXTS.replace("STEP", "{% set ns.n = ns.n * ns.n %}"),
        "{% for a in range(9**5) if false %}{% endfor %}",
        "{% for i in range(999) %}{{ range(10**5)|select('odd')|list|length }}{% endfor %}",
        "{% macro f() %}{{ varargs|length }}{% endmacro %}{% for i in range(999) %}{{ f(*range(10**5)) }}{% endfor %}",
        "{% block a %}{{ self.b() }}{% endblock %}{% block b %}{% endblock %}"
        + ROUNDS.replace("STEP", "self.b()") * 99,
        *(
            ROUNDS.replace("STEP", use)
            for use in ("s[1:]", "s == s ~ ''", "'aab' in s", "s.split()", "s|title", "s|list")
        ),
    ],
)
def test_whatever_grows_is_counted_before_it_is_done(template: str) -> None:
    chat = ChatTemplate({"default": template})
    chat.compile()
    tracemalloc.start()
    try:
        with pytest.raises(TemplateTooExpensive):
            chat.render([{"role": "user", "content": "Hm?"}], budget=PROBE_BUDGET)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_a_format_that_only_inserts_texts_is_counted() -> None:
    chat = ChatTemplate({"default": "{{ '<{0}{1}>'.format('think', ':x') }}"})
    assert chat.render([USER], budget=PROBE_BUDGET) == "<think:x>"


@pytest.mark.parametrize("template", [CHATML, LLAMA, MACROS])
def test_templates_as_checkpoints_have_them_take_few_steps_and_do_nothing_uncounted(template: str) -> None:
    messages = [SYSTEM, *[USER, ANSWER] * (2 if template is MACROS else 20), *([] if template is MACROS else [USER])]
    budget = TemplateBudget(steps=600, uncounted=False)
    assert "Hello" in ChatTemplate({"default": template}, SPECIAL).render(messages, budget=budget).title()


def test_a_template_that_is_too_long_or_wrong_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="131,073 characters, and may have 131,072"):
        ChatTemplate({"default": "x" * (MAX_TEMPLATE_SOURCE + 1)}).render([USER])
    wrong = ChatTemplate({"default": "{% if %}"})
    wrong.compile()
    monkeypatch.setattr(MeteredEnvironment, "from_string", lambda *_: pytest.fail("compiled again"))
    for _ in range(2):
        with pytest.raises(RequestError, match="not valid, at line 1"):
            wrong.render([USER])


def test_a_date_format_has_a_bound() -> None:
    with pytest.raises(RequestError, match="at most 1000 characters"):
        ChatTemplate({"default": "{{ strftime_now('%c' * 501) }}"}).render([USER])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "user", "content": 1}, r"message 1 has int for content; it should be text, or a list of parts"),
        ({"role": "user", "content": {"a": 1}}, "has dict for content"),
        ({"role": "user", "content": ["a"]}, "has list for content"),
        ({"role": "user", "content": [{"text": "a"}]}, "has list for content"),
        ({"role": "assistant", "content": "", "tool_calls": 1}, "message 1 has tool_calls that are no list of calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "no list of calls such as"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, "no list of calls such as"),
    ],
)
def test_content_and_calls_of_a_form_that_no_template_reads_are_refused(message: Any, why: str) -> None:
    written = "m.content if m.content is string else m.content | default('') | tojson"
    template = ChatTemplate({"default": f"{{% for m in messages %}}{{{{ {written} }}}}{{% endfor %}}"})
    first = {"role": "user", "content": "a"}
    with pytest.raises(RequestError, match=why):
        template.render([first, message])
    call = {"name": "f", "arguments": {}}
    others: list[Any] = [
        {"role": "tool", "content": {"a": 1}},
        {"role": "assistant", "tool_calls": [call, {"type": "function", "function": call}]},
        {"role": "user", "content": ({"type": "text", "text": "b"},)},
    ]
    assert template.render([first, *others, {"role": "assistant", "content": None}]).startswith("a")


PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
ITSELF: dict[str, Any] = {}
ITSELF["a"] = ITSELF
CALLED = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"foo": 1},
            "message 0 has the key 'foo'; keys are role, content, tool_calls, name, .* the chat template names",
        ),
        ({"tool_call": []}, r"'tool_call' \(did you mean tool_calls\?\)"),
        ({"tool_call_ids": "1"}, r"\(did you mean tool_call_id\?\)"),
        ({"reasonings": "so"}, r"\(did you mean reasoning\?\)"),
        ({"reasoning": "so", "reasoning_content": "not so"}, "message 0 has reasoning_content and another reasoning"),
        ({"images": ["x"]}, "'images'; images are parts of content"),
        ({"content": [{"type": "txt", "text": "a"}]}, r"the type 'txt' in content\[0\] \(did you mean text\?\); types"),
        ({"content": [{"type": "file", "file": {}}]}, "the type 'file' .* are text, .*, image_url, image, video, and"),
        ({"tool_calls": [CALLED]}, "message 0, of the user, has tool_calls, which only an assistant's may have"),
        ({"role": "tool", "content": None}, "of the tool, has no content"),
        ({"role": "assistant", "tool_calls": [{**CALLED, "foo": 1}]}, r"tool_calls\[0\], has the key 'foo'"),
        (
            {"role": "assistant", "tool_calls": [{"function": {**CALLED["function"], "args": 1}}]},
            r"tool_calls\[0\].function, has the key 'args'.*; keys are name, arguments",
        ),
        ({"role": "tool", "content": {"a": 1}}, "takes text alone, and message 0 has other content"),
        ({"role": "tool", "content": ITSELF}, "is nested too deeply, or holds itself"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            r"message 0, in tool_calls\[0\], has arguments that are no JSON object",
        ),
    ],
)
def test_what_a_template_would_leave_out_or_write_as_python_is_refused(changed: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        ChatTemplate({"default": PLAIN}).render([{**USER, **changed}])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": "b"}', {"a": "b"}),
        ("", {}),
        ({"a": "b"}, {"a": "b"}),
        ('{"a": "b', {"a": "b"}),
        ('{"a": 1, "b', {"a": 1}),
    ],
)
@pytest.mark.parametrize("form", ["function", "bare"])
def test_arguments_of_a_call_that_are_text_are_objects_for_the_template(
    arguments: Any, expected: Any, form: str
) -> None:
    function = {"name": "f", "arguments": arguments}
    message = {"role": "assistant", "tool_calls": [function if form == "bare" else {**CALLED, "function": function}]}
    written = "{% for call in messages[1].tool_calls %}{{ (call.function or call).arguments | tojson }}{% endfor %}"
    assert json.loads(ChatTemplate({"default": written}).render([USER, message])) == expected
    assert function["arguments"] is arguments


@pytest.mark.parametrize(
    ("changed", "written"),
    [
        ({}, "It greets me."),
        ({"tool_calls": [CALLED], "content": ""}, "It greets me."),
        ({"tool_calls": [CALLED]}, ""),
        ({"thinking": "Of its own."}, "Of its own."),
    ],
)
def test_reasoning_has_the_name_of_a_template_that_knows_it_as_thinking(changed: Any, written: str) -> None:
    reads = "{% for message in messages %}{{ message.thinking }}{% endfor %}"
    assert ChatTemplate({"default": reads}).render([USER, {**THOUGHTFUL, **changed}]) == written
    both = "{% for message in messages %}{{ message.thinking }}{{ message.reasoning_content }}{% endfor %}"
    assert ChatTemplate({"default": both}).render([USER, THOUGHTFUL]) == "It greets me."


@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_by_either_name(read: str) -> None:
    """Answers of some servers have it as `reasoning`, or under both names, and agents send them back."""
    template = ChatTemplate({"default": "{% for message in messages %}{{ message['" + read + "'] }}{% endfor %}"})
    plain = ChatTemplate({"default": PLAIN})
    for names in (("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")):
        message = {"role": "assistant", "content": "Hello.", **dict.fromkeys(names, "It greets me.")}
        assert template.render([USER, message]) == "It greets me."
        assert plain.render([USER, message]) == f"{USER['content']}Hello."


def test_keys_and_parts_that_a_template_names_and_those_that_clients_echo_are_taken() -> None:
    nulls = dict.fromkeys(("refusal", "function_call", "audio", "anything"))
    message = {**USER, "annotations": [], "provider_specific_fields": {}, **nulls}
    assert ChatTemplate({"default": PLAIN}).render([message]) == USER["content"]
    named = "{% for m in messages %}{{ m.mood }}{{ m['tone'] }}{% for p in m.content if p.type == 'file' %}{{ p.name }}"
    template = ChatTemplate({"default": f"{named}{{% endfor %}}{{% endfor %}}"})
    parts = [{"type": "file", "name": "c"}]
    assert template.render([{"role": "user", "content": parts, "mood": "a", "tone": "b"}]) == "abc"
    with pytest.raises(RequestError, match="the key 'moo'"):
        template.render([{**USER, "moo": "a"}])
