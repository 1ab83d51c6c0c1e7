"""The first rank's side: it starts the other ranks, sends them each step, and ends with them."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ostinato.child_process import child_environment, start_bound_process
from ostinato.distributed import rank_messages, shared_memory
from ostinato.distributed.rank_messages import ChosenDrafts, RankFailed, RankStart, RankStep, ReadMemory, WriteMemory
from ostinato.distributed.shared_memory import SharedMemoryGroup
from ostinato.errors import RankError, Remedy
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.tensor_parallel import Rank
from ostinato.runner.inputs import Drafts
from ostinato.runner.model_runner import TensorParallel
from ostinato.sampling.sampler import SampleKernel
from ostinato.sampling.state import PendingToken
from ostinato.scheduler.batch import Batch

if TYPE_CHECKING:
    from ostinato.distributed.process_group import RankProcessGroup

_POLL_SECONDS = 0.1
"""Seconds between looks whether all ranks are alive while they connect."""
_PATIENCE = 5.0
"""Seconds that a rank has to end after its connection has ended; then it is killed."""


class LeaderRank(TensorParallel):
    """The first rank's side of a `TensorParallel`. It owns the model's other ranks, each a process of this machine.

    They end with their connection, and so with this process.
    """

    def __init__(self, plan: Plan, spec: ModelSpec, directory: Path | None, draft_directory: Path | None) -> None:
        """Start the other ranks, which load their weights meanwhile. RankError if one ends before it is connected."""
        super().__init__()
        self._world_size = plan.settings.tensor_parallel_size
        self.group: RankProcessGroup | SharedMemoryGroup
        self._error: RankError | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        device = torch.device(plan.settings.device)
        memory = (
            shared_memory.create_shared_memory(self._world_size)
            if device.type == "cpu" and shared_memory.has_shared_memory()
            else None
        )
        try:
            with tempfile.TemporaryDirectory(prefix="ostinato-ranks-") as folder:
                meeting = Path(folder) / "meeting"
                for number in range(1, self._world_size):
                    self._spawn(
                        RankStart(
                            plan, spec, directory, draft_directory, Rank(number, self._world_size), meeting, memory
                        )
                    )
                self.wait_ready()
                if memory is None:
                    self.group = self._form_group(meeting, device, plan.settings.deterministic)
                else:
                    self.group = SharedMemoryGroup(Rank(0, self._world_size), memory)
                    self.group.check = self._check_alive
                self.wait_ready()
        except BaseException:
            self.close(at_once=True)
            raise
        finally:
            if memory is not None:
                os.close(memory)

    def _spawn(self, start: RankStart) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "ostinato.distributed.rank_worker", str(theirs.fileno())]
        inherited = [theirs.fileno(), *([] if start.shared_memory_fd is None else [start.shared_memory_fd])]
        with theirs:
            # In a new session, Ctrl-C does not reach the process: it ends with its connection.
            self._processes.append(start_bound_process(command, child_environment(), inherited))
        rank_messages.set_send_timeout(ours)
        self._connections.append(ours)
        with contextlib.suppress(OSError):  # the process has died, which the next wait for it notices
            ours.send(start)

    def _check_alive(self) -> None:
        """Raise RuntimeError if a rank has ended."""
        if any(process.poll() is not None for process in self._processes):
            raise RuntimeError("a rank has ended")

    def _form_group(self, meeting: Path, device: torch.device, in_order: bool) -> RankProcessGroup:
        """Return the group once all ranks are there. RankError if one ends meanwhile: others would wait for it."""
        from ostinato.distributed.process_group import (
            RankProcessGroup,  # imports torch.distributed, in a part of a second
        )

        forming: Future[RankProcessGroup] = Future()

        def form() -> None:
            try:
                forming.set_result(RankProcessGroup(Rank(0, self._world_size), meeting, device, in_order))
            except InvalidStateError:  # the wait was cancelled before
                return
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):
                    forming.set_exception(error)

        # Nothing can end the thread's wait, so it is a daemon and never joined.
        threading.Thread(target=form, name="ostinato-ranks", daemon=True).start()
        while not forming.done():
            wait([forming], _POLL_SECONDS)
            try:
                self._check_alive()
            except RuntimeError:
                forming.cancel()
        try:
            return forming.result()
        except (CancelledError, RuntimeError) as error:
            message = f"the {self._world_size} ranks of this engine did not come together ({error!r}); start it again"
            raise self._find_failed_rank() or RankError(message) from error

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks, in their order."""
        return [process.pid for process in self._processes]

    def wait_ready(self) -> None:
        """Wait for a message from each rank. RankError if one has ended or failed instead."""
        for number in range(1, self._world_size):
            try:
                said = self._connections[number - 1].recv()
            except (EOFError, OSError):
                raise self._failed(number, None) from None
            if isinstance(said, RankFailed):
                raise self._failed(number, said.message)

    def check(self) -> None:
        """Raise RankError if a rank has ended since the last step."""
        for number, process in enumerate(self._processes, 1):
            if self._error is None and process.poll() is not None:
                self._failed(number, None)
        if self._error is not None:
            raise self._error

    def step(self, batch: Batch, drafts: Drafts) -> AbstractContextManager[None]:
        """Return the context of a step, which all other ranks compute too. Errors as `_collective`."""
        return self._collective(RankStep.of(batch, drafts))

    def logits(self) -> AbstractContextManager[None]:
        """Return the context of a chunk of the last step's logits. Errors as `_collective`."""
        return self._collective()

    def read(self, asked: ReadMemory) -> list[bytes]:
        """Return the other ranks' parts of a block or a slot. Errors as `_collective`."""
        with self._collective(asked):
            return [self._receive(number) for number in range(1, self._world_size)]

    def write(self, parts: Sequence[WriteMemory]) -> None:
        """Send each of the other ranks its part of a block or a slot. Errors as `_collective`."""
        with self._collective():
            for number, part in enumerate(parts, 1):
                self._send_bytes(number, pickle.dumps(part))

    def select_drafts(
        self, logits: torch.Tensor, pending_tokens: Sequence[PendingToken], kernel: SampleKernel
    ) -> dict[int, int]:
        """Sample draft tokens here, and send them to the other ranks, which wait for them. RankError if one is gone."""
        tokens = self.draft_selector(logits, pending_tokens, kernel)
        self._send(ChosenDrafts(tokens))
        return tokens

    @contextmanager
    def _collective(self, message: RankStep | ReadMemory | None = None) -> Iterator[None]:
        """Send `message`, if there is one, and do this rank's part inside the context while all others do theirs.

        RankError, now and in all later calls, if a rank is gone or does not come. Any other error that ends the
        computation here also ends all ranks, since they would wait for this one.
        """
        if self._error is not None:
            raise self._error
        try:
            if message is not None:
                self._send(message)
            yield
        except RankError as error:
            self._error = self._error or error
            self.close(at_once=True)
            raise
        except BaseException as error:
            # An interrupt is no rank's failure, so the ranks' reasons are not waited for.
            found = self._find_failed_rank() if isinstance(error, Exception) else None
            found = found or RankError(
                f"the first of {self._world_size} ranks failed, and the others cannot go on without it: {error!r}; "
                "start the engine again"
            )
            self._error = found
            self.close(at_once=True)
            if isinstance(error, Exception):
                raise found from error
            raise

    def _send(self, message: RankStep | ChosenDrafts | ReadMemory) -> None:
        # Pickled here: multiprocessing's pipes would pass an image's tensor as a descriptor, for children only.
        packed = pickle.dumps(message)
        for number in range(1, self._world_size):
            self._send_bytes(number, packed)

    def _send_bytes(self, number: int, packed: bytes) -> None:
        try:
            self._connections[number - 1].send_bytes(packed)
        except BlockingIOError:
            raise rank_messages.rank_timeout_error(self._world_size) from None
        except OSError:
            raise self._failed(number, None) from None

    def _receive(self, number: int) -> bytes:
        """Return the bytes that a rank was asked for. RankError if it ends instead, or lives and does not answer."""
        connection, end = self._connections[number - 1], time.monotonic() + rank_messages.RANK_TIMEOUT
        try:
            while not connection.poll(_POLL_SECONDS):
                if time.monotonic() > end:
                    raise rank_messages.rank_timeout_error(self._world_size)
            said = connection.recv()
        except (EOFError, OSError):
            raise self._failed(number, None) from None
        if isinstance(said, RankFailed):
            raise self._failed(number, said.message)
        contents: bytes = said
        return contents

    def close(self, at_once: bool = False) -> None:
        """End the other ranks: between two steps, or with `at_once` also while they wait for this one."""
        if self._error is None:
            self._error = RankError(f"the {self._world_size} ranks of this engine have ended; start it again")
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0 if at_once else _PATIENCE)
                continue
            process.kill()
            process.wait()

    def _find_failed_rank(self) -> RankError | None:
        """Return the error of the first rank that has sent a reason, else of one that has ended; None without any."""
        ended = None
        for number, connection in enumerate(self._connections, 1):
            try:
                # A dead rank's neighbours report their errors later than it ends.
                while connection.poll(0.5):
                    said = connection.recv()
                    if isinstance(said, RankFailed):
                        return self._failed(number, said.message)
            except (EOFError, OSError):
                ended = ended or number
        return None if ended is None else self._failed(ended, None)

    def _failed(self, number: int, message: str | None) -> RankError:
        how = message or self._status(number)
        self._error = RankError(
            f"rank {number} of {self._world_size} ranks {how}; the engine cannot go on without it, start it again",
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
