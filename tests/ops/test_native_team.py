"""The threads that run kernels: they meet, share work, fail and wait as one, in any process and beside any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ostinato.errors import ConfigError
from ostinato.ops.dispatch import load_extension
from ostinato.os_support import spin_turns
from tests.support.native_sets import SETS
from tests.support.patience import PATIENCE

ADAPTS = -1
WAITS = [ADAPTS, 0, 10]
"""Turns that threads spin: as long as fits the machine, none, and so few that some of them sleep."""


@pytest.fixture
def extension(isa: str) -> Iterator[Any]:
    loaded = load_extension(isa)
    yield loaded
    loaded.set_spin_turns(spin_turns(os.environ))


def meet_often(extension: Any, threads: int, times: int, seed: int = 0) -> int:
    """Returns in how many rounds a thread saw another in another round."""
    rounds, wrong = torch.zeros(threads, dtype=torch.int32), torch.zeros(threads, dtype=torch.int32)
    extension.meet_often(times, {"rounds": rounds, "wrong": wrong, "seed": seed}, threads)
    assert rounds.tolist() == [times] * threads
    return int(wrong.sum())


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("turns", WAITS)
@pytest.mark.parametrize("threads", [2, 1, 3, 5])
def test_no_thread_passes_a_barrier_before_all_are_there(extension: Any, threads: int, turns: int) -> None:
    extension.set_spin_turns(turns)
    assert meet_often(extension, threads, 500, turns) == 0


@pytest.mark.long
@pytest.mark.parametrize("isa", SETS[:1])
@pytest.mark.parametrize("turns", WAITS)
def test_a_million_barriers_lose_no_thread(extension: Any, turns: int) -> None:
    extension.set_spin_turns(turns)
    # Many regions, as the machine is looked at once in each.
    assert sum(meet_often(extension, 2, 1000, seed) for seed in range(500)) == 0


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("threads", [3, 1])
@pytest.mark.parametrize("items", [37, 0, 1, 4])
def test_every_item_of_a_loop_is_claimed_once(extension: Any, items: int, threads: int) -> None:
    claimed = torch.zeros(items, dtype=torch.int32)
    for _ in range(5):
        extension.claim_items(40, {"claimed": claimed}, threads)
    assert claimed.tolist() == [200] * items


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize(("rank", "threads"), [(1, 3), (0, 3), (2, 3), (0, 1)])
def test_what_one_thread_throws_is_the_callers_and_leaves_no_other_waiting(
    extension: Any, rank: int, threads: int
) -> None:
    for _ in range(20):
        with pytest.raises(RuntimeError, match=f"thread {rank} fails as asked"):
            extension.fail_in_thread(1, {"rank": rank}, threads)
        assert meet_often(extension, threads, 3) == 0


@pytest.mark.parametrize("isa", SETS)
def test_callers_at_once_have_threads_of_their_own(extension: Any) -> None:
    def call(number: int) -> int:
        threads = 1 + number % 3
        rounds, wrong = torch.zeros(threads, dtype=torch.int32), torch.zeros(threads, dtype=torch.int32)
        program = extension.Program()
        program.meet_often(200, {"rounds": rounds, "wrong": wrong, "seed": number})
        for _ in range(5):
            program.run(200, threads)  # releases the GIL
        return int(wrong.sum())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(12))) == [0] * 12


@pytest.mark.parametrize("isa", SETS[:1])
def test_a_call_without_a_number_of_threads_has_torchs(extension: Any) -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError, match="thread 2 fails"):
            extension.fail_in_thread(1, {"rank": 2})
    finally:
        torch.set_num_threads(usual)
    with pytest.raises(ValueError, match="threads are 1 or more"):
        extension.fail_in_thread(1, {"rank": 2}, -1)


PREPARED = """
import os, select, sys, torch
from ostinato.ops.dispatch import load_extension
extension = load_extension(sys.argv[1])

def meet(threads, times):
    rounds, wrong = torch.zeros(threads, dtype=torch.int32), torch.zeros(threads, dtype=torch.int32)
    extension.meet_often(times, {"rounds": rounds, "wrong": wrong, "seed": 5}, threads)
    return rounds.tolist() == [times] * threads and not wrong.any()
"""


def process(code: str, isa: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARED + code, isa]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("isa", SETS[:1])
@pytest.mark.slow
def test_a_process_that_was_forked_makes_threads_of_its_own(isa: str) -> None:
    code = """
assert meet(2, 100)
for _ in range(3):
    child = os.fork()
    if not child:
        os._exit(0 if meet(2, 100) and meet(3, 100) else 1)
    assert meet(2, 100)
    assert os.waitpid(child, 0)[1] == 0
"""
    forked = process(code, isa)
    forked.communicate(timeout=PATIENCE)
    assert forked.returncode == 0


@pytest.mark.parametrize("isa", SETS[:1])
@pytest.mark.parametrize("turns", WAITS)
@pytest.mark.slow
def test_threads_that_are_stopped_and_continued_at_any_moment_lose_no_wake_up(isa: str, turns: int) -> None:
    code = f"""
extension.set_spin_turns({turns})
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    assert meet(2, 300) and meet(3, 300)
"""
    stopped = process(code, isa)
    assert stopped.stdout is not None
    assert stopped.stdin is not None
    assert stopped.stdout.readline() == "ready\n"
    for _ in range(20):
        stopped.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
        stopped.send_signal(signal.SIGCONT)
    stopped.communicate("end\n", timeout=PATIENCE)
    assert stopped.returncode == 0


@pytest.mark.parametrize(
    ("environment", "turns"),
    [
        ({}, ADAPTS),
        ({"GOMP_SPINCOUNT": "300"}, 300),
        ({"GOMP_SPINCOUNT": "30 K"}, 30_000),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, 0),
        ({"OMP_WAIT_POLICY": "active"}, 2**62),
        ({"GOMP_SPINCOUNT": "infinity", "OMP_WAIT_POLICY": "passive"}, 2**62),
        ({"GOMP_SPINCOUNT": "", "OMP_WAIT_POLICY": " "}, ADAPTS),
    ],
)
def test_threads_wait_as_the_variables_of_libgomp_say(environment: dict[str, str], turns: int) -> None:
    assert spin_turns(environment) == turns


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("GOMP_SPINCOUNT", "some", "such as 10000"),
        ("GOMP_SPINCOUNT", "-3", "such as"),
        ("OMP_WAIT_POLICY", "x", "passive"),
    ],
)
def test_a_value_that_libgomp_would_ignore_is_refused_by_name(name: str, value: str, fits: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{value}' should be .*{fits}"):
        spin_turns({name: value})
