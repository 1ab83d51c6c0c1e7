"""Processes that end with who has started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ostinato.child_process import child_environment, start_bound_process
from tests.support.patience import PATIENCE


def test_a_process_whose_starter_is_interrupted_while_it_starts_is_killed_also_where_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_left = threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            started.append(self)
            os.kill(self.pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGINT)
            assert has_left.wait(PATIENCE)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start_bound_process([sys.executable, "-c", "import time; time.sleep(3600)"], os.environ)
    finally:
        signal.signal(signal.SIGINT, before)
        has_left.set()
    assert started[0].wait(PATIENCE) == -signal.SIGKILL


def test_a_child_has_the_paths_of_its_parent_without_what_imports_pass_over_and_in_a_folder_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", ["", Path("elsewhere"), "here", None])
    gone.rmdir()
    assert child_environment()["PYTHONPATH"].split(os.pathsep) == [".", "here"]
