"""What the page is made of: files of the package, as published, small, and under a strict policy."""

import gzip
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import httpx2
import pytest

from ostinato.demo import CHECKPOINTS, INTRODUCTIONS
from ostinato.serve.api.page import DIRECTORY
from tests.support.page_chat import answered, chunks, script_answers
from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[3]
THIRD_PARTY = DIRECTORY / "third_party"
LIBRARIES = json.loads((THIRD_PARTY / "versions.json").read_text())["libraries"]
OWN = [
    path for path in DIRECTORY.rglob("*") if path.suffix in (".js", ".css", ".html") and THIRD_PARTY not in path.parents
]
LARGEST = 300_000
"""Bytes of all that the page loads, as the issue of the page asks."""


def tool():
    spec = importlib.util.spec_from_file_location("page_libraries", ROOT / "tools/page_libraries.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_library_is_as_it_was_published():
    assert tool().differences() == []


def test_a_file_that_was_changed_added_or_lost_is_found(tmp_path, monkeypatch):
    module = tool()
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "VERSIONS", tmp_path / "versions.json")
    (tmp_path / "a.js").write_text("changed")
    (tmp_path / "b.js").write_text("added")
    files = {"a.js": {"sha256": "0" * 64}, "c.js": {"sha256": "0" * 64}}
    (tmp_path / "versions.json").write_text(json.dumps({"libraries": [{"files": files}]}))
    assert module.differences() == [
        "c.js is missing",
        "b.js is not in versions.json",
        "a.js is not the file that was published",
    ]


def test_every_library_has_its_licence_beside_it_and_in_the_metadata():
    for library in LIBRARIES:
        [licence] = [name for name in library["files"] if "LICENSE" in name]
        assert len((THIRD_PARTY / licence).read_text()) > 500
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(project["license"].split(" AND "))
    assert named == {"Apache-2.0", *(library["licence"] for library in LIBRARIES)}
    shipped = {path for pattern in project["license-files"] for path in ROOT.glob(pattern)}
    assert {THIRD_PARTY / name for library in LIBRARIES for name in library["files"] if "LICENSE" in name} < shipped


def test_own_files_are_small_and_have_no_inline_script_style_or_other_host():
    for path in OWN:
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        assert "innerHTML" not in text, path
        assert not re.search(r"(?:src|href|url|import|from)\s*[=(]?\s*[\"'(]?\s*(?:https?:)?//", text), path
    index = (DIRECTORY / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", index)


def test_every_embedded_model_is_introduced_with_questions_and_their_pictures():
    assert set(INTRODUCTIONS) == set(CHECKPOINTS)
    for introduction in INTRODUCTIONS.values():
        assert 3 <= len(introduction.questions) <= 4
        assert all((DIRECTORY / name).is_file() for name in introduction.pictures.values())
        assert set(introduction.pictures) <= set(introduction.questions)


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/third_party/katex/katex.js"])
def test_texts_are_compressed_for_those_who_take_that(served, path):
    url = f"{served.url}{path}"
    plain = httpx2.get(url, headers={"Accept-Encoding": "identity"}, timeout=PATIENCE)
    assert "content-encoding" not in plain.headers
    for accepted in ("gzip", "br, gzip;q=0.5"):
        packed = httpx2.get(url, headers={"Accept-Encoding": accepted}, timeout=PATIENCE)
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.content == plain.content
        assert int(packed.headers["content-length"]) < len(plain.content)
        assert packed.headers["vary"] == "Accept-Encoding"
        again = httpx2.get(
            url, headers={"Accept-Encoding": accepted, "If-None-Match": packed.headers["etag"]}, timeout=PATIENCE
        )
        assert (again.status_code, again.content) == (304, b"")
    for refused in ("gzip;q=0", "br"):
        assert "content-encoding" not in httpx2.get(url, headers={"Accept-Encoding": refused}, timeout=PATIENCE).headers


def test_pictures_and_fonts_are_sent_as_they_lie(served):
    for path in ("examples/dark.png", "third_party/katex/fonts/KaTeX_Main-Regular.woff2"):
        sent = httpx2.get(f"{served.url}/page/{path}", headers={"Accept-Encoding": "gzip"}, timeout=PATIENCE)
        assert sent.content == (DIRECTORY / path).read_bytes()
        assert "content-encoding" not in sent.headers


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/styles/base.css", "/page/third_party/katex/katex.js"])
@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_every_file_comes_under_the_strict_policy(served, path, encoding):
    headers = httpx2.get(f"{served.url}{path}", headers={"Accept-Encoding": encoding}, timeout=PATIENCE).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "object-src": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-cache"


def test_the_policy_lets_no_text_become_markup_even_by_mistake(page):
    failed = page.script("try { document.createElement('p').innerHTML = '<b>1</b>'; } catch (it) { return it.name; }")
    assert failed == "TypeError"
    page.forget()


LOADED = """const entries = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .filter(({ name }) => name.endsWith("/") || name.includes("/page/"));
const sum = (field) => entries.reduce((total, entry) => total + entry[field], 0);
return [sum("encodedBodySize"), sum("decodedBodySize"), entries.map(({ name }) => name)];"""


def test_all_that_the_page_loads_is_small_and_maths_comes_only_when_there_is_some(page):
    sent, raw, names = page.script(LOADED)
    assert sent < LARGEST
    assert raw < LARGEST
    assert not [name for name in names if "katex" in name or "/highlight/" in name]
    script_answers(page, chunks({"content": "```python\ndef f(): pass\n```\n\n$$\\sum_{i=1}^n i^2$$ and $x$"}))
    answered(page, "?")
    page.until(lambda: page.count(".katex") == 2 and page.count(".hljs-keyword"))
    page.wait_for("await document.fonts.ready")
    sent, _, names = page.script(LOADED)
    assert [name for name in names if name.endswith(".woff2")]
    assert sent < LARGEST


def test_what_is_sent_is_as_large_as_gzip_makes_it(served):
    path = DIRECTORY / "third_party/katex/katex.js"
    sent = httpx2.get(
        f"{served.url}/page/third_party/katex/katex.js", headers={"Accept-Encoding": "gzip"}, timeout=PATIENCE
    )
    assert int(sent.headers["content-length"]) == len(gzip.compress(path.read_bytes(), 6, mtime=0))


def test_about_tells_what_the_model_is_and_takes(served):
    told = httpx2.get(f"{served.url}/about", timeout=PATIENCE).json()
    assert told["model"] == "demo"
    assert told["parameters"] == 3263688
    assert told["layers"] == {"mamba2": 3, "mlp": 3, "attention": 2}
    assert (told["sampling"]["temperature"], told["chat_sampling"]) == (0.0, {})
    assert (told["chats"], told["takes_images"], told["takes_tools"], told["reasons"]) == (True, False, False, False)
    assert [each["image"] for each in told["examples"]] == [None, None, None]
