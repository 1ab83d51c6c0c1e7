"""Cache events over ZeroMQ: who follows them knows the index, through losses, evictions and restarts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import msgpack
import pytest
import zmq

from ostinato.engine.process import cache_event_hub
from ostinato.engine.process.cache_event_hub import CacheEventHub
from ostinato.errors import ConfigError
from ostinato.kv_cache.cache_events import BlockStored, CacheContents
from ostinato.serve import zmq_events
from ostinato.serve.settings import KvEventsConfig, ServeSettings
from ostinato.serve.zmq_events import ZmqPublisher
from tests.support.patience import PATIENCE
from tests.support.scheduler_steps import BLOCK, make_caching_scheduler, runner_for, serve, text
from tests.support.serving import serving
from tests.support.zmq_subscriber import Subscriber


class Engine:
    """A scheduler with a small cache, whose events are published."""

    def __init__(self, num_blocks: int = 24, num_slots: int = 6) -> None:
        self.scheduler = make_caching_scheduler(num_blocks=num_blocks, num_slots=num_slots)
        self.runner = runner_for(self.scheduler)
        self.index = self.scheduler.cache.store.index
        self.log, self.hub = self.index.publish(), CacheEventHub(with_tokens=True)

    def serve(self, seed: int, length: int) -> None:
        serve(self.scheduler, self.runner, text(length, seed), max_tokens=3)
        self.tell()

    def clear(self) -> None:
        assert self.scheduler.cache.store.clear()
        self.tell()

    def tell(self) -> None:
        if events := self.log.take():
            self.hub.publish(events)

    def is_known_to(self, contents: CacheContents) -> bool:
        blocks = {e.key: (None if e.parent is None else e.parent.key, list(e.token_ids)) for e in self.index}
        checkpoints = {each.entry.key: each.entry.end for each in self.index.checkpoints}
        return contents.blocks == blocks and contents.checkpoints == checkpoints


@asynccontextmanager
async def publishing(engine: Engine, folder: Path, **config: Any) -> AsyncIterator[ZmqPublisher]:
    chosen = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay", **config}
    publisher = ZmqPublisher(KvEventsConfig(**chosen))
    publisher.start(engine.hub, BLOCK, "CPU")
    try:
        yield publisher
    finally:
        await publisher.stop()


@asynccontextmanager
async def subscribing(folder: Path, topic: str = "") -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(f"ipc://{folder}/events", f"ipc://{folder}/replay", topic)
    try:
        yield subscriber
    finally:
        subscriber.close()


async def joined(engine: Engine, subscriber: Subscriber) -> None:
    """Publish until the subscription has reached the publisher, and what came before was replayed."""
    for number in count():
        engine.serve(1000 + number, 20)
        try:
            async with asyncio.timeout(0.2):
                await subscriber.receive()
        except TimeoutError:
            continue
        return


async def caught_up(engine: Engine, subscriber: Subscriber) -> None:
    """Take messages until the subscriber knows what the index holds."""
    while not engine.is_known_to(subscriber.contents):
        await subscriber.receive()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await work()

    asyncio.run(bounded())


@pytest.mark.parametrize("buffer_steps", [1, 4, 1000])
def test_a_subscriber_that_loses_messages_sees_it_by_their_numbers_and_ends_with_the_engines_index(
    tmp_path: Path, buffer_steps: int
) -> None:
    async def work() -> None:
        engine, chance = Engine(), Random(buffer_steps)
        async with publishing(engine, tmp_path, buffer_steps=buffer_steps) as publisher, subscribing(tmp_path) as late:
            await joined(engine, late)
            for number in range(60):
                before, told = publisher._number, engine.hub._number
                if number % 23 == 22:
                    engine.clear()
                else:
                    engine.serve(chance.randrange(6), chance.randrange(1, 50))
                while publisher._number < before + engine.hub._number - told:
                    await asyncio.sleep(0)
                for _ in range(publisher._number - before):
                    await late.receive(loses=number < 58 and chance.random() < 0.4)
            await caught_up(engine, late)
            assert late.num_gaps > 1
            assert late.num_replayed > 0
            assert late.kinds.keys() == {
                "BlockStored", "BlockRemoved", "AllBlocksCleared", "CheckpointStored", "CheckpointRemoved",
            }  # fmt: skip

    run(work)


def test_a_publisher_that_is_started_anew_tells_its_subscribers_to_forget_what_was_cached(tmp_path: Path) -> None:
    async def work() -> None:
        async with subscribing(tmp_path) as subscriber:
            for number in range(3):
                engine = Engine()
                async with publishing(engine, tmp_path):
                    await joined(engine, subscriber)
                    engine.serve(number, 40)
                    await caught_up(engine, subscriber)
                assert subscriber.kinds["AllBlocksCleared"] > number

    run(work)


def test_a_message_is_that_of_vllm_with_an_array_of_time_events_and_rank(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Engine()
        async with publishing(engine, tmp_path, topic="kv-events", checkpoints=False) as publisher:
            engine.serve(1, 20)
            while len(publisher._kept) < 2:
                await asyncio.sleep(0)
            (number, begin), (later, stored) = await publisher._replay_from(engine.hub, publisher._kept[0][0])
            assert later == number + 1
            when, first, rank = msgpack.unpackb(begin)
            assert (type(when), first, rank) == (float, [{"type": "AllBlocksCleared"}], 0)
            _, events, _ = msgpack.unpackb(stored)
            assert {fields["type"] for fields in events} == {"BlockStored"}
            tokens = list(text(20, 1))
            assert events[0]["token_ids"] == tokens[: len(events[0]["token_ids"])]
            assert {key: value for key, value in events[0].items() if key not in ("block_hashes", "token_ids")} == {
                "type": "BlockStored", "parent_block_hash": None, "block_size": BLOCK, "lora_id": None,
                "medium": "CPU", "lora_name": None,
            }  # fmt: skip
            async with subscribing(tmp_path, "kv-ev") as subscriber:
                await joined(engine, subscriber)
                assert subscriber.kinds.keys() == {"AllBlocksCleared", "BlockStored"}

    run(work)


def test_all_that_is_cached_is_encoded_once_off_the_loop_and_sent_again_with_what_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, threads = ZmqPublisher._encode_all, list[int]()

    def noted(publisher: ZmqPublisher, parts: Any) -> bytes:
        threads.append(threading.get_ident())
        return encode(publisher, parts)

    monkeypatch.setattr(ZmqPublisher, "_encode_all", noted)

    async def work() -> None:
        engine = Engine()
        async with publishing(engine, tmp_path, buffer_steps=3) as publisher:
            while not publisher._kept:  # what it begins with: that nothing is cached
                await asyncio.sleep(0)
            for number, num_encoded in enumerate((1, 1, 1, 1, 2)):
                before, told = publisher._number, engine.hub._number
                engine.serve(number, 20)
                while publisher._number < before + engine.hub._number - told:
                    await asyncio.sleep(0)
                async with subscribing(tmp_path) as late:
                    await late.replay()
                    assert engine.is_known_to(late.contents)
                    assert late.last == publisher._number
                assert len(threads) == num_encoded
            assert threading.get_ident() not in threads

    run(work)


def test_a_publisher_that_fails_says_so_and_begins_again_and_one_that_was_stopped_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zmq_events, "PAUSE", 0.0)
    fields, failures = zmq_events.event_fields, [RuntimeError("once")]

    def failing(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return fields(*args)

    monkeypatch.setattr(zmq_events, "event_fields", failing)

    async def work() -> None:
        engine = Engine()
        async with publishing(engine, tmp_path) as publisher, subscribing(tmp_path) as subscriber:
            await joined(engine, subscriber)
            await caught_up(engine, subscriber)
        assert not failures
        assert caplog.text.count("begins again") == 1
        publisher.start(engine.hub, BLOCK, "CPU")
        await asyncio.sleep(0)
        assert not engine.hub._readers
        # Nothing is left of its sockets.
        async with publishing(engine, tmp_path):
            pass

    with caplog.at_level(logging.ERROR, "ostinato.serve"):
        run(work)


def test_wrong_questions_for_a_replay_end_at_once_and_those_of_the_future_are_empty(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Engine()
        async with publishing(engine, tmp_path):
            engine.serve(1, 20)
            with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.connect(f"ipc://{tmp_path}/replay")
                for question in ([b""], [b"", b"x"], [b"", b"\xff" * 8], [b"", b"1" * 8, b"more"]):
                    await socket.send_multipart(question)
                    assert await socket.recv_multipart() == [b"", b"\xff" * 8, b""]

    run(work)


def test_too_much_at_once_for_the_publisher_is_told_anew_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_events, "PAUSE", 0.0)
    monkeypatch.setattr(cache_event_hub, "MAX_WAITING", 256)

    async def work() -> None:
        engine = Engine()
        async with publishing(engine, tmp_path), subscribing(tmp_path) as subscriber:
            await joined(engine, subscriber)
            cleared = subscriber.kinds["AllBlocksCleared"]
            for start in range(0, 400, 100):  # without a pause for the publisher
                engine.hub.publish([BlockStored(list(range(start, start + 100)), None, [0] * 100)])
            told = engine.hub._contents
            while (subscriber.contents.blocks, subscriber.contents.checkpoints) != (told.blocks, told.checkpoints):
                await subscriber.receive()
            assert subscriber.kinds["AllBlocksCleared"] == cleared + 1

    run(work)


@pytest.mark.slow
def test_a_server_publishes_what_its_own_endpoint_tells(tmp_path: Path) -> None:
    config = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    settings = {"kv_events": "hashes", "kv_events_config": json.dumps(config)}

    async def follow(url: str) -> None:
        async with subscribing(tmp_path) as subscriber, asyncio.timeout(PATIENCE):
            await subscriber.replay()
            for number in range(3):
                body = {"prompt": [7 + (number * 31 + each) % 200 for each in range(100)], "max_tokens": 2}
                async with httpx2.AsyncClient(timeout=PATIENCE) as client:
                    assert (await client.post(f"{url}/v1/completions", json=body)).status_code == 200
                served.until(lambda: len(served.engine.cache_events._contents.blocks) >= 6 * (number + 1))  # noqa: B023
            while subscriber.contents.checkpoints != served.engine.cache_events._contents.checkpoints:
                await subscriber.replay()
            assert subscriber.contents.blocks == served.engine.cache_events._contents.blocks
            assert subscriber.contents.checkpoints

    with serving(settings, graph_mode="none", max_model_len=512) as served:
        asyncio.run(follow(served.url))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events_config": {"endpoint": "ipc:///tmp/x"}}, "--kv-events|kv_events what"),
        ({"kv_events": "hashes", "kv_events_config": {}}, "ZeroMQ has no keys"),
        ({"kv_events": "hashes", "kv_events_config": {"endpoint": "here"}}, "tcp://HOST:PORT"),
        ({"kv_events": "hashes", "kv_events_config": {"endpoint": "tcp://0.0.0.0:5559"}}, r"write tcp://\*:5559"),
        ({"kv_events": "hashes", "kv_events_config": "{"}, "JSON object"),
        ({"kv_events": "hashes", "kv_events_config": {"max_queue_size": 5}}, "max_queue_size"),
        (
            {
                "kv_events": "hashes",
                "kv_events_config": {"endpoint": "tcp://router:5557", "replay_endpoint": "tcp://*:1"},
            },
            r"opens tcp://\*:1,",
        ),
    ],
)
def test_what_cannot_be_published_is_refused_with_what_can(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeSettings(**settings)
    if settings.get("kv_events_config") == {}:
        assert ServeSettings(**settings, insecure=True).publishes_events


def test_an_address_that_is_taken_and_a_package_that_is_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with publishing(Engine(), tmp_path):
            with pytest.raises(ConfigError, match=r"cannot be opened: there is no directory .*/missing"):
                ZmqPublisher(KvEventsConfig(endpoint=f"ipc://{tmp_path}/missing/events"))
            await ZmqPublisher(KvEventsConfig(endpoint=f"ipc://@ostinato/missing/{os.getpid()}")).stop()

    run(work)
    monkeypatch.setattr(zmq_events, "find_spec", lambda name: None if name == "zmq" else object())
    with pytest.raises(ConfigError, match=r"needs pyzmq: pip install 'ostinato\[zmq\]'"):
        ZmqPublisher(KvEventsConfig(endpoint="ipc:///tmp/x"))


def test_the_log_says_whether_an_endpoint_was_opened_or_connected_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with publishing(Engine(), tmp_path, replay_endpoint=None):
            pass
        async with publishing(Engine(), tmp_path, endpoint="tcp://127.0.0.1:9", replay_endpoint=None):
            pass

    with caplog.at_level(logging.INFO, "ostinato.serve"):
        run(work)
    assert [record.getMessage() for record in caplog.records] == [
        f"kv_events_config: ipc://{tmp_path}/events is opened",
        "kv_events_config: tcp://127.0.0.1:9 is connected to",
    ]


def test_a_config_with_a_key_twice_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'topic' twice"):
        ServeSettings(kv_events="hashes", kv_events_config='{"topic": "a", "topic": "b"}')


def test_a_config_of_vllms_that_publishes_nothing_publishes_nothing() -> None:
    for off in ({"enable_kv_cache_events": False}, {"publisher": "null"}):
        assert not ServeSettings(kv_events_config=off).publishes_events
