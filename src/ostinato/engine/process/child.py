"""An engine's process: `python -m ostinato.engine.process.child FD` serves whoever is at that socket's other end."""

from __future__ import annotations

import copy
import logging
import os
import signal
import socket
import sys

from ostinato.engine.engine import Engine
from ostinato.engine.process.channel import Channel
from ostinato.engine.process.failures import portable
from ostinato.engine.process.garbage import keep_for_good
from ostinato.engine.process.host import Host
from ostinato.engine.process.messages import Failed, Log, Progress, Start, Started
from ostinato.sample.params import SamplingParams


def main(descriptor: int) -> None:
    """Makes the engine that the first message asks for, and runs it until the server is gone or it fails."""
    # They are the server's, though a terminal and a supervisor send them to all of its processes.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    channel.end_with_peer()
    try:
        start = _first_message(channel)
        _send_logs(channel, start.log_level)
        engine = start.make(start.config, lambda what, done, total: channel.send(Progress(what, done, total)))
        _first_step(engine)
        spec = engine.spec
        channel.send(Started(engine.plan, engine.directory, engine.default_params(), spec.vocab_size, spec.vision))
        keep_for_good()
        Host(engine, channel).run()
    except BaseException as error:
        if not isinstance(error, EOFError | ConnectionError):
            channel.send(Failed(portable(error)))


def _first_message(channel: Channel) -> Start:
    messages: list[Start] = []
    while not messages:
        messages += channel.receive(None)
    [start] = messages
    return start


def _first_step(engine: Engine) -> None:
    """One token behind one token: shows that the model runs. Raises what went wrong."""
    token = engine.tokenizer.bos_token_id
    engine.add([0 if token is None else token], SamplingParams(temperature=0, max_tokens=1), cache_salt="first step")
    while engine.has_unfinished:
        for output in engine.step():
            if output.error is not None:
                raise output.error


class _ToServer(logging.Handler):
    """Sends what is logged to the server, whose handlers write it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        told = copy.copy(record)
        told.msg, told.args = record.getMessage(), None
        if record.exc_info:
            told.exc_text, told.exc_info = logging.Formatter().formatException(record.exc_info), None
        self._channel.send(Log(told))


def _send_logs(channel: Channel, level: int) -> None:
    logger = logging.getLogger("ostinato")
    logger.setLevel(level)
    logger.addHandler(_ToServer(channel))
    logger.propagate = False


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Threads that compile grammars are not waited for.
    os._exit(1)
