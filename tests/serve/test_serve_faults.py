"""What may go wrong while the server computes: each fault stays with the request that has it."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2
import pytest

from ostinato.serve.http import connection as connections
from tests.support.engine_probe import SECRET
from tests.support.patience import PATIENCE
from tests.support.serving import events, serving

PROMPT = [5, 6, 7, 8]
LONG = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served():
    with serving(
        {"max_waiting": 4},
        max_num_seqs=2,
        graph_mode="none",
        max_model_len=512,
        scheduling_policy="priority",
    ) as served:
        yield served


@pytest.fixture(autouse=True)
def _nothing_is_left(served):
    yield
    served.probe.reset()
    served.until(lambda: served.engine.num_unfinished == served.engine.queue_limit.num_unfinished == 0)
    served.until(lambda: served.num_kept() == 0)
    cache = served.stats()["cache"]
    assert cache["blocks_used"] == cache["slots_used"] == 0


def post(served, body, timeout=PATIENCE):
    return httpx2.post(f"{served.url}/v1/completions", json=body, timeout=timeout)


def send(connection, body):
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    connection.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def connect(served, body):
    """A connection on which a request was sent, and whose answer nobody has read."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    send(connection, body)
    return connection


def look(served):
    """(requests that run, requests that wait, steps so far) between two steps."""
    stats = served.stats()
    return stats["running"], stats["waiting"], stats["steps"]


def both_at_once(served, bodies):
    """The answers to two requests that are in the same steps, but for the first one's first."""
    with ThreadPoolExecutor() as pool:
        served.probe.hold()
        answers = [pool.submit(post, served, body) for body in bodies]
        served.unfinished(2)
        served.probe.go()
        return [answer.result() for answer in answers]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_frees_its_memory_and_the_other_goes_on(served, stream):
    aborted = served.stats()["finished"]["abort"]
    served.probe.delay = 0.05  # so that neither ends by itself
    with ThreadPoolExecutor() as pool:
        other = pool.submit(post, served, LONG)
        served.until(lambda: look(served)[0] == 1)
        leaving = connect(served, {**LONG, "stream": stream})
        served.until(lambda: look(served)[0] == 2)
        if stream:
            leaving.recv(100)
        leaving.close()
        served.until(lambda: served.stats()["finished"]["abort"] == aborted + 1)
        assert look(served)[0] == 1
        served.probe.delay = 0
        assert other.result().json()["usage"]["completion_tokens"] == 400


def test_a_request_whose_client_has_gone_gets_at_most_one_more_step(served, monkeypatch):
    abandon, counted = served.engine._streams.abandon, []

    def abandon_between_steps(name):
        served.probe.hold_next()
        counted.append(served.probe.steps)
        abandon(name)
        served.probe.go()

    monkeypatch.setattr(served.engine._streams, "abandon", abandon_between_steps)
    served.probe.delay = 0.05  # so that it does not end by itself
    gone = connect(served, {**LONG, "stream": True})
    gone.recv(100)
    gone.close()
    served.until(lambda: counted)
    served.until(lambda: look(served)[:2] == (0, 0))
    assert served.probe.steps == counted[0] + 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_clients_that_go_before_their_first_token_or_while_they_wait_leave_nothing(served, stream):
    served.probe.delay = 0.05
    clients = [connect(served, {**LONG, "stream": stream}) for _ in range(5)]  # two run, three wait
    served.until(lambda: served.engine.num_unfinished == 5)
    steps = served.probe.steps
    for client in clients:
        client.close()
    served.until(lambda: served.engine.num_unfinished == 0)
    served.until(lambda: look(served)[:2] == (0, 0))
    assert served.probe.steps <= steps + 200  # of the 400 that each of them asked for


