"""How commands end that cannot go on: outputs that take nothing, and Ctrl-C at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.output import check_room
from tests.support.patience import PATIENCE

SMALL = ["--max-num-seqs", "2", "--cache-memory", "16MiB", "--threads", "1", "--max-model-len", "128"]
GENERATE = ["generate", "hello", "--max-tokens", "40", "--ignore-eos", *SMALL]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="Linux's file that is always full")


def run(*arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ostinato", *arguments]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(command, env=ENVIRONMENT, text=True, check=False, timeout=PATIENCE, **streams)


# Outputs that take nothing


@needs_full
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "nope", "--json"], ["serve", "--print-config"], GENERATE])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        ended = run(*arguments, stdout=full)
    assert ended.returncode == 1
    assert ended.stderr == "the output could not be written: No space left on device\n"


@needs_full
@pytest.mark.parametrize(("arguments", "status"), [(["plan", "demo", "--measure-nothing"], 2), (GENERATE, 0)])
def test_remarks_on_a_full_disk_are_lost_and_nothing_else_is(arguments: list[str], status: int) -> None:
    with FULL.open("w") as full:
        ended = run(*arguments, stdout=subprocess.PIPE, stderr=full)
    assert ended.returncode == status
    assert bool(ended.stdout.strip()) == (status == 0)


@needs_full
@pytest.mark.slow
def test_a_file_that_cannot_be_written_later_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    for path, why in (
        (FULL, "No space left"),
        (tmp_path / "no" / "file", "make its folder first: mkdir -p"),
        (tmp_path, "Is a directory"),
    ):
        ended = run(*GENERATE, "--save-traffic", str(path), stdout=subprocess.PIPE)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert why in ended.stderr
    check_room(kept, "the traffic")
    assert kept.read_text() == "{}"
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("arguments", [["plan", "demo"], ["plan", "nope", "--json"], ["inspect", "demo"], GENERATE])
def test_a_reader_that_has_left_ends_a_command_in_silence(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = run(*arguments, stdout=writer)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


# Streams that take or give no Unicode

NARROW = [
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "utf-8:strict"},
]
PRINT_AN_ANSWER = r"""
from ostinato.cli.main import open_streams
from ostinato.cli.output import print_pieces
def pieces():
    yield from ("na\xefve ", "\u65e5\ud800")
open_streams()
print_pieces(pieces())
"""


@pytest.mark.parametrize("environment", NARROW, ids=str)
def test_characters_that_stdout_cannot_take_are_replaced(environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", PRINT_AN_ANSWER]
    ended = subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    is_utf8 = "utf-8" in environment.get("PYTHONIOENCODING", "")
    assert ended.stdout == ("na\xefve \u65e5?\n".encode() if is_utf8 else b"na?ve ??\n")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["plan", "demo"], 0),
        (["plan", b"\xff"], 2),
        (["plan", b"\xff", "--json"], 2),
        (["inspect", b"/\xc3\xa9"], 2),
        (["plan", "demo", b"--\xff"], 2),
    ],
    ids=str,
)
def test_commands_with_any_bytes_for_arguments_end_without_a_traceback(
    arguments: list[str | bytes], status: int
) -> None:
    command = [sys.executable, "-m", "ostinato", *arguments]
    ended = subprocess.run(command, env=ENVIRONMENT | NARROW[1], capture_output=True, check=False)
    assert ended.returncode == status
    assert b"Traceback" not in ended.stderr


def test_bytes_of_stdin_that_are_no_text_are_refused_as_a_prompt() -> None:
    command = [sys.executable, "-m", "ostinato", "generate", "-", *SMALL]
    ended = subprocess.run(command, env=ENVIRONMENT, input=b"a\xff", capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"not text that can be encoded in UTF-8" in ended.stderr


@pytest.mark.parametrize("closed", [[0], [1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize(("arguments", "status"), [(["plan", "demo"], 0), (["plan", "nope"], 2), (["chat", *SMALL], 0)])
def test_streams_that_are_closed_are_no_streams(closed: list[int], arguments: list[str], status: int) -> None:
    redirections = " ".join(f"{number}>&-" if number else "0<&-" for number in closed)
    command = f"{sys.executable} -m ostinato {' '.join(arguments)} {redirections}"
    ended = subprocess.run(
        ["bash", "-c", command], env=ENVIRONMENT, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    assert ended.returncode == status, ended.stderr
    assert b"Traceback" not in ended.stderr


# Ctrl-C

INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
left = {calls}
def count(frame, event, argument):
    global left
    left -= 1
    if left == 0:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)
sys.setprofile(count)
sys.argv[1:] = {arguments!r}
from ostinato.__main__ import main
main()
"""
"""A command that gets the signal at a certain call of a function, so that the moment is the same on any machine."""
LONG = {
    "plan": ["plan", "demo", "--max-num-seqs", "300"],
    "inspect": ["inspect", "demo"],
    "generate": GENERATE,
    "chat": ["chat", *SMALL],
    "eval": ["eval", "--num-problems", "4", *SMALL],
    "verify": ["verify", "demo", "--quick", "--num-prompts", "0", "--max-tokens", "2"],
    "latency": ["bench", "latency", "demo", "--batch-sizes", "1", "--rounds", "1", "--output-len", "4"],
    "serve": ["serve", "demo", "--port", "0", *SMALL],
}
FEWEST, MOST = 1_000, 4_000_000
"""Calls before the signal. The imports take some hundred thousand."""
MOMENTS = 1
"""Of each command. They are drawn the same in every run; more of them find more."""


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("name", LONG)
def test_ctrl_c_at_any_moment_ends_a_command_without_a_traceback(name: str, moment: int) -> None:
    draw = random.Random(f"{name} {moment}")
    calls = int(FEWEST * (MOST / FEWEST) ** draw.random())
    if name == "serve":
        calls = min(calls, 300_000)  # it would serve for ever
    code = INTERRUPTED.format(calls=calls, arguments=LONG[name])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT,
        input="hi\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert "Traceback" not in ended.stderr, (calls, ended.stderr)
    assert "Error" not in ended.stderr, (calls, ended.stderr)
    # What was over before has its own status; before the command's modules are there, the signal itself ends it.
    assert ended.returncode in (130, -signal.SIGINT, 0), (calls, ended.stderr)
