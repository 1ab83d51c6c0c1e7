"""Requests move between two engines in processes of their own: whoever reads their streams notices nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.request_streams import RequestStream
from ostinato.errors import DamagedExport, DeadlineExceeded, EngineDraining, ForeignExport
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from tests.support.engine_probe import Probe, without_native_kernels
from tests.support.patience import PATIENCE

CONFIG = EngineConfig(model="demo", dtype="float32", threads=1, max_num_seqs=24, max_model_len=512, graph_mode="none")
PROMPT = "Q: Ava has 17 apples and buys 25 more. How many apples has she?\nA:"


@contextlib.asynccontextmanager
async def engines(
    config: EngineConfig = CONFIG, **of_second: int
) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine, Probe]]:
    """Two of one plan, and the probe of the first."""
    with contextlib.closing(Probe(reference=without_native_kernels())) as probe:
        first, second = await asyncio.gather(
            AsyncEngine.start(config, make=probe), AsyncEngine.start(config, make=_plain(probe), **of_second)
        )
        try:
            yield first, second, probe
        finally:
            probe.reset()
            await asyncio.gather(first.stop(), second.stop())


def _plain(probe: Probe) -> Probe:
    return Probe(reference=probe.reference)


async def whole(stream: RequestStream) -> tuple[list[tuple[list[int], str, str | None]], Any]:
    """(tokens, text, reason) of each output, as the stream's gains add up; and the output that came with the last."""
    found: dict[int, tuple[list[int], str, str | None]] = {}
    last = None
    async for delta in stream:
        for each in delta.samples:
            tokens, text, _ = found.get(each.sample_index, ([], "", None))
            found[each.sample_index] = ([*tokens, *each.token_ids], text + each.text, each.finish_reason)
        last = delta.output or last
    return [found[index] for index in sorted(found)], last


def wishes() -> list[tuple[str | list[int], SamplingParams]]:
    """Twenty requests of all kinds. Without a seed they have one of the engine's, by their number."""
    found: list[tuple[str | list[int], SamplingParams]] = []
    for number in range(20):
        settings: dict[str, Any] = {"temperature": 0.8, "max_tokens": 90 + number, "ignore_eos": True}
        if number % 5 == 0:
            settings["temperature"] = 0
        if number % 5 == 1:
            settings |= {"seed": number, "n": 2, "logprobs": 1}
        if number % 5 == 2:
            settings |= {"repetition_penalty": 1.3, "min_tokens": 30, "stop": ["apples and a pear"]}
        if number == 18:
            settings |= {"guide": Guide(regex="( [0-9]{3}){40}"), "ignore_eos": False}
        found.append((PROMPT * (1 + number % 3), SamplingParams(**settings)))
    return found


def scores(output: Any) -> list[float]:
    """The log-probabilities of all tokens, where they were asked for."""
    return [each.logprob for sample in output.outputs for each in sample.logprobs or ()]


async def settle(engine: AsyncEngine) -> None:
    until = asyncio.get_running_loop().time() + PATIENCE
    while engine.num_unfinished or await engine.check_integrity():
        assert asyncio.get_running_loop().time() < until, "a request was left behind"
        await asyncio.sleep(0.005)
    assert engine.queue_limit.num_unfinished == 0
    stats = (await engine.observe()).stats
    assert stats["cache"]["blocks_used"] == stats["cache"]["slots_used"] == 0


@pytest.mark.slow
def test_twenty_streams_go_on_elsewhere_as_if_nothing_had_happened() -> None:
    async def run() -> None:
        async with engines() as (first, second, probe):
            alone = [await second.submit(*wish) for wish in wishes()]
            expected = await asyncio.gather(*map(whole, alone))
            probe.delay = 0.05  # so that none ends before all have begun
            streams = [await first.submit(*wish) for wish in wishes()]
            reading = [asyncio.create_task(whole(stream)) for stream in streams]
            while not all(stream.num_output_tokens for stream in streams):
                await asyncio.sleep(0.001)
            probe.hold()
            probe.delay = 0
            draining = asyncio.create_task(first.drain(second))
            await asyncio.sleep(0)
            with pytest.raises(EngineDraining):
                await first.submit(PROMPT)
            while not draining.done():
                if any(stream.handover is not None for stream in first.streams()):
                    probe.allowed = probe.steps + 1  # else the first engine would be done before it is asked
                await asyncio.sleep(0.002)
            drained = await draining
            probe.go()
            assert first.num_unfinished == 0
            assert (drained.moved, drained.kept) == (20, 0)
            for task, (outputs, output) in zip(reading, expected, strict=True):
                moved_outputs, moved_output = await task
                assert moved_outputs == outputs
                assert scores(moved_output) == pytest.approx(scores(output), abs=1e-4)
            left, came = [(await each.observe()).stats["moves"] for each in (first, second)]
            assert left["exported"] == came["imported"] == drained.moved
            assert left["exported_bytes"] == came["imported_bytes"] == drained.num_bytes
            assert came["carried_tokens"] > 0
            assert came["recomputed_tokens"] == came["refused"] == 0
            await settle(first)
            await settle(second)

    asyncio.run(run())


