"""Messages between the first rank and another one, except those for the memory of blocks and slots (`memory`)."""

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
class RankStart:
    """Arguments that a rank is started with."""

    plan: Plan
    spec: ModelSpec
    directory: Path | None
    draft_directory: Path | None
    rank: Rank
    rendezvous_file: Path
    """File through which the ranks of a process group find each other."""
    shared_memory_fd: int | None = None
    """File descriptor of the shared memory that replaces the process group, if there is one."""


@dataclass(frozen=True)
class RankReady:
    """Note that a rank has finished a stage of its start."""


@dataclass(frozen=True)
class RankFailed:
    """Last message of a rank that ends with an error."""

    message: str

    @classmethod
    def by(cls, error: BaseException) -> RankFailed:
        """Return the message of this process, which `error` ends."""
        text = error.message if isinstance(error, OstinatoError) else repr(error)
        return cls(f"(process {os.getpid()}) failed: {text}")


@dataclass(frozen=True)
class RankStep:
    """A step to be computed."""

    batch: Batch
    drafts: Drafts

    @classmethod
    def of(cls, batch: Batch, drafts: Drafts) -> RankStep:
        """Return the step in the form that is sent: without sampling states and without the list of new requests."""
        rows = tuple(row._replace(sampling_state=None) for row in batch.rows)
        return cls(replace(batch, rows=rows, new_request_ids=()), drafts)


@dataclass(frozen=True)
class Logits:
    """A request for the logits at some positions of the last step."""

    positions: list[int]


@dataclass(frozen=True)
class ChosenDrafts:
    """Drafts sampled from the logits that all ranks have just computed, by index of the logits."""

    tokens: dict[int, int]
