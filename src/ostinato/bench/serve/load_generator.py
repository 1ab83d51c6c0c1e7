"""Sender of conversations to a server. It notes the replies, and how late the generator itself was."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ostinato.bench.serve.load_client import Failure, HttpClient, SseReply
from ostinato.bench.serve.workload import ScriptedConversation
from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject
from ostinato.os_support import raise_max_open_files

T = TypeVar("T")

TICK = 0.02
"""Seconds between two checks of how late the generator's own loop is."""


@dataclass(frozen=True)
class Target:
    """The server, and the form of requests to it. `timeout` is in seconds, for each request."""

    base_url: str
    model: str
    chat: bool
    ignore_eos: bool = False
    timeout: float = 600.0
    api_key: str | None = None
    cache_salt: str | None = None
    """Salt that keeps the run's prefixes apart from those of other runs."""

    @property
    def url(self) -> str:
        return f"{self.base_url.rstrip('/')}/{'chat/completions' if self.chat else 'completions'}"

    def body(self, said: Sequence[str], output_tokens: int) -> bytes:
        """Return the request's body. `said` are a conversation's texts so far, the user's and the answers in turn."""
        request: JsonObject = {
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            request["ignore_eos"] = True
        if self.cache_salt is not None:
            request["cache_salt"] = self.cache_salt
        if self.chat:
            roles = ("user", "assistant")
            request["messages"] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        else:
            # An answer follows its prompt at once, as it was generated, so that it can be found in a cache.
            request["prompt"] = "".join(f"\n{text}" if i and i % 2 == 0 else text for i, text in enumerate(said))
        return json.dumps(request).encode()


@dataclass(frozen=True)
class RequestOutcome:
    """Outcome of one request, of conversation number `conversation`. Times are in seconds since the run began."""

    conversation: int
    due: float
    """Time at which it was to be sent: its arrival, or in a closed loop the moment when there was room for it."""
    sent: float
    end: float
    chunk_times: tuple[float, ...] = ()
    """Times at which each piece of text arrived."""
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Cached prompt tokens. None, as the two before, if the server did not report them."""
    error: str | None = None
    """Kind of the error; None for a reply that is complete."""
    detail: str | None = None


@dataclass(frozen=True)
class LoadRun:
    """One run. `loop_lags` are how late the generator woke up, in seconds, checked every `TICK`."""

    outcomes: list[RequestOutcome]
    """Outcomes by conversation, and in each by turn."""
    seconds: float
    """Seconds from the first arrival to the last end."""
    not_sent: int
    """Turns of conversations whose turn before had failed."""
    cpu_seconds: float
    """Processor seconds of the generator itself."""
    loop_lags: list[float]


def run_on_loop(work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`, run on a new event loop.

    It is the fastest loop, as the generator often shares the cores with the server.
    """
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop  # imported late, since every start of the command line imports this file

    return uvloop.run(work)


async def run_load(
    target: Target, conversations: Sequence[ScriptedConversation], concurrency: int | None = None
) -> LoadRun:
    """Send each conversation at its arrival, whether or not the server keeps up.

    With `concurrency`, send the next one as soon as fewer than `concurrency` are under way. A turn waits until its time
    for thinking is over. Turns after one that failed are not sent.
    """
    _check_open_files(concurrency or len(conversations))
    driver = _Driver(target)
    lags: list[float] = []
    ticker = asyncio.create_task(_watch(lags))
    cpu = time.process_time()
    try:
        if concurrency is None:
            await driver.open_loop(conversations)
        else:
            await driver.closed_loop(conversations, concurrency)
    finally:
        ticker.cancel()
        driver.client.close()
    outcomes = sorted(driver.outcomes, key=lambda outcome: (outcome.conversation, outcome.due))
    seconds = max(outcome.end for outcome in outcomes)
    return LoadRun(outcomes, seconds, driver.not_sent, time.process_time() - cpu, lags)


class _Driver:
    """One run under way."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.client = HttpClient(target.url, target.api_key)
        self.outcomes: list[RequestOutcome] = []
        self.not_sent = 0
        self._begin = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._begin

    async def open_loop(self, conversations: Sequence[ScriptedConversation]) -> None:
        async with asyncio.TaskGroup() as group:
            for number, each in enumerate(conversations):
                await _sleep(each.arrival - self.now())
                group.create_task(self._converse(number, each, each.arrival))

    async def closed_loop(self, conversations: Sequence[ScriptedConversation], concurrency: int) -> None:
        waiting = enumerate(conversations)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(conversations))):
                group.create_task(self._work_off(waiting))

    async def _work_off(self, waiting: Iterator[tuple[int, ScriptedConversation]]) -> None:
        for number, each in waiting:
            await self._converse(number, each, self.now())

    async def _converse(self, number: int, conversation: ScriptedConversation, due: float) -> None:
        said: list[str] = []
        for turns_before, turn in enumerate(conversation.turns):
            due += turn.think_seconds
            await _sleep(due - self.now())
            said.append(turn.text)
            outcome = await self._ask(number, self.target.body(said, turn.output_tokens), due)
            self.outcomes.append(outcome)
            if outcome.error is not None:
                self.not_sent += len(conversation.turns) - turns_before - 1
                return
            said.append(outcome.text)
            due = outcome.end

    async def _ask(self, number: int, body: bytes, due: float) -> RequestOutcome:
        reply = SseReply(self.now)
        sent = self.now()
        try:
            try:
                await self.client.post(body, reply, self.target.timeout)
            except Failure as failure:
                # A server may close the connection as soon as it has said that it is done.
                if failure.kind != "broken_stream" or reply.end is None:
                    raise
            reply.check_complete()
        except Failure as failure:
            times = tuple(reply.chunk_times)
            return RequestOutcome(number, due, sent, self.now(), times, error=failure.kind, detail=failure.detail)
        assert reply.end is not None
        usage = reply.usage
        return RequestOutcome(
            conversation=number,
            due=due,
            sent=sent,
            end=reply.end,
            chunk_times=tuple(reply.chunk_times),
            text=reply.text,
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=usage.get("completion_tokens"),
            cached_tokens=usage.get("cached_tokens"),
        )


async def _sleep(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


async def _watch(lags: list[float]) -> None:
    while True:
        due = time.monotonic() + TICK
        await asyncio.sleep(TICK)
        lags.append(time.monotonic() - due)


def _check_open_files(count: int) -> None:
    """Raise the limit of open files for `count` connections. Raises ConfigError if the process may not."""
    limit = raise_max_open_files(count + 100)
    if limit is not None:
        raise ConfigError(
            f"{count} requests at once need as many connections, and the process may have {limit} files open; "
            "send fewer requests, or raise the limit (ulimit -n)"
        )