@pytest.mark.slow
def test_without_another_engine_readers_get_what_another_one_needs() -> None:
    async def run() -> None:
        async with engines() as (first, second, probe):
            prompt, params = wishes()[1]
            expected, _ = await whole(await second.submit(prompt, params))
            stream = await first.submit(prompt, params)
            await anext(stream)
            probe.delay = 0.05
            draining = asyncio.create_task(first.drain())
            _, told = await whole(stream)
            await draining
            assert {each.finish_reason for each in told.outputs} == {"moved"}
            assert stream.exported is not None
            following = await second.import_(stream.exported)
            assert following.prompt_token_ids == stream.prompt_token_ids
            given = stream.num_output_tokens
            assert following.num_output_tokens >= given
            _, output = await whole(following)
            found = [(each.token_ids, each.text, each.finish_reason) for each in output.outputs]
            assert found == expected
            assert following.num_output_tokens == sum(len(tokens) for tokens, _, _ in expected)
            with pytest.raises(DamagedExport):
                await second.import_(stream.exported[:-1])
            first.resume()
            assert (await whole(await first.submit(prompt, params)))[0] == expected
            await settle(first)
            await settle(second)

    asyncio.run(run())


@pytest.mark.slow
def test_what_the_other_engine_refuses_is_computed_to_its_end() -> None:
    async def run() -> None:
        async with engines(max_waiting=0) as (first, second, probe):
            params = SamplingParams(temperature=0.9, seed=3, max_tokens=80, ignore_eos=True)
            expected, _ = await whole(await second.submit(PROMPT, params))
            probe.delay = 0.05  # so that none ends by itself
            streams = [await first.submit(PROMPT, params) for _ in range(10)]
            reading = [asyncio.create_task(whole(stream)) for stream in streams]
            probe.hold_next()
            probe.delay = 0
            second.queue_limit.acquire(24)  # nobody else finds room
            draining = asyncio.create_task(first.drain(second))
            await asyncio.sleep(0)
            probe.go()
            drained = await draining
            assert drained.moved == 0
            assert drained.kept > 0
            for task in reading:
                assert (await task)[0] == expected
            second.queue_limit.release(24)
            await settle(first)
            await settle(second)

    asyncio.run(run())


@pytest.mark.slow
def test_deadlines_and_readers_that_leave_count_on_the_other_engine_too() -> None:
    async def run() -> None:
        async with engines() as (first, second, probe):
            params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            probe.delay = 0.05
            late = await first.submit(PROMPT, params, deadline=600)
            left = await first.submit(PROMPT, params)
            gone = await first.submit(PROMPT, params)
            when = late.deadline
            draining = asyncio.create_task(first.drain(second))
            await asyncio.sleep(0)
            gone.abort()  # before it is its turn
            assert (await draining).moved == 2
            assert late.timer is not None
            assert late.deadline == when
            second._streams.expire(late.request_id, 600)
            with pytest.raises(DeadlineExceeded):
                await whole(late)
            left.abort()
            assert left.ended
            await settle(first)
            await settle(second)

    asyncio.run(run())


@pytest.mark.slow
def test_an_engine_of_another_plan_says_what_differs() -> None:
    async def run() -> None:
        async with engines() as (first, _, probe):
            other = await AsyncEngine.start(CONFIG.with_settings(block_size=32), make=_plain(probe))
            probe.delay = 0.05  # so that it does not end before it is asked for
            stream = await first.submit(PROMPT, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
            exported = await first.export(stream.request_id)
            assert exported is not None
            with pytest.raises(ForeignExport, match="block_size is 16 there and 32 here") as caught:
                await other.import_(exported)
            assert any(each.startswith("block_size") for each in caught.value.differences)
            assert (await other.observe()).stats["moves"]["refused"] == 1
            await settle(other)
            await other.stop()

    asyncio.run(run())
