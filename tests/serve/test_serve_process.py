"""`ostinato serve` as a process: its signals, its exit status, and what it says where it cannot start."""

import contextlib
import errno
import fcntl
import ipaddress
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from ostinato import demo, os_support
from ostinato.cli.main import main
from ostinato.engine.process.engine_process import process_death_error
from ostinato.errors import EngineError
from ostinato.observe.logs import CONFIGURED
from ostinato.serve.http import listener
from ostinato.serve.settings import ServeSettings
from tests.support.engine_probe import Probe, without_native_kernels
from tests.support.patience import PATIENCE
from tests.support.server_process import ENGINE, RUN, Process

ROOT = Path(__file__).parents[2]
LONG = {"prompt": [5, 6, 7], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


def with_engine(make):
    """The server with another engine, as an expression: of `engines`, tests/support/odd_engines.py, or a Probe."""
    return (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from ostinato.serve import server; from ostinato.serve.http import lifecycle\n"
        "import tests.support.odd_engines as engines\n"
        "from tests.support.engine_probe import Probe\n"
        f"server.Lifecycle = lambda *given: lifecycle.Lifecycle(*given[:3], make={make})\n{RUN}"
    )


def is_alive(pid):
    """Whether a process runs; one that has ended may wait for its parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("url", "settings", "said"),
    [
        ("http://0.0.0.0:8000", {"host": "0.0.0.0", "insecure": True}, "open http://10.1.2.3:8000"),
        ("https://0.0.0.0:8000", {"host": "0.0.0.0", "api_key": ("k",)}, "open https://10.1.2.3:8000"),
        ("http://0.0.0.0:80", {"host": "0.0.0.0", "insecure": True, "root_path": "/llm"}, "http://10.1.2.3:80/llm"),
        ("http://[::]:8000", {"host": "::", "insecure": True}, "open http://[fd00::2]:8000"),
        ("http://127.0.0.1:8000", {}, "--host 0.0.0.0, with a key (OSTINATO_API_KEY) or --insecure"),
        ("http://127.0.0.1:8000", {"api_key": ("k",)}, "--host 0.0.0.0 lets"),
        ("http://192.168.0.7:8000", {"host": "192.168.0.7", "insecure": True}, None),
        ("unix:/run/ostinato.sock", {"uds": "/run/ostinato.sock"}, None),
    ],
)
def test_what_a_phone_on_the_network_opens_is_said(monkeypatch, url, settings, said):
    addresses = {socket.AF_INET: "10.1.2.3", socket.AF_INET6: "fd00::2"}

    class Routed(socket.socket):
        def connect(self, address):
            assert ipaddress.ip_address(address[0]).version == (6 if self.family == socket.AF_INET6 else 4)

        def getsockname(self):
            return addresses[self.family], 9

    monkeypatch.setattr(listener.socket, "socket", Routed)
    text = listener.reach_text(url, ServeSettings(**settings))
    assert text is None if said is None else said in text


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_address_on_the_network_is_one_that_others_can_use(family):
    address = listener._network_address(family)
    assert address is None or not ipaddress.ip_address(address.strip("[]")).is_loopback


@pytest.fixture
def probe():
    """Slows steps down, so that no request ends by itself before a test has looked."""
    with contextlib.closing(Probe(reference=without_native_kernels())) as probe:
        probe.delay = 0.5
        yield probe


def slowed(probe):
    return with_engine(f"Probe({probe.path!r}, {probe.reference})")


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
            httpx2.stream("POST", f"{self.url}/v1/completions", json=LONG, timeout=PATIENCE) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))


@pytest.mark.slow
def test_a_server_whose_output_nobody_reads_goes_on_and_ends():
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-c", RUN, "serve", *ENGINE, "--port", "0", "--log-level", "debug"]
    server = subprocess.Popen(command, stdout=writing, stderr=writing)
    try:
        told = b""
        while b" is ready" not in told:
            told += os.read(reading, 4096)
        url = told.partition(b"listening on ")[2].split()[0].decode()
        with httpx2.Client(base_url=url, timeout=PATIENCE) as client:
            for _ in range(100):  # each is a line of a hundred bytes
                assert client.get("/nothing").status_code == 404
            completed = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert completed.status_code == 200
            assert "ostinato:log_lines_dropped_total" in client.get("/metrics").text
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.wait()
        for each in (reading, writing):
            os.close(each)


@pytest.mark.slow
def test_sigterm_under_load_lets_running_requests_end_and_takes_no_new_ones(start, probe):
    server = start("--drain-timeout", str(PATIENCE), "--engine-timeout", str(PATIENCE), code=slowed(probe))
    url = server.ready()
    readers = [Reader(url) for _ in range(6)]

    def all_are_in():
        stats = httpx2.get(f"{url}/live", timeout=PATIENCE).json()["stats"]
        return (stats["running"], stats["waiting"]) == (4, 2)

    server.until(all_are_in)
    probe.hold_next()  # so that all are unfinished until the signal has been seen
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: httpx2.get(f"{url}/health", timeout=PATIENCE).json()["status"] == "draining")
    refused = httpx2.post(f"{url}/v1/completions", json={"prompt": [5]}, timeout=PATIENCE)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    probe.delay = 0
    probe.go()
    for reader in readers:
        reader.join(PATIENCE)
        assert reader.events[-1] == "[DONE]"
        assert json.loads(reader.events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.status() == 0


@pytest.mark.slow
def test_what_outlasts_the_drain_is_told_so_and_a_second_signal_ends_the_process_at_once(start, probe):
    impatient, patient = (start("--drain-timeout", seconds, code=slowed(probe)) for seconds in ("0", "600"))
    readers = []
    for server in (impatient, patient):
        url = server.ready()
        readers.append(Reader(url))
        server.until(lambda: readers[-1].events)
        server.process.send_signal(signal.SIGTERM)
        if server is patient:
            server.until(lambda url=url: httpx2.get(f"{url}/health", timeout=PATIENCE).json()["status"] == "draining")
            server.process.send_signal(signal.SIGTERM)
    assert patient.status() == -signal.SIGTERM
    assert impatient.status() == 0
    readers[0].join(PATIENCE)
    assert json.loads(readers[0].events[-2])["error"]["code"] == "draining"


@pytest.mark.slow
def test_a_restarted_server_finds_what_it_had_in_files(start, tmp_path):
    body = {"model": "demo", "prompt": list(range(20, 600)), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answers = []
    for _ in range(2):
        server = start("--cache-dir", str(tmp_path))
        url = server.ready()
        answers.append(httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json())
        server.process.send_signal(signal.SIGTERM)
        assert server.status() == 0
    cold, warm = answers
    assert warm["choices"] == cold["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 576]


@pytest.mark.slow
def test_sigint_while_the_model_is_loaded_ends_the_process_and_its_engine(start):
    server = start(code=with_engine("engines.never"))
    assert httpx2.get(f"{server.url}/health", timeout=PATIENCE).json() == {"status": "starting"}
    engine = server.engine_pid()
    server.process.send_signal(signal.SIGINT)
    assert server.status() == 0
    server.until(lambda: not is_alive(engine))


@pytest.mark.slow
def test_an_engine_that_fails_ends_the_process_with_1(start):
    server = start("--log-format", "json", code=with_engine("engines.out_of_memory"))
    response = httpx2.post(f"{server.ready()}/v1/completions", json={"prompt": [5]}, timeout=PATIENCE)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_failed"
    assert server.status() == 1
    entries = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert any(entry["level"] == "critical" and "MemoryError" in entry["exception"] for entry in entries)


@pytest.mark.slow
def test_a_model_whose_file_is_shortened_later_is_named_in_the_log(start):
    server = start()
    server.ready()
    os.kill(server.engine_pid(), signal.SIGBUS)  # as the system does
    assert server.status() == 1
    assert any("a file of model demo could not be read: it was shortened" in line for line in server.lines)


@pytest.mark.slow
def test_an_engine_whose_process_is_killed_ends_the_server_with_1(start, probe):
    server = start(code=slowed(probe))
    url = server.ready()
    reader = Reader(url)
    server.until(lambda: reader.events)
    os.kill(server.engine_pid(), signal.SIGKILL)
    reader.join(PATIENCE)
    assert json.loads(reader.events[-2])["error"]["code"] == "engine_failed"
    assert server.status() == 1
    assert any("SIGKILL" in line for line in server.lines)


@pytest.mark.slow
def test_an_engine_whose_process_dies_while_it_loads_ends_the_server(start):
    server = start(code=with_engine("engines.never"))
    assert server.url
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.status() == 1
    assert any("SIGKILL" in line for line in server.lines)


@pytest.mark.slow
def test_what_goes_wrong_in_making_the_engine_is_shown_with_its_place(start):
    server = start(code=with_engine("engines.broken"))
    assert server.status() == 1
    assert any("ZeroDivisionError" in line for line in server.lines)
    assert any("in broken" in line for line in server.lines)


@pytest.mark.slow
def test_a_model_whose_file_is_shortened_while_it_is_read_is_named(start, tmp_path):
    model = shutil.copytree(Path(demo.__file__).parent / "checkpoint", tmp_path / "model")
    server = start("--model", str(model), code=with_engine("engines.shortened"))
    assert server.status() == 2
    told = "".join(server.lines)
    assert "SIGBUS" in told
    assert f"a file of model {model} could not be read: it was shortened" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("engine", ["limited_before_torch", "limited_before_the_cache"])
@pytest.mark.slow
def test_a_limit_of_the_address_space_that_is_too_low_is_named(start, engine):
    server = start("--cache-memory", "1GiB", code=with_engine(f"engines.{engine}"))
    assert server.status() == 2
    told = "".join(server.lines)
    assert "ulimit -v" in told
    assert "Traceback" not in told


def test_a_command_names_such_a_limit_too():
    paths = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.odd_engines import limit_by\n"
    limited = "from ostinato.cli.main import main; import ostinato.engine.core; limit_by(700)\n"
    code = f"{paths}{limited}main(['generate', 'hello', '--threads', '1', '--cache-memory', '1GiB'])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert told.returncode == 2
    assert "CapacityError" in told.stderr
    assert "ulimit -v" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_death_is_explained_by_such_a_limit_only_where_there_is_one(monkeypatch):
    assert isinstance(process_death_error(-signal.SIGABRT, "m"), EngineError)
    monkeypatch.setattr(os_support, "address_space_limit", lambda: 2**30)
    assert "1 GiB of address space" in str(process_death_error(-signal.SIGABRT, "m"))
    assert "ulimit" not in str(process_death_error(-signal.SIGKILL, "m"))
    for error, is_lack in (
        (MemoryError(), True),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (ImportError("no module named x"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), True),
        (RuntimeError("shapes differ"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
    ):
        assert (os_support.lack_of_address_space(error) is not None) == is_lack


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "loading"])
@pytest.mark.slow
def test_an_engine_ends_with_a_server_that_is_killed(start, ready):
    server = start() if ready else start(code=with_engine("engines.never"))
    assert server.ready() if ready else server.url
    engine = server.engine_pid()
    server.process.kill()
    server.until(lambda: not is_alive(engine))


@pytest.mark.slow
def test_all_processes_end_with_a_server_that_is_killed_also_where_they_are_stopped(start):
    server = start()
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode() + b" " * 20_000
    headers = {"Content-Type": "application/json"}
    url = server.ready()
    assert httpx2.post(f"{url}/v1/completions", content=body, headers=headers, timeout=PATIENCE).status_code == 200
    pids = [int(pid) for pid in server.descendants()]
    assert len(pids) == 3  # the engine, the fork server and a worker
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    server.process.kill()
    server.until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.slow
def test_signals_that_reach_the_engine_too_are_the_servers(start):
    server = start()
    reader = Reader(server.ready())
    server.until(lambda: reader.events)
    for each in (signal.SIGINT, signal.SIGTERM):
        os.kill(server.engine_pid(), each)
    server.process.send_signal(signal.SIGTERM)
    reader.join(PATIENCE)
    assert reader.events[-1] == "[DONE]"
    assert json.loads(reader.events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.status() == 0


@pytest.mark.slow
def test_the_server_itself_imports_no_torch(start):
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); {RUN}"
    server = start(code=code)
    server.ready()
    server.process.send_signal(signal.SIGTERM)
    assert server.status() == 0
    server.until(lambda: "False\n" in server.lines)


def loggers():
    """How all loggers stand that serving changes."""
    found = [logging.getLogger(name) for name in CONFIGURED]
    return [(logger.handlers[:], logger.propagate, logger.level) for logger in found]


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
    before = loggers()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [flag.replace("PORT", str(taken.getsockname()[1])) for flag in flags]
        with pytest.raises(SystemExit) as ended:
            main(["serve", *ENGINE, "--port", "0", *flags])
    assert ended.value.code == 2
    assert loggers() == before
    told_all = capsys.readouterr().err
    assert told in told_all
    assert "Traceback" not in told_all
    assert "listening" not in told_all


@pytest.mark.slow
def test_keys_are_neither_in_the_log_nor_among_the_arguments(start, tmp_path):
    path = tmp_path / "keys"
    path.write_text("key-of-a-file\n")
    server = start("--api-key-file", str(path), "--log-level", "debug", OSTINATO_API_KEY="key-of-the-environment")
    url = server.ready()
    for key in ("key-of-a-file", "key-of-the-environment"):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx2.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE).status_code == 200
    assert httpx2.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 401
    environment = Path(f"/proc/{server.engine_pid()}/environ").read_text()
    assert "key-of" not in environment
    assert "OSTINATO_API_KEY" not in environment

    def status(key):
        return httpx2.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE).status_code

    path.write_text("team key-of-a-new-file\n")
    server.process.send_signal(signal.SIGHUP)
    server.until(lambda: status("key-of-a-new-file") == 200)
    assert (status("key-of-a-file"), status("key-of-the-environment")) == (401, 200)
    path.write_text("one two key-of-a-broken-file\n")
    server.process.send_signal(signal.SIGHUP)
    server.until(lambda: any("the keys stay as they were" in line for line in server.lines))
    assert status("key-of-a-new-file") == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.status() == 0
    assert "key-of" not in "".join(server.lines)
    assert not any("key-of" in argument for argument in map(str, server.process.args))
