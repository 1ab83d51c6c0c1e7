"""Commands and programs in the pages run, and print what the page shows; the slow ones in `make docs-check` alone."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.cli.main import main
from ostinato.models.named_models import find_file
from tests.support.docs_pages import PAGES, ROOT, Block, assert_printed, blocks
from tests.support.patience import PATIENCE
from tests.support.serving import Served, serving

ADDRESS = "http://127.0.0.1:8000"
ALL = "DOCS_CHECK" in os.environ
RUN = [block for page in PAGES for block in blocks(page) if block.is_run and (ALL or "slow" not in block.flags)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_num_seqs=4) as served:
        yield served


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like the project's and may be written to, a terminal of 110 columns, and one core, as other
    tests have the others."""
    for name in ("docs", "benchmarks", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
@pytest.mark.usefixtures("place")
def test_a_page_shows_what_is_printed(
    block: Block,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "native" in block.flags and not has_native_kernels(request):
        pytest.skip("this machine has no native kernels for it")
    if "smollm2" in block.flags and find_file("smollm2") is None:
        pytest.skip("the file of smollm2 is not here; `ostinato fetch smollm2` brings it")
    text = "\n".join(block.lines)
    if ADDRESS in text:
        url = request.getfixturevalue("served").url
        text = text.replace(ADDRESS, url)
        block = Block(block.page, block.line, block.language, text.split("\n"), block.check, block.output)
    if block.language == "python":
        exec(compile(text, block.name, "exec"), {"__name__": "__main__"})
        assert_printed(block.output, capsys.readouterr().out, "varies" in block.output_check)
        return
    for command, shown in block.commands:
        printed, remarks = run(command, capsys, monkeypatch)
        assert_printed(shown, printed, "varies" in block.flags, remarks)


def has_native_kernels(request: pytest.FixtureRequest) -> bool:
    return not request.config.getoption("--reference-kernels") and any((ROOT / "src/ostinato").glob("_native_*.so"))


def run(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What a command prints on stdout, and on stderr: ours in this process, others by a shell."""
    words = shlex.split(command)
    typed = ""
    if words[0] == "echo" and words[2:4] == ["|", "ostinato"]:
        typed, words = words[1] + "\n", words[3:]
    if words[0] != "ostinato":
        if shutil.which(words[0]) is None:
            pytest.skip(f"there is no {words[0]}; apt install {words[0]}")
        quiet = command.replace("curl ", "curl -sS --fail-with-body ", 1)
        done = subprocess.run(["bash", "-c", quiet], check=True, capture_output=True, text=True, timeout=PATIENCE)
        return done.stdout, ""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    with pytest.raises(SystemExit):
        main(words[1:])
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_commands_that_are_not_run_say_how_long_they_take_and_why() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("console", "python") and not block.is_run:
                assert block.check.startswith("no, "), block.name
                assert ":" in block.check, block.name
