"""The command line as people type it: help of a page, other engines' flags, remedies, and settings from a file."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.main import get_command

from ostinato import other_engines
from ostinato.cli.bench import app as bench
from ostinato.cli.help import COMMON_FLAGS, SHORT_HELP_LINES, groups
from ostinato.cli.main import COMMANDS, main
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.serve.settings import ServeSettings
from ostinato.setting_names import ALIASES

HELPS = [[], *([name] for name in COMMANDS), *(["bench", name] for name in get_command(bench).commands)]  # type: ignore[attr-defined]
ENGINES = ("generate", "chat", "serve", "plan", "eval", "verify")
COMING_FROM = Path(__file__).parents[2] / "docs/coming-from-vllm-or-llama-cpp.md"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), ["bench", "latency"], []])
def test_help_has_a_short_name(capsys: pytest.CaptureFixture[str], command: list[str], flag: str) -> None:
    status, out, _ = run(capsys, *command, flag)
    assert status == 0
    assert out.startswith("Usage: ostinato")


def test_the_version_has_a_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "-V") == run(capsys, "--version")


@pytest.mark.parametrize("command", [*([name] for name in ENGINES), ["bench", "latency"]])
def test_help_is_a_page_that_names_every_flag(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    _, short, _ = run(capsys, *command, "--help")
    _, full, _ = run(capsys, *command, "--help-all")
    assert short.count("\n") < SHORT_HELP_LINES
    flags = set(re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", full, flags=re.MULTILINE))
    assert len(flags) > 40
    assert flags <= set(re.findall(r"--[a-z0-9-]+", short))
    for alias in ALIASES:
        assert f"--{alias.replace('_', '-')}" in full, "what grep looks for"
    assert "None:" not in full
    assert "default: (" not in full
    first = [short.index(f"  --{name.replace('_', '-')} ") for name in COMMON_FLAGS if f"--{name}" in full]
    assert first == sorted(first)


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
@pytest.mark.parametrize("columns", ["80", "60", "110"])
def test_help_of_every_command_is_a_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = run(capsys, *command, "--help")[1]
    assert columns == "60" or out.count("\n") < SHORT_HELP_LINES
    assert not [line for line in out.partition("\n")[2].splitlines() if line.endswith("...")], "whole sentences"
    if command and command != ["bench"]:
        assert "Example: ostinato" in out


def test_a_terminal_that_tells_no_width_shows_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "nosuch" in run(capsys, "plan", "./nosuch")[2]


def test_every_setting_has_a_place_in_help() -> None:
    fields = (EngineConfig.model_fields, ServeSettings.model_fields)
    assert {name for each in fields for name in each} <= groups().keys()


def test_serve_takes_the_model_as_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "serve", "demo-vl", "--print-config")
    assert (status, yaml.safe_load(out)["model"]) == (0, "demo-vl")
    status, _, err = run(capsys, "serve", "demo", "--model", "demo-vl")
    assert status == 2
    assert "the model is given twice: 'demo' and --model 'demo-vl'" in err


@pytest.mark.parametrize("flag", ["--max-body", "--worker-memory", "--cache-memory", "--cache-offload"])
def test_every_size_is_taken_in_the_same_forms(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    name = flag[2:].replace("-", "_")
    for text, size in (("128MiB", 2**27), ("0.5g", 2**29), ("1GB", 10**9), ("134217728", 2**27)):
        status, out, _ = run(capsys, "serve", flag, text, "--print-config")
        assert (status, yaml.safe_load(out)[name]) == (0, size)
    status, _, err = run(capsys, "serve", flag, "much", "--print-config")
    assert (status, "'much' is not a size; write it like 4GiB, 512MiB or 2GB" in err) == (2, True)


def test_a_size_is_answered_as_one_would_type_it(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "serve", "--worker-memory", "1MiB", "--print-config")
    assert (status, "--worker-memory 64MiB\n" in err) == (2, True)
    assert "[default: 16MiB]" in run(capsys, "serve", "--help-all")[1]


@pytest.mark.parametrize("command", ["chat", "eval", "plan", "verify"])
def test_the_model_stands_first(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, _, err = run(capsys, command, "no/such/model")
    assert status == 2
    assert "no/such/model" in err


@pytest.mark.slow
def test_flags_and_commands_are_completed() -> None:
    for words, position, found in (("ostinato ser", 1, "serve"), ("ostinato serve --max-num-s", 2, "--max-num-seqs")):
        asked = {"_OSTINATO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | asked
        code = "import sys; sys.argv[0] = 'ostinato'; from ostinato.__main__ import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert found in done.stdout.split()


# Other engines' flags


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--enforce-eager"], "No such option: --enforce-eager (here it is --graph-mode none)"),
        (["-c", "4096"], "No such option: -c (here it is --max-model-len)"),
        (["-ngl", "99"], "No such option: -ngl (here it is --device cuda)"),
        (["--jinja"], "No such option: --jinja (leave it out: here that needs no flag)"),
        (
            ["--pipeline-parallel-size=2"],
            "--pipeline-parallel-size=2 (it has no counterpart here: only --tensor-parallel-size cuts a model",
        ),
        (["--max-num-seq", "4"], "No such option: --max-num-seq (Possible options:"),
        (["--qqqq"], "No such option: --qqqq\n"),
    ],
)
def test_flags_of_other_engines_are_answered_with_ours(
    capsys: pytest.CaptureFixture[str], typed: list[str], message: str
) -> None:
    status, _, err = run(capsys, "serve", *typed)
    assert status == 2
    assert message in err


def test_what_is_answered_exists_and_is_no_flag_of_ours_itself(capsys: pytest.CaptureFixture[str]) -> None:
    ours: set[str] = set()
    for command in ENGINES:
        ours |= set(re.findall(r"--[a-z0-9-]+|(?<![\w-])-[a-zA-Z](?![\w-])", run(capsys, command, "--help-all")[1]))
    for theirs, here in other_engines.FLAG_EQUIVALENTS.items():
        assert theirs not in ours
        assert set(re.findall(r"--[a-z-]+", here or "")) <= ours
    assert not other_engines.REFUSED.keys() & ours
    assert not other_engines.REFUSED.keys() & other_engines.FLAG_EQUIVALENTS.keys()


def test_flags_that_the_page_of_other_engines_names_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Those in the columns of vLLM and llama.cpp; flags of other programs than the server and the chat aside."""
    ours = set(re.findall(r"--[a-z0-9-]+", run(capsys, "serve", "--help-all")[1]))
    ours |= {f"--{alias.replace('_', '-')}" for alias in ALIASES}
    text = COMING_FROM.read_text(encoding="utf-8").partition("## Settings")[2]
    rows = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("| ")]
    theirs = {flag for row in rows for cell in row for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", cell)}
    assert len(theirs) > 40
    assert not [flag for flag in theirs - ours if other_engines.advice(flag) is None]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["-m", "m.gguf", "-p", "hi"], "No such option: -m (here it is --model); a command comes first"),
        (["generate", "-p", "hi"], "here it is the prompt as an argument: ostinato generate MODEL PROMPT"),
        (["serve", "-tp", "2"], "here it is --tensor-parallel-size"),
        (["serve", "--tp", "2"], "here it is --tensor-parallel-size"),
        (["serve", "-q", "awq"], "here it is --quantization"),
        (["-hf", "O/N"], "No such option: -hf (here it is --model OWNER/NAME, or OWNER/NAME:FILE.gguf)"),
        (["chat", "-cnv"], "No such option: -cnv (leave it out: ostinato chat does that)"),
        (
            ["chat", "--url", "http://h/v1"],
            "no counterpart here: chat runs a model itself; a server that runs has a page",
        ),
        (["generate", "--grammar", "g"], "here it is --guide-lark, a grammar in Lark's form, not in GBNF"),
        (["serve", "--api-key"], "Error: --api-key needs a value behind it\n"),
        (["eval", "demo", "--limit", "3"], "No such option: --limit (here it is --num-problems)"),
        (["serve", "-lv", "3"], "No such option: -lv (here it is --log-level debug)"),
        (["generate", "hi", "--system", "be brief"], "No such option: --system (it is a flag of chat)"),
        (["chat", "demo", "hi"], "unexpected extra argument(s) (hi); generate takes prompts, chat asks for them"),
        (["plan", "demo", "demo-vl"], "extra argument(s) (demo-vl); for example: ostinato plan demo"),
        (
            ["serve", "demo", "--served-model-name", "a", "b"],
            "(b); for several values, repeat the flag: --served-model-name ... --served-model-name ...\n",
        ),
        (["serve", "demo", "--api-key=a", "b"], "repeat the flag: --api-key ... --api-key ...\n"),
        (["plan", "demo", "--capture-sizes", "1", "2", "4"], "commas separate several values: --capture-sizes 1,2\n"),
        (["serve", "demo", "--port", "8000", "x"], "(x); for example: ostinato serve demo"),
        (["serve", "--load-in-8bit"], "here it is --quantization int8"),
        (["serve", "--swap-space", "4"], "no counterpart here: requests that lose their memory are computed again"),
        (["ps"], "No such command 'ps'; here it is ostinato serve's page"),
        (["embed"], "here it is POST /v1/embeddings"),
        (["help", "serve"], "here it is ostinato serve --help\n"),
        (["demo"], "for a model it is ostinato chat demo"),
        (["./m.gguf"], "for a model it is ostinato chat ./m.gguf"),
    ],
)
def test_what_one_types_in_other_engines_is_answered(
    capsys: pytest.CaptureFixture[str], typed: list[str], message: str
) -> None:
    status, _, err = run(capsys, *typed)
    assert (status, message in err) == (2, True), err


