"""Parser of one answer's text into reasoning, content and tool calls while it grows.

A model's reasoning tags and form of tool calls are detected by a round trip through its chat template. A call is
rendered as an earlier answer's and read back: the form that gives the same call is the model's. A template that does
not print calls, as some do, is identified by the tags in its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.engine.text.template_sandbox import PROBE_BUDGET
from ostinato.errors import RequestError
from ostinato.serve.chat.answer_formats import (
    ANALYSIS,
    REASONING,
    AnswerDelta,
    AnswerFormats,
    DeltaCollector,
    ReasoningTags,
)
from ostinato.serve.chat.harmony import ChannelReader
from ostinato.serve.chat.incremental_text import SPACE, EndOfText, Reading, TextBuffer, start_of_tag
from ostinato.serve.chat.tool_calls.formats import EQUATION, FORMS, HARMONY, PARSERS, ToolCallFormat
from ostinato.serve.chat.tool_calls.readers import BlockReader, ToolCallSyntaxError
from ostinato.serve.chat.tools import Tool


class AnswerParser:
    """Parser that splits one answer's text, as it grows, into reasoning, content and tool calls.

    The joined deltas do not depend on where the text was cut. Only two things are held back: text that may be the
    beginning of a tag, with the white space before it, and a call until it is complete. A call that a grammar
    enforces is passed on as it comes.

    - Reasoning comes only at the beginning: a tag after other text is content. Newlines around its tags are dropped.
      Without an end tag all the text is reasoning.
    - Everything else is content, verbatim, except for white space before a call and after the last one.
    - A call has a name among `tools`, and arguments that are JSON in the end. All that only looks like a call, or is
      not complete when the model ends its answer, is content, verbatim.
    - Of a call that is cut off, as by `max_tokens`, the arguments so far are passed on. They are no JSON then.
    - An answer with channels is read by `ChannelReader`, which has other rules.
    """

    def __init__(
        self,
        formats: AnswerFormats,
        *,
        tools: Sequence[Tool] | None,
        starts_in_reasoning: bool,
        new_id: Callable[[], str],
        calls_or_content: bool = False,
        enforced: bool = False,
    ) -> None:
        """Make a parser of one answer.

        `tools`: if None or empty, no calls are looked for. `new_id` makes the id of a call, such as "call_7f3a".
        `calls_or_content`: a grammar makes the answer one or the other: it has no calls unless it begins with one.
        `enforced`: a grammar enforces calls, so they are passed on as they come.
        """
        self._text = TextBuffer()
        self._collector = DeltaCollector(new_id, enforced)
        self._give: Callable[[str], None] = self._add_content
        if formats.has_channels:
            self._steps = ChannelReader(self._text, self._collector, [tool.name for tool in tools or ()]).read()
        else:
            self._steps = self._read(formats, tools or (), starts_in_reasoning, calls_or_content)

    def push(self, text: str) -> AnswerDelta:
        """Return what the next piece of text adds, as far as that is certain."""
        self._text.add(text)
        next(self._steps, None)
        return self._collector.take()

    def finish(self, is_cut: bool = False) -> AnswerDelta:
        """Return the text that was held back, now that no text follows; `is_cut`: the model would have written more."""
        self._text.end(is_cut)
        next(self._steps, None)
        return self._collector.take()

    def _read(
        self, formats: AnswerFormats, tools: Sequence[Tool], starts_in_reasoning: bool, calls_or_content: bool
    ) -> Reading[None]:
        try:
            if formats.reasoning is not None:
                yield from self._read_reasoning(formats.reasoning, starts_in_reasoning)
            if (
                formats.tools is None
                or not tools
                or (calls_or_content and not (yield from self._begins(formats.tools)))
            ):
                yield from self._read_plain()
            else:
                reader = BlockReader(formats.tools, self._text, self._collector, {tool.name: tool for tool in tools})
                if formats.tools.begin:
                    yield from self._read_content(reader, formats.tools.begin)
                else:
                    yield from self._read_first(reader)
        except EndOfText:
            rest = self._text.release_all()
            if rest.strip(SPACE) or not self._collector.after_call:
                self._give(rest)

    def _read_reasoning(self, tags: ReasoningTags, inside: bool) -> Reading[None]:
        text = self._text
        if inside:
            self._give = self._collector.add_reasoning
            yield from text.drop("\n")
        # Some models open their reasoning once more after a prompt that did.
        if not (yield from text.tag(tags.begin)) and not inside:
            return
        text.consume()
        self._give = self._collector.add_reasoning
        yield from text.drop("\n")
        while (end := text.text.find(tags.end)) < 0:
            self._give(text.consume(start_of_tag(text.text, tags.end, "\n")))
            yield from text.wait()
        self._give(text.text[:end].rstrip("\n"))
        text.consume(end + len(tags.end))
        self._give = self._add_content
        yield from text.drop("\n")

    def _begins(self, form: ToolCallFormat) -> Reading[bool]:
        """Return whether a call comes next, without reading anything."""
        begins = yield from self._text.tag(form.begin)
        self._text.position = 0
        return begins

    def _add_content(self, released: str) -> None:
        """Add the text that was released last."""
        self._collector.add_content(released, self._text.released)

    def _read_plain(self) -> Reading[None]:
        while True:
            self._give(self._text.release_all())
            yield from self._text.wait()

    def _read_first(self, reader: BlockReader) -> Reading[None]:
        """Read an answer of a form without a begin tag: it begins with a call, or has none."""
        try:
            yield from reader.read()
            yield from self._text.drop(SPACE)
        except ToolCallSyntaxError:
            self._give(self._text.consume())
        yield from self._read_plain()

    def _read_content(self, reader: BlockReader, begin_tag: str) -> Reading[None]:
        text = self._text
        while True:
            if (where := text.text.find(begin_tag)) < 0:
                self._give(text.consume(start_of_tag(text.text, begin_tag, SPACE)))
                yield from text.wait()
                continue
            content = len(text.text[:where].rstrip(SPACE))
            self._give(text.consume(content))
            text.position = where - content + len(begin_tag)
            try:
                yield from reader.read()
            except ToolCallSyntaxError:
                self._give(text.consume())


_QUESTION, _THOUGHT, _ANSWER = "Zanzibar?", "Mulling.", "Certainly."
_CITY = "Samarkand"
_PROBE = Tool(
    "lookup_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "description": "How many."},
            "hourly": {"type": "boolean", "description": "Whether by the hour."},
        },
        "required": ["city"],
    },
)
_ARGUMENTS = {"city": _CITY, "days": 3, "hourly": True}


def detect_formats(
    template: ChatTemplate, token_id: Callable[[str], int | None] = lambda tag: None, parser: str | None = None
) -> AnswerFormats:
    """Return the formats that a chat template writes earlier answers in, or asks the model for.

    If a template shows no form of tool calls, the tags in the vocabulary tell; `token_id` gives their ids. `parser`
    names a form of `PARSERS`, which then is the model's.
    """
    form = PARSERS[parser] if parser is not None else _tool_form(template, token_id)
    return AnswerFormats(ANALYSIS if form == HARMONY else _reasoning(template), form)


def takes_tools(template: ChatTemplate) -> bool:
    """Return whether a prompt describes tools to the model; the template's text decides if it cannot be rendered."""
    rendered = _rendered(template)
    return "tools" in template.text if rendered is None else _PROBE.name in rendered


