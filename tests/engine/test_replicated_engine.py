"""Two real engines behind one AsyncEngine, without a cluster between them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.failures import ReplicaLost
from ostinato.engine.process.stream import Stream
from ostinato.engine.replicas.front import Replicas
from ostinato.engine.replicas.host import FRONT_PATIENCE, ReplicaHost
from ostinato.engine.replicas.replicated_engine import ReplicatedEngine
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams
from tests.support.engine_probe import Probe, without_native_kernels
from tests.support.fake_replicas import LocalLink

CONFIG = EngineConfig(model="demo", dtype="float32", threads=1, max_num_seqs=4, graph_mode="none")
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
PATIENCE = 60


@dataclass
class Two:
    """An engine over replicas; `hosts` by name, and a probe of each."""

    engine: ReplicatedEngine
    replicas: Replicas
    hosts: dict[str, ReplicaHost]
    probes: dict[str, Probe]

    async def start(self, name: str) -> None:
        """One more replica."""
        probe = self.probes[name] = Probe(reference=without_native_kernels())
        self.hosts[name] = host = await ReplicaHost.start(CONFIG, 30, PATIENCE, make=probe)
        self.replicas.add(LocalLink(name, host))

    def where(self, stream: Stream) -> str | None:
        return self.replicas._requests[stream.request_id].replica

    async def until(self, condition: object) -> None:
        end = asyncio.get_running_loop().time() + PATIENCE
        while not condition():  # type: ignore[operator]
            assert asyncio.get_running_loop().time() < end, "what was waited for did not happen"
            await asyncio.sleep(0.01)

    def kill(self, name: str) -> None:
        os.kill(self.hosts[name]._process.pid, signal.SIGKILL)


@asynccontextmanager
async def two_replicas() -> AsyncIterator[Two]:
    replicas = Replicas()
    two = Two(None, replicas, {}, {})  # type: ignore[arg-type]
    try:
        await asyncio.gather(two.start("a"), two.start("b"))
        two.engine = await ReplicatedEngine.over(replicas, CONFIG)
        await two.until(lambda: len(replicas.states) == 2)
        yield two
    finally:
        for probe in two.probes.values():
            probe.reset()
        if two.engine is not None:
            await two.engine.stop()
        await asyncio.gather(*(host.end() for host in two.hosts.values()))
        for probe in two.probes.values():
            probe.close()


def prompts() -> list[str]:
    return [f"Q: Ava has {count} apples and buys {count + 3} more. How many apples has she?\nA:" for count in range(9)]


def asked() -> list[tuple[str, SamplingParams]]:
    """Greedy, with a seed, without one, and with a guide (whose turn depends on its compilation, so with a seed)."""
    kinds = (
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=1, seed=5, max_tokens=24),
        SamplingParams(temperature=1, max_tokens=24),
        SamplingParams(temperature=1, seed=7, max_tokens=8, guide=Guide(choice=("yes", "no"))),
    )
    return [(prompt, kinds[place % 4]) for place, prompt in enumerate(prompts() * 2)]


async def answers(engine: AsyncEngine) -> list[list[int]]:
    """The tokens of all requests, which run at the same time."""

    async def answer(stream: Stream) -> list[int]:
        async with stream:
            return [token async for delta in stream for sample in delta.samples for token in sample.token_ids]

    streams = [await engine.submit(prompt, params) for prompt, params in asked()]
    return await asyncio.gather(*map(answer, streams))


async def first_tokens(stream: Stream) -> None:
    await anext(aiter(stream))


def test_streams_of_two_replicas_are_those_of_one_engine() -> None:
    async def run() -> None:
        one = await AsyncEngine.start(CONFIG)
        try:
            expected = await answers(one)
        finally:
            await one.stop()
        async with two_replicas() as two:
            assert await answers(two.engine) == expected
            await two.engine.observe()
            seen = two.replicas.observations
            assert all(each.stats["generated_tokens"] > 10 for each in seen.values()), "both have worked"
            # Both have computed a first token of their own.
            assert (await two.engine.observe()).stats["requests"] == len(expected) + 2
            assert two.engine.admission.max_running == 8
            two.replicas.check_integrity()
            assert await two.engine.check_integrity() == 0

    asyncio.run(run())


def test_a_killed_replica_ends_what_it_had_begun_and_nothing_else() -> None:
    async def run() -> None:
        async with two_replicas() as two:
            engine = two.engine
            streams = [await engine.submit(prompt, LONG) for prompt in prompts() * 2]
            by_home = {name: [each for each in streams if two.where(each) == name] for name in "ab"}
            assert min(map(len, by_home.values())) > 4, "more than run at a time, so some have not begun"
            await first_tokens(by_home["a"][0])
            two.probes["a"].hold_next()
            two.probes["b"].hold_next()
            begun = {each.request_id for each in by_home["a"] if two.replicas._requests[each.request_id].has_begun}
            assert 0 < len(begun) < len(by_home["a"])
            two.kill("a")
            await two.until(lambda: list(two.replicas.states) == ["b"])
            assert engine.admission.max_running == 4
            two.probes["b"].go()
            lost = set()
            for stream in streams:
                try:
                    assert sum([len(each.token_ids) async for delta in stream for each in delta.samples]) > 0
                    assert stream.num_output_tokens == 300
                except ReplicaLost:
                    lost.add(stream.request_id)
            assert lost == begun
            # Another one comes, and gets requests.
            await two.start("c")
            await two.until(lambda: len(two.replicas.states) == 2)
            later = [await engine.submit(prompt, LONG) for prompt in prompts()]
            assert {two.where(each) for each in later} == {"b", "c"}
            for stream in later:
                stream.abort()
            assert engine.num_unfinished == engine.admission.num_unfinished == 0

    asyncio.run(run())


def test_draining_under_load_loses_nothing() -> None:
    async def run() -> None:
        async with two_replicas() as two:
            streams = [await two.engine.submit(prompt, LONG) for prompt in prompts()]
            draining = asyncio.ensure_future(two.hosts["a"].drain(PATIENCE))
            await two.until(lambda: two.replicas.states["a"] == "draining")
            streams += [await two.engine.submit(prompt, LONG) for prompt in prompts()[:3]]
            assert {two.where(each) for each in streams[-3:]} == {"b"}
            for stream in streams:
                async for _ in stream:
                    pass
                assert stream.num_output_tokens == 300
            await draining
            await two.hosts["a"].end()
            await two.until(lambda: list(two.replicas.states) == ["b"])

    asyncio.run(run())


def test_a_front_that_leaves_takes_its_requests_with_it() -> None:
    async def run() -> None:
        async with two_replicas() as two:
            host = two.hosts["a"]
            other = Replicas()
            other.add(LocalLink("a", host, front="other"))
            engine = await ReplicatedEngine.over(other, CONFIG, seed=1)
            streams = [await engine.submit(prompt, LONG) for prompt in prompts()]
            assert host.num_unfinished == len(streams)
            own = await two.engine.submit(prompts()[0], LONG)
            await engine.stop()
            for stream in streams:
                with pytest.raises(Exception, match="stopped"):
                    async for _ in stream:
                        pass
            await two.until(lambda: host.num_unfinished <= 1)
            async for _ in own:
                pass
            assert await two.engine.check_integrity() == 0

    asyncio.run(run())


def test_what_was_computed_is_published_and_found_there() -> None:
    async def run() -> None:
        async with two_replicas() as two:
            long = "Once there was a story. " * 60
            few = SamplingParams(temperature=0, max_tokens=2)
            first = await two.engine.submit(long + "One", few)
            home = two.where(first)
            async for _ in first:
                pass
            router = two.replicas.router
            assert home is not None
            assert router is not None
            await two.until(lambda: len(router._replicas[home].published) > 0)
            for end in ("Two", "Three", "Four"):
                stream = await two.engine.submit(long + end, few)
                assert two.where(stream) == home
                async for _ in stream:
                    pass
                assert (stream.num_cached_tokens or 0) > 256
            salted = await two.engine.submit(long + "Five", few, cache_salt="another")
            async for _ in salted:
                pass
            assert salted.num_cached_tokens == 0

    asyncio.run(run())


def test_a_replica_notes_that_its_engine_hangs_and_that_a_front_is_silent() -> None:
    async def run() -> None:
        async with two_replicas() as two:
            host, probe = two.hosts["a"], two.probes["a"]
            await two.until(lambda: host.last is not None)
            assert not host.is_stalled
            load = host.load()
            assert load == {"requests": 0.0, "slots": 0.0}
            host._heartbeat._timeout = 0.5
            stream = await two.engine.submit(prompts()[0], LONG)
            other = await two.engine.submit(prompts()[1], LONG)
            held = stream if two.where(stream) == "a" else other
            assert {two.where(stream), two.where(other)} == {"a", "b"}
            probe.hold_next()
            await two.until(lambda: host.is_stalled)
            # The other one does not wait for it, nor do the counts of both.
            async for _ in other if held is stream else stream:
                pass
            assert (await two.engine.observe()).stats["generated_tokens"] >= 300
            probe.go()
            await two.until(lambda: not host.is_stalled)
            async for _ in held:
                pass
            assert held.num_output_tokens == 300
            # One that says nothing for long is as good as gone.
            for front in host._fronts.values():
                front.heard_at -= 2 * FRONT_PATIENCE
            await two.until(lambda: list(two.replicas.states) == ["b"])
            assert host.num_unfinished == 0

    asyncio.run(run())
