"""The guide of an answer: the form that a request asks for, or the tool calls that it demands.

Its grammar is Lark text for llguidance: tool calls in a model's own format, and values after reasoning. It is compiled
here too.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.errors import Remedy, RequestError
from ostinato.sampling.guide import MAX_GUIDE_CHARACTERS, Guide
from ostinato.serve.chat.answer_formats import ANALYSIS, AnswerFormats, AnswerLayout, ReasoningTags
from ostinato.serve.chat.text_support import ModelText
from ostinato.serve.chat.tool_calls.formats import EQUATION, GENERIC, known_forms
from ostinato.serve.chat.tool_calls.grammar import LarkGrammar, ToolGrammar
from ostinato.serve.chat.tools import Tool, forced_tools
from ostinato.serve.http.api_errors import ApiError

NO_TAGS: Mapping[str, int] = {}


def tool_guide(
    tools: Sequence[Tool],
    tool_choice: object,
    formats: AnswerFormats,
    *,
    starts_in_reasoning: bool = False,
    parallel: bool = True,
    special_tags: Mapping[str, int] = NO_TAGS,
    instead: Guide | None = None,
) -> str | None:
    """Return the Lark grammar of an answer that calls tools as `tool_choice` demands; None if it demands nothing.

    - "required" allows calls of any of the tools, several in a row if `parallel`. A named function is called once.
    - With "auto", if some tools are `strict` or the form is `GENERIC` or `EQUATION`, every call in the answer must be
      well-formed.
    - With "auto" and `instead`, the answer either consists of calls, as with "required", or has that form.

    A model that reasons may do so first; it must end its reasoning if the prompt began it. `special_tags` are the tags
    of the form that are special tokens of the tokenizer, with their ids: a grammar does not write these as text.

    Arguments follow their schemas, with properties in the schema's order. In the XML format only parameters that the
    schema names are written, and a string without `enum` or `const` is any text without `</parameter>`. RequestError if
    the choice is malformed, the model has no known format, or the format cannot write a name.
    """
    called = forced_tools(tools, tool_choice)
    may_call = bool(tools) and not called and tool_choice != "none"
    calls_or_form = may_call and instead is not None
    enforced = formats.tools in (GENERIC, EQUATION)
    free = may_call and not calls_or_form and (enforced or any(tool.strict for tool in tools))
    if not (called or calls_or_form or free):
        return None
    if formats.tools is None:
        demand = "tool_choice" if called else "a form of the answer beside tools" if calls_or_form else "strict"
        remedy = (
            Remedy("tool_choice", "auto" if called else "none") if called or calls_or_form else Remedy("strict", False)
        )
        raise RequestError(
            f"{demand} needs a model whose chat template shows how it writes tool calls; known are the forms of "
            f"{known_forms()}",
            [remedy],
        )
    grammar = ToolGrammar(formats.tools, special_tags, called or tools)
    start = grammar.thoughts(formats.reasoning, starts_in_reasoning)
    if instead is not None and calls_or_form:
        start += grammar.calls_or_value(instead, parallel)
    elif free:
        start += grammar.free_calls(formats.reasoning, parallel)
    else:
        start += grammar.forced_calls(parallel and tool_choice == "required")
    text, most = grammar.text(start), MAX_GUIDE_CHARACTERS["lark"]
    if len(text) > most:
        raise RequestError(
            f"the parameters of the {len(called or tools)} tools that may be called make a grammar of {len(text)} "
            f"characters, and may make one of {most}; fewer tools work, or tools with fewer or simpler parameters"
        )
    return text


def value_guide(
    guide: Guide, tags: ReasoningTags, starts_in_reasoning: bool, special_tags: Mapping[str, int] = NO_TAGS
) -> str:
    """Return the Lark grammar of a value of `guide` (JSON, a regular expression or a choice), after reasoning.

    Reasoning must end if the prompt began it; otherwise it is optional. `special_tags` as for `tool_guide`.
    """
    grammar = LarkGrammar(special_tags)
    return grammar.text(grammar.thoughts(tags, starts_in_reasoning) + grammar.value(guide, in_channel=tags == ANALYSIS))


MAX_WAITING = 64
"""Largest number of requests that wait for guides; more get status 429. Each may take a second."""
MAX_TRIED = 1024
"""Number of guides that are known to be harmless; the least recently requested one is forgotten first."""


@dataclass(frozen=True)
class GuideRequest:
    """A form that an output should have."""

    param: str
    """The field of the body that asks for it."""
    kind: str
    """A field of Guide."""
    value: Any

    def guide(self) -> Guide:
        """Return the guide. ApiError for a value that is no such form."""
        return _guide(self.param, **{self.kind: self.value})


@dataclass(frozen=True)
class GuidePlan:
    """A guide to be compiled."""

    guide: Guide
    param: str
    """The field of the body that asks for it."""
    part: GuidePlan | None = None
    """Part of the guide that is compiled alone if the whole cannot be: its error, if any, is reported."""


def plain_guide(asked: GuideRequest | None) -> GuidePlan | None:
    """Return the guide of an output that has the form and nothing else."""
    return None if asked is None else GuidePlan(asked.guide(), asked.param)


def answer_guide(
    text: ModelText, layout: AnswerLayout, asked: GuideRequest | None, tool_choice: object
) -> GuidePlan | None:
    """Return the guide of an answer that may reason first, and calls tools according to `tool_choice`.

    If a form is asked for and no call is demanded, the answer either calls tools or has the form.
    """
    if asked is None or forced_tools(layout.tools, tool_choice):
        return _tool_guide(text, layout, tool_choice)
    guide = asked.guide()
    if layout.tools:
        return _tool_guide(text, layout, tool_choice, GuidePlan(guide, asked.param))
    tags = layout.formats.reasoning
    if tags is None:
        return GuidePlan(guide, asked.param)
    lark = value_guide(guide, tags, layout.starts_in_reasoning, text.special_tags)
    return GuidePlan(_guide(asked.param, lark=lark), asked.param)


class GuideCompiler:
    """Compiler of one guide at a time in the engine's process, after a trial in a process that may die of it."""

    def __init__(self, engine: AsyncEngine, try_out: Callable[[str, Guide], Awaitable[None]] | None = None) -> None:
        """Compile guides in `engine`, once `try_out` has tried those of clients (`GuideTrial`)."""
        self._engine = engine
        self._try_out = try_out
        self._tried: OrderedDict[Guide, None] = OrderedDict()
        self._trying: dict[Guide, asyncio.Event] = {}
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def compiled(self, plan: GuidePlan | None, client: str) -> Guide | None:
        """Return the guide, once the engine has compiled it. Requests with the same guide try and compile it once.

        Raises ApiError, which names the field, if that cannot be done, and with status 429 if too many wait.
        """
        if plan is None:
            return None
        if self._num_waiting >= MAX_WAITING:
            message = f"{self._num_waiting} requests wait for their grammars to be compiled already"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
        self._num_waiting += 1
        try:
            await self._try(plan.guide, client)
            async with self._turn:
                await self._engine.compile_guide(plan.guide)
                return plan.guide
        except RequestError as error:
            refusal = _refused(error, plan.param)
        finally:
            self._num_waiting -= 1
        await self.compiled(plan.part, client)
        raise refusal

    async def _try(self, guide: Guide, client: str) -> None:
        """Return once a guide has passed its trial, now or before. RequestError if it does not."""
        if self._try_out is None:
            return
        while guide not in self._tried:
            if (other := self._trying.get(guide)) is not None:
                await other.wait()
                continue
            ended = self._trying[guide] = asyncio.Event()
            try:
                await self._try_out(client, guide)
                self._tried[guide] = None
                if len(self._tried) > MAX_TRIED:
                    self._tried.popitem(last=False)
            except ApiError as error:
                if error.code not in ("worker_ended", "too_costly"):
                    raise
                most = "time or memory (worker_seconds, worker_memory)"
                problem = f" cannot be compiled: the process that tried it took too much {most}, or died; a guide with "
                raise RequestError.of_parts(
                    [("guide", f"{problem}smaller numbers, fewer alternatives or less nesting works")]
                ) from None
            finally:
                del self._trying[guide]
                ended.set()
        self._tried.move_to_end(guide)


def _tool_guide(
    text: ModelText, layout: AnswerLayout, tool_choice: object, instead: GuidePlan | None = None
) -> GuidePlan | None:
    try:
        lark = tool_guide(
            layout.tools,
            tool_choice,
            layout.formats,
            starts_in_reasoning=layout.starts_in_reasoning,
            parallel=layout.parallel,
            special_tags=text.special_tags,
            instead=None if instead is None else instead.guide,
        )
    except RequestError as error:
        raise ApiError(400, error.message, param=error.setting or "tools") from None
    return None if lark is None else GuidePlan(_guide("tools", lark=lark), "tools", instead)


def _guide(param: str, **kind: Any) -> Guide:
    try:
        return Guide(**kind)
    except RequestError as error:
        raise _refused(error, param) from None


def _refused(error: RequestError, param: str) -> ApiError:
    """Return the error of a guide by the field that asked for it."""
    names = {f"guide.{kind}": param for kind in Guide.model_fields}
    return ApiError(400, error.renamed({"guide": param, **names}).message, param=param)