def _tool_form(template: ChatTemplate, token_id: Callable[[str], int | None]) -> ToolCallFormat | None:
    for rendered in _calls(template):
        answer = rendered[rendered.rfind(_QUESTION) + len(_QUESTION) :]
        if _CITY not in answer:
            continue
        for form in (*FORMS, HARMONY):
            if _reads(form, answer):
                return form
        return None
    return _hinted(template.text) or (_of_vocabulary(token_id) if takes_tools(template) else None)


def _calls(template: ChatTemplate) -> Iterator[str]:
    """Yield renderings of a conversation that ends with a call, in the variants that the template accepts.

    Some templates want ids of nine characters, some want arguments as text, some no content.
    """
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        for content in ("", None):
            function = {"name": _PROBE.name, "arguments": arguments}
            call = {"id": "abcdef123", "type": "function", "function": function}
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            rendered = _rendered(template, answer)
            if rendered is not None:
                yield rendered


def _rendered(template: ChatTemplate, *answer: Mapping[str, object]) -> str | None:
    """Render a question with a tool, and perhaps an answer; None if the template refuses it."""
    function = {"name": _PROBE.name, "description": _PROBE.description, "parameters": dict(_PROBE.parameters)}
    messages = [{"role": "user", "content": _QUESTION}, *answer]
    try:
        return template.render(
            messages,
            tools=[{"type": "function", "function": function}],
            add_generation_prompt=False,
            budget=PROBE_BUDGET,
        )
    except RequestError:
        return None


def _reads(form: ToolCallFormat, answer: str) -> bool:
    """Return whether the form reads the call back from an answer, perhaps with texts of the template around it."""
    begin = form.begin or "{"
    if (start := answer.find(begin)) < 0:
        return False
    parser = AnswerParser(
        AnswerFormats(None, form), tools=(_PROBE,), starts_in_reasoning=False, new_id=lambda: "call_0"
    )
    deltas = (parser.push(answer[start:]), parser.finish())
    calls = [call for delta in deltas for call in delta.tool_calls]
    if not calls or {call.index for call in calls} != {0} or calls[0].name != _PROBE.name:
        return False
    try:
        return bool(json.loads("".join(call.arguments for call in calls)) == _ARGUMENTS)
    except ValueError:
        return False


def _hinted(text: str) -> ToolCallFormat | None:
    """Return the form whose tags are all in a template's text; of several, the one with the most."""
    hints = [(form, form.hints or form.tags) for form in (*FORMS, HARMONY, EQUATION)]
    fitting = [form for form, texts in hints if texts and all(tag in text for tag in texts)]
    return max(fitting, key=lambda form: len(form.tags), default=None)


def _of_vocabulary(token_id: Callable[[str], int | None]) -> ToolCallFormat | None:
    """Return the form whose tags are all tokens; None if there are several with as many."""
    fitting = [form for form in (*FORMS, HARMONY) if form.tags and all(token_id(tag) is not None for tag in form.tags)]
    most = max((len(form.tags) for form in fitting), default=0)
    best = [form for form in fitting if len(form.tags) == most]
    return best[0] if len(best) == 1 else None


def _reasoning(template: ChatTemplate) -> ReasoningTags | None:
    """Return the reasoning tags that the template prints, or else those in its text.

    One of two tags is enough in the text: some templates only open reasoning, or only cut it out of earlier answers.
    """
    text = template.text
    rendered = _rendered(template, {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT})
    if rendered is not None and _THOUGHT in rendered:
        before, after = rendered.split(_THOUGHT, 1)
        for tags in REASONING:
            if before.rstrip().endswith(tags.begin) and after.lstrip().startswith(tags.end):
                return tags
    return next((tags for tags in REASONING if tags.begin in text or tags.end in text), None)
