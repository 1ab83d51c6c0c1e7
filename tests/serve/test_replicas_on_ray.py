"""Replicas on a real Ray, as users have them: `ostinato serve --replicas 2`, and an application with an ingress."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.support.patience import PATIENCE
from tests.support.server_process import Process
from tests.support.serving import serving

pytest.importorskip("ray", reason="ray is not installed: pip install 'ostinato[ray]'")
pytestmark = pytest.mark.ray

SETTINGS = {"max_num_seqs": 4, "graph_mode": "none", "max_model_len": 4096}
LONG, SHORT = 2000, 40
"""Tokens of streams that run when a replica is killed, and of those that wait."""
NUM_LONG = 8
"""As many as run on two replicas at a time."""


def ask(url: str, prompt: str, num_tokens: int, **more: object) -> dict[str, object]:
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **more}
    response = httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return response.json()


def prompts(count: int) -> list[str]:
    return [f"Q: Ava has {number} apples and buys {number + 3} more. How many?\nA:" for number in range(count)]


def texts(url: str) -> list[str]:
    """Greedy ones and sampled ones, with a seed and without."""
    kinds = ({}, {"temperature": 1, "seed": 5}, {"temperature": 1})
    answers = [ask(url, prompt, SHORT, **kinds[place % 3]) for place, prompt in enumerate(prompts(9))]
    return [answer["choices"][0]["text"] for answer in answers]


class Streamed(threading.Thread):
    """One stream, as its client sees it."""

    def __init__(self, url: str, prompt: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.num_tokens = url, num_tokens
        self.body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        self.body["stream_options"] = {"include_usage": True}
        self.text, self.error, self.num_got, self.is_done = "", None, 0, False
        self.start()

    def run(self) -> None:
        with httpx2.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.is_done = True
                elif line.startswith("data: "):
                    self._note(json.loads(line.removeprefix("data: ")))

    def _note(self, event: dict[str, object]) -> None:
        if "error" in event:
            self.error = event["error"]
        elif event["choices"]:
            self.text += event["choices"][0]["text"]
        else:
            self.num_got = event["usage"]["completion_tokens"]


def pids(process: Process, name: str) -> list[int]:
    """Of the server's descendants, those with a name."""
    found = []
    for pid in process.descendants():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if name in command:
            found.append(int(pid))
    return found


def num_ready(process: Process) -> int:
    told = [re.search(r"is ready; there are (\d+)", line) for line in list(process.lines)]
    return max((int(each[1]) for each in told if each), default=0)


@contextmanager
def two_replicas():
    flags = ["--replicas", "2", "--drain-timeout", "120"]
    process = Process(*flags)
    try:
        process.ready()
        process.until(lambda: num_ready(process) == 2)
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait()


@pytest.mark.slow
def test_two_replicas_answer_as_one_engine_does_and_survive_the_end_of_one() -> None:
    with serving(**SETTINGS) as one:
        expected = texts(one.url)
        long_text = ask(one.url, prompts(1)[0], LONG)["choices"][0]["text"]
        short_texts = [ask(one.url, each, SHORT)["choices"][0]["text"] for each in prompts(50 - NUM_LONG)]
    with two_replicas() as process:
        url = process.url
        assert texts(url) == expected
        assert_both_are_measured(url)
        first = killed_while_streaming(process, long_text, short_texts)
        process.until(lambda: sum("there are 2" in line for line in list(process.lines)) >= 2)
        assert first not in pids(process, "ray::EngineActor")
        assert texts(url) is not None
        drained_while_streaming(process, long_text)
        drained_under_load(process, long_text)


def assert_both_are_measured(url: str) -> None:
    metrics = httpx2.get(f"{url}/metrics", timeout=PATIENCE).text
    rows = re.findall(r'ostinato:generation_tokens_total{engine="(\w+)",model_name="demo"} ([\d.]+)', metrics)
    assert len(rows) == len(dict(rows)) == 2
    assert sum(float(count) for _, count in rows) >= 9 * SHORT
    assert metrics.count("# TYPE ostinato:generation_tokens_total") == 1
    assert httpx2.get(f"{url}/plan", timeout=PATIENCE).json()["settings"]["max_num_seqs"] == 4
    assert "<!doctype html>" in httpx2.get(url, timeout=PATIENCE).text


def killed_while_streaming(process: Process, long_text: str, short_texts: list[str]) -> int:
    """Of 50 streams, those that a killed replica had begun end with an error, all others as they should. -> the
    process that was killed."""
    streams = [Streamed(process.url, prompts(1)[0], LONG) for _ in range(NUM_LONG)]
    process.until(lambda: all(each.text for each in streams))
    streams += [Streamed(process.url, prompt, SHORT) for prompt in prompts(50 - NUM_LONG)]
    [first, _] = pids(process, "ray::EngineActor")
    os.kill(first, signal.SIGKILL)
    for each in streams:
        each.join(PATIENCE)
        assert not each.is_alive()
        assert each.is_done, "every stream ends as streams do"
    lost = [each for each in streams if each.error is not None]
    assert lost
    for each in lost:
        assert each.error["code"] == "replica_lost"
        assert each.text, "one that had not begun is served elsewhere"
        assert (long_text if each.num_tokens == LONG else "".join(short_texts)).find(each.text[:20]) >= 0
    rest = [each for each in streams if each.error is None]
    assert len(rest) >= 50 - NUM_LONG // 2 - 4, "a replica runs 4 at a time"
    for each in rest:
        assert each.num_got == each.num_tokens
        expected = long_text if each.num_tokens == LONG else short_texts[prompts(50).index(each.body["prompt"])]
        assert each.text == expected
    return first


