"""A chat template for each form of tool calls, as short as can be, and what it writes."""

from __future__ import annotations

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.serve.chat.tool_calls import formats
from ostinato.serve.chat.tool_calls.formats import ToolCallFormat

_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_LISTED = "{% if not loop.last %}, {% endif %}"
_TAGGED = (
    "<function={{ f.name }}>\n{% for key, value in f.arguments.items() %}<parameter={{ key }}>%s"
    "{{ value if value is string else value | tojson }}%s</parameter>\n{% endfor %}</function>"
)
_PYTHON = (
    "{{ f.name }}({% for key, value in f.arguments.items() %}{{ key }}="
    "{% if value is string %}'{{ value }}'{% else %}{{ value }}{% endif %}" + _LISTED + "{% endfor %})"
)
_DSML = (
    '<｜DSML｜invoke name="{{ f.name }}">\n{% for key, value in f.arguments.items() %}'
    '<｜DSML｜parameter name="{{ key }}" '
    'string={% if value is string %}"true">{{ value }}{% else %}"false">{{ value | tojson }}{% endif %}'
    "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n"
)
_BARE = (
    "{% macro bare(value) %}{% if value is string %}{{ '<|\"|>' ~ value ~ '<|\"|>' }}"
    "{% elif value is boolean %}{{ 'true' if value else 'false' }}"
    "{% elif value is mapping %}{{ '{' }}{% for key, item in value | dictsort %}{{ key }}:{{ bare(item) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif value is sequence %}[{% for item in value %}{{ bare(item) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ value }}{% endif %}{% endmacro %}"
)
CALLS: dict[ToolCallFormat, tuple[str, str, str]] = {
    formats.HERMES: ("", "<tool_call>\n" + _JSON + "\n</tool_call>\n", ""),
    formats.XML: ("", "<tool_call>\n" + _TAGGED.replace("%s", "\n") + "\n</tool_call>\n", ""),
    formats.TOOLCALL: ("<TOOLCALL>[", _JSON + _LISTED, "]</TOOLCALL>"),
    formats.GLM: (
        "",
        "<tool_call>{{ f.name }}\n{% for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>\n",
        "",
    ),
    formats.LFM2: ("<|tool_call_start|>[", _PYTHON + _LISTED, "]<|tool_call_end|>"),
    formats.OLMO3: (
        "<function_calls>",
        "{{ f.name }}({% for key, value in f.arguments.items() %}{{ key }}={{ value | tojson }}"
        + _LISTED
        + "{% endfor %}){% if not loop.last %}\n{% endif %}",
        "</function_calls>",
    ),
    formats.KIMI: (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    formats.MINIMAX: (
        "<minimax:tool_call>\n",
        '<invoke name="{{ f.name }}">\n{% for key, value in f.arguments.items() %}<parameter name="{{ key }}">'
        "{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}</invoke>\n",
        "</minimax:tool_call>",
    ),
    formats.MINIMAX_LINES: ("<tool_calls>\n", _JSON + "\n", "</tool_calls>"),
    formats.APRIEL: ("<tool_calls>[", _JSON + _LISTED, "]</tool_calls>"),
    formats.SEED: ("", "<seed:tool_call>\n" + _TAGGED.replace("%s", "") + "\n</seed:tool_call>\n", ""),
    formats.COMMAND: (
        "<|START_ACTION|>[\n",
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
        + _LISTED,
        "\n]<|END_ACTION|>",
    ),
    formats.APERTUS: (
        "<|tools_prefix|>[",
        '{"{{ f.name }}": {{ f.arguments | tojson }}}' + _LISTED,
        "]<|tools_suffix|>",
    ),
    formats.COMMAND_R: (
        "Action:\n```json\n[\n",
        '    {\n        "tool_name": "{{ f.name }}",\n        "parameters": {{ f.arguments | tojson }}\n    }'
        "{% if not loop.last %},\n{% endif %}",
        "\n]```\n",
    ),
    formats.GRANITE: ("<|tool_call|>[", _JSON + _LISTED, "]"),
    formats.FIREFUNCTION: ("functools[", _JSON + _LISTED, "]"),
    formats.GIGACHAT3: ("", "<|message_sep|>\n\nfunction call<|role_sep|>\n" + _JSON + "<|message_sep|>\n\n", ""),
    formats.GEMMA: (
        _BARE,
        "<|tool_call>call:{{ f.name }}{{ bare(f.arguments) }}<tool_call|>",
        "",
    ),
    formats.GIGACHAT: ("", "<|function_call|>" + _JSON + "\n", ""),
    formats.DEEPSEEK: (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    formats.DEEPSEEK_R1: (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    formats.DEEPSEEK_V32: ("<｜DSML｜function_calls>\n", _DSML, "</｜DSML｜function_calls>"),
    formats.DEEPSEEK_V4: ("<｜DSML｜tool_calls>\n", _DSML, "</｜DSML｜tool_calls>"),
    formats.HUNYUAN: (
        "<tool_calls:opensource>\n",
        "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n{% for key, value in f.arguments.items() %}"
        "<arg_key:opensource>{{ key }}</arg_key:opensource>\n<arg_value:opensource>"
        "{{ value if value is string else value | tojson }}</arg_value:opensource>\n{% endfor %}"
        "</tool_call:opensource>\n",
        "</tool_calls:opensource>",
    ),
    formats.MISTRAL: ("", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
    formats.MISTRAL_WITH_IDS: (
        "",
        "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}",
        "",
    ),
    formats.MISTRAL_LIST: (
        "[TOOL_CALLS] [",
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ call.id }}"}' + _LISTED,
        "]",
    ),
    formats.MINICPM: (
        "",
        '<function name="{{ f.name }}">{% for key, value in f.arguments.items() %}<param name="{{ key }}">'
        "{{ value if value is string else value | tojson }}</param>{% endfor %}</function>\n",
        "",
    ),
    formats.FUNCTIONARY: ("", "<function={{ f.name }}>{{ f.arguments | tojson }}</function>", ""),
    formats.LLAMA3: ("", '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', ""),
}
"""What stands before an answer's calls, for each of them, and after them."""


def template_of(form: ToolCallFormat) -> ChatTemplate:
    """A template that writes earlier answers' calls in the form, and tells the model of tools."""
    before, call, after = CALLS[form]
    calls = "{% for call in message.tool_calls %}{% set f = call.function %}" + call + "{% endfor %}"
    return ChatTemplate(
        {
            "default": "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}"
            "<|{{ message.role }}|>{{ message.content or '' }}{% if message.tool_calls %}"
            + before
            + calls
            + after
            + "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        }
    )


def written(form: ToolCallFormat, *calls: tuple[str, object]) -> str:
    """An answer with these calls, (name, arguments) each, as the template writes it."""
    made = [{"id": "abcdef123", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    message = {"role": "assistant", "content": "", "tool_calls": made}
    text = template_of(form).render([message], add_generation_prompt=False)
    return text.removeprefix("<|assistant|>").removesuffix("<|end|>\n")
