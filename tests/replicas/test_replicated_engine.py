"""Two real engines behind one AsyncEngine, without a cluster between them.

What is long here has its like with fake engines: tests/replicas/test_replicas_front.py and test_replicas_moving.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.request_streams import RequestStream
from ostinato.errors import ReplicaLost
from ostinato.replicas.front import ReplicaSet
from ostinato.replicas.host import FRONT_PATIENCE, ReplicaHost
from ostinato.replicas.replicated_engine import ReplicatedEngine
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from tests.support.engine_probe import Probe, without_native_kernels
from tests.support.fake_replicas import LocalLink
from tests.support.patience import PATIENCE

CONFIG = EngineConfig(model="demo", dtype="float32", threads=1, max_num_seqs=4, graph_mode="none")
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@dataclass
class Two:
    """An engine over replicas; `hosts` by name, and a probe of each."""

    engine: ReplicatedEngine
    replicas: ReplicaSet
    hosts: dict[str, ReplicaHost]
    probes: dict[str, Probe]
    config: EngineConfig = CONFIG
    sent_to: dict[str, str | None] = field(default_factory=dict)

    async def fetch(self, source: str, request_id: str, offset: int) -> bytes:
        await asyncio.sleep(0)
        return self.hosts[source].moves.departures.piece(request_id, offset)

    async def start(self, name: str) -> None:
        """One more replica."""
        probe = self.probes[name] = Probe(reference=without_native_kernels())
        self.hosts[name] = host = await ReplicaHost.start(self.config, 30, PATIENCE, make=probe)
        host.moves.fetch = self.fetch
        self.replicas.add(LocalLink(name, host))

    def where(self, stream: RequestStream) -> str | None:
        """The replica that has its request; once that has ended, the one that it was sent to."""
        request = self.replicas._requests.get(stream.request_id)
        return self.sent_to[stream.request_id] if request is None else request.replica

    def note_places(self) -> None:
        """From now on it is known of requests that end at once, too."""
        place = self.replicas._assign

        def noted(request_id: str) -> None:
            place(request_id)
            self.sent_to[request_id] = self.replicas._requests[request_id].replica

        self.replicas._assign = noted  # type: ignore[method-assign]

    async def until(self, condition: object) -> None:
        end = asyncio.get_running_loop().time() + PATIENCE
        while not condition():  # type: ignore[operator]
            assert asyncio.get_running_loop().time() < end, "what was waited for did not happen"
            await asyncio.sleep(0.01)

    def kill(self, name: str) -> None:
        os.kill(self.hosts[name]._process.pid, signal.SIGKILL)


@asynccontextmanager
async def two_replicas(config: EngineConfig = CONFIG) -> AsyncIterator[Two]:
    replicas = ReplicaSet()
    two = Two(None, replicas, {}, {}, config)  # type: ignore[arg-type]
    two.note_places()
    try:
        await asyncio.gather(two.start("a"), two.start("b"))
        two.engine = await ReplicatedEngine.over(replicas, config)
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

    async def answer(stream: RequestStream) -> list[int]:
        async with stream:
            return [token async for delta in stream for sample in delta.samples for token in sample.token_ids]

    streams = [await engine.submit(prompt, params) for prompt, params in asked()]
    return await asyncio.gather(*map(answer, streams))


async def first_tokens(stream: RequestStream) -> None:
    await anext(aiter(stream))


@pytest.mark.slow
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
            # The first token that each has computed of its own is not counted.
            assert (await two.engine.observe()).stats["requests"] == len(expected)
            assert two.engine.queue_limit.max_running == 8
            two.replicas.check_integrity()
            assert await two.engine.check_integrity() == 0

    asyncio.run(run())


@pytest.mark.slow
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
            two.kill("a")
            await two.until(lambda: list(two.replicas.states) == ["b"])
            # Those of which a token has come here. The other replica gives none yet.
            begun = {each.request_id for each in by_home["a"] if each.num_output_tokens}
            assert 0 < len(begun) < len(by_home["a"])
            assert engine.queue_limit.max_running == 4
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
            assert engine.num_unfinished == engine.queue_limit.num_unfinished == 0

    asyncio.run(run())


@pytest.mark.long
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


def kinds() -> list[SamplingParams]:
    """Of all that a move has to carry: noise, several outputs, log-probabilities, penalties, stop strings, a guide."""
    some = {"temperature": 0.8, "max_tokens": 400, "ignore_eos": True}
    return [
        SamplingParams(**{**some, "temperature": 0}),
        SamplingParams(**some),
        SamplingParams(**some, seed=3, n=2, logprobs=1),
        SamplingParams(**some, repetition_penalty=1.3, min_tokens=30, stop=["apples and a pear"]),
        SamplingParams(temperature=0.8, max_tokens=400, guide=Guide(regex="( [0-9]{3}){95}")),
    ]


async def whole(stream: RequestStream) -> tuple[dict[int, list[int]], dict[int, str], list[str]]:
    """Tokens and text of each output, as its gains add up, and the reasons for which outputs ended."""
    tokens: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    async for delta in stream:
        for each in delta.samples:
            tokens.setdefault(each.sample_index, []).extend(each.token_ids)
            texts[each.sample_index] = texts.get(each.sample_index, "") + each.text
        if delta.output is not None:
            assert [each.text for each in delta.output.outputs] == [texts[i] for i in sorted(texts)]
            assert [each.token_ids for each in delta.output.outputs] == [tokens[i] for i in sorted(tokens)]
    assert sum(map(len, tokens.values())) == stream.num_output_tokens
    return tokens, texts, stream.finish_reasons


async def begun_on(two: Two, name: str, params: list[SamplingParams]) -> list[RequestStream]:
    """Streams that run on one replica, whose next step waits."""
    other = next(each for each in two.hosts if each != name)
    two.replicas._replicas[other].accepts_requests = False
    two.replicas._table.router._replicas[other].takes_new = False
    probe = two.probes[name]
    probe.delay = 0.02  # of each step, so that none ends before the last begins
    streams = [await two.engine.submit(prompts()[place], each) for place, each in enumerate(params)]
    await two.until(lambda: all(two.replicas._requests[each.request_id].has_begun for each in streams))
    two.replicas._replicas[other].accepts_requests = True
    two.replicas._table.router._replicas[other].takes_new = True
    assert {two.where(each) for each in streams} == {name}
    probe.hold_next()
    probe.delay = 0
    return streams


@pytest.mark.parametrize("speculative", [None, pytest.param("ngram:3", marks=pytest.mark.long)])
@pytest.mark.slow
def test_streams_of_a_replica_that_drains_go_on_at_another_with_the_same_tokens(speculative: str | None) -> None:
    config = CONFIG.with_settings(max_num_seqs=8, speculative=speculative)

    async def run() -> None:
        one = await AsyncEngine.start(config)
        try:
            alone = [await one.submit(prompts()[place], each) for place, each in enumerate(kinds())]
            expected = await asyncio.gather(*map(whole, alone))
        finally:
            await one.stop()
        async with two_replicas(config) as two:
            streams = await begun_on(two, "a", kinds())
            reading = [asyncio.create_task(whole(each)) for each in streams]
            await drained(two, "a")
            assert two.hosts["a"].num_unfinished == 0
            assert await asyncio.gather(*reading) == expected
            counts = two.replicas.moving.counts
            assert (counts.moved, counts.stayed) == (len(streams), {})
            seen = await two.engine.observe()
            assert seen.stats["drains"] == counts.to_json()
            assert seen.stats["moves"]["carried_tokens"] > 0
            assert seen.stats["moves"]["imported_bytes"] == counts.moved_bytes
            assert [each.num_cached_tokens for each in streams] == [each.num_cached_tokens for each in alone]
            assert await two.engine.check_integrity() == 0
            assert two.engine.queue_limit.num_unfinished == 0

    asyncio.run(run())


async def drained(two: Two, name: str) -> None:
    """Drains a replica that is held, a step at a time, so that it does not end what it has before it is asked for it;
    and ends it."""
    draining = asyncio.ensure_future(two.hosts[name].drain(PATIENCE))
    while not draining.done():
        two.probes[name].allowed = two.probes[name].steps + 1
        if two.hosts[name].moves.departures.num_kept:
            # One that is held, too, takes messages between two steps.
            for probe in two.probes.values():
                probe.allowed = max(probe.allowed, probe.steps + 1)
        await asyncio.sleep(0.005)
    await draining
    two.probes[name].go()
    await two.hosts[name].end()
    await two.until(lambda: name not in two.replicas.states)


@pytest.mark.long
def test_a_rolling_update_replaces_all_replicas_and_cuts_no_stream() -> None:
    params = [SamplingParams(temperature=0.9, max_tokens=300, ignore_eos=True)] * 3

    async def run() -> None:
        one = await AsyncEngine.start(CONFIG)
        try:
            alone = [await one.submit(prompts()[place], each) for place, each in enumerate(params)]
            expected = await asyncio.gather(*map(whole, alone))
        finally:
            await one.stop()
        async with two_replicas() as two:
            streams = await begun_on(two, "a", params)
            reading = [asyncio.create_task(whole(each)) for each in streams]
            # Until b is drained, it lets nothing end either.
            two.probes["b"].hold()
            await drained(two, "a")
            assert {two.where(each) for each in streams} == {"b"}
            await two.start("c")
            await two.until(lambda: "c" in two.replicas.states)
            await drained(two, "b")
            assert await asyncio.gather(*reading) == expected
            assert two.replicas.moving.counts.moved == 2 * len(streams)
            assert list(two.replicas.states) == ["c"]
            assert await two.engine.check_integrity() == 0

    asyncio.run(run())


@pytest.mark.long
def test_a_replica_of_other_settings_does_not_go_on_and_the_streams_end_where_they_were() -> None:
    async def run() -> None:
        async with two_replicas() as two:
            # Alike for a front, and not for a move.
            two.config = CONFIG.with_settings(ssm_state_dtype="bfloat16")
            await two.start("c")
            await two.until(lambda: "c" in two.replicas.states)
            await two.hosts["b"].end()
            await two.until(lambda: sorted(two.replicas.states) == ["a", "c"])
            two.hosts.pop("b")
            streams = await begun_on(two, "a", kinds()[:3])
            draining = asyncio.ensure_future(two.hosts["a"].drain(PATIENCE))
            requests = [two.replicas._requests[each.request_id] for each in streams]
            while not all(each.stays == "foreign" and each.move is None for each in requests):
                two.probes["a"].allowed = two.probes["a"].steps + 1  # else it would end what it has before that
                await asyncio.sleep(0.005)
            two.probes["a"].go()
            for stream in streams:
                tokens, _, reasons = await whole(stream)
                assert {len(each) for each in tokens.values()} == {400}
                assert set(reasons) == {"length"}
            await draining
            counts = two.replicas.moving.counts
            assert counts.moved == 0
            assert counts.stayed["foreign"] == len(streams)

    asyncio.run(run())


@pytest.mark.long
def test_a_source_that_is_killed_while_it_keeps_a_request_ends_its_stream_as_lost() -> None:
    async def run() -> None:
        async with two_replicas() as two:
            [stream] = await begun_on(two, "a", [LONG])
            never = asyncio.get_running_loop().create_future()

            async def fetch(*_: object) -> bytes:
                if not never.done():
                    await never
                raise LookupError("it is gone")

            two.hosts["b"].moves.fetch = fetch
            draining = asyncio.ensure_future(two.hosts["a"].drain(PATIENCE))
            while not two.hosts["a"].moves.departures.num_kept:
                two.probes["a"].allowed = two.probes["a"].steps + 1
                await asyncio.sleep(0.005)
            two.probes["a"].go()
            two.kill("a")
            await two.until(lambda: list(two.replicas.states) == ["b"])
            assert not stream.ended, "the other one may have it"
            never.set_result(None)
            with pytest.raises(ReplicaLost):
                await whole(stream)
            await draining
            assert two.engine.queue_limit.num_unfinished == two.hosts["b"].num_unfinished == 0

    asyncio.run(run())


@pytest.mark.long
def test_a_front_that_leaves_takes_its_requests_with_it() -> None:
    async def run() -> None:
        async with two_replicas() as two:
            host = two.hosts["a"]
            other = ReplicaSet()
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


@pytest.mark.slow
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


@pytest.mark.slow
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
                front.last_message_at -= 2 * FRONT_PATIENCE
            await two.until(lambda: list(two.replicas.states) == ["b"])
            assert host.num_unfinished == 0

    asyncio.run(run())
