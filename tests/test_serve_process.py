"""`ostinato serve` as a process: its signals, its exit status, and what it says where it cannot start."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from ostinato.cli.main import main

RUN = "from ostinato.cli.main import main; main()"
ENGINE = ["--model", "demo", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--graph-mode", "none"]
LONG = {"prompt": [5, 6, 7], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


class Process:
    """A server of its own, which is ended with the test."""

    def __init__(self, *flags, code=RUN, **environment):
        command = [sys.executable, "-c", code, "serve", *ENGINE, "--port", "0", *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.lines = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()

    def until(self, condition, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "".join(self.lines)
            time.sleep(0.01)

    @property
    def url(self):
        self.until(lambda: self.process.poll() is not None or any("listening on" in line for line in self.lines))
        [line] = [line for line in self.lines if "listening on" in line]
        return line.split()[2]

    def ready(self):
        url = self.url
        self.until(lambda: self.process.poll() is not None or httpx2.get(f"{url}/health").status_code == 200)
        return url

    def status(self, seconds=60):
        return self.process.wait(seconds)


@pytest.fixture
def start():
    started = []

    def begin(*flags, **options):
        started.append(Process(*flags, **options))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait()


class Reader(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.events = url, []
        self.start()

    def run(self):
        with (
            contextlib.suppress(httpx2.HTTPError),
            httpx2.stream("POST", f"{self.url}/v1/completions", json=LONG, timeout=60) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))


def test_sigterm_under_load_lets_running_requests_end_and_takes_no_new_ones(start):
    server = start()
    url = server.ready()
    readers = [Reader(url) for _ in range(6)]  # four run, two wait
    server.until(lambda: sum(bool(reader.events) for reader in readers) >= 4)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: httpx2.get(f"{url}/health").json()["status"] == "draining")
    refused = httpx2.post(f"{url}/v1/completions", json={"prompt": [5]})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    for reader in readers:
        reader.join(60)
        assert reader.events[-1] == "[DONE]"
        assert json.loads(reader.events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.status() == 0


def test_what_outlasts_the_drain_is_told_so_and_a_second_signal_ends_the_process_at_once(start):
    impatient, patient = start("--drain-timeout", "0"), start("--drain-timeout", "600")
    readers = []
    for server in (impatient, patient):
        url = server.ready()
        readers.append(Reader(url))
        server.until(lambda: readers[-1].events)
        server.process.send_signal(signal.SIGTERM)
        if server is patient:
            server.until(lambda url=url: httpx2.get(f"{url}/health").json()["status"] == "draining")
            server.process.send_signal(signal.SIGTERM)
    assert patient.status(10) == -signal.SIGTERM
    assert impatient.status(30) == 0
    readers[0].join(30)
    assert json.loads(readers[0].events[-2])["error"]["code"] == "draining"


def test_sigint_while_the_model_is_loaded_ends_the_process(start):
    slow = f"import time, ostinato.engine.async_engine as e; e.Engine = lambda *_: time.sleep(600); {RUN}"
    server = start(code=slow)
    assert httpx2.get(f"{server.url}/health").json() == {"status": "starting"}
    server.process.send_signal(signal.SIGINT)
    assert server.status(30) == 0


def test_an_engine_that_fails_ends_the_process_with_1(start):
    broken = (
        "from ostinato.engine.engine import Engine\n"
        "step = Engine.step\n"
        "def fail(self):\n"
        "    if self.output('async-1') is not None: raise MemoryError('no more')\n"
        "    return step(self)\n"
        f"Engine.step = fail\n{RUN}"
    )
    server = start("--log-format", "json", code=broken)
    response = httpx2.post(f"{server.ready()}/v1/completions", json={"prompt": [5]}, timeout=60)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_failed"
    assert server.status(30) == 1
    entries = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert any(entry["level"] == "critical" and "MemoryError" in entry["exception"] for entry in entries)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "PORT"], "cannot listen"),
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--cache-memory", "1KiB"], "cache_memory"),
        (["--host", "0.0.0.0"], "insecure"),
        (["--host", "no.such.host.invalid"], "api_key"),
        (["--log-level", "loud"], "log_level"),
    ],
)
def test_what_cannot_start_says_why_with_status_2(flags, told, capsys):
    names = ("ostinato", "uvicorn", "asyncio")
    before = {name: (logging.getLogger(name).handlers[:], logging.getLogger(name).propagate) for name in names}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [flag.replace("PORT", str(taken.getsockname()[1])) for flag in flags]
        with pytest.raises(SystemExit) as ended:
            main(["serve", *ENGINE, "--port", "0", *flags])
    for name, (handlers, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(logging.NOTSET)
    assert ended.value.code == 2
    told_all = capsys.readouterr().err
    assert told in told_all
    assert "Traceback" not in told_all


def test_keys_are_neither_in_the_log_nor_among_the_arguments(start, tmp_path):
    path = tmp_path / "keys"
    path.write_text("key-of-a-file\n")
    server = start("--api-key-file", str(path), "--log-level", "debug", OSTINATO_API_KEY="key-of-the-environment")
    url = server.ready()
    for key in ("key-of-a-file", "key-of-the-environment"):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx2.get(f"{url}/v1/models", headers=headers).status_code == 200
    assert httpx2.get(f"{url}/v1/models").status_code == 401
    server.process.send_signal(signal.SIGTERM)
    assert server.status() == 0
    assert "key-of" not in "".join(server.lines)
    assert not any("key-of" in argument for argument in map(str, server.process.args))
