"""Output that nobody reads blocks nobody."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ostinato.observe import output_pump
from ostinato.observe.output_pump import OutputPump
from tests.support.patience import PATIENCE

LINE = b"x" * 1023 + b"\n"


@contextlib.contextmanager
def unread() -> Iterator[tuple[int, int]]:
    """A pipe: the end that nobody reads yet, and the one that is written to."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        for each in (reading, writing):
            with contextlib.suppress(OSError):
                os.close(each)


def read_all(reading: int) -> tuple[threading.Thread, list[bytes]]:
    got: list[bytes] = []

    def read() -> None:
        while data := os.read(reading, 2**16):
            got.append(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, got


def test_what_nobody_reads_is_dropped_and_counted_and_the_rest_comes_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with unread() as (reading, writing):
        pump = OutputPump(writing)
        code = f"import sys; sys.stdout.buffer.write({LINE!r} * 1000)"
        subprocess.run([sys.executable, "-c", code], stdout=writing, check=True)  # a child's output counts too
        for _ in range(1000):
            os.write(writing, LINE)  # which would block where it is not taken
        assert pump.dropped > 500
        thread, got = read_all(reading)
        with caplog.at_level("WARNING", "ostinato.serve"):
            pump.close()
        os.write(writing, b"after")
        os.close(writing)
        thread.join(PATIENCE)
    whole = b"".join(got)
    assert whole == LINE * (2000 - pump.dropped) + b"after"
    assert f"{pump.dropped} lines were dropped here" in caplog.text


def test_the_end_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_pump, "FLUSH_SECONDS", 0.05)
    with unread() as (_, writing):
        pump = OutputPump(writing)
        os.write(writing, LINE * 200)
        pump.close()
        for _ in range(1000):
            os.write(writing, LINE)  # goes nowhere


def test_a_reader_that_has_ended_is_no_error() -> None:
    with unread() as (reading, writing):
        pump = OutputPump(writing)
        os.close(reading)
        os.write(writing, LINE)
        pump.close()
        assert pump.dropped == 1


def test_pipes_get_a_pump_and_files_do_not() -> None:
    code = (
        "import os, sys; from ostinato.observe.output_pump import unblocked_output as u; before = os.fstat(2).st_ino\n"
        "with u() as dropped: print(dropped(), os.fstat(1).st_mode >> 12, os.fstat(2).st_ino != before, flush=True)\n"
        "print(os.fstat(2).st_ino == before)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert told.stdout.decode().split() == ["0", "1", "True", "True"]
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    assert told.stdout.decode().split() == ["0", "1", "False", "True"]
