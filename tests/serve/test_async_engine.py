import asyncio
import contextlib
import logging
import random
import threading
import time

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.output_deltas import MAX_DELAY_SECONDS, MAX_SERVER_SHARE, DeltaPacer
from ostinato.errors import DeadlineExceeded, EngineFailed, EngineStopped, RequestError, StepFailed
from ostinato.sampling.params import SamplingParams
from tests.support.engine_probe import SECRET, Probe, without_native_kernels
from tests.support.patience import PATIENCE
from tests.support.serving import serving

CONFIG = EngineConfig(model="demo", dtype="float32", threads=1, max_num_seqs=4, graph_mode="none")
PROMPT = "Q: Ava has 17 apples and buys 25 more. How many apples has she?\nA:"
FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MANY = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=4, graph_mode="none") as served:
        yield served


@pytest.fixture
def probe():
    with contextlib.closing(Probe(reference=without_native_kernels())) as probe:
        yield probe


@pytest.fixture(autouse=True)
def _nothing_goes_wrong_any_more(served):
    yield
    served.probe.reset()


async def tokens(stream):
    return [token async for delta in stream for sample in delta.samples for token in sample.token_ids]


async def settle(engine):
    """Waits until nothing is left of any request, and checks that."""
    until = asyncio.get_running_loop().time() + PATIENCE
    while engine.num_unfinished or engine._calls or await engine.check_integrity():
        assert asyncio.get_running_loop().time() < until, "a request was left behind"
        await asyncio.sleep(0.005)
    await asyncio.sleep(0)
    assert engine.queue_limit.num_unfinished == 0
    stats = (await engine.observe()).stats
    assert stats["kept"] == stats["cache"]["blocks_used"] == stats["cache"]["slots_used"] == 0


def test_a_submit_that_is_cancelled_at_any_moment_leaves_nothing(served):
    async def run():
        engine, moments = served.engine, random.Random(1)
        running = await engine.submit(PROMPT, MANY)  # so that the engine's thread is busy
        for _ in range(60):
            task = asyncio.create_task(engine.submit(PROMPT, FEW, deadline=60))
            for _ in range(moments.randrange(6)):
                await asyncio.sleep(moments.choice((0, 0, 0.002)))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await task).abort()
        running.abort()
        await settle(engine)

    served.on_loop(run())


def test_streams_that_are_left_at_any_moment_leave_nothing(served):
    async def run():
        engine, moments = served.engine, random.Random(2)
        for _ in range(40):
            async with await engine.submit(PROMPT, MANY, deadline=60) as stream:
                for _ in range(moments.randrange(3)):
                    await anext(stream, None)  # what came late came as one
        await settle(engine)

    served.on_loop(run())


async def after_one_step(engine, probe):
    """The counts after the step that waits. Its successor carries them here, and the next one waits again."""
    looking = asyncio.create_task(engine.observe())
    while not engine._calls:
        await asyncio.sleep(0)
    probe.allowed += 2
    return (await looking).stats


def test_an_aborted_request_frees_its_memory_within_one_step(served):
    async def run():
        engine, probe = served.engine, served.probe
        probe.delay = 0.05  # so that neither ends by itself
        other = await engine.submit([9] * 20, MANY)
        stream = await engine.submit(PROMPT, MANY)
        await anext(stream)
        probe.hold_next()
        before = await after_one_step(engine, probe)
        stream.abort()
        after = await after_one_step(engine, probe)
        assert before["running"] == 2
        assert after["running"] == 1
        assert after["cache"]["blocks_used"] < before["cache"]["blocks_used"]
        assert after["steps"] <= before["steps"] + 2  # the one that carried `previous_hidden`, and one more
        probe.reset()
        other.abort()
        await settle(engine)

    served.on_loop(run())


def test_a_deadline_counts_from_the_arrival_and_ends_a_prompt_that_is_being_tokenized(served, monkeypatch):
    async def run():
        engine = served.engine
        encode = engine.tokenizer.encode
        monkeypatch.setattr(engine.tokenizer, "encode", lambda *a: (time.sleep(0.2), encode(*a))[1])
        with pytest.raises(DeadlineExceeded):
            await engine.submit(PROMPT, FEW, deadline=0.05)
        monkeypatch.undo()
        await settle(engine)

    served.on_loop(run())


def test_a_request_that_has_ended_has_no_timer(served):
    async def run():
        stream = await served.engine.submit(PROMPT, MANY, deadline=600)
        assert stream.timer is not None
        await tokens(stream)
        assert stream.timer is None
        assert stream.times.arrival <= stream.times.scheduled <= stream.times.first_token <= stream.times.last_token

    served.on_loop(run())


def test_a_prompt_that_is_too_long_in_any_case_is_not_tokenized(served, monkeypatch):
    async def run():
        monkeypatch.setattr(served.engine.tokenizer, "encode", lambda *_: pytest.fail("it was tokenized"))
        with pytest.raises(RequestError, match="at least 83334 tokens"):
            await served.engine.submit("x" * 1_000_000, FEW)
        with pytest.raises(RequestError, match="1000000 tokens"):
            await served.engine.submit([5] * 1_000_000, FEW)
        monkeypatch.undo()
        await settle(served.engine)

    served.on_loop(run())


