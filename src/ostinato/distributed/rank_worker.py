"""Process of a follower rank, which computes its part of each step that the first rank sends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch

from ostinato.child_process import die_with_parent, exit_with_peer
from ostinato.distributed.rank_messages import (
    ChosenDrafts,
    RankFailed,
    RankReady,
    RankStart,
    RankStep,
    ReadMemory,
    WriteMemory,
)
from ostinato.distributed.shared_memory import SharedMemoryGroup
from ostinato.runner.cache_memory import LayerCacheMemory
from ostinato.runner.model_runner import ModelRunner, TensorParallel
from ostinato.sampling.sampler import SampleKernel
from ostinato.sampling.state import PendingToken

if TYPE_CHECKING:
    from ostinato.distributed.process_group import RankProcessGroup


class FollowerRank(TensorParallel):
    """A follower rank's side of a `TensorParallel`: it continues with the tokens that the first rank has sampled."""

    def __init__(self, group: RankProcessGroup | SharedMemoryGroup, connection: Connection) -> None:
        super().__init__(group)
        self._connection = connection

    def select_drafts(
        self, _logits: torch.Tensor, _picks: Sequence[PendingToken], _kernel: SampleKernel
    ) -> dict[int, int]:
        chosen: ChosenDrafts = self._connection.recv()
        return chosen.tokens


def main(fileno: int) -> None:
    """Serve the connection at a file descriptor until it ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fileno)
    # This works also while it loads weights, or waits for a rank that will not come.
    exit_with_peer(connection)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(RankFailed.by(error))


def _group(start: RankStart, device: torch.device) -> RankProcessGroup | SharedMemoryGroup:
    """Return this rank's connection with the others."""
    if start.shared_memory_fd is not None:
        group = SharedMemoryGroup(start.rank, start.shared_memory_fd)
        os.close(start.shared_memory_fd)
        return group
    from ostinato.distributed.process_group import RankProcessGroup  # imports torch.distributed, in a part of a second

    return RankProcessGroup(start.rank, start.rendezvous_file, device, start.plan.settings.deterministic)


def _serve(connection: Connection) -> None:
    start: RankStart = connection.recv()
    device = torch.device(start.plan.settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(start.rank.number)
    connection.send(RankReady())
    group = _group(start, device)
    connection.send(RankReady())
    runner = ModelRunner(
        start.plan,
        start.spec,
        start.directory,
        draft_directory=start.draft_directory,
        tensor_parallel=FollowerRank(group, connection),
    )
    connection.send(RankReady())
    if start.plan.settings.capture == "startup":
        runner.capture()
    memory = LayerCacheMemory(runner.layer_memory, start.plan.settings.block_size)
    while True:
        message: RankStep | ReadMemory | WriteMemory = connection.recv()
        match message:
            case RankStep(batch, drafts):
                with torch.inference_mode():
                    runner.execute_model(batch, drafts).logits.finish()
            case ReadMemory():
                connection.send(bytes(message.of(memory)))
            case WriteMemory():
                message.to(memory)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Exit without waiting for the threads of a group whose other ranks may have died.
    os._exit(1)
