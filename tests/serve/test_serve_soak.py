"""Many clients at once, and many one after another: everyone gets what he would get alone, and nothing is left.

The whole soak takes minutes: SOAK_REQUESTS=10000, as `make soak` has it.
"""

import asyncio
import gc
import json
import os

import httpx2
import pytest

from tests.serve.test_serve_images import image
from tests.support.media_cases import drawn
from tests.support.serving import serving

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "600"))
"""How many are sent after the warm-up."""
WARM_UP = max(400, REQUESTS // 5)
CONCURRENT = 200
GROWTH = 0.02 if REQUESTS >= 10_000 else 0.05
"""Of a process's memory after the warm-up: what its allocator keeps, which a longer warm-up has seen."""


@pytest.fixture(scope="module")
def served():
    with serving({"max_waiting": 512}, max_num_seqs=16, max_model_len=256, cache_memory="32MiB") as served:
        yield served


def body_of(number, max_tokens):
    """A prompt of its own: some share a beginning, some are long."""
    prompt = [7 + number % 5] * (16 * (number % 3)) + [10 + (number * k) % 80 for k in range(1, 6 + number % 23)]
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def whole(client, url, body):
    answer = (await client.post(f"{url}/v1/completions", json=body)).json()
    return answer["choices"][0]["text"]


async def streamed(client, url, body):
    text, ended = "", False
    async with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert ended, "a stream was lost"
    return text


def client(most):
    limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most)
    return httpx2.AsyncClient(timeout=300, limits=limits)


@pytest.mark.slow
def test_200_streams_at_once_give_what_each_gives_alone(served):
    bodies = [body_of(number, 12 + number % 9) for number in range(CONCURRENT)]

    async def run():
        async with client(CONCURRENT) as one:
            alone = [await whole(one, served.url, body) for body in bodies]
            at_once = await asyncio.gather(*(streamed(one, served.url, body) for body in bodies))
        return alone, at_once

    alone, at_once = asyncio.run(run())
    assert at_once == alone


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mebibytes(sizes):
    return " and ".join(f"{size / 2**20:.1f} MiB" for size in sizes)


def engine_objects(served):
    """What the server and its engine keep of requests, by name, between two steps."""
    engine = served.engine
    return {
        "streams": len(engine._streams),
        "calls": len(engine._calls),
        "kept": served.num_kept(),
        "admitted": engine.queue_limit.num_unfinished,
        "timers": sum(not timer.cancelled() and timer.when() > served.loop.time() + 60 for timer in timers(served)),
    }


def timers(served):
    return list(getattr(served.loop, "_scheduled", ()))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the memory of a process is read from /proc")
@pytest.mark.slow
def test_requests_leave_no_memory_behind(served):
    """Streams, whole answers, refusals and clients that go; their like are measured before and after."""

    async def one(session, number):
        body = body_of(number % 997, 2 + number % 3)
        kind = number % 8
        if kind < 3:
            await streamed(session, served.url, body)
        elif kind < 6:
            await whole(session, served.url, body)
        elif kind == 6:
            assert (await session.post(f"{served.url}/v1/completions", json={**body, "foo": 1})).status_code == 400
        else:
            async with session.stream("POST", f"{served.url}/v1/completions", json={**body, "stream": True}) as answer:
                await anext(answer.aiter_lines())

    async def run(first, count):
        numbers = iter(range(first, first + count))

        async def worker(session):
            for number in numbers:
                await one(session, number)

        async with client(16) as session:
            await asyncio.gather(*(worker(session) for _ in range(16)))

    def measured():
        served.until(lambda: served.engine.num_unfinished == 0)
        served.stats()
        gc.collect()
        return resident_bytes("self"), resident_bytes(served.engine._process.pid)

    asyncio.run(run(0, WARM_UP))
    before, kinds_before = measured(), len(gc.get_objects())
    asyncio.run(run(WARM_UP, REQUESTS))
    after, kinds_after = measured(), len(gc.get_objects())
    print(f"server and engine: {mebibytes(before)}, after {REQUESTS} requests {mebibytes(after)}; "
          f"{kinds_before} objects, then {kinds_after}")  # fmt: skip
    assert not any(engine_objects(served).values()), engine_objects(served)
    for late, early in zip(after, before, strict=True):
        assert late < early * (1 + GROWTH)
    # A tenth of an object per request is none; the prefix index may still grow to its bound.
    assert kinds_after - kinds_before < 2000 + REQUESTS / 10