def test_a_full_queue_turns_requests_away_and_says_when_to_come_again(served):
    served.probe.hold()
    with ThreadPoolExecutor(6) as pool:
        taken = [pool.submit(post, served, SHORT) for _ in range(6)]  # two run, four wait
        served.until(lambda: served.engine.queue_limit.num_unfinished == 6)
        refused = post(served, SHORT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert post(served, {**SHORT, "n": 7}).status_code == 400  # which will never find room
        served.probe.go()
        assert all(each.result().status_code == 200 for each in taken)
    assert post(served, SHORT).status_code == 200


def test_a_deadline_ends_a_whole_answer_with_504_and_a_stream_with_an_event(served):
    served.probe.delay = 0.02
    late = post(served, {**LONG, "timeout": 0.3})
    assert late.status_code == 504
    assert late.json()["error"]["param"] == "timeout"
    chunks = []
    for seconds in (0.3, 3, 30):  # until the first token is in time, and the last one not
        served.probe.delay = seconds / 20
        answer = post(served, {**LONG, "timeout": seconds, "stream": True})
        if answer.status_code == 200:
            *chunks, error, done = events(answer)
            assert done == "[DONE]"
            assert json.loads(error)["error"]["code"] == "deadline_exceeded"
        if chunks:
            break
    assert chunks


def test_a_deadline_ends_a_request_that_waits(served):
    served.probe.hold()
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(post, served, SHORT) for _ in range(2)]
        served.unfinished(2)
        assert post(served, {**SHORT, "timeout": 0.05}).status_code == 504
        served.probe.go()
        assert [each.result().status_code for each in running] == [200, 200]


def test_of_those_who_wait_the_lowest_priority_is_served_first(served, monkeypatch):
    served.probe.hold()
    streams, ended, names = served.engine._streams, [], {}
    finish = streams.finish
    monkeypatch.setattr(streams, "finish", lambda name, error=None: (ended.append(name), finish(name, error)))
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(post, served, {**SHORT, "max_tokens": 40 * i, "priority": -9}) for i in (1, 9)]
        served.unfinished(2)
        for priority in (3, 1, 2):  # they come one after another
            asked.append(pool.submit(post, served, {**SHORT, "priority": priority}))
            served.unfinished(len(asked))
            names[priority] = [*streams][-1]
        served.probe.go()
        assert [each.result().status_code for each in asked] == [200] * 5
    assert [name for name in ended if name in names.values()] == [names[1], names[2], names[3]]


def test_nan_in_one_requests_logits_ends_that_request_alone(served):
    alone = post(served, {**SHORT, "max_tokens": 24}).json()["choices"][0]["text"]
    for stream in (False, True):
        served.probe.nan_rows = 2
        answers = both_at_once(served, [{**SHORT, "max_tokens": 24, "stream": stream}] * 2)
        assert served.probe.nan_rows == 0
        if stream:
            errors = [json.loads(each) for answer in answers for each in events(answer) if each.startswith('{"error"')]
            assert [each["error"]["type"] for each in errors] == ["server_error"]
            continue
        assert sorted(answer.status_code for answer in answers) == [200, 500]
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == alone
            else:
                assert answer.json()["error"]["code"] == "ModelError"


def test_an_exception_in_a_step_ends_its_requests_and_the_server_goes_on(served):
    expected = post(served, SHORT).json()["choices"][0]["text"]
    served.probe.fail_rows = 2
    whole, stream = both_at_once(served, [LONG, {**LONG, "stream": True}])
    assert whole.status_code == 500
    *_, error, done = events(stream)
    assert done == "[DONE]"
    assert json.loads(error)["error"]["type"] == "server_error"
    assert SECRET not in whole.text + stream.text
    assert httpx2.get(f"{served.url}/health", timeout=PATIENCE).status_code == 200
    assert post(served, SHORT).json()["choices"][0]["text"] == expected


def test_the_day_may_change_while_requests_run(served, monkeypatch):
    real = time.time
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 10**8)
    served.probe.clock_jumps = 1
    answer = post(served, {**SHORT, "timeout": 30})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert len(events(post(served, {**SHORT, "stream": True, "timeout": 30}))) >= 2