# Values


@pytest.mark.parametrize(
    ("flag", "value", "nearest"),
    [
        ("--max-model-len", "4k", "4096"),
        ("--max-num-seqs", "1,024", "1024"),
        ("--memory-utilization", "90%", "0.9"),
        ("--dtype", "bf16", "bfloat16"),
        ("--quantization", "q4_k_m", "int4_g32"),
        ("--kv-cache-dtype", "fp8", "int8"),
        ("--overlap", "true", "on"),
        ("--graph-mode", "Piecewise", "piecewise"),
    ],
)
def test_a_value_that_is_none_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, nearest: str
) -> None:
    status, _, err = run(capsys, "plan", "demo", flag, value)
    assert (status, f"did you mean {nearest}?" in err) == (2, True), err
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {nearest}?")) as refused:
        EngineConfig(**{flag[2:].replace("-", "_"): value})
    assert [str(remedy.value) for remedy in refused.value.remedies] == [nearest]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["plan", "demo", "--device", "h100"], "did you mean h100-80gb?"),
        (["plan", "demo", "--device", "A100"], "did you mean a100-80gb?"),
        (["serve", "--device", "gpu"], "did you mean cuda?"),
        (["plan", "demo", "--device-memory", "24"], "--device-memory '24' would be 24 bytes; did you mean 24GiB"),
        (["plan", "demo", "--cache-memory", "512"], "did you mean 512GiB or 512MiB?"),
        (["serve", "--request-timeout", "30s"], "did you mean 30?"),
        (["serve", "--keep-alive-timeout", "5m"], "did you mean 300?"),
        (["serve", "--log-level", "WARN"], "did you mean warning?"),
        (["generate", "hi", "--temperature", "0,7"], "did you mean 0.7?"),
        (["generate", "hi", "--top-p", "90"], "--top-p 0.9\n"),
        (["bench", "latency", "--rounds", "1k"], "did you mean 1024?"),
        (["generate", "hi", "--deterministic", "true"], "takes no value, and its opposite is --no-deterministic"),
        (["generate", "hi", "--stats", "1"], "--stats takes no value; an argument '1' goes before all flags"),
        (["generate", "hi", "--chat-template-kwargs", '{"top_k": 1}'], "top_k, which is a flag: --top-k"),
    ],
)
def test_units_and_names_are_answered_with_what_is_taken(
    capsys: pytest.CaptureFixture[str], typed: list[str], message: str
) -> None:
    status, _, err = run(capsys, *typed)
    assert (status, message in err) == (2, True), err


