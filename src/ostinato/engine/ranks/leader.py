"""The first rank's side: it starts the others, sends them each step, and ends with them."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from ostinato.engine.process.environment import child_environment
from ostinato.engine.process.peer import start_kept
from ostinato.engine.ranks.group import Group
from ostinato.engine.run.inputs import Drafts
from ostinato.errors import OstinatoError, RankError, Remedy
from ostinato.plan.cuts import Rank
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.sample.sampler import Draw, choose
from ostinato.sample.state import Pick
from ostinato.schedule.batch import Batch

T = TypeVar("T")

_GLANCE = 0.1
"""Seconds between looks whether all ranks live while they come together."""
_PATIENCE = 5.0
"""Seconds that a rank has to end after its connection has; it is killed then."""


@dataclass(frozen=True)
class Start:
    """What a rank is started with."""

    plan: Plan
    spec: ModelSpec
    directory: Path | None
    draft_directory: Path | None
    rank: Rank
    meeting: Path


@dataclass(frozen=True)
class Ready:
    """A rank has come so far."""


@dataclass(frozen=True)
class Failed:
    """A rank ends."""

    message: str


@dataclass(frozen=True)
class Step:
    """A step to be computed."""

    batch: Batch
    drafts: Drafts


@dataclass(frozen=True)
class Logits:
    """The logits at some positions of the last step are wanted."""

    positions: list[int]


@dataclass(frozen=True)
class Chosen:
    """The drafts that were chosen of the logits that all have just computed, by the places of these."""

    tokens: dict[int, int]


class Leader:
    """The first rank's side of a `Together`. It owns the other ranks of a model, each a process of this machine. They
    end with their connection, and so with this process."""

    def __init__(self, plan: Plan, spec: ModelSpec, directory: Path | None, draft_directory: Path | None) -> None:
        """Starts them; they load their weights meanwhile. RankError if one does not come as far."""
        self._of = plan.settings.tensor_parallel_size
        self._error: RankError | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            with tempfile.TemporaryDirectory(prefix="ostinato-ranks-") as folder:
                meeting = Path(folder) / "meeting"
                for number in range(1, self._of):
                    self._spawn(Start(plan, spec, directory, draft_directory, Rank(number, self._of), meeting))
                self.wait_ready()
                self.group = self._formed(meeting, torch.device(plan.settings.device), plan.settings.deterministic)
                self.wait_ready()
        except BaseException:
            self.close(at_once=True)
            raise

    def _spawn(self, start: Start) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "ostinato.engine.ranks.worker", str(theirs.fileno())]
        with theirs:
            # In a session of its own, Ctrl-C does not reach it: it ends with its connection.
            process = start_kept(command, child_environment(), [theirs.fileno()])
        self._processes.append(process)
        self._connections.append(ours)
        with contextlib.suppress(OSError):  # it has died, which is noticed when it is waited for
            ours.send(start)

    def _formed(self, meeting: Path, device: torch.device, in_order: bool) -> Group:
        """The group, once all ranks are there. RankError if one ends meanwhile, for which the others would wait."""
        forming: Future[Group] = Future()

        def form() -> None:
            try:
                forming.set_result(Group(Rank(0, self._of), meeting, device, in_order))
            except InvalidStateError:  # it came too late
                return
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):
                    forming.set_exception(error)

        # Nothing can end its waiting, so nobody waits for this thread.
        threading.Thread(target=form, name="ostinato-ranks", daemon=True).start()
        while not forming.done():
            wait([forming], _GLANCE)
            if any(process.poll() is not None for process in self._processes):
                forming.cancel()
        try:
            return forming.result()
        except (CancelledError, RuntimeError) as error:
            message = f"the {self._of} ranks of this engine did not come together ({error!r}); start it again"
            raise self._who_failed() or RankError(message) from error

    @property
    def pids(self) -> list[int]:
        """Of the other ranks, in their order."""
        return [process.pid for process in self._processes]

    def wait_ready(self) -> None:
        """Waits for a word of each. RankError if one has ended or failed instead."""
        for number in range(1, self._of):
            try:
                said = self._connections[number - 1].recv()
            except (EOFError, OSError):
                raise self._failed(number, None) from None
            if isinstance(said, Failed):
                raise self._failed(number, said.message)

    def check(self) -> None:
        """RankError if one has ended since the last step."""
        for number, process in enumerate(self._processes, 1):
            if self._error is None and process.poll() is not None:
                self._failed(number, None)
        if self._error is not None:
            raise self._error

    def step(self, batch: Batch, drafts: Drafts, compute: Callable[[], T]) -> T:
        """`compute`, while all other ranks compute their parts of the same step. Errors as `_together`."""
        return self._together(Step(_without_sampling(batch), drafts), compute)

    def logits(self, positions: Sequence[int], compute: Callable[[], T]) -> T:
        """`compute`, while all other ranks compute their parts of the logits. Errors as `_together`."""
        return self._together(Logits(list(positions)), compute)

    def choose(self, logits: torch.Tensor, picks: Sequence[Pick], draw: Draw) -> dict[int, int]:
        """What is chosen here, which the other ranks wait for. RankError if one is gone."""
        tokens = choose(logits, picks, draw)
        self._send(Chosen(tokens))
        return tokens

    def _together(self, message: Step | Logits, compute: Callable[[], T]) -> T:
        """`compute`, while all other ranks do what the message says. RankError, now and ever after, if one is gone, or
        does not come; whatever else ends the computation here ends all ranks too, for they would wait for this one."""
        if self._error is not None:
            raise self._error
        try:
            self._send(message)
            return compute()
        except RankError as error:
            self._error = self._error or error
            self.close(at_once=True)
            raise
        except BaseException as error:
            # What interrupts is no rank's failure, and does not wait for their words.
            found = self._who_failed() if isinstance(error, Exception) else None
            found = found or RankError(
                f"a step failed on the first of {self._of} ranks, and the others cannot go on without it: {error!r}; "
                "start the engine again",
            )
            self._error = found
            self.close(at_once=True)
            if isinstance(error, Exception):
                raise found from error
            raise

    def _send(self, message: Step | Logits | Chosen) -> None:
        # As bytes: pipes of multiprocessing would pass an image's tensor as a descriptor, which only children can take.
        packed = pickle.dumps(message)
        for number, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(packed)
            except OSError:
                raise self._failed(number, None) from None

    def close(self, at_once: bool = False) -> None:
        """Ends the other ranks: between two steps when they see it, `at_once` also where they wait for this one."""
        if self._error is None:
            self._error = RankError(f"the {self._of} ranks of this engine have ended; start it again")
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0 if at_once else _PATIENCE)
                continue
            process.kill()
            process.wait()

    def _who_failed(self) -> RankError | None:
        """The first rank that has told why it ends, or else one that has ended."""
        ended = None
        for number, connection in enumerate(self._connections, 1):
            try:
                # Those that a dead rank's neighbours tell of come later than its own end.
                while connection.poll(0.5):
                    said = connection.recv()
                    if isinstance(said, Failed):
                        return self._failed(number, said.message)
            except (EOFError, OSError):
                ended = ended or number
        return None if ended is None else self._failed(ended, None)

    def _failed(self, number: int, message: str | None) -> RankError:
        how = message or self._status(number)
        self._error = RankError(
            f"rank {number} of {self._of} ranks {how}; the engine cannot go on without it, start it again",
            [Remedy("tensor_parallel_size", 1)],
        )
        return self._error

    def _status(self, number: int) -> str:
        try:
            status = self._processes[number - 1].wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"(process {self._processes[number - 1].pid}) ended " + (
            f"by signal {-status}" if status < 0 else f"with status {status}"
        )


def _without_sampling(batch: Batch) -> Batch:
    """What the other ranks need of it: not what rows sample with."""
    return Batch(
        rows=tuple(row._replace(payload=None) for row in batch.rows),
        num_decode_rows=batch.num_decode_rows,
        num_drafts=batch.num_drafts,
        encode=batch.encode,
    )


def told(error: BaseException) -> str:
    """An error in a message to the first rank."""
    text = error.message if isinstance(error, OstinatoError) else repr(error)
    return f"(process {os.getpid()}) failed: {text}"
