"""Limits of the first rank's waits for another one."""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection

from ostinato.errors import RankError

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
        f"another of the {ranks} ranks of this engine lives, and has not answered for {RANK_TIMEOUT:g} s; start the engine "
        "again"
    )
