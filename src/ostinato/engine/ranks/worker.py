"""The process of a rank that does not lead: it computes its part of each step that the first rank sends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from ostinato.engine.process.peer import end_with_peer, end_with_starter
from ostinato.engine.ranks.group import Group
from ostinato.engine.ranks.leader import Chosen, Failed, Logits, Ready, Start, Step, told
from ostinato.engine.run.runner import Runner
from ostinato.engine.run.together import ForItself
from ostinato.sample.sampler import Draw
from ostinato.sample.state import Pick


class Following(ForItself):
    """Another rank's side of a `Together`: it goes on with what the first one has chosen."""

    def __init__(self, group: Group, connection: Connection) -> None:
        super().__init__(group)
        self._connection = connection

    def choose(self, _logits: torch.Tensor, _picks: Sequence[Pick], _draw: Draw) -> dict[int, int]:
        chosen: Chosen = self._connection.recv()
        return chosen.tokens


def main(fileno: int) -> None:
    """Serves the connection at a file descriptor until it ends."""
    end_with_starter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fileno)
    # Also while it loads weights, or waits for a rank that will not come.
    end_with_peer(connection)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(Failed(told(error)))


def _serve(connection: Connection) -> None:
    start: Start = connection.recv()
    device = torch.device(start.plan.settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(start.rank.number)
    connection.send(Ready())
    group = Group(start.rank, start.meeting, device, start.plan.settings.deterministic)
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
    while True:
        message: Step | Logits = connection.recv()
        with torch.inference_mode():
            if isinstance(message, Step):
                _, hidden = runner.compute(message.batch, message.drafts)
            else:
                assert hidden is not None, "logits are a step's"
                runner.logits(hidden, message.positions)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Does not wait for the threads of a group whose other ranks may have died.
    os._exit(1)