@pytest.mark.parametrize(
    "flag", ["--max-num-seqs", "--max-num-batched-tokens", "--max-capture-size", "--max-model-len", "--threads"]
)
def test_a_number_beyond_all_plans_is_refused_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    status, _, err = run(capsys, "plan", "demo", flag, "2147483648", "--device-memory", "999999999TiB")
    assert (status, re.findall(rf"^  - {flag} \d+$", err, flags=re.MULTILINE) != []) == (2, True), err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            "serve demo --max-num-seq 4 -ngl 99 --port abc --dtype foo --max-body 3 --block-size 7",
            ["--max-num-seq", "-ngl", "'--port'", "dtype", "max_body", "block_size", "did you mean 3GiB"],
        ),
        ("serve demo --port 99999 --dtype foo", ["port = 99999", "dtype = 'foo'"]),
        ("generate demo hi --temperature -1 --dtype foo --top-p 3", ["--temperature", "--top-p", "dtype"]),
        ("plan demo --foo --bar=3 --baz 4 demo", ["--foo", "--bar", "--baz"]),
        ("serve demo --config {file} --foo", ["--foo", "'max_num_seq'", "'prot'"]),
        ("serve demo --config {values} --dtype foo", ["max_waiting", "--port", "dtype"]),
    ],
)
def test_all_that_is_wrong_with_a_command_line_is_named_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, named: list[str]
) -> None:
    file, values = tmp_path / "names.yaml", tmp_path / "values.yaml"
    file.write_text("max_num_seq: 4\nprot: 3\n")
    values.write_text("max_waiting: -1\nport: many\n")
    status, _, err = run(capsys, *line.format(file=file, values=values).split())
    assert status == 2
    assert not [name for name in named if name not in err], err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "named", "made_up"),
    [
        ("serve demo --host 0.0.0.0 --api-keyfil /tmp/k", "--api-keyfil", ["there is no api_key", "--insecure"]),
        ("serve demo --replicas x --routing prefix", "'--replicas'", ["give replicas", "--replicas 2"]),
        ("serve demo --uds-mode 600 --udss /tmp/s", "--udss", ["give uds"]),
        ("generate hi --min-tokens 5 --max-tokens 4 --qqq", "--qqq", ["min_tokens", "--min-tokens"]),
    ],
)
def test_a_mistyped_flag_makes_up_no_problem_of_others(
    capsys: pytest.CaptureFixture[str], line: str, named: str, made_up: list[str]
) -> None:
    status, _, err = run(capsys, *line.split())
    assert (status, named in err) == (2, True), err
    assert not [text for text in made_up if text in err], err


