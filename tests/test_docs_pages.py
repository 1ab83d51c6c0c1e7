"""The pages name what exists, are short, and tell the settings and flags as they are."""

from __future__ import annotations

import inspect
import json
import os
import pydoc
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.main import get_command

import ostinato
from ostinato import LLM, AsyncLLM, EngineConfig, Guide, SamplingParams, other_engines
from ostinato.cli.main import app
from ostinato.demo.drawings import held_out
from ostinato.formats.gguf.architectures import ARCHITECTURES
from ostinato.models.registry import MODELS
from ostinato.setting_names import ALIASES
from tests.support.client_frameworks import FRAMEWORKS
from tests.support.docs_pages import LANGUAGES, PAGES, ROOT, assert_printed, blocks

MOST_BYTES = 8192
COMING_FROM = ROOT / "docs/coming-from-vllm-or-llama-cpp.md"
BESIDE_OTHERS = (COMING_FROM, *ROOT.glob("docs/flags-of-*.md"), *ROOT.glob("docs/coming-from-*.md"))
_FENCED = re.compile(r"```.*?```", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.*-]+\.\w+|(?:[\w.-]+/)+)`")
_FLAG = re.compile(r"`(--[a-z0-9-]+)")
_NAME = re.compile(r"`(?:--)?([a-z][a-z0-9_-]+)")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_a_page_is_read_in_a_few_minutes(page: Path) -> None:
    assert len(page.read_bytes()) <= MOST_BYTES


def test_the_sites_copy_buttons_take_commands_alone() -> None:
    hook = runpy.run_path(str(ROOT / "tools/site_hook.py"))
    readme = "$ git clone URL && cd it\n$ make demo     # sets up, it's said\n3 answers\n\n$ make test # runs\n"
    assert list(hook["commands_in"](readme)) == ["git clone URL && cd it", "make demo", "make test"]
    html = (
        '<div class="language-console highlight"><pre><span></span><code><span class="gp">$ </span>curl -d'
        "<span class='s1'>&#39;{\n  &quot;a&quot;: &quot; # 1&quot;}&#39;</span>\n<span>{}</span></code></pre>"
    )
    made = hook["on_page_content"](html)
    assert unescape(re.findall(r'data-copy="(.*?)"', made, re.DOTALL)[0]) == """curl -d'{\n  "a": " # 1"}'"""
    assert hook["on_page_content"]('<div class="language-text highlight"><pre>$ a</pre>').count("data-copy") == 0
    for page in PAGES:
        for block in blocks(page):
            if block.language == "console" and block.is_run:
                commands = [command for command, _ in block.commands]
                copied = list(hook["commands_in"]("\n".join(block.lines)))
                assert len(copied) == len(commands)
                assert all(map(str.startswith, commands, copied)), block.name


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        file, _, heading = target.partition("#")
        if "://" in target:
            continue
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        if heading:
            assert heading in {anchor(line) for line in linked.read_text(encoding="utf-8").splitlines()}, target


def anchor(line: str) -> str | None:
    """What a link says of a heading."""
    if not line.startswith("#"):
        return None
    words = re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower())
    return words.replace(" ", "-")


def test_the_readme_or_the_table_of_models_names_every_architecture_and_the_readme_counts_those_of_the_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [row] = [line for line in readme.splitlines() if line.startswith("| models")]
    named = set(re.findall("`(\\w+)`", row))
    table = (ROOT / "docs/models.md").read_text(encoding="utf-8").partition("## Architectures")[2]
    of_table = {name for cell in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall("`(\\w+)`", cell)}
    of_table.discard("model_type")
    assert named | of_table == set(MODELS)
    assert f"[{len(of_table - named)} others]" in row
    names_in_files = {name for each in ARCHITECTURES.values() for name in each.configs}
    assert f"[GGUF files](docs/gguf.md) of {len(names_in_files)} architectures" in readme


@every_page
def test_paths_that_are_named_exist(page: Path) -> None:
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    roots = (ROOT, ROOT / "src/ostinato", page.parent)
    for path in _PATH.findall(text):
        if path.startswith(("v1/", "build/", "dist/", "DIR/", ".venv")) or "NAME" in path:
            continue
        assert any(list(root.glob(path.rstrip("/"))) for root in roots), path


@every_page
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, block.name