@pytest.mark.parametrize("wrong", [{"cache_salt": "\ud800"}, {"cache_salt": ""}, {"priority": 3}])
def test_a_request_that_is_refused_leaves_nothing(served, wrong):
    async def run():
        with pytest.raises(RequestError):
            await served.engine.submit(PROMPT, FEW, **wrong)
        await settle(served.engine)

    served.on_loop(run())


def test_a_step_that_raises_ends_its_own_requests_and_the_engine_goes_on(served, caplog):
    async def run():
        engine = served.engine
        expected = await tokens(await engine.submit(PROMPT, FEW))
        served.probe.delay = 0.05  # so that none ends by itself
        streams = [await engine.submit(PROMPT, MANY) for _ in range(6)]  # four run, two wait
        for stream in streams[:4]:
            await anext(stream)
        served.probe.fail_rows = 4
        served.probe.delay = 0
        results = await asyncio.gather(*(tokens(stream) for stream in streams), return_exceptions=True)
        assert [type(result) for result in results] == [StepFailed] * 4 + [list] * 2
        assert len({id(result) for result in results}) == 6
        assert await tokens(await engine.submit(PROMPT, FEW)) == expected
        await settle(engine)

    with caplog.at_level(logging.ERROR, "ostinato"):
        served.on_loop(run())
    [record] = caplog.records
    assert "4 requests" in record.message
    assert SECRET in record.exc_text


def test_what_unfinished_requests_are_told_when_the_engine_stops(probe):
    async def run():
        engine = await AsyncEngine.start(CONFIG, make=probe)
        probe.delay = 0.05  # so that none ends by itself
        begun = await engine.submit(PROMPT, MANY)
        encode, is_tokenizing, has_stopped = engine.tokenizer.encode, threading.Event(), threading.Event()
        engine.tokenizer.encode = lambda *a: (is_tokenizing.set(), has_stopped.wait(PATIENCE), encode(*a))[2]
        tokenizing = asyncio.create_task(engine.submit(PROMPT, MANY))
        while not is_tokenizing.is_set():
            await asyncio.sleep(0.005)
        await engine.stop()
        has_stopped.set()
        with pytest.raises(EngineStopped):
            await tokens(begun)
        with pytest.raises(EngineStopped):
            await tokenizing
        with pytest.raises(EngineStopped):
            await engine.submit(PROMPT, MANY)
        assert engine.num_unfinished == engine.queue_limit.num_unfinished == 0
        await engine.stop()

    asyncio.run(run())


def test_broken_bookkeeping_after_a_failed_step_ends_the_engine(probe):
    async def run():
        engine = await AsyncEngine.start(CONFIG, make=probe)
        failed = asyncio.Event()
        engine.on_failure = failed.set
        probe.delay = 0.05  # so that it does not end by itself
        stream = await engine.submit(PROMPT, MANY)
        probe.breaks = 1
        with pytest.raises(EngineFailed):
            await tokens(stream)
        await asyncio.wait_for(failed.wait(), PATIENCE)
        assert "AssertionError" in str(engine.failure)
        with pytest.raises(EngineFailed):
            await engine.submit(PROMPT, FEW)
        with pytest.raises(EngineFailed):
            await engine.observe()
        assert engine.num_unfinished == engine.queue_limit.num_unfinished == 0
        await engine.stop()

    asyncio.run(run())


def test_an_engine_that_fails_right_after_it_took_a_request_ends_it(probe):
    async def run():
        engine = await AsyncEngine.start(CONFIG, make=probe)
        handle = engine._handle_message
        # Both come in one turn of the loop, before the call that waits for the first goes on.
        engine._process.on_message = lambda message: (handle(message), engine.fail(RuntimeError("made up")))
        with pytest.raises(EngineFailed):
            await engine.submit(PROMPT, MANY)
        assert engine.num_unfinished == engine.queue_limit.num_unfinished == 0
        await engine.stop()

    asyncio.run(run())


def test_one_expensive_round_does_not_hold_the_next_ones_up():
    now = 100.0
    pace = DeltaPacer(clock=lambda: now)
    for cost in (0.0001, 0.0001, 0.5):  # the last one with other work of the loop in it
        pace.sent(are_all=True)
        assert not pace.allows_urgent
        pace.settled(cost)
    assert pace.allows_urgent
    assert not pace.allows_all
    now += 0.0001 / MAX_SERVER_SHARE
    assert pace.allows_all


def test_what_begins_or_ends_does_not_put_off_the_others():
    now = 100.0
    pace = DeltaPacer(clock=lambda: now)
    for cost, are_all in ((1.0, True), (0.001, True), (1.0, False)):
        pace.sent(are_all)
        pace.settled(cost)
    assert not pace.allows_all
    now += 0.001 / MAX_SERVER_SHARE
    assert pace.allows_all


@pytest.mark.slow
def test_rounds_that_are_all_expensive_wait_but_not_for_ever():
    now = 100.0
    pace = DeltaPacer(clock=lambda: now)
    for _ in range(2):
        pace.sent(are_all=True)
        pace.settled(0.5)
    assert not pace.allows_all
    now += MAX_DELAY_SECONDS
    assert pace.allows_all