def test_a_file_of_settings_is_read_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("temperature: 1\nport: many\n")
    status, _, err = run(capsys, "serve", "demo", "--config", str(file))
    assert (status, "'--port'" in err) == (2, True), err
    assert err.count("passes over") == 1


HEAVY = ("numpy", "torch", "tokenizers", "jinja2", "fastapi", "uvicorn", "ostinato.kv_cache.manager")
PLANNER = ("ostinato.plan.plan", "ostinato.models.checkpoint")


@pytest.mark.parametrize(
    ("line", "unwanted"),
    [
        ("--help", (*HEAVY, *PLANNER, "pydantic")),
        ("plan --help", (*HEAVY, *PLANNER, "ostinato.serve.settings", "ostinato.sampling.params")),
        ("serve --help", (*HEAVY, *PLANNER)),
        ("generate demo hi --dtype foo", (*HEAVY, *PLANNER)),
        ("serve demo --max-num-seq 4", (*HEAVY, *PLANNER)),
        ("serve dmeo", (*HEAVY, "ostinato.plan.plan", "ostinato.plan.speculation")),
        ("plan demo", HEAVY),
    ],
)
def test_a_quick_answer_imports_only_what_it_needs(line: str, unwanted: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom ostinato.cli.main import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print('IMPORTED', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True, check=True)
    imported = done.stdout.rpartition("IMPORTED")[2].split()
    assert not [name for name in unwanted if name in imported]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--port", "1", "--port", "2"], "(--port is given 2 times: the last one counts)"),
        (["--overlap", "on", "--overlap", "off"], "(--overlap is given 2 times: the last one counts)"),
        (["--no-deterministic", "--deterministic"], "(--deterministic is given 2 times: the last one counts)"),
        (["--capture-sizes", "1", "--capture-sizes", "2"], "commas separate several values"),
    ],
)
def test_that_the_last_of_an_options_values_counts_is_said(
    capsys: pytest.CaptureFixture[str], typed: list[str], message: str
) -> None:
    status, out, err = run(capsys, "serve", *typed, "--print-config")
    assert (status, message in err) == (0, True), err
    assert list(yaml.safe_load(out).values()) in ([2], ["off"], [True], [[2]])