# All kinds of requests

SEGMENTS = 6
PLATEAU = 0.02
"""Growth of a process's memory from the first half of the segments to the second, in a soak: short ones warm up."""
TOOL = {
    "type": "function",
    "function": {"name": "turn", "parameters": {"type": "object", "properties": {"by": {"enum": [1, 2, 3]}}}},
}
LEAVES = 5
"""Of so many streams, one is left after its first line."""


@pytest.fixture(scope="module", params=["demo", "demo-vl"])
def mixed(request):
    budgets = {"client_seconds": 1e6, "client_pixels": 10**12, "max_waiting": 512}
    sizes = {"max_num_seqs": 8, "max_model_len": 512, "cache_memory": "32MiB"}
    with serving(budgets, model=request.param, **sizes) as served:
        yield served, request.param == "demo-vl"


def mixed_request(number, takes_images):
    """Return the path and the body of a request, of seven kinds in turn; guides and images are a few dozen."""
    ids = body_of(number % 97, 6)
    guided = {name: value for name, value in ids.items() if name != "ignore_eos"}
    chat = {"messages": [{"role": "user", "content": f"How much is {number % 50} + 7?"}], "max_tokens": 6}
    kind = number % 7
    if kind == 0:
        return "completions", {**ids, "logprobs": 5, "echo": True}
    if kind == 1:
        return "chat/completions", {**chat, "logprobs": True, "top_logprobs": 5, "n": 2}
    if kind == 2:
        names = {f"a{number % 40}": {"type": "integer"}, "b": {"type": "string"}}
        return "completions", {**guided, "guided_json": {"type": "object", "properties": names, "required": ["b"]}}
    if kind == 3:
        return "completions", {**guided, "guided_regex": f"[a-z]{{1,{1 + number % 40}}}"}
    if kind == 4:
        return "chat/completions", {**chat, "tools": [TOOL], "tool_choice": "required"}
    if kind == 5 and takes_images:
        content = [image(drawn(32 + 32 * (number % 3), 48, number % 24)), {"type": "text", "text": "What is it?"}]
        return "chat/completions", {**chat, "messages": [{"role": "user", "content": content}]}
    return "completions", {**ids, "n": 3, "temperature": 1}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the memory of a process is read from /proc")
@pytest.mark.slow
def test_memory_stays_on_a_plateau_with_all_kinds_of_requests(mixed):
    """Images, tools, guides and log-probabilities, whole and as streams, some of which are left."""
    served, takes_images = mixed

    async def one(session, number):
        path, body = mixed_request(number, takes_images)
        url = f"{served.url}/v1/{path}"
        if number % 3 == 0:
            async with session.stream("POST", url, json={**body, "stream": True}) as answer:
                assert answer.status_code == 200, await answer.aread()
                if number % LEAVES == 0:
                    await anext(answer.aiter_lines())
                    return
                assert "data: [DONE]" in [line async for line in answer.aiter_lines()]
        else:
            answer = await session.post(url, json=body)
            assert answer.status_code == 200, answer.text

    async def run(first, count):
        numbers = iter(range(first, first + count))

        async def worker(session):
            for number in numbers:
                await one(session, number)

        async with client(16) as session:
            await asyncio.gather(*(worker(session) for _ in range(16)))

    def measured():
        served.until(lambda: served.engine.num_unfinished == 0)
        served.stats()
        gc.collect()
        return resident_bytes("self"), resident_bytes(served.engine._process.pid), len(gc.get_objects())

    count = REQUESTS // SEGMENTS // (1 if REQUESTS >= 10_000 else 3)  # a request takes longer than one of token ids
    asyncio.run(run(0, max(200, count)))
    seen = []
    for segment in range(SEGMENTS):
        asyncio.run(run(segment * count, count))
        seen.append(measured())
    print("server and engine:", *(mebibytes(sizes[:2]) for sizes in seen), sep="\n  ")
    assert not any(engine_objects(served).values()), engine_objects(served)
    early, late = seen[: SEGMENTS // 2], seen[SEGMENTS // 2 :]
    for place in range(2 if REQUESTS >= 10_000 else 0):
        assert max(sizes[place] for sizes in late) < max(sizes[place] for sizes in early) * (1 + PLATEAU)
    assert max(sizes[2] for sizes in late) < max(sizes[2] for sizes in early) + 2000
