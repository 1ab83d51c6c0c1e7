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

from ostinato.engine.process.peer import end_with_peer, end_with_starter
from ostinato.engine.ranks.memory import Read, Write
from ostinato.engine.ranks.messages import Chosen, Failed, Logits, Ready, Start, Step
from ostinato.engine.ranks.shared import SharedMemory
from ostinato.engine.run.cache_bytes import CacheBytes
from ostinato.engine.run.runner import Runner
from ostinato.engine.run.together import ForItself
from ostinato.sample.sampler import Draw
from ostinato.sample.state import Pick

if TYPE_CHECKING:
    from ostinato.engine.ranks.group import Group


class Following(ForItself):
    """A follower rank's side of a `Together`: it continues with the tokens that the first rank has sampled."""

    def __init__(self, group: Group | SharedMemory, connection: Connection) -> None:
        super().__init__(group)
        self._connection = connection

    def choose(self, _logits: torch.Tensor, _picks: Sequence[Pick], _draw: Draw) -> dict[int, int]:
        chosen: Chosen = self._connection.recv()
        return chosen.tokens


def main(fileno: int) -> None:
    """Serve the connection at a file descriptor until it ends."""
    end_with_starter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fileno)
    # This works also while it loads weights, or waits for a rank that will not come.
    end_with_peer(connection)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(Failed.by(error))


def _group(start: Start, device: torch.device) -> Group | SharedMemory:
    """Return this rank's connection with the others."""
    if start.memory is not None:
        group = SharedMemory(start.rank, start.memory)
        os.close(start.memory)
        return group
    from ostinato.engine.ranks.group import Group  # imports torch.distributed, in a part of a second

    return Group(start.rank, start.meeting, device, start.plan.settings.deterministic)


def _serve(connection: Connection) -> None:
    start: Start = connection.recv()
    device = torch.device(start.plan.settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(start.rank.number)
    connection.send(Ready())
    group = _group(start, device)
    connection.send(Ready())
    runner = Runner(
        start.plan,
        start.spec,
        start.directory,
        draft_directory=start.draft_directory,
        together=Following(group, connection),
    )
    connection.send(Ready())
    if start.plan.settings.capture == "startup":
        runner.capture()
    hidden: torch.Tensor | None = None
    memory = CacheBytes(runner.memory, start.plan.settings.block_size)
    while True:
        message: Step | Logits | Read | Write = connection.recv()
        if isinstance(message, Read | Write):
            if isinstance(message, Read):
                connection.send(bytes(message.of(memory)))
            else:
                message.to(memory)
            continue
        with torch.inference_mode():
            if isinstance(message, Step):
                _, hidden = runner.compute(message.batch, message.drafts)
            else:
                assert hidden is not None, "logits are a step's"
                runner.logits(hidden, message.positions)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Exit without waiting for the threads of a group whose other ranks may have died.
    os._exit(1)
