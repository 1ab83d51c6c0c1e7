"""Messages between the first rank and another one, and the limits of the first rank's waits for it.

Messages about the memory of blocks and slots are in `memory`.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from ostinato.errors import OstinatoError, RankError
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.tensor_parallel import Rank
from ostinato.runner.inputs import Drafts
from ostinato.scheduler.batch import Batch

RANK_TIMEOUT = 60.0
"""Seconds that the first rank waits for a rank that lives and does not come.

One that has died is noticed sooner. All ranks compute the same at the same time, so none is that far behind the others.
"""


def set_send_timeout(connection: Connection) -> None:
    """Limit sends to `RANK_TIMEOUT` from now on: BlockingIOError if the other side reads nothing meanwhile."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        limit = struct.pack("ll", int(RANK_TIMEOUT), int(RANK_TIMEOUT % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def rank_timeout_error(ranks: int) -> RankError:
    """Return the error for a rank that the first rank has waited for long enough."""
    return RankError(
        f"another of the {ranks} ranks of this engine lives, and has not answered for {RANK_TIMEOUT:g} s; "
        "start the engine again"
    )


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
    """A step to be computed, with all chunks of its logits."""

    batch: Batch
    drafts: Drafts

    @classmethod
    def of(cls, batch: Batch, drafts: Drafts) -> RankStep:
        """Return the step in the form that is sent: without sampling states and without the list of new requests."""
        rows = tuple(row._replace(sampling_state=None) for row in batch.rows)
        return cls(replace(batch, rows=rows, new_request_ids=()), drafts)


@dataclass(frozen=True)
class ChosenDrafts:
    """Drafts sampled from the logits that all ranks have just computed, by index of the logits."""

    tokens: dict[int, int]