def connect_slowly(served, body):
    """As `connect`, on a connection that takes little before it is read."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((host, int(port)))
    connection.settimeout(60)
    send(connection, body)
    return contextlib.closing(connection)


@pytest.fixture
def small_buffers(monkeypatch):
    """Connections into which the system takes little beyond what their clients have taken."""
    made = connections.HttpConnection.connection_made

    def connection_made(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self._limits = replace(self._limits, stalled_seconds=0.5, idle_seconds=0.5)
        made(self, transport)

    monkeypatch.setattr(connections.HttpConnection, "connection_made", connection_made)


MUCH = {**LONG, "n": 2, "logprobs": 20}


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_reader_that_does_not_read_holds_up_nobody_and_is_left_at_last(served, stream):
    served.until(lambda: served.num_connections() == 0)
    served.probe.hold()
    with connect_slowly(served, {**MUCH, "stream": stream}) as connection:
        served.unfinished(1)
        served.probe.go()
        # The engine computes what it can, whether it is read or not.
        served.until(lambda: served.engine.num_unfinished == 0)
        assert post(served, SHORT).status_code == 200
        # Nothing was read, and the socket is closed all the same.
        served.until(lambda: served.num_connections() == 0)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert len(received) < 65536


@pytest.mark.usefixtures("small_buffers")
def test_the_last_words_to_a_reader_that_does_not_read_do_not_keep_its_connection(served):
    served.until(lambda: served.num_connections() == 0)
    # Too short to pause whoever writes, and too long for the system's buffers.
    served.probe.hold()
    with connect_slowly(served, {**LONG, "max_tokens": 60, "logprobs": 10}) as connection:
        served.unfinished(1)
        assert served.num_connections() == 1
        served.probe.go()
        served.until(lambda: served.num_connections() == 0)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": [5] * 512}, None),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"prompt": [5] * 100_000}, None),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [None] * 200_000}, "prompt"),
        ({"prompt": [PROMPT] * 1000}, "n"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": "x" * 10_000}, "stop"),
        ({"stop": [1] * 100_000}, "stop[0]"),
        ({"stop_token_ids": [5] * 10_000}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(10_000)}}, "logit_bias"),
        ({"logit_bias": {str(i): None for i in range(100_000)}}, None),
        ({"cache_salt": "x" * 1000}, "cache_salt"),
        ({str(i): i for i in range(100_000)}, None),
        ({"n": 10**6}, "n"),
        ({"seed": 10**30}, None),
        ({"timeout": -1}, "timeout"),
    ],
    ids=lambda value: str(value)[:32],
)
def test_what_is_too_much_is_refused_soon_and_by_name(served, wrong, param):
    begin = time.thread_time()
    answer = post(served, {**SHORT, **wrong})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param or param is None
    assert len(error["message"]) < 2000
    assert time.thread_time() - begin < 5


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": [{}] * 200_000}, 400),
        ("/v1/chat/completions", {"messages": [1] * 200_000}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 60_000}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}] * 200_000}]}, 400),
        ("/v1/chat/completions", {"messages": [], "tools": [{}] * 200_000}, 400),
        ("/v1/responses", {"input": [{}] * 200_000}, 400),
        ("/detokenize", {"tokens": [None] * 200_000}, 400),
        ("/v1/completions", {"prompt": "x", "model": "x" * 1_000_000}, 404),
        ("/v1/completions", {"prompt": "x", "guided_choice": ["x"] * 200_000}, 400),
        ("/v1/completions", {"prompt": "x", "guided_regex": "(?=x)"}, 400),
        ("/v1/completions", {"prompt": "x", "guided_json": {"$ref": "#/nowhere"}}, 400),
    ],
    ids=lambda value: str(value)[:48],
)
@pytest.mark.slow
def test_what_is_too_much_for_any_endpoint_is_refused_in_few_words(served, path, body, status):
    answer = httpx2.post(f"{served.url}{path}", json=body, timeout=PATIENCE)
    assert answer.status_code == status, answer.text
    assert len(answer.text) < 3000
