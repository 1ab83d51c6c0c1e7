"""Starting up: checkpoints and settings that will not do, and what is imported and printed on the way."""

from __future__ import annotations

import json
import os
import pty
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, ConfigError, ModelError, OstinatoError
from ostinato.serve.http.listener import EarlyAnswers
from tests.support.checkpoints import checkpoint
from tests.support.patience import PATIENCE
from tests.support.text_checkpoint import SETTINGS, text_checkpoint


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def no_architecture(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    del config["model_type"]
    (directory / "config.json").write_text(json.dumps(config))


def unknown_architecture(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "hyena"}))


def quantized(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))


def broken_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def truncated_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def broken_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_config, "no config.json"),
        (no_architecture, r"no architecture \(model_type\); the known ones are arcee, bailing_hybrid"),
        (unknown_architecture, "'hyena' is not known; the known ones are arcee, bailing_hybrid"),
        (quantized, "awq"),
        (broken_config, "config.json cannot be read"),
        (no_weights, "neither model.safetensors nor"),
        (truncated_weights, "truncated; download it again"),
        (broken_tokenizer, "tokenizer.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_an_error_that_says_what_is_wrong(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(text_checkpoint(), directory)
    damage(directory)
    with pytest.raises(ModelError, match=message):
        LLM(str(directory), **SETTINGS)


@pytest.mark.parametrize(
    ("model", "settings", "kind", "message"),
    [
        ("/no/such/directory", {}, ModelError, "no directory '/no/such/directory'"),
        (__file__, {}, ModelError, "is a file and does not end in .gguf; give a GGUF file"),
        (None, {"max_num_seq": 3}, ConfigError, "did you mean max_num_seqs"),
        (None, {"max_num_seqs": 0}, ConfigError, "max_num_seqs = 0"),
        (None, {"max_model_len": 10**6, "cache_memory": "1MiB"}, OstinatoError, "max_model_len"),
    ],
)
def test_a_bad_model_or_setting_is_an_error_that_says_what_to_do(
    model: str | None, settings: dict[str, Any], kind: type[OstinatoError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        LLM(model or str(text_checkpoint()), **settings)


def test_a_draft_model_whose_tokens_are_other_texts_is_an_error_before_weights_are_read(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(text_checkpoint(), draft)
    no_weights(draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has other tokens than the model") as refused:
        LLM(str(text_checkpoint()), speculative=f"draft:{draft}:2", **SETTINGS)
    assert [(remedy.setting, remedy.value) for remedy in refused.value.remedies] == [("speculative", "ngram:2")]


# What it prints and imports


@pytest.fixture(scope="module")
def made() -> Path:
    """The checkpoint, made before output is captured."""
    return text_checkpoint()


def test_nothing_is_printed_where_there_is_no_terminal(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    llm = LLM(str(made), **SETTINGS)
    llm.generate(["ab", "cd", "ef"])
    list(llm.stream("gh"))
    assert capfd.readouterr() == ("", "")


def run_python(code: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, check=False, **streams)
    assert done.returncode == 0, done.stderr
    return done


def test_a_program_that_ends_while_an_engine_is_held_ends_in_silence(made: Path) -> None:
    code = f"""
import threading, time
from ostinato import LLM
llm = LLM({str(made)!r}, **{SETTINGS!r})
def hold(llm, pieces):
    time.sleep(1000)
pieces = llm.stream("ab")
next(pieces)
threading.Thread(target=hold, args=(llm, pieces), daemon=True).start()
"""
    assert run_python(code, capture_output=True).stderr == ""


def test_importing_and_planning_import_no_torch() -> None:
    code = f"""
import sys
import ostinato
from ostinato import EngineConfig, SamplingParams, CapacityError
assert not {{"torch", "transformers", "tokenizers"}} & set(sys.modules), "import"
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import make_plan
from ostinato.plan.render.tables import render_plan
from ostinato.models.checkpoint import model_spec, read_config, resolve_model_dir
from pathlib import Path
for directory in {[str(checkpoint(name)) for name in ("nemotron_h", "llama", "falcon_h1")]}:
    render_plan(make_plan(EngineConfig(model=directory), model_spec(read_config(Path(directory))), detect("cpu")))
assert not {{"torch", "transformers"}} & set(sys.modules), "plan"
"""
    run_python(code, capture_output=True)


LIGHT = [
    "torch",
    "transformers",
    "jinja2",
    "numpy",
    "tokenizers",
    "fastapi",
    "uvicorn",
    "huggingface_hub",
    "llguidance",
]
LIGHT += ["PIL", "httpx2", "yaml", "matplotlib", "safetensors", "prometheus_client"]


UNASKED = ["ostinato.sampling.guide", "ostinato.sampling.params", "ostinato.plan.capacity.estimate"]
"""Modules that a plan without traffic has no use for."""


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [(["--help"], [*LIGHT, "pydantic"]), (["--version"], LIGHT), (["plan", "demo"], [*LIGHT, *UNASKED])],
)
def test_what_is_asked_first_imports_nothing_heavy(arguments: list[str], heavy: list[str]) -> None:
    """Each of these takes a tenth of a second and more."""
    code = f"""
import atexit, sys
atexit.register(lambda: print(sorted(set({heavy!r}) & set(sys.modules)), file=sys.stderr))
sys.argv[1:] = {arguments!r}
from ostinato.__main__ import main
main()
"""
    assert run_python(code, capture_output=True).stderr == "[]\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "demo", "--port", "0"],
        ["serve", "demo", "--port", "x"],
        ["serve", "no-such-model"],
        ["chat", "no-such-model"],
        ["plan", "demo", "--max-num-seq", "3"],
        ["generate", "--temperature", "-1", "x"],
    ],
    ids=" ".join,
)
def test_errors_and_a_server_that_starts_are_answered_before_anything_heavy_is_imported(arguments: list[str]) -> None:
    """The server's first answers come from a thread that begins where this program ends."""
    code = f"""
import sys
from ostinato.cli.main import main
from ostinato.serve.http import listener
def begin(self, socket):
    raise SystemExit(2)
listener.EarlyAnswers.__init__ = begin
try:
    main({arguments!r})
except SystemExit as end:
    assert end.code == 2, end.code
print(sorted({{*{LIGHT!r}, "asyncio"}} & set(sys.modules)))
"""
    assert run_python(code, capture_output=True).stdout == "[]\n"


def test_a_server_answers_while_it_starts_and_leaves_later_connections_to_the_next() -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        early = EarlyAnswers(opened)
        statuses = []
        for path in ("/health", "/health/live", "/v1/models", "/v1/messages", "/api/chat", "/?a=1"):
            client = HTTPConnection(*opened.getsockname(), timeout=PATIENCE)
            client.request("GET", path)
            answer = client.getresponse()
            statuses.append((answer.status, answer.read().decode()))
        page, *bodies = [body for _, body in reversed(statuses)]
        starting, told = {"status": "starting"}, "the server is starting"
        error = {"message": told, "type": "service_unavailable_error", "param": None, "code": "starting"}
        overloaded = {"type": "overloaded_error", "message": told}
        assert [status for status, _ in statuses] == [503, 200, 503, 503, 503, 503]
        assert [json.loads(body) for body in reversed(bodies)] == [
            starting, starting, {"error": error}, {"type": "error", "error": overloaded}, {"error": told},
        ]  # fmt: skip
        assert told in page
        assert 'http-equiv="refresh"' in page
        early.close()
        early.close()
        with socket.create_connection(opened.getsockname()):
            opened.accept()[0].close()


def test_a_command_ends_without_a_search_for_cycles_in_all_that_it_made() -> None:
    code = """
import atexit, gc
atexit.register(lambda: print("left out:", gc.get_freeze_count() > 10_000))
from ostinato.cli.main import main
main(["--version"])
"""
    assert run_python(code, capture_output=True).stdout.endswith("left out: True\n")


def test_planning_and_inspecting_a_gguf_file_import_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")
    from tests.support.gguf_files import write_gguf

    path = write_gguf(tmp_path / "model.gguf", "llama")
    code = f"""
import sys
from ostinato.cli.main import main
heavy = {{"torch", "transformers"}}
for command, unwanted in (("plan", {{*heavy, "tokenizers"}}), ("inspect", heavy)):
    try:
        main([command, {str(path)!r}])
    except SystemExit as end:
        assert not end.code, end.code
    assert not unwanted & set(sys.modules), sorted(sys.modules)
"""
    assert "file's pages" in " ".join(run_python(code, capture_output=True).stdout.split())


def pieces(terminal: int) -> Iterator[bytes]:
    """What was written to a terminal, which gives at most some kilobytes at once."""
    with suppress(BlockingIOError):
        while piece := os.read(terminal, 1 << 16):
            yield piece


def test_on_a_terminal_there_are_bars_and_nothing_imports_transformers() -> None:
    code = f"""
import sys
from ostinato import LLM, SamplingParams
llm = LLM({str(text_checkpoint())!r}, **{SETTINGS | {"capture": "startup"}})
llm.generate(["ab", "cd", "ef"], SamplingParams(max_tokens=8, ignore_eos=True))
llm.chat([{{"role": "user", "content": "hi"}}])
assert "transformers" not in sys.modules
"""
    terminal, their_end = pty.openpty()
    try:
        done = run_python(code, stdout=subprocess.PIPE, stderr=their_end)
        os.set_blocking(terminal, False)
        shown = b"".join(pieces(terminal)).decode()
    finally:
        os.close(terminal)
        os.close(their_end)
    assert done.stdout == ""
    assert "Loading weights" in shown
    assert "Capturing graphs" in shown
    assert "Generating" in shown
    assert "3/3" in shown
