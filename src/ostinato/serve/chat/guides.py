"""The guide of an answer: the form that a request asks for, or the tool calls that it demands; and its compilation."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.errors import RequestError
from ostinato.sample.guide import Guide
from ostinato.serve.chat.formats import AnswerLayout
from ostinato.serve.chat.grammars import tool_guide, value_guide
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.chat.tools import forced_tools
from ostinato.serve.http.errors import ApiError

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


def answer_guide(text: ModelText, form: AnswerLayout, asked: GuideRequest | None, tool_choice: Any) -> GuidePlan | None:
    """Return the guide of an answer that may reason first, and calls tools according to `tool_choice`.

    If a form is asked for and no call is demanded, the answer either calls tools or has the form.
    """
    if asked is None or forced_tools(form.tools, tool_choice):
        return _tool_guide(text, form, tool_choice)
    guide = asked.guide()
    if form.tools:
        return _tool_guide(text, form, tool_choice, GuidePlan(guide, asked.param))
    tags = form.formats.reasoning
    if tags is None:
        return GuidePlan(guide, asked.param)
    lark = value_guide(guide, tags, form.starts_in_reasoning, text.special_tags)
    return GuidePlan(_guide(asked.param, lark=lark), asked.param)


class GuideCompiler:
    """Compiler of one guide at a time in the engine's process, after a trial in a process that may die of it."""

    def __init__(self, engine: AsyncEngine, try_out: Callable[[str, Guide], Awaitable[None]] | None = None) -> None:
        """`try_out` tries a guide of a client; see `GuideTrial`."""
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
            refusal = ApiError(400, error.message, param=plan.param)
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
                raise RequestError(
                    f"the guide cannot be compiled: the process that tried it took too much {most}, or died; "
                    "a guide with smaller numbers, fewer alternatives or less nesting works"
                ) from None
            finally:
                del self._trying[guide]
                ended.set()
        self._tried.move_to_end(guide)


def _tool_guide(
    text: ModelText, form: AnswerLayout, tool_choice: Any, instead: GuidePlan | None = None
) -> GuidePlan | None:
    try:
        lark = tool_guide(
            form.tools,
            tool_choice,
            form.formats,
            starts_in_reasoning=form.starts_in_reasoning,
            parallel=form.parallel,
            special_tags=text.special_tags,
            instead=None if instead is None else instead.guide,
        )
    except RequestError as error:
        raise ApiError(400, error.message, param="tools") from None
    return None if lark is None else GuidePlan(_guide("tools", lark=lark), "tools", instead)


def _guide(param: str, **kind: Any) -> Guide:
    try:
        return Guide(**kind)
    except RequestError as error:
        raise ApiError(400, error.message, param=param) from None
