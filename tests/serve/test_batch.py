"""`ostinato batch`: bodies mean what they mean to the server, and what is computed is not computed again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from ostinato.cli.main import main
from tests.support.engine_probe import Probe, without_native_kernels
from tests.support.patience import PATIENCE
from tests.support.serving import serving

EXAMPLE = Path(__file__).parents[2] / "docs/examples/batch.jsonl"
ENGINE = ["--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--graph-mode", "none"]
SLOWED = """
import signal

import ostinato.serve.batch.run as run
import ostinato.serve.http.lifecycle as lifecycle
from ostinato.cli.main import main
from tests.support.engine_probe import Probe

# A shell's background processes, and so these tests, may have been told to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
run.Lifecycle = lambda *given: lifecycle.Lifecycle(*given, make=Probe({path!r}, {reference}))
main()
"""
WORDS = "Ava has 17 apples and buys 25 more. "
KINDS = {"/v1/chat/completions": ChatCompletion, "/v1/completions": Completion, "/v1/responses": Response}


def line(custom_id, url="/v1/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path, lines):
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def run(capsys, *arguments):
    """Status and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["batch", *map(str, arguments), *ENGINE])
    return int(ended.value.code or 0), capsys.readouterr().err


def answers(path):
    return {each["custom_id"]: each for each in map(json.loads, path.read_text().splitlines())}


def text(body):
    """The output in an answer of any endpoint."""
    if "output" in body:
        return [part["text"] for item in body["output"] for part in item["content"]]
    return [choice.get("text") or choice["message"]["content"] for choice in body["choices"]]


@pytest.mark.slow
def test_every_body_means_what_it_means_to_the_server_and_refusals_are_lines(tmp_path, capsys):
    asked = [json.loads(each) for each in EXAMPLE.read_text().splitlines()]
    asked += [
        line("several", prompt=[WORDS, [5, 6, 7]], max_tokens=5, n=2, temperature=0.5, seed=1, ignore_eos=True),
        line("long", prompt=WORDS, max_tokens=2, echo=True, user="x" * 20_000),  # a worker reads it
        line("regex", prompt="a", guided_regex="[ab]{4}"),
        line("other model", prompt="a", model="gpt"),
        line("field", prompt="a", colour=1),
        line("many", prompt="a", n=17),
        line("stream", prompt="a", stream=True),
    ]
    source, out = written(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    status, told = run(capsys, source, out)
    assert status == 1, "some were refused"
    assert "10 requests" in told
    assert "computing 10 answers" in told
    assert "10 answers, 4 of them refusals" in told
    found = answers(out)
    assert len(found) == 10
    with serving(max_num_seqs=4, graph_mode="none") as served:
        for each in asked:
            response = found[each["custom_id"]]["response"]
            if each["custom_id"] == "stream":
                assert response["status_code"] == 400
                assert response["body"]["error"]["param"] == "stream"
                continue
            there = httpx2.post(served.url + each["url"], json=each["body"], timeout=PATIENCE)
            assert response["status_code"] == there.status_code
            if there.status_code == 200:
                assert text(response["body"]) == text(there.json())
                KINDS[each["url"]].model_validate(response["body"])
            else:
                assert response["body"] == there.json()
    # Nothing is computed: not even a model is looked for.
    before = out.read_bytes()
    status, told = run(capsys, source, out, "--model", "/nowhere")
    assert status == 1
    assert "10 requests, of which 10 are answered" in told
    assert out.read_bytes() == before


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_where_it_was(tmp_path, request):
    # Four that end soon, and others whose steps take far longer than the signal.
    lengths = [2] * 4 + [200] * 20
    asked = [
        line(f"{i}", prompt=[5, 6, i], max_tokens=length, temperature=0, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]
    source, out = written(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    flags = ["batch", source, out, *ENGINE]
    command = [sys.executable, "-c", "from ostinato.cli.main import main; main()", *flags]
    probe = Probe(reference=without_native_kernels())
    request.addfinalizer(probe.close)
    probe.delay = 0.05
    slowed = [sys.executable, "-c", SLOWED.format(path=probe.path, reference=probe.reference), *flags]
    process = subprocess.Popen(slowed, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    end = time.monotonic() + PATIENCE
    while not (out.exists() and out.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, "it ended early"
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in told
    assert "the same command goes on" in told
    before = out.read_text().splitlines()
    assert 2 <= len(before) < 24, "it was stopped on its way"
    out.write_text("\n".join(before)[:-20])  # as if it had been killed within a line
    again = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert again.returncode == 0, again.stderr
    assert f"of which {len(before) - 1} are answered" in again.stderr
    assert out.read_text().splitlines()[: len(before) - 1] == before[:-1]
    found = answers(out)
    assert set(found) == {f"{i}" for i in range(24)}
    counts = {name: each["response"]["body"]["usage"]["completion_tokens"] for name, each in found.items()}
    assert counts == {f"{i}": length for i, length in enumerate(lengths)}


def test_answers_go_to_a_file_of_their_own(tmp_path, capsys):
    source = written(tmp_path / "in.jsonl", [line("a", prompt="a")])
    status, told = run(capsys, source, source)
    assert (status, "holds the requests" in told) == (2, True)
    other = tmp_path / "other"
    other.write_text('{"id":"batch_req_1","custom_id":"b","response":{"status_code":200,"body":{}},"error":null}\n')
    status, told = run(capsys, source, other)
    assert (status, "answers 'b', which" in told) == (2, True)
    status, told = run(capsys, source, tmp_path / "nowhere/out")
    assert (status, f"make its folder first: mkdir -p {tmp_path}/nowhere" in told) == (2, True)


@pytest.mark.slow
def test_unknown_fields_can_be_ignored_with_a_log_line(tmp_path, capsys, caplog):
    lines = [line("a", prompt=[5, 6], max_tokens=1, colour=1), line("b", prompt=[5, 6], max_tokens=1)]
    asked = written(tmp_path / "in.jsonl", lines)
    status, _ = run(capsys, asked, tmp_path / "strict.jsonl")
    assert status == 1
    assert answers(tmp_path / "strict.jsonl")["a"]["response"]["status_code"] == 400
    status, _ = run(capsys, asked, tmp_path / "lenient.jsonl", "--unknown-fields", "warn")
    assert status == 0
    assert {each["response"]["status_code"] for each in answers(tmp_path / "lenient.jsonl").values()} == {200}
    assert caplog.text.count("unknown fields are ignored: colour") == 1
