"""What a server and its engine's process tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import LogRecord
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ostinato.config import EngineConfig
from ostinato.engine.process.delivery import OutputDelta
from ostinato.media.prompt import MediaPrompt
from ostinato.observe.meter import Meter
from ostinato.plan.model import VisionSpec
from ostinato.plan.plan import Plan
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.engine.run.runner import StartProgress

Question = Literal["observe", "check"]
"""`observe`: an Observation. `check`: for how many requests anything is kept; AssertionError if the bookkeeping is in
disorder."""

# To the engine.


@dataclass(frozen=True)
class Start:
    """The first message."""

    config: EngineConfig
    make: Callable[[EngineConfig, StartProgress], Engine]
    """Makes the engine. Sent by its name, or by its class's."""
    log_level: int


class Submit(NamedTuple):
    """A request; its answer is a Reply. See `Engine.add`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    media: MediaPrompt | None = None


class Abort(NamedTuple):
    """Nobody waits for the request any more."""

    request_id: str


class Settled(NamedTuple):
    """The last gains are with those who wait for them, which took the event loop `cost` seconds."""

    cost: float


class Compile(NamedTuple):
    """Compiles a guide, so that it is known whether that can be done; its answer is a Reply."""

    call_id: str
    guide: Guide


class Ask(NamedTuple):
    """A question to the engine, between two steps; its answer is a Reply."""

    call_id: str
    question: Question


# From the engine.


class Progress(NamedTuple):
    """What is being done at the start; see StartProgress."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Started:
    """The engine has succeeded in a step."""

    plan: Plan
    directory: Path
    """The checkpoint's."""
    default_params: SamplingParams
    vocab_size: int
    """The model's, which may be padded."""
    vision: VisionSpec | None
    """Its encoder of images, if it has one."""


class Reply(NamedTuple):
    """The answer to a Submit (whose id it bears), a Compile or an Ask: a result, or the error that was raised."""

    call_id: str
    result: Any = None
    error: Exception | None = None


class Gained(NamedTuple):
    """What requests have gained since the last time."""

    deltas: Sequence[OutputDelta]


class Log(NamedTuple):
    """A line for the server's log."""

    record: LogRecord


class Failed(NamedTuple):
    """The last message: why the engine cannot start, or not go on."""

    error: Exception


@dataclass(frozen=True)
class Observation:
    """The engine's counts between two steps, so that all agree with each other."""

    stats: dict[str, Any]
    """See `Engine.stats`."""
    meter: Meter
