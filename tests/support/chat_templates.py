"""Chat templates of tiny checkpoints, as Hermes and thinking models have them; short: characters are tokens."""

HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{# <tool_call> #}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"
)
THINKING = HERMES.replace(
    "answer:", "answer:{% if enable_thinking is not false %}<think>\n{% else %}<think>\n\n</think>{% endif %}"
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