def test_an_option_may_be_given_twice_with_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--port", "1", "--port=1", "--deterministic", "--deterministic", "--print-config"]
    _, out, err = run(capsys, "serve", *typed)
    assert (yaml.safe_load(out), err) == ({"port": 1, "deterministic": True}, "")


def test_a_model_may_have_several_names(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "serve", "--served-model-name", "a", "--served-model-name", "b", "--print-config")
    assert yaml.safe_load(out)["served_model_name"] == ["a", "b"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["smolm2", "What is the capital of France?"], "did you mean smollm2?"),
        (["./none.gguf", "hi"], "there is no file './none.gguf'"),
        (["demo"], "'demo' is taken as the model, and there is no prompt; after --model, all are prompts"),
    ],
)
def test_the_first_argument_of_generate_may_be_the_model(
    capsys: pytest.CaptureFixture[str], typed: list[str], message: str
) -> None:
    status, _, err = run(capsys, "generate", *typed)
    assert (status, message in err) == (2, True), err


@pytest.mark.slow
def test_errors_of_values_and_names_come_before_torch_is_imported(tmp_path: Path) -> None:
    code = f"""
import sys
from ostinato.cli.main import main
computing = ["generate hi", "chat", "eval", "verify", *("bench " + name for name in (
    "throughput", "latency", "startup", "prefix", "graphs", "encoder", "profile", "speculative", "serve-overhead"))]
others = ["serve", "plan", "ray-config", "batch docs/examples/batch.jsonl {tmp_path}/answers"]
wrong = ["--max-num-seqs -1", "--model no-such-model"]
lines = [[*command.split(), *flags.split()] for command in (*others, *computing) for flags in wrong]
lines += [["inspect", "no-such-model"], ["fetch", "no-such-model"], ["generate", "hi", "--max-model-len", "99999"]]
lines += [[command, "--chat-template", "no-such-file"] for command in ("chat", "eval")]
lines += [[command, *words, "--temperature", "-1"] for command, words in (("generate", ["hi"]), ("chat", []))]
for line in lines:
    try:
        main(line)
    except SystemExit as end:
        assert end.code == 2, line
    assert "torch" not in sys.modules, line
    assert line[0] != "serve" or "ostinato.serve.server" not in sys.modules, line
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    root = COMING_FROM.parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# Remedies and files


def test_a_remedy_is_what_one_would_type(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "plan", "demo", "--cache-memory", "1KiB")
    [remedy] = re.findall(r"^  - (--cache-memory \S+)$", err, flags=re.MULTILINE)
    assert main_succeeds("plan", "demo", *remedy.split(), "--max-num-seqs", "1", "--max-model-len", "16")
    capsys.readouterr()
    _, _, err = run(capsys, "plan", "demo", "--block-size", "17")
    assert "  - --block-size 16\n" in err


def main_succeeds(*arguments: str) -> bool:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return not ended.value.code


LIMITS = {
    "--cache-memory": st.sampled_from(["1KiB", "100KiB", "900KB", "3MiB", "40MiB", "2GiB"]),
    "--max-num-seqs": st.sampled_from(["1", "40", "300", "2000"]),
    "--max-model-len": st.sampled_from(["2", "100", "4096", "100000"]),
    "--max-num-batched-tokens": st.sampled_from(["1", "64", "4000", "200000"]),
    "--device-memory": st.sampled_from(["8MiB", "24MiB", "64MiB", "1GiB"]),
    "--block-size": st.sampled_from(["16", "17", "256"]),
    "--state-block-size": st.sampled_from(["16", "100", "512"]),
    "--memory-utilization": st.sampled_from(["0", "0.5", "1", "2"]),
    "--device": st.sampled_from(["cpu", "l4-24gb"]),
    "--overlap": st.sampled_from(["on", "off"]),
    "--speculative": st.sampled_from(["ngram:4", "mtp:3", "mtp:300"]),
    "--kernels": st.sampled_from(["triton", "native", "reference"]),
    "--graph-mode": st.sampled_from(["piecewise", "full_decode_only"]),
    "--capture-sizes": st.sampled_from(["1,2", "0", "x"]),
    "--tokenizer": st.sampled_from(["demo", "demo-vl"]),
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({}, optional=LIMITS))
@pytest.mark.slow
def test_every_remedy_that_is_printed_works(capsys: pytest.CaptureFixture[str], flags: dict[str, str]) -> None:
    """Typed in place of the flag, it makes what did not fit fit; a value that is none is complained of no more, though
    another setting may be."""
    status, _, err = run(capsys, "plan", "demo", *chain.from_iterable(flags.items()))
    remedies = re.findall(r"^  - (.+)$", err, flags=re.MULTILINE)
    for remedy in remedies:
        changed = dict(flags)
        match shlex.split(remedy):
            case ["leave", "out", flag]:
                changed.pop(flag, None)
            case [flag, value]:
                changed[flag] = value
            case other:
                pytest.fail(f"this is nothing to type: {other}")
        after, _, then = run(capsys, "plan", "demo", *chain.from_iterable(changed.items()))
        assert after == 0 or (not err.startswith("CapacityError") and then != err), (flags, remedy, then)
        assert "No such option" not in then
    assert status == 0 or "No such option" not in err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["run", "demo"], "No such command 'run'; here it is ostinato chat demo\n"),
        (["pull", "smollm2"], "No such command 'pull'; here it is ostinato fetch smollm2\n"),
        (["servee"], "No such command 'servee'; did you mean serve?\n"),
        (["bench", "laency"], "No such command 'laency'; did you mean latency?\n"),
        (["cache", "list"], "No such command 'list'; did you mean ls?\n"),
        (["xyzzy"], "No such command 'xyzzy'; there are generate, chat, serve"),
        (["fetch"], "Missing argument 'MODEL'; for example: ostinato fetch smollm2\n"),
        (["plan", "--max-num-seqs", "many"], "should be a whole number, such as 8\n"),
        (["generate", "hi", "--temperature", "hot"], "should be a number, such as 0.5\n"),
        (["plan", ""], "there is no directory '': it names nothing"),
        (["plan", "llama3.2:1b"], "names of Ollama's library are not known here: give a hub id"),
        (["plan", "ollama.com/library/llama3"], "names of Ollama's library are not known here"),
        (["gpu-check"], "`make gpu-rehearsal` runs every part without a GPU"),
        (["serve", "--host", "http://10.0.0.1:80/v1"], "  - --host 10.0.0.1\n"),
        (["serve", "--host", "127.0.0.1:80"], "  - --host 127.0.0.1\n"),
        (["serve", "--host", "[::1]"], "  - --host ::1\n"),
        (["serve", "--host", "10.0.0.500"], "  - --host 127.0.0.1\n"),
        (["serve", "--host", ""], "  - --host 127.0.0.1\n"),
        (["serve", "--host", "0.0.0.0"], "  - --host 127.0.0.1\n  - --insecure\n"),
        (["serve", "--host", "192.0.2.1", "--insecure"], "  - --host 127.0.0.1\n"),
    ],
)
def test_what_cannot_be_is_answered_with_what_can(
    capsys: pytest.CaptureFixture[str], typed: list[str], message: str
) -> None:
    status, _, err = run(capsys, *typed)
    assert status == 2
    assert message in err


def test_a_port_that_is_taken_is_answered_with_one_that_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(9):  # another process may take it meanwhile
            status, _, err = run(capsys, "serve", "--port", str(taken.getsockname()[1]))
            assert status == 2
            [port] = re.findall(r"^  - --port (\d+)$", err, flags=re.MULTILINE)
            with suppress(OSError), socket.create_server(("127.0.0.1", int(port))):
                return
    pytest.fail("the port that it names cannot be listened on")


def test_settings_come_from_a_file_and_flags_go_before_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ostinato.yaml"
    file.write_text(
        "model: demo-vl\nmax-num-seqs: 4\ncapture_sizes: [1, 2, 4]\nenable_prefix_caching: false\n"
        "speculative: {method: ngram, num_speculative_tokens: 2}\nport: 8123\napi_key: [secret-one, secret-two]\n"
        "revision:\nserved_model_name: [007, no, 1.10]\noverlap: off\n"
    )
    _, out, err = run(capsys, "serve", "--config", str(file), "--max-num-seqs", "3", "--print-config")
    printed = yaml.safe_load(out)
    assert not err
    assert (printed["model"], printed["max_num_seqs"], printed["port"]) == ("demo-vl", 3, 8123)
    assert (printed["capture_sizes"], printed["enable_prefix_caching"]) == ([1, 2, 4], False)
    assert printed["speculative"] == "ngram:2"
    # As they stand in the file: YAML reads them as 7, false, 1.1 and false.
    assert (printed["served_model_name"], printed["overlap"]) == (["007", "no", "1.10"], "off")
    assert "secret" not in out
    # What was printed is such a file, which says the same.
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert run(capsys, "serve", "--config", str(again), "--print-config")[1] == out
    assert set(re.findall(r"^(?:# )?(\w+):", out, flags=re.MULTILINE)) >= EngineConfig.model_fields.keys()
    # Of one file for the server, a plan takes what is its own, and says what is not.
    status, _, err = run(capsys, "plan", "--config", str(again))
    assert status == 0
    [others] = re.findall("plan passes over what is another command's: (.*)", err)
    assert set(others.split(", ")) == {"port", "served_model_name"}


BILLIONS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
"""A file of 400 bytes that stands for billions of values."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 4", "serve has no setting 'max_num_seq'; did you mean max_num_seqs?"),
        ("max_num_seqs: 4\nmax-num-seqs: 5", "max_num_seqs is given twice"),
        ("max_num_seqs: 4\nmax_num_seqs: 5", "max_num_seqs is given twice"),
        ("speculative:\n  method: ngram\n  method: mtp", "method is given twice"),
        ("speculative: &a\n  method: *a", "speculative holds what is no setting"),
        ("speculative:\n  method: 2026-01-01", "speculative holds what is no setting"),
        ("host: &a [*a]", "host holds what is no setting"),
        ("served_model_name: [a, null]", "served_model_name holds what is no setting"),
        ("host: !!set {a, b}", "host holds what is no setting"),
        ("host: !!omap [a: 1]", "host holds what is no setting"),
        (BILLIONS + "speculative: {method: *a9}", "holds what is no setting: more than 10,000 values"),
        (BILLIONS + "? *a9\n: 1", "holds what is no setting: more than 10,000 values"),
        ("? &a [*a]\n: 1", "is not YAML: found unhashable key"),
        (BILLIONS + "<<: [*a9]", "holds what is no setting: more than 10,000 values"),
        ("port: 2:10", "--port': should be a whole number"),
        ("- 4", "should have a line `name: value` for each setting"),
        ("port: 8000\na: b: c", "is not YAML: mapping values are not allowed here, in line 2\n"),
        ("a: \x00", "is not YAML: unacceptable character"),
        ("max_num_seqs: many", "--max-num-seqs': should be a whole number"),
        ("enforce_eager: true", "serve has no setting 'enforce_eager'; here it is graph_mode"),
        ("config: other.yaml", "serve has no setting 'config'"),
        ("config_file: other.yaml", "serve has no setting 'config_file'\n"),
        ("print_config: true", "serve has no setting 'print_config'; did you mean kv_events_config?"),
    ],
)
def test_a_file_that_says_nothing_we_know_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    status, _, err = run(capsys, "serve", "--config", str(file))
    assert status == 2
    assert message in err


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, "serve", "--config", str(tmp_path / "none.yaml"))
    assert (status, "No such file" in err) == (2, True)
