"""What is shipped, under which names and versions."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import ostinato
from tests.support.docs_pages import PAGES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LICENCES_OF_OTHERS = {
    str(path.relative_to(ROOT)) for path in ROOT.glob("src/ostinato/serve/page/third_party/*/LICENSE*")
}
ASKED_FOR = [ROOT / "Makefile", *ROOT.glob("deploy/*"), *ROOT.glob(".github/**/*.yml"), ROOT / "benchmarks/README.md"]
_EXTRAS = re.compile(r"(?:\bostinato|['\"\s]\.)\[([a-z0-9,]+)\]")
_BUILDS = {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"}


def extras_in(paths: list[Path]) -> dict[str, str]:
    """Extra -> the last file that names it."""
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return {
        extra: str(path.relative_to(ROOT))
        for path, text in texts.items()
        for names in _EXTRAS.findall(text)
        for extra in names.split(",")
    }


def test_every_extra_that_is_named_exists_and_pages_name_them_all() -> None:
    extras = set(PROJECT["optional-dependencies"])
    named = extras_in([*PAGES, *ASKED_FOR, *ROOT.glob("src/**/*.py")])
    assert not {extra: where for extra, where in named.items() if extra not in extras}
    assert extras == set(extras_in(PAGES))


@pytest.fixture(scope="module")
def source_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)
    [archive] = folder.iterdir()
    return archive


@pytest.mark.slow
def test_the_source_archive_has_what_a_build_reads_and_nothing_else(source_archive: Path) -> None:
    with tarfile.open(source_archive) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    sources = {
        str(path.relative_to(ROOT))
        for folder in ("cmake", "native", "src")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".so" and not re.search(r"__pycache__|\.egg-info", str(path))
    }
    assert names == sources | _BUILDS | {"PKG-INFO"}
    assert "src/ostinato/py.typed" in names


def test_its_metadata_tell_version_licence_and_extras(source_archive: Path) -> None:
    told = metadata(source_archive)
    assert told["Version"] == ostinato.__version__
    assert told["License-Expression"] == PROJECT["license"]
    assert set(told.get_all("License-File", [])) == {"LICENSE", *LICENCES_OF_OTHERS}
    assert set(told.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_the_version_stands_once() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    files = [(ROOT / "deploy" / name).read_text(encoding="utf-8") for name in ("kubernetes.yaml", "kuberay.yaml")]
    images = re.findall(r"image: ostinato(?:-ray)?:(\S+)", "\n".join(files))
    assert set(images) == {ostinato.__version__}


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert first is not None
    assert first[1] == ostinato.__version__


def metadata(source_archive: Path) -> Message:
    with tarfile.open(source_archive) as archive:
        [name] = [name for name in archive.getnames() if name.endswith("/PKG-INFO")]
        member = archive.extractfile(name)
        assert member is not None
        return message_from_bytes(member.read())


def test_a_release_needs_its_tag_its_day_and_a_wheel_of_each_architecture(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools/release.py"))
    version = ostinato.__version__
    assert tool["problems"](tmp_path, None) == [f"{tmp_path} has no wheel; `make wheels` builds one"]
    (tmp_path / f"ostinato-{version}-cp311-cp311-manylinux_2_28_x86_64.whl").write_bytes(b"")
    assert tool["problems"](tmp_path, None) == []
    wanted = "\n".join(tool["problems"](tmp_path, "v0.0.1"))
    for problem in (f"it should be v{version}", "no wheel for aarch64", "no source archive"):
        assert problem in wanted
    assert "no wheel for x86_64" not in wanted
    (tmp_path / "ostinato-0.0.1-cp311-cp311-linux_x86_64.whl").write_bytes(b"")
    (tmp_path / f"ostinato-{version}-cp312-cp312-linux_x86_64.whl").write_bytes(bytes(25 * 10**6 + 1))
    assert [" ".join(problem.split()[1:4]) for problem in tool["problems"](tmp_path, None)] == [
        "is not of",
        "has 25.0 MB,",
    ]


def test_a_releases_notes_are_its_section_of_the_changelog_without_the_next() -> None:
    section = runpy.run_path(str(ROOT / "tools/release.py"))["changelog_section"]
    text = "# Changelog\n\n## [2.0.0] - unreleased\n\n- b\n\n## [1.9.0] - 2026-01-02\n\n- a\n"
    assert section(text, "2.0.0") == ("unreleased", "- b\n")
    assert section(text, "1.9.0") == ("2026-01-02", "- a\n")
    assert section(text, "3.0.0") == ("", "")


def test_checksums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools/release.py"))
    (tmp_path / "ostinato-1.tar.gz").write_bytes(b"a")
    (tmp_path / "notes.md").write_bytes(b"b")
    (tmp_path / "SHA256SUMS").write_text(tool["checksums"](tmp_path), encoding="utf-8")
    told = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert told.stdout == "ostinato-1.tar.gz: OK\n"


def test_the_bill_of_materials_has_what_lies_in_the_wheel_itself() -> None:
    components = runpy.run_path(str(ROOT / "tools/release.py"))["bundled_components"]()
    named = {component["purl"].partition("/")[2].rpartition("@")[0] for component in components}
    assert {"markdown-it", "%40highlightjs/cdn-assets", "katex", "nanobind"} <= named
    assert len(named) == len(components)
    assert {component["licenses"][0]["license"]["id"] for component in components} <= set(
        PROJECT["license"].split(" AND ")
    )