@every_page
def test_no_command_stands_outside_a_block_that_is_tested(page: Path) -> None:
    assert not re.search(r"^ {4}\$ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_extras_that_pages_and_messages_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        extra.strip()
        for file in files
        for extras in re.findall(r"ostinato\[([a-z0-9,]+)\]", file.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert {"ray", "hub"} <= named
    assert named <= project["optional-dependencies"].keys()


def test_every_page_is_in_the_index() -> None:
    for folder, pages in (("docs", "*.md"), ("docs", "tutorials/*.md"), ("docs/architecture", "*.md")):
        linked = _LINK.findall((ROOT / folder / "README.md").read_text(encoding="utf-8"))
        listed = {page.relative_to(ROOT / folder).as_posix() for page in (ROOT / folder).glob(pages)}
        assert listed - {"README.md"} <= set(linked)


def test_every_page_is_in_the_sites_navigation() -> None:
    named = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    on_the_site = runpy.run_path(str(ROOT / "tools/site_pages.py"))["pages"]()
    assert sorted(named) == sorted(map(str, on_the_site))
    assert {page.relative_to(ROOT) for page in PAGES} <= set(on_the_site)


def test_the_reference_has_the_names_that_the_package_exports() -> None:
    named = re.findall(r"^::: ostinato\.(\w+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(named) == sorted(ostinato.__all__)


@every_page
def test_what_a_page_shows_of_a_file_stands_there(page: Path) -> None:
    for block in blocks(page):
        if stands := re.search(r"it stands in (\S+):", block.check):
            assert "\n".join(block.lines) in (ROOT / stands[1]).read_text(encoding="utf-8"), block.name


def test_the_pages_of_settings_are_those_that_the_code_gives() -> None:
    tool = runpy.run_path(str(ROOT / "tools/settings_page.py"))
    pages = tool["pages"]()
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run tools/settings_page.py"
    rows = re.findall(r"^\| `(\w+)`", pages["settings.md"] + pages["graph-settings.md"], flags=re.MULTILINE)
    assert sorted(rows) == sorted(EngineConfig.model_fields), "each setting of the engine once"


def test_the_pages_of_other_engines_are_those_that_the_code_gives() -> None:
    tool = runpy.run_path(str(ROOT / "tools/other_engines_page.py"))
    for name, text in tool["pages"]().items():
        assert (tool["DOCS"] / name).read_text(encoding="utf-8") == text, "run tools/other_engines_page.py"
    assert "not known" not in tool["_fields"](tool["PROGRAMS"]["vllm"]["fields"])
    assert "not known" not in tool["_fields"](tool["PROGRAMS"]["llama.cpp"]["fields"])


@pytest.mark.parametrize("program", ["vllm", "llama.cpp", "mlx_lm"])
def test_every_flag_of_another_program_is_one_here_or_is_answered(program: str) -> None:
    tool = runpy.run_path(str(ROOT / "tools/other_engines_page.py"))
    ours = set().union({"-h", "--help"}, *flags().values())
    assert not [flag for flag in tool["_flags"](program) - ours if other_engines.advice(flag) is None]


def test_command_lines_of_ours_beside_those_of_others_are_understood() -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/coming-from-*.md"))]
    lines = [shlex.split(line) for page in pages for line in re.findall(r"^\$ (ostinato .*)", page, re.MULTILINE)]
    for _, name, *words in lines:
        if "--enforce-eager" not in words:  # a mistake that is shown
            assert get_command(app).commands[name].make_context(name, words).params, words
    assert len(lines) >= 9


def test_the_page_of_machines_has_each_model_on_each_machine_and_its_plans_are_todays() -> None:
    """One plan of the page is made anew; all of them take minutes."""
    tool = runpy.run_path(str(ROOT / "tools/machines_page.py"))
    lines = tool["PAGE"].read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    fits, speed = rows[: len(tool["MODELS"]) + 2], rows[len(tool["MODELS"]) + 2 :]
    assert fits[0] == ["", *tool["MACHINES"]]
    assert [re.findall(r"\((?:.*?)co/(.*)\)", linked) for linked, *_ in fits[2:]] == [[name] for name in tool["MODELS"]]
    assert [name for name, *_ in speed[2:]] == [name.partition("/")[2] for name in tool["MODELS"]]
    name, machine = "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "h100-80gb"
    place = 2 + list(tool["MODELS"]).index(name)
    for row, made in ((fits[place], tool["cell"](name, machine)), (speed[place], tool["slow"](name, machine))):
        assert made in row, "run tools/machines_page.py"


@pytest.mark.parametrize("name", json.loads((ROOT / "tools/published_models.json").read_text(encoding="utf-8")))
def test_a_published_model_has_about_the_parameters_that_its_name_says(name: str) -> None:
    spec = runpy.run_path(str(ROOT / "tools/machines_page.py"))["model"](name, "none")[1]
    said = re.search(r"-(\d+(?:\.\d+)?)b\b", name.lower())
    billions = float(said[1]) if said is not None else {"micro": 3.2, "tiny": 7, "small": 32}[name.rpartition("-")[2]]
    assert spec.num_parameters / 1e9 == pytest.approx(billions, rel=0.09)


def test_the_page_of_errors_is_the_one_that_the_classes_give() -> None:
    tool = runpy.run_path(str(ROOT / "tools/troubleshooting_page.py"))
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["page"](), "run tools/troubleshooting_page.py"
    for flag in _FLAG.findall(" ".join(tool["ADVICE"].values())):
        assert flag in flags()["serve"]


def test_every_proof_names_a_test_that_is_there_and_its_page_is_that_of_the_last_run() -> None:
    tool = runpy.run_path(str(ROOT / "tools/proofs.py"))
    named = tool["tests"]()
    assert len(set(named)) == len(named)
    for test in named:
        file, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE)
    results = tool["load_results"]()
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["page"](results), "run make proofs"
    assert set(results["outcomes"]) <= set(named)
    assert "failed" not in results["outcomes"].values()


def test_tables_beside_other_engines_say_what_a_mistyped_flag_is_answered_with() -> None:
    text = COMING_FROM.read_text(encoding="utf-8").partition("## Settings")[2]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    answered = 0
    for *others, ours in rows:
        for theirs in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(others[1:])):
            flags = _FLAG.findall(f"`{other_engines.FLAG_EQUIVALENTS.get(theirs) or ''}".replace(" --", " `--"))
            assert all(f"`{flag}" in ours for flag in flags), (theirs, flags, ours)
            answered += bool(flags)
    assert answered > 25


def test_editors_know_the_settings_that_there_are() -> None:
    tool = runpy.run_path(str(ROOT / "tools/settings_types.py"))
    assert tool["MODULE"].read_text(encoding="utf-8") == tool["module"](), "run tools/settings_types.py"


def test_settings_that_are_given_by_keyword_are_typed() -> None:
    for typed in (LLM, AsyncLLM, EngineConfig, SamplingParams, Guide):
        parameters = inspect.signature(typed.__init__).parameters
        assert str(parameters["settings"].annotation).startswith("Unpack["), typed


MISTAKES = """
from ostinato import EngineConfig, Guide, LLM, SamplingParams
SamplingParams(temperature=0.5, stop="a", stop_token_ids=[1], logit_bias={1: 2.0}, guide={"regex": "a"})
SamplingParams(temprature=0.5)
SamplingParams(temperature="hot")
SamplingParams().replace(max_token=3)
Guide(json="x")
EngineConfig(max_num_seq=3)
def run(llm: LLM) -> None:
    llm.generate("a", SamplingParams())
    llm.generate("a", use_tqdm=False)
"""


@pytest.mark.long
def test_a_type_checker_finds_misspelled_settings(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(MISTAKES)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", "--cache-dir", tmp_path, program]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
    assert [int(line) for line in re.findall(r"program.py:(\d+): error", said)] == [4, 5, 6, 7, 8, 11], said
    assert 'did you mean "temperature"?' in said


def test_help_describes_every_field() -> None:
    for described in (EngineConfig, Guide, SamplingParams):
        text = pydoc.plain(pydoc.render_doc(described))
        for name, field in described.model_fields.items():
            assert field.description, f"{described.__name__}.{name}"
            assert field.description.split()[-1] in text
            assert re.search(rf"^ \|  {name}\b", text, flags=re.MULTILINE), f"{described.__name__}.{name}"


def test_the_example_drawing_is_one_that_training_never_saw() -> None:
    turn = held_out(0, 6)[5][0]
    with Image.open(ROOT / "docs/examples/drawing.png") as shipped:
        assert shipped.tobytes() == turn.images()[0].tobytes()
    assert turn.question.answer == "a blue triangle left of a yellow cross"


# How pages are read


@pytest.mark.parametrize(
    ("shown", "printed", "varies", "fits"),
    [
        (["a 1", "b"], "a 1\n\nb  \n", False, True),
        (["a 1"], "a 2\n", False, False),
        (["a 1"], "a 2\n", True, True),
        (["a  12.5 ms"], "a 3 ms\n", True, True),
        (["a 1"], "b 1\n", True, False),
        (["a"], "a\nb\n", False, False),
        (["a", "..."], "a\nb\nc\n", False, True),
        (["...", "c"], "a\nb\nc\n", False, True),
        (["...", "d"], "a\nb\nc\n", False, False),
        (["a ... d"], "a b c d\n", False, True),
        (["a ... e"], "a b c d\n", False, False),
        ([], "a\n", False, False),
    ],
)
def test_output_fits_what_is_shown(shown: list[str], printed: str, varies: bool, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(AssertionError):
        assert_printed(shown, printed, varies)


def test_remarks_on_stderr_are_shown_as_they_are_or_not_at_all() -> None:
    for shown in (["a"], ["a", "b 2"]):
        assert_printed(shown, "a\n", False, "b 2\n")
    for shown in ([], ["b 2"], ["a", "b"], ["a", "b 2", "c"]):
        with pytest.raises(AssertionError):
            assert_printed(shown, "a\n", False, "b 2\n")


def test_blocks_are_read_with_their_comments_commands_and_outputs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- check: slow, 5 s, varies -->\n```console\n$ echo 'a\nb'\na\nb\n$ true\n```\n\n"
        "```python\nprint(1)\n```\n\n<!-- check: varies -->\n```text\n1\n```\n\nprose\n\n```text\ndrawing\n```\n"
    )
    console, python, drawing = blocks(page)
    assert console.commands == [("echo 'a\nb'", ["a", "b"]), ("true", [])]
    assert console.flags == {"slow", "5 s", "varies"}
    assert (python.output, python.output_check, python.check) == (["1"], "varies", "")
    assert (drawing.language, drawing.lines, drawing.is_run) == ("text", ["drawing"], False)


# Flags


@cache
def flags() -> dict[str, set[str]]:
    """The flags of each command, `bench` and its like as `bench serve`."""
    return dict(commands(get_command(app), ""))


def commands(command: Any, name: str) -> list[tuple[str, set[str]]]:
    options = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    found = [(name, options)]
    for inner, each in getattr(command, "commands", {}).items():
        found += commands(each, f"{name} {inner}".strip())
    return found


def test_our_flags_exist() -> None:
    known = set().union(*flags().values())
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for line in page.read_text(encoding="utf-8").splitlines():
            # Of a table beside others' flags, the last column has ours.
            ours = line.split("|")[-2] if page in BESIDE_OTHERS and line.startswith("|") else line
            for flag in _FLAG.findall(ours):
                assert flag in known, f"{page.name}: {flag}"


def test_a_flag_of_vllms_that_is_said_to_work_does() -> None:
    rows = [line.strip("|").split("|") for line in COMING_FROM.read_text(encoding="utf-8").splitlines()]
    same = [row for row in rows if len(row) == 4 and "vLLM's too" in row[3]]
    named = {
        setting(theirs): setting(ours)
        for row in same
        for theirs, ours in zip(_NAME.findall(row[1]), _FLAG.findall(row[3]), strict=False)
    }
    assert named == ALIASES
    assert {setting(flag) for flag in flags()["serve"]} >= set(named)


def setting(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def test_the_page_of_the_server_names_the_versions_of_clients_that_are_tested() -> None:
    pinned = {}
    for file in ("constraints.txt", "tests/serve/clients.txt"):
        lines = (ROOT / file).read_text().splitlines()
        pinned[file] = dict(line.split("==") for line in lines if "==" in line)
    own, theirs = pinned.values()
    [table] = re.findall(r"\| package \| tested version \|\n.*?\n((?:\|.*\n)+)", (ROOT / "docs/serving.md").read_text())
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table.splitlines()]
    assert rows[0] == ("`openai`; `anthropic`; `ollama`", f"{own['openai']}; {own['anthropic']}; {own['ollama']}")
    frameworks = {re.findall("`(.*?)`", package)[0]: version for package, version in rows[1:]}
    assert frameworks.pop("litellm") == f"{theirs['litellm']}, with openai {theirs['openai']}"
    assert frameworks == {name: theirs[name] for name in frameworks}
    assert frameworks.keys() == FRAMEWORKS.keys() - {"litellm"}
