"""How long the first rank waits for another one."""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection

from ostinato.errors import RankError

PATIENCE = 60.0
"""Seconds that the first rank waits for one that lives and does not come. One that has died is noticed sooner. All
ranks compute the same at a time, so none is so far behind the others."""


def limit_sending(connection: Connection) -> None:
    """BlockingIOError, from now on, where the other side takes nothing for as long."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        limit = struct.pack("ll", int(PATIENCE), int(PATIENCE % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def does_not_answer(ranks: int) -> RankError:
    """Of one that the first rank has waited for long enough."""
    return RankError(
        f"another of the {ranks} ranks of this engine lives, and has not answered for {PATIENCE:g} s; start the engine "
        "again"
    )
