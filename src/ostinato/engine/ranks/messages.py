"""What the first rank and another one say to each other, but for the memory of blocks and slots (`memory`)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ostinato.engine.run.inputs import Drafts
from ostinato.errors import OstinatoError
from ostinato.plan.cuts import Rank
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.schedule.batch import Batch


@dataclass(frozen=True)
class Start:
    """What a rank is started with."""

    plan: Plan
    spec: ModelSpec
    directory: Path | None
    draft_directory: Path | None
    rank: Rank
    meeting: Path
    """A file for a process group to meet by."""
    memory: int | None = None
    """The file descriptor of the memory that ranks share in place of that."""


@dataclass(frozen=True)
class Ready:
    """A rank has come so far."""


@dataclass(frozen=True)
class Failed:
    """A rank ends."""

    message: str

    @classmethod
    def by(cls, error: BaseException) -> Failed:
        """This process's end."""
        text = error.message if isinstance(error, OstinatoError) else repr(error)
        return cls(f"(process {os.getpid()}) failed: {text}")


@dataclass(frozen=True)
class Step:
    """A step to be computed."""

    batch: Batch
    drafts: Drafts

    @classmethod
    def of(cls, batch: Batch, drafts: Drafts) -> Step:
        """What the other ranks need of one: not what its rows sample with, nor which are new."""
        rows = tuple(row._replace(payload=None) for row in batch.rows)
        return cls(replace(batch, rows=rows, first=()), drafts)


@dataclass(frozen=True)
class Logits:
    """The logits at some positions of the last step are wanted."""

    positions: list[int]


@dataclass(frozen=True)
class Chosen:
    """The drafts that were chosen of the logits that all have just computed, by the places of these."""

    tokens: dict[int, int]
