"""Files that are written whole: on a full disk, what was there before stays, and the error has path and remedy."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ostinato.cli.flags import read_prompts
from ostinato.config import EngineConfig
from ostinato.engine.text.chat_template import read_chat_template
from ostinato.errors import ConfigError, OstinatoError, RequestError
from ostinato.files import write_text
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.traffic import Traffic
from ostinato.serve.http.api_key_file import read_keys
from ostinato.units import parse_bytes
from tests.support.plan_cases import GIB, gpu, hybrid

PLAN = make_plan(EngineConfig(), hybrid(), gpu(GIB))
SAVES = {"the plan": PLAN.save, "the traffic": Traffic({}, {}).save}


@contextmanager
def no_more_than(size: int) -> Iterator[None]:
    """Files end at so many bytes, as on a disk that is full: what fits is written first."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("what", SAVES)
def test_a_file_that_does_not_fit_leaves_the_one_before(tmp_path, what):
    path = tmp_path / "saved.json"
    for before in (None, "before"):
        if before is not None:
            path.write_text(before)
        with no_more_than(16), pytest.raises(OstinatoError) as caught:
            SAVES[what](path)
        assert caught.value.message == f"{what} cannot be written to {path}: {os.strerror(errno.EFBIG)}"
        assert [each.read_text() for each in tmp_path.iterdir()] == ([] if before is None else [before])
    SAVES[what](path)
    assert path.read_text() != "before"


def test_a_full_device_is_named_with_what_to_do():
    with pytest.raises(RequestError, match="No space left on device; make room there, or choose another place"):
        write_text(Path("/dev/full"), "text", "the plan")


def test_a_missing_folder_is_named_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(RequestError, match=f"make its folder first: mkdir -p {tmp_path}/gone"):
        write_text(tmp_path / "gone" / "plan.json", "text", "the plan")


def test_a_prompt_ends_where_its_line_does_and_an_editors_mark_is_no_part_of_it(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeffone\u2028and\x0bmore\r\n\n \n\x85two\n", encoding="utf-8")
    assert read_prompts(path) == ("one\u2028and\x0bmore", "\x85two")
    path.write_text("\ufeff{{ messages }}", encoding="utf-8")
    assert read_chat_template(path) == "{{ messages }}"
    with pytest.raises(ConfigError, match="/dev/null is a pipe or a device; give a file, which several processes read"):
        read_chat_template(Path("/dev/null"))
    path.write_text("\ufeffthe-key\n", encoding="utf-8")
    assert [key.key for key in read_keys((), path).values()] == ["the-key"]


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5", "9" * 400 + "GiB", "0." + "9" * 5000])
def test_a_size_of_more_digits_than_any_is_none(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("path", [None, 5, b"plan.json", ["plan.json"], "plan\0.json", "\ud800"])
def test_what_is_no_name_of_a_file_is_refused_by_name(path):
    for what, save in SAVES.items():
        with pytest.raises(OstinatoError, match=f"{what} cannot be written to "):
            save(path)
    with pytest.raises(ConfigError, match="the plan cannot be read from "):
        Plan.load(path)


def test_a_link_stays_one_and_permissions_stay(tmp_path):
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("before")
    kept.chmod(0o640)
    link.symlink_to(kept)
    write_text(link, "after", "the plan")
    assert link.is_symlink()
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("after", 0o640)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV])
@pytest.mark.parametrize("call", ["write_bytes", "replace"])
def test_a_file_that_none_can_take_the_place_of_is_written_in_place(tmp_path, monkeypatch, number, call):
    path, original = tmp_path / "plan.json", getattr(Path, call)
    path.write_text("before")

    def refuse(self, *arguments):
        if self.suffix == ".part":
            raise OSError(number, os.strerror(number))
        return original(self, *arguments)

    monkeypatch.setattr(Path, call, refuse)
    write_text(path, "after", "the plan")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("plan.json", "after")]


def test_a_name_may_be_as_long_as_the_system_takes_it(tmp_path):
    path = tmp_path / ("n" * 250)
    write_text(path, "text", "the plan")
    assert path.read_text() == "text"


def test_an_interrupt_leaves_the_file_before_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("before")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "after", "the plan")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("plan.json", "before")]


def test_a_text_that_is_no_utf_8_leaves_the_file_before(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("before")
    with pytest.raises(RequestError, match=r"the plan cannot be written to .*: UTF-8 has no '\\udcff'"):
        write_text(path, "a\udcff", "the plan")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("plan.json", "before")]


def test_a_plan_that_was_cut_off_is_no_plan(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    for text in (path.read_text()[:1000], "{}", "", "\udcff"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match=f"the plan cannot be read from {path}: "):
            Plan.load(path)
