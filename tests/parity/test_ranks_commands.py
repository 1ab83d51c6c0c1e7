"""`ostinato serve`, `chat` and `verify` as a user calls them, with a process for each rank of the embedded model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import httpx2
import pytest

from ostinato import LLM, SamplingParams
from tests.parity.test_parity_ranks import is_rank
from tests.support.patience import PATIENCE
from tests.support.server_process import RUN, Process

QUESTION = "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?"
RANKS = ["--tensor-parallel-size", "2", "--threads", "1"]
SMALL = ["--dtype", "float32", "--cache-memory", "16MiB", "--max-num-seqs", "2"]


@pytest.fixture(scope="module")
def answer() -> str:
    """What one process says to the question."""
    with LLM("demo", dtype="float32", threads=1, cache_memory="16MiB", max_num_seqs=2) as llm:
        [output] = llm.chat([[{"role": "user", "content": QUESTION}]], SamplingParams(temperature=0.0, max_tokens=64))
    return output.outputs[0].text


def command(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments], input=given, capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.slow
def test_a_server_with_ranks_answers_as_one_process_does_and_ends_with_all_of_them(answer: str) -> None:
    server = Process(*RANKS)
    try:
        url = server.ready()
        messages = [{"role": "user", "content": QUESTION}]
        asked = {"messages": messages, "temperature": 0.0, "max_tokens": 64}
        response = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=PATIENCE)
        assert response.json()["choices"][0]["message"]["content"] == answer
        processes = server.descendants()
        assert sum(is_rank(pid) for pid in processes) == 1  # beside the first, which is the engine's process
        server.process.send_signal(signal.SIGTERM)
        assert server.status() == 0
        server.until(lambda: not any(is_rank(pid) for pid in processes))
    finally:
        server.process.kill()


@pytest.mark.ranks
def test_a_chat_with_ranks_says_what_one_process_does(answer: str) -> None:
    told = command("chat", "demo", *RANKS, *SMALL, "--temperature", "0", "--max-tokens", "64", given=f"{QUESTION}\n")
    assert (told.returncode, told.stdout.strip()) == (0, answer.strip()), told.stderr


@pytest.mark.ranks
def test_verify_compares_ranks_with_one_process() -> None:
    few = ["--quick", "--num-prompts", "1", "--max-tokens", "16", "--graph-mode", "none", "--state-cache-mode", "align"]
    told = command("verify", "demo", *RANKS, *SMALL, *few, "--json")
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    methods = {cell["speculative"].split(":")[0] for cell in report["cells"]}
    assert methods == {"none", "mtp", "draft", "ngram"}
    assert not any("draft" in reason for reason in report["left_out"])
    assert [note for cell in report["cells"] for note in cell["notes"] if "draft" in note] == []
