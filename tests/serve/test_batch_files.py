"""The files of `ostinato batch`: what they may hold, and what is left of answers that were cut off."""

import json
import os
import resource
from pathlib import Path

import pytest

from ostinato.errors import RequestError
from ostinato.serve.batch.files import AnswerFile, read_bodies, read_lines

URLS = ("/v1/completions",)


def request(custom_id="a", **changes):
    return {"custom_id": custom_id, "method": "POST", "url": URLS[0], "body": {"prompt": "é"}, **changes}


def written(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_requests_are_read_with_their_places(tmp_path):
    source = written(tmp_path / "in", request("a"), "\n", request("b", body={"prompt": "漢"}), request("c"))
    lines = read_lines(source, URLS)
    assert [line.custom_id for line in lines] == ["a", "b", "c"]
    assert [body["prompt"] for _, body in read_bodies(source, lines[1:])] == ["漢", "é"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: it is not JSON"),
        ("[" * 100_000, "line 2: it is not JSON"),
        ("1\n", "line 2: it should be a JSON object"),
        (request(""), "line 2: custom_id"),
        (request(7), "line 2: custom_id"),
        (request("b", method="GET"), "line 2: method"),
        (request("b", url="/v1/files"), "line 2: url should be /v1/completions, not '/v1/files'"),
        (request("b", body="x"), "line 2: body"),
        (request("b", colour=1), "line 2: 'colour' is unknown"),
        (request("a"), "line 2: line 1 has its custom_id 'a' too"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, line, says):
    with pytest.raises(RequestError, match=says):
        read_lines(written(tmp_path / "in", request("a"), line), URLS)


def test_a_file_without_requests_or_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(RequestError, match="there is no request"):
        read_lines(written(tmp_path / "in", "\n\n"), URLS)
    with pytest.raises(RequestError, match="cannot be read"):
        read_lines(tmp_path / "nowhere", URLS)


def answered(path):
    with AnswerFile(path) as file:
        return file.statuses


def test_answers_are_there_when_the_file_is_opened_again(tmp_path):
    path = tmp_path / "out"
    with AnswerFile(path) as file:
        file.write('a"', 200, "r1", b'{"x":"\xc3\xa9"}')
        file.write("b", 400, "r2", b"{}")
        assert file.num_refused == 1
    assert answered(path) == {'a"': 200, "b": 400}
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["custom_id"] == 'a"'
    assert first["response"] == {"status_code": 200, "request_id": "r1", "body": {"x": "é"}}
    assert (second["error"], second["id"] != first["id"]) == (None, True)


def test_a_last_answer_that_was_cut_off_anywhere_is_removed_and_the_others_stay(tmp_path):
    path = tmp_path / "out"
    with AnswerFile(path) as file:
        file.write("a", 200, "r", b'{"x":1}')
        first = path.read_bytes()
        file.write("b", 200, "r", b'{"x":2}')
    whole = path.read_bytes()
    for length in range(len(first), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert answered(path) == {"a": 200}, length
        assert path.read_bytes() == first
    path.write_bytes(whole[:-1])  # all but the line's end is there
    assert answered(path) == {"a": 200, "b": 200}
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ["hello\n", "hello", '{"custom_id": "a"}\n', '{"id":"batch_req_1\n{}\n'])
def test_a_file_of_something_else_is_refused_and_stays_as_it_is(tmp_path, text):
    path = written(tmp_path / "out", text)
    with pytest.raises(RequestError, match="line 1 is no answer"):
        AnswerFile(path)
    assert path.read_text() == text


def test_two_answers_to_one_request_are_refused(tmp_path):
    path = tmp_path / "out"
    with AnswerFile(path) as file:
        file.write("a", 200, "r", b"{}")
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(RequestError, match="line 2 answers 'a' again"):
        AnswerFile(path)


def test_a_file_that_another_writes_is_refused(tmp_path):
    with (
        AnswerFile(tmp_path / "out"),
        pytest.raises(RequestError, match="another process is writing"),
    ):
        AnswerFile(tmp_path / "out")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/null", "pipe"])
def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path, path):
    place = Path(path)
    if path == "pipe":
        place = tmp_path / "pipe"
        os.mkfifo(place)
    elif not place.exists():
        pytest.skip("a device of Linux")
    with pytest.raises(RequestError, match="no file that can be read twice"):
        read_lines(place, URLS)
    with pytest.raises(RequestError, match=r"no file that could be read|cannot be written"):
        AnswerFile(place)


def test_where_there_is_no_room_the_answers_before_are_whole_and_the_next_run_goes_on(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with AnswerFile(tmp_path / "out") as answers:
        answers.write("a", 200, "1", b"{}")
        size = (tmp_path / "out").stat().st_size
        try:
            # A limit on the size of files stands for the disk; the signal that comes with it is ignored by Python.
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
            with pytest.raises(RequestError, match=r"cannot be written to .*File too large; the same command goes on"):
                answers.write("b", 200, "2", b"{}")
            answers.__exit__()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with AnswerFile(tmp_path / "out") as answers:
        assert answers.statuses == {"a": 200}
    assert (tmp_path / "out").stat().st_size == size


def test_a_file_of_answers_that_is_removed_meanwhile_is_an_error(tmp_path):
    with AnswerFile(tmp_path / "out") as answers:
        answers.write("a", 200, "1", b"{}")
        (tmp_path / "out").unlink()
        with pytest.raises(RequestError, match=r"cannot be written to .*removed meanwhile; the same command goes on"):
            answers.write("b", 200, "2", b"{}")
