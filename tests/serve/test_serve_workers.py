"""Large bodies are read by processes that can be ended, that have bounds, and that clients share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from ostinato.child_process import start_bound_process
from ostinato.serve.body_workers import pool
from ostinato.serve.body_workers.pool import MAX_WAITING
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.settings import ServeSettings
from tests.support.odd_bodies import OddBody
from tests.support.patience import PATIENCE
from tests.support.server_process import Process
from tests.support.serving import serving


@pytest.fixture(scope="module")
def served():
    with serving({"body_workers": 2, "worker_memory": 2**27}, max_num_seqs=2, graph_mode="none") as served:
        yield served


def sent(path, does="end"):
    return json.dumps({"path": str(path), "does": does}).encode()


def read(served, path, does="end", client="a"):
    """What comes of a body that does something odd."""
    return served.on_loop(served.lifecycle.workers.read(client, OddBody, sent(path, does)))[1]


def is_gone(pid):
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return False
    return True


async def appears(path):
    while not path.exists():
        await asyncio.sleep(0.005)
    return int(path.read_text())


def test_a_worker_is_used_again(served, tmp_path):
    assert read(served, tmp_path / "one") == read(served, tmp_path / "two")


def test_who_leaves_gives_his_worker_back_whatever_it_is_doing(served, tmp_path):
    workers = served.lifecycle.workers
    before = workers.num_ended_early

    async def leave():
        reading = asyncio.create_task(workers.read("a", OddBody, sent(tmp_path / "pid", "hold")))
        pid = await appears(tmp_path / "pid")
        assert workers.num_running == 1
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return pid

    pid = served.on_loop(leave())
    served.until(lambda: is_gone(pid))
    assert workers.num_running == 0
    assert workers.num_ended_early == before + 1
    assert read(served, tmp_path / "after")


def test_a_client_that_closes_its_connection_ends_the_work_for_it(served, monkeypatch, tmp_path):
    workers = served.lifecycle.workers
    kept = workers.read

    async def held(client, *_):
        return await kept(client, OddBody, sent(tmp_path / "pid", "hold"))

    monkeypatch.setattr(workers, "read", held)
    body, where = json.dumps({"prompt": "x" * 20_000}), httpx2.URL(served.url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((where.host, where.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        served.until((tmp_path / "pid").exists)
    served.until(lambda: workers.num_running == 0)
    served.until(lambda: is_gone(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(
    ("does", "status", "told"),
    [("fill", 400, "worker_memory"), ("die", 500, "ended, perhaps for want of memory")],
)
def test_work_that_takes_too_much_is_an_error_and_the_next_one_succeeds(served, tmp_path, does, status, told):
    with pytest.raises(ApiError, match=told) as caught:
        read(served, tmp_path / "pid", does)
    assert caught.value.status == status
    if does == "die":
        assert len(set((tmp_path / "pid.deaths").read_text().split())) == 2  # it was tried once more
    assert read(served, tmp_path / "after")


def test_work_that_takes_too_long_is_an_error_and_its_process_is_ended(served, tmp_path, monkeypatch):
    workers = served.lifecycle.workers
    pid = read(served, tmp_path / "first")
    monkeypatch.setattr(workers, "_seconds", 0.5)
    with pytest.raises(ApiError, match="worker_seconds") as caught:
        read(served, tmp_path / "second", "hold")
    assert caught.value.status == 400
    served.until(lambda: is_gone(pid))


def test_a_bug_is_told_to_the_log_alone(served, tmp_path):
    with pytest.raises(RuntimeError, match="KeyError"):
        read(served, tmp_path / "pid", "raise")


def test_workers_come_back_when_the_process_that_forks_them_has_died(served, tmp_path):
    first = read(served, tmp_path / "first")
    workers = served.lifecycle.workers
    process, _ = workers._forkserver
    os.kill(process.pid, signal.SIGSTOP)  # its workers end with it, also where it is stopped
    process.kill()
    process.wait()
    served.until(lambda: is_gone(first))
    assert read(served, tmp_path / "second") != first


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGSTOP, signal.SIGKILL]], ids=["kill", "stop, kill"])
def test_a_body_whose_idle_worker_is_killed_is_read_by_another(served, tmp_path, signals):
    first = read(served, tmp_path / "first")
    for each in signals:
        os.kill(first, each)
    assert read(served, tmp_path / "second") != first


def test_a_body_whose_worker_is_killed_meanwhile_is_read_once_more(served, tmp_path):
    done = served.lifecycle.workers.num_done
    first = read(served, tmp_path / "first")
    again = read(served, tmp_path / "pid", "die once")
    assert (tmp_path / "pid.died").exists()
    assert again != first
    assert read(served, tmp_path / "after") == again
    assert served.lifecycle.workers.num_done == done + 3


def test_clients_take_turns_and_one_cannot_take_all_places(served, tmp_path):
    workers = served.lifecycle.workers

    async def main():
        order = []
        blocked = [
            asyncio.create_task(workers.read("many", OddBody, sent(tmp_path / f"held-{i}", "hold"))) for i in range(2)
        ]
        for i in range(2):
            await appears(tmp_path / f"held-{i}")

        async def one(client, name):
            await workers.read(client, OddBody, sent(tmp_path / name))
            order.append(client)

        share = MAX_WAITING // 4
        waiting = [asyncio.create_task(one("many", f"many-{i}")) for i in range(share)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await workers.read("many", OddBody, sent(tmp_path / "more"))
        waiting.append(asyncio.create_task(one("few", "few")))
        await asyncio.sleep(0)
        blocked[0].cancel()  # one worker serves all who wait
        await asyncio.gather(*waiting)
        blocked[1].cancel()
        await asyncio.gather(*blocked, return_exceptions=True)
        return order, refused.value

    order, refused = served.on_loop(main())
    assert refused.status == 429
    assert "Retry-After" in refused.headers
    assert order.index("few") <= 1
    assert len(order) == MAX_WAITING // 4 + 1


def test_one_who_leaves_while_he_waits_takes_no_worker(served, tmp_path):
    workers = served.lifecycle.workers

    async def main():
        held = [asyncio.create_task(workers.read("a", OddBody, sent(tmp_path / f"h{i}", "hold"))) for i in range(2)]
        for i in range(2):
            await appears(tmp_path / f"h{i}")
        waits = asyncio.create_task(workers.read("a", OddBody, sent(tmp_path / "waits")))
        await asyncio.sleep(0)
        for each in (waits, *held):
            each.cancel()
        await asyncio.gather(waits, *held, return_exceptions=True)
        return await workers.read("b", OddBody, sent(tmp_path / "next"))

    assert served.on_loop(main())
    assert workers.num_running == 0
    assert not (tmp_path / "waits").exists()


def without_floats(value):
    """Log-probabilities differ in their last bits with who else is in a step."""
    if isinstance(value, dict):
        return {name: without_floats(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_floats(each) for each in value]
    return "a float" if isinstance(value, float) else value


@pytest.mark.slow
def test_bodies_that_are_read_in_a_worker_give_the_same_answers(served):
    def ask(path, body, key):
        small = httpx2.post(f"{served.url}{path}", json=body, timeout=PATIENCE)
        # White space makes a body large, and nothing else of it.
        padded = json.dumps(body).encode() + b" " * 20_000
        headers = {"Content-Type": "application/json"}
        large = httpx2.post(f"{served.url}{path}", content=padded, headers=headers, timeout=PATIENCE)
        assert small.status_code == large.status_code
        return [key(each.json()) for each in (small, large)]

    done = served.lifecycle.workers.num_done
    talk = [{"role": "user", "content": "Ava has 17 apples and buys 2."}]
    more = {"max_tokens": 8, "temperature": 0}
    cases = [
        ("/v1/completions", {"prompt": ["2 + 2 =", [5, 6, 7]], "echo": True, "logprobs": 1, **more}, "choices"),
        ("/v1/chat/completions", {"messages": talk, "n": 2, "guided_regex": "[0-9]{4}", **more}, "choices"),
        ("/v1/chat/completions", {"messages": talk, "temperature": -1}, "error"),
        ("/v1/chat/completions", {"messages": talk, "wrong": 1}, "error"),
        ("/tokenize", {"messages": talk, "return_token_strs": True}, "tokens"),
        ("/detokenize", {"tokens": [5, 6, 7]}, "prompt"),
    ]
    for path, body, key in cases:
        small, large = ask(path, body, lambda answer, key=key: without_floats(answer[key]))
        assert small == large
    trials = sum("guided_regex" in body for _, body, _ in cases)
    assert served.lifecycle.workers.num_done == done + len(cases) + trials

    def echoed(answer):
        kept = ("instructions", "tools", "metadata", "reasoning", "text", "max_output_tokens", "status")
        return {name: answer[name] for name in kept} | {"text_out": answer["output"][0]["content"][0]["text"]}

    body = {"input": "2 + 2 =", "instructions": 'é "quoted"', "metadata": {"a": "b"}, "max_output_tokens": 4}
    small, large = ask("/v1/responses", {**body, "temperature": 0}, echoed)
    assert small == large
    assert small["instructions"] == body["instructions"]
    assert small["metadata"] == body["metadata"]


def test_the_fork_server_starts_before_the_first_request_that_needs_it(served, tmp_path, monkeypatch):
    workers = served.lifecycle.workers

    async def restart():
        workers._end_forkserver()
        workers._idle.clear()
        workers.start()

    served.on_loop(restart())
    starting = workers._starting
    served.until(starting.done)
    assert read(served, tmp_path / "first")
    assert workers._forkserver[0] is starting.result()[0]

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_start_forkserver", fail)
        served.on_loop(restart())
        served.until(lambda: workers._starting is None)
    assert read(served, tmp_path / "second")


@pytest.mark.parametrize("error", [RuntimeError("no memory"), OSError("too many processes")])
def test_a_pool_whose_fork_server_cannot_start_can_be_stopped(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(pool, "_start_forkserver", fail)

    async def start_and_stop():
        workers = pool.BodyWorkerPool(SimpleNamespace(settings=ServeSettings()))
        workers.start()
        await workers.stop()

    asyncio.run(start_and_stop())


def test_a_fork_server_that_is_not_ready_ends_with_its_pool(monkeypatch):
    processes = []

    def start_one_that_never_gets_ready(command, *rest):
        processes.append(start_bound_process([command[0], "-c", "import time; time.sleep(1000)"], *rest))
        return processes[-1]

    monkeypatch.setattr(pool, "start_bound_process", start_one_that_never_gets_ready)

    async def start_and_stop():
        workers = pool.BodyWorkerPool(SimpleNamespace(settings=ServeSettings()))
        workers.start()
        await workers.stop()
        assert workers._connections == []

    asyncio.run(start_and_stop())
    assert processes[0].poll() == -signal.SIGKILL


def test_a_server_of_its_own_process_starts_the_fork_server_when_it_is_ready():
    server = Process()
    try:
        server.ready()

        def commands():
            for pid in server.descendants():
                with contextlib.suppress(OSError):
                    yield Path(f"/proc/{pid}/cmdline").read_text()

        server.until(lambda: any("body_workers.forkserver" in command for command in commands()))
    finally:
        server.process.terminate()
        server.process.wait()