def drained_while_streaming(process: Process, long_text: str) -> None:
    """A replica that gets a signal moves its streams to the other one, and none is cut or differs."""
    streams = [Streamed(process.url, prompts(1)[0], LONG // 2) for _ in range(4)]
    process.until(lambda: all(each.text for each in streams))
    for pid in pids(process, "ray::EngineActor"):
        # Whichever has some: with room for all, they may be at one.
        os.kill(pid, signal.SIGTERM)
        process.until(lambda: any("has drained" in line for line in list(process.lines)))
        if drained(process.url)[("moved", "")]:
            break
        process.until(lambda: sum("there are 2" in line for line in list(process.lines)) >= 3)
    assert drained(process.url)[("moved", "")] > 0, "".join(process.lines)
    for each in streams:
        each.join(PATIENCE)
        assert each.error is None
        assert each.is_done
        assert each.num_got == LONG // 2
        assert each.text
        assert long_text.startswith(each.text)


def drained(url: str) -> dict[tuple[str, str], float]:
    """Requests of replicas that have ended, by what became of them and why."""
    metrics = httpx2.get(f"{url}/metrics", timeout=PATIENCE).text
    rows = re.findall(r"ostinato:drained_requests_total{(.*)} ([\d.]+)", metrics)
    labels = [(dict(re.findall(r'(\w+)="([^"]*)"', each)), float(count)) for each, count in rows]
    return {(each["result"], each["reason"]): count for each, count in labels}


def drained_under_load(process: Process, long_text: str) -> None:
    """A signal lets what runs end, and then Ray ends too."""
    streams = [Streamed(process.url, prompts(1)[0], LONG) for _ in range(10)]
    process.until(lambda: sum(bool(each.text) for each in streams) >= 5)
    others = process.descendants()
    process.process.send_signal(signal.SIGTERM)
    for each in streams:
        each.join(PATIENCE)
        assert each.error is None
        assert each.text == long_text
    assert process.status() == 0, "".join(process.lines)
    end = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        assert time.monotonic() < end, "a process of Ray was left behind"
        time.sleep(0.1)


APPLICATION = """
import sys, time, ray, yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema
from ray.serve.context import _get_global_client

ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=10**8, logging_level="ERROR",
         log_to_driver=False)
config = yaml.safe_load(sys.stdin)
serve.start(proxy_location="EveryNode", http_options=config["http_options"])
_get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
while (status := serve.status().applications.get("ostinato-demo")) is None or status.status == "DEPLOYING":
    time.sleep(0.2)
print(status.status.value, flush=True)
time.sleep(1000)
"""


@pytest.mark.long
def test_an_application_on_a_cluster_answers_and_outlives_its_ingress(unused_port: int) -> None:
    flags = ["--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--port", str(unused_port)]
    written = subprocess.run(
        [sys.executable, "-m", "ostinato", "ray-config", "demo", "--replicas", "2", *flags],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "300"}
    ray = subprocess.Popen(
        [sys.executable, "-c", APPLICATION],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables,
    )  # fmt: skip
    try:
        assert ray.stdin is not None
        assert ray.stdout is not None
        ray.stdin.write(written)
        ray.stdin.close()
        assert ray.stdout.readline().strip() == "RUNNING"
        url = f"http://127.0.0.1:{unused_port}"
        text = answered(url)
        [ingress] = [pid for pid in all_children(ray.pid) if ":Ingress" in command_of(pid)]
        engines = {pid for pid in all_children(ray.pid) if "ray::EngineActor" in command_of(pid)}
        assert len(engines) == 2
        os.kill(ingress, signal.SIGKILL)
        wait(lambda: any(":Ingress" in command_of(pid) and pid != ingress for pid in all_children(ray.pid)))
        assert answered(url) == text
        assert engines <= set(all_children(ray.pid)), "the engines go on"
    finally:
        ray.kill()
        ray.wait()


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answered(url: str) -> str:
    """The answer to a prompt, once somebody answers."""
    found: list[str] = []

    def is_answered() -> bool:
        try:
            found.append(ask(url, prompts(1)[0], SHORT)["choices"][0]["text"])
        except (AssertionError, httpx2.TransportError):
            return False
        return True

    wait(is_answered)
    return found[0]


def wait(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "what was waited for did not happen"
        time.sleep(0.2)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def all_children(pid: int) -> list[int]:
    """The processes that one has started, and those that they have."""
    found, parents = [], [pid]
    while parents:
        for thread in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            try:
                children = [int(each) for each in thread.read_text().split()]
            except OSError:
                continue
            parents += children
            found += children
    return found


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("no"), 1), (None, 0)])
def test_a_replica_that_cannot_be_drained_does_not_end_as_if_it_had_been(monkeypatch, error, status):
    from ostinato.serve.ray.actor import EngineActor

    async def drain() -> None:
        if error is not None:
            raise error

    actor = object.__new__(EngineActor)
    monkeypatch.setattr(actor, "drain", drain, raising=False)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        asyncio.run(actor._drain_and_exit())
    assert ended.value.code == status
