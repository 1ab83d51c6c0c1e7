"""Each example runs as its docstring says, and prints what stands there."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.docs_pages import ROOT, assert_printed

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PUBLIC = re.compile(r"^(?:from ostinato import |import ostinato$)")


def docstring(example: Path) -> str:
    """Return the text that says how to run the example and what it prints."""
    return ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_prints_what_its_docstring_shows(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All run in this process, which has imported torch, and the server alone has one of its own."""
    text = docstring(example)
    shown = [line.strip() for line in text.split("It prints", 1)[1].splitlines() if line.startswith("    ")]
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    printed = "\n".join(line.strip() for line in capsys.readouterr().out.splitlines())
    assert_printed(shown, printed, varies="numbers" in text)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_says_how_to_run_it_and_uses_what_the_package_exports(example: Path) -> None:
    assert f".venv/bin/python examples/{example.name}" in docstring(example)
    lines = example.read_text(encoding="utf-8").splitlines()
    imports = [line for line in lines if re.match(r"\s*(?:from|import) ostinato\b", line)]
    assert all(PUBLIC.match(line) for line in imports), imports
    assert len(lines) <= 80


def test_there_is_an_example_of_each_use() -> None:
    uses = {"batch", "calculator", "chat_with_a_picture", "embeddings", "plan", "server_and_client", "stream", "verify"}
    assert {example.stem for example in EXAMPLES} == uses
