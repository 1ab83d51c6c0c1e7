"""Hub ids: fetched by the hub's own client from a hub that is pretended, in processes as a person starts them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf_files import write_gguf
from tests.support.patience import PATIENCE
from tests.support.pretended_hub import Hub, files_of, pretended_hub
from tests.support.text_checkpoint import text_checkpoint

pytest.importorskip("huggingface_hub", reason="it comes with the hub extra")

SMALL = ["--max-model-len", "96", "--max-num-seqs", "2", "--cache-memory", "8MiB", "--threads", "1"]
NOWHERE = "http://127.0.0.1:9"
"""Where nobody listens."""


@dataclass
class Person:
    """Someone with a cache of the hub's in `home`."""

    hub: Hub
    home: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ostinato", *arguments]
        return subprocess.run(
            command, env=self.environment(**environment), capture_output=True, text=True, check=False, timeout=PATIENCE
        )

    def environment(self, **changes: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        own = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1", "COLUMNS": "300"}
        return kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | own | changes

    def plan(self, model: str, *arguments: str, **environment: str) -> Any:
        """The plan of a model that can be had."""
        done = self.run("plan", model, "--json", *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def refused(self, *arguments: str, **environment: str) -> str:
        """The message of a command that ends with status 2."""
        done = self.run(*arguments, **environment)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    files = files_of(text_checkpoint())
    quantised = {"sub/m.gguf": write_gguf(tmp_path / "m.gguf", "llama").read_bytes(), "README.md": b"what this is"}
    with pretended_hub(someone__text=files, someone__text_GGUF=quantised) as hub:
        yield Person(hub, tmp_path / "home")


@pytest.mark.slow
def test_a_plan_fetches_the_config_alone_and_once(person: Person) -> None:
    assert person.plan("someone/text")["model"]["architecture"] == "nemotron_h"
    assert person.hub.files_asked() == ["config.json"]
    person.plan("someone/text")
    assert person.hub.files_asked() == ["config.json"]


@pytest.mark.slow
def test_a_model_of_the_hub_generates_and_then_needs_no_network(person: Person) -> None:
    prompt = ["generate", "--raw", "ab", "--max-tokens", "3", "--model", "someone/text", "--json", *SMALL]
    fetched = person.run(*prompt)
    assert fetched.returncode == 0, fetched.stderr
    assert set(person.hub.files_asked()) == files_of(text_checkpoint()).keys()
    own = person.run(*prompt[:-10], str(text_checkpoint()), "--json", *SMALL)
    assert json.loads(fetched.stdout)[0]["token_ids"] == json.loads(own.stdout)[0]["token_ids"]
    again = person.run(*prompt, HF_ENDPOINT=NOWHERE)
    assert again.stdout == fetched.stdout, again.stderr
    assert person.run(*prompt, HF_HUB_OFFLINE="1").stdout == fetched.stdout


@pytest.mark.slow
def test_a_file_of_a_repository_is_fetched_alone_and_a_tokenizer_too(person: Person) -> None:
    assert person.plan("someone/text_GGUF:sub/m.gguf")["model"]["architecture"] == "llama"
    assert person.hub.files_asked() == ["sub/m.gguf"]
    message = person.refused("plan", "someone/text_GGUF:other.gguf")
    assert "someone/text_GGUF on the hub holds no file 'other.gguf'; it holds sub/m.gguf" in message
    message = person.refused("plan", "someone/text_GGUF")
    assert "has no config.json; it has GGUF files: give one, as someone/text_GGUF:sub/m.gguf" in message
    plan = person.plan("demo", "--tokenizer", "someone/text")
    assert [each["effective"] for each in plan["decisions"] if each["topic"] == "tokenizer"] == ["someone/text"]
    assert "model.safetensors" not in person.hub.files_asked()


@pytest.mark.slow
def test_files_are_kept_in_the_hubs_cache_or_in_a_given_place_where_its_own_commands_find_them(
    person: Person, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    person.plan("someone/text", "--download-dir", str(other))
    assert not list(person.home.rglob("config.json"))
    person.plan("someone/text")
    assert list(person.home.rglob("config.json"))
    hf = [sys.executable, "-c", "from huggingface_hub.cli.hf import main; main()", "cache"]
    for place in ([], ["--cache-dir", str(other)]):

        def listed(place: list[str] = place) -> str:
            command = [*hf, "ls", *place]
            return subprocess.run(command, env=person.environment(), capture_output=True, text=True, check=True).stdout

        assert "model/someone/text" in listed()
        command = [*hf, "rm", "model/someone/text", "--yes", *place]
        subprocess.run(command, env=person.environment(), capture_output=True, check=True)
        assert "someone/text" not in listed()
    assert person.run("inspect", "someone/text", "--download-dir", str(other)).returncode == 0
    assert list(other.rglob("model.safetensors"))


@pytest.mark.slow
def test_a_checkpoint_or_a_file_is_fetched_to_be_used_later(person: Person) -> None:
    done = person.run("fetch", "someone/text")
    assert done.returncode == 0, done.stderr
    assert files_of(Path(done.stdout.strip())) == files_of(text_checkpoint())
    file = person.run("fetch", "someone/text_GGUF:sub/m.gguf").stdout.strip()
    assert Path(file).read_bytes() == person.hub.repositories["someone/text_GGUF"]["sub/m.gguf"]
    assert "a hub id is OWNER/NAME, the embedded models are" in person.refused("fetch", "nothing")
    assert "the hub has no model of that name" in person.refused("fetch", "someone/nothing")


# What goes wrong


@pytest.mark.slow
def test_a_name_that_is_not_there_says_what_to_look_at(person: Person) -> None:
    message = person.refused("plan", "someone/nothing")
    assert "the hub has no model of that name that you may see" in message
    assert "`hf cache ls` lists the models that are here" in message
    assert "hf cache ls --cache-dir here" in person.refused("plan", "someone/nothing", "--download-dir", "here")


@pytest.mark.slow
def test_a_revision_that_is_not_there_is_named_with_its_remedy(person: Person) -> None:
    message = person.refused("plan", "someone/text", "--revision", "v9")
    assert "someone/text on the hub has no branch, tag or commit 'v9'" in message
    assert "  - leave out --revision\n" in message
    person.plan("someone/text", "--revision", "main")


@pytest.mark.parametrize("token", [{}, {"HF_TOKEN": "anothers"}])
@pytest.mark.slow
def test_a_gated_model_says_how_to_be_let_in(person: Person, token: dict[str, str]) -> None:
    person.hub.gated.add("someone/text")
    message = person.refused("plan", "someone/text", **token)
    assert (
        "does not let you have that model: ask for access on its page there, then log in by `hf auth login`" in message
    )
    person.plan("someone/text", HF_TOKEN="secret")


@pytest.mark.parametrize("environment", [{"HF_ENDPOINT": NOWHERE}, {"HF_HUB_OFFLINE": "1"}])
@pytest.mark.slow
def test_without_a_network_a_model_that_is_not_here_says_so(person: Person, environment: dict[str, str]) -> None:
    message = person.refused("plan", "someone/text", **environment)
    assert "not all of its files are here; the hub cannot be reached" in message
    assert "`hf cache ls` lists the models that are here" in message
    # Nor is one that is here in part, which is not taken for the whole.
    person.plan("someone/text")
    assert "not all of its files are here" in person.refused("generate", "hi", "--model", "someone/text", **environment)


def test_a_connection_that_breaks_is_taken_up_where_it_broke(person: Person) -> None:
    # The client writes pieces of 10 MiB, of which the first is whole when the connection breaks.
    weights = bytes(range(256)) * (12 * 2**12)
    person.hub.repositories["someone/large"] = {"config.json": b"{}", "model.safetensors": weights}
    person.hub.breaks["model.safetensors"] = 11 * 2**20
    code = "from ostinato.models.checkpoint import resolve_model_dir; print(resolve_model_dir('someone/large'))"
    done = subprocess.run([sys.executable, "-c", code], env=person.environment(), stdout=subprocess.PIPE, check=True)
    assert (Path(done.stdout.decode().strip()) / "model.safetensors").read_bytes() == weights
    ranges = [each for method, path, each in person.hub.asked if method == "GET" and "safetensors" in path]
    assert ranges == [None, f"bytes={10 * 2**20}-"]


LARGE = bytes(range(256)) * (32 * 2**12)
"""32 MiB"""


def interrupted(person: Person, end: int) -> Path:
    """The part that is left of a large file by a process that was killed when it had `end` bytes."""
    person.hub.repositories["someone/large"] = {"config.json": b"{}", "model.safetensors": LARGE}
    person.hub.stalls["model.safetensors"] = end
    command = [sys.executable, "-m", "ostinato", "fetch", "someone/large"]
    process = subprocess.Popen(command, env=person.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (parts := [part for part in person.home.rglob("*.part.incomplete") if part.stat().st_size >= 2**20]):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    return parts[0]


def ranges_of(person: Person) -> list[str | None]:
    """Of the requests for the weights."""
    return [each for method, path, each in person.hub.asked if method == "GET" and "safetensors" in path]


@pytest.mark.slow
def test_a_command_that_was_killed_is_gone_on_with_where_it_stopped(person: Person) -> None:
    part = interrupted(person, 25 * 2**20)
    begun = part.stat().st_size
    done = person.run("fetch", "someone/large")
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == LARGE
    assert ranges_of(person) == [None, f"bytes={begun}-"]
    assert not part.exists()
    person.run("fetch", "someone/large")
    assert len(ranges_of(person)) == 2


@pytest.mark.slow
def test_a_part_that_is_damaged_is_fetched_anew(person: Person) -> None:
    part = interrupted(person, 25 * 2**20)
    with part.open("r+b") as file:
        file.write(b"damage")
    done = person.run("fetch", "someone/large")
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == LARGE
    assert ranges_of(person)[-1] is None
    part.write_bytes(LARGE + b"too long")
    (person.home / "hub" / "models--someone--large" / "blobs" / part.name.partition(".")[0]).unlink()
    person.run("fetch", "someone/large")
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == LARGE


@pytest.mark.slow
def test_two_processes_do_not_write_to_one_part(person: Person) -> None:
    part = interrupted(person, 25 * 2**20)
    begun = part.stat().st_size
    with part.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = person.run("fetch", "someone/large")
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == LARGE
    assert (part.stat().st_size, ranges_of(person)) == (begun, [None, None])


@pytest.mark.slow
def test_a_hub_that_is_down_can_be_asked_again(person: Person) -> None:
    person.hub.down = True
    assert "the hub cannot be reached to fetch them" in person.refused("plan", "someone/text")
    person.hub.down = False
    person.plan("someone/text")
    person.run("inspect", "someone/text")
    assert sorted(person.hub.files_asked()) == sorted(files_of(text_checkpoint()))


def test_a_place_where_nothing_can_be_kept_is_named(person: Person, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = person.refused("plan", "someone/text", "--download-dir", str(tmp_path / "file"))
    assert "cannot be kept in" in message
    assert "--download-dir" in message


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar(person: Person) -> None:
    terminal, their_end = pty.openpty()
    fcntl.ioctl(their_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    try:
        command = [sys.executable, "-m", "ostinato", "inspect", "someone/text"]
        subprocess.run(command, env=person.environment(), stdout=subprocess.PIPE, stderr=their_end, check=True)
        os.set_blocking(terminal, False)
        shown = b""
        with suppress(BlockingIOError):
            while piece := os.read(terminal, 1 << 16):
                shown += piece
    finally:
        os.close(terminal)
        os.close(their_end)
    assert b"Fetching" in shown
    assert b"100%" in shown
    assert not person.run("inspect", "someone/text").stderr, "nothing where there is no terminal"
