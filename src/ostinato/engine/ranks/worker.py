"""The process of a rank that does not lead: it computes its part of each step that the first rank sends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from multiprocessing.connection import Connection

import torch

from ostinato.engine.process.peer import end_with_peer
from ostinato.engine.ranks.group import Group
from ostinato.engine.ranks.leader import Failed, Ready, Start, Step, told
from ostinato.engine.run.runner import Runner


def main(fileno: int) -> None:
    """Serves the connection at a file descriptor until it ends."""
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
    group = Group(start.rank, start.meeting, device)
    connection.send(Ready())
    runner = Runner(start.plan, start.spec, start.directory, group=group)
    connection.send(Ready())
    if start.plan.settings.capture == "startup":
        runner.capture()
    while True:
        step: Step = connection.recv()
        with torch.inference_mode():
            runner.forward(step.batch, step.drafts)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Does not wait for the threads of a group whose other ranks may have died.
    os._exit(1)
