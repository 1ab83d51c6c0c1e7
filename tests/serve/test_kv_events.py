"""`/kv_events`: a router that reads it knows what is cached, and no reader costs more than its bound."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from ostinato.engine.process.cache_event_hub import MAX_READERS, MAX_WAITING, CacheEventHub, SlowReader
from ostinato.errors import ConfigError
from ostinato.kv_cache.cache_events import AllBlocksCleared, BlockStored, CacheContents
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.serve.settings import ServeSettings
from tests.support.cache_events import event_of
from tests.support.patience import PATIENCE
from tests.support.serving import Served, serving

PROMPT = [7 + token % 50 for token in range(100)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving({"kv_events": "hashes"}, graph_mode="none", max_model_len=512) as served:
        yield served


def complete(served: Served, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
    answer = httpx2.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


@contextmanager
def reading(served: Served) -> Iterator[Iterator[dict[str, Any]]]:
    """The batches of a new reader."""
    with httpx2.stream("GET", f"{served.url}/kv_events", timeout=PATIENCE) as response:
        assert response.status_code == 200
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def follow(contents: CacheContents, batch: dict[str, Any]) -> None:
    for fields in batch["events"]:
        contents.apply(event_of(fields))


def test_a_reader_gets_what_is_cached_and_then_what_changes(served: Served) -> None:
    complete(served, PROMPT)
    chain = BlockHashes(16)
    chain.extend(lambda start, end: tuple(PROMPT[start:end]), len(PROMPT))
    contents = CacheContents()
    with reading(served) as batches:
        first = next(batches)
        assert first["events"][0] == {"type": "AllBlocksCleared"}
        follow(contents, first)
        number = first["seq"]
        while first["replay_left"]:
            first = next(batches)
            assert first["seq"] == number
            follow(contents, first)
        assert set(chain.keys) <= set(contents.blocks)
        assert contents.checkpoints
        other = [*PROMPT[:64], *[3] * 60]
        complete(served, other)
        chain = BlockHashes(16)
        chain.extend(lambda start, end: tuple(other[start:end]), len(other))
        while not set(chain.keys) <= set(contents.blocks):
            batch = next(batches)
            assert (batch["seq"], batch["replay_left"]) == (number + 1, None)
            number += 1
            stored = [event for event in batch["events"] if event["type"] == "BlockStored"]
            for event in stored:
                assert (event["block_size"], event["medium"], event["lora_id"]) == (16, "CPU", None)
                assert event["token_ids"] == []  # they would be text of other clients
            follow(contents, batch)
    depth = max(index for index, key in enumerate(chain.keys, 1) if key in contents.checkpoints)
    assert complete(served, other)["prompt_tokens_details"]["cached_tokens"] == depth * 16


def test_a_salt_is_part_of_the_hashes(served: Served) -> None:
    complete(served, PROMPT, cache_salt="mine")
    salted = BlockHashes(16, "mine")
    salted.extend(lambda start, end: tuple(PROMPT[start:end]), len(PROMPT))
    contents = CacheContents()
    with reading(served) as batches:
        for batch in batches:
            follow(contents, batch)
            if not batch["replay_left"] and set(salted.keys) <= set(contents.blocks):
                break


def test_readers_are_few_and_leave_nothing_behind(served: Served) -> None:
    hub = served.engine.cache_events
    served.until(lambda: not hub._readers)  # those of the tests before have left
    responses = []
    with httpx2.Client(timeout=PATIENCE) as client:
        for _ in range(MAX_READERS):
            response = client.send(client.build_request("GET", f"{served.url}/kv_events"), stream=True)
            assert response.status_code == 200
            responses.append(response)
        refused = client.get(f"{served.url}/kv_events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_readers")
        for response in responses:
            response.close()
    served.until(lambda: not hub._readers)
    with reading(served) as batches:
        next(batches)


def test_a_head_ends_though_the_stream_does_not(served: Served) -> None:
    answer = httpx2.head(f"{served.url}/kv_events", timeout=PATIENCE)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    served.until(lambda: not served.engine.cache_events._readers)


def test_a_server_without_the_setting_says_which_it_needs() -> None:
    with serving(graph_mode="none", max_model_len=256) as served:
        answer = httpx2.get(f"{served.url}/kv_events", timeout=PATIENCE)
        assert answer.status_code == 403
        assert "--kv-events hashes" in answer.json()["error"]["message"]
        assert served.engine.cache_events is None


def test_replicas_publish_no_events_of_their_own() -> None:
    with pytest.raises(ConfigError, match="kv_events are of one engine"):
        ServeSettings(kv_events="hashes", replicas=2)


def test_a_slow_reader_is_dropped_by_name_and_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        hub = CacheEventHub(with_tokens=False)
        slow, quick = hub.add_reader("slow"), hub.add_reader("quick")
        assert slow is not None
        assert quick is not None
        seen = 0
        stream = quick.batches(PATIENCE)
        for number in range(MAX_WAITING // 256 + 2):
            hub.publish([BlockStored([number * 256 + i for i in range(256)], None, [])])
            async for batch in stream:
                assert batch is not None
                seen += sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlockStored))
                if seen == (number + 1) * 256:
                    break
        assert not slow._waiting
        assert not list(slow._replay)
        with pytest.raises(SlowReader):
            async for _ in slow.batches(PATIENCE):
                pass
        hub.end()
        assert [batch async for batch in stream] == []

    asyncio.run(run())
    assert "slow reads cache events too slowly" in caplog.text


def test_others_run_between_the_parts_of_a_replay_which_later_changes_do_not_touch() -> None:
    async def run() -> None:
        hub = CacheEventHub(with_tokens=False)
        hub.publish([BlockStored(list(range(start, start + 256)), None, []) for start in range(0, 2560, 256)])
        reader = hub.add_reader("late")
        assert reader is not None
        hub.publish([AllBlocksCleared()])
        hub.end()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        contents, left, seen = CacheContents(), [], []
        async for batch in reader.batches(PATIENCE):
            assert batch is not None
            left.append(batch.replay_left)
            seen.append(turns)
            if left[-1] is None:
                assert sorted(contents.blocks) == list(range(2560))
                assert batch.number == 2
            for event in batch.events:
                contents.apply(event)
        task.cancel()
        assert left == [*range(10, -1, -1), None]
        assert not contents.blocks
        assert all(later > earlier for earlier, later in pairwise(seen))

    asyncio.run(run())


@pytest.mark.slow
def test_the_stream_ends_when_the_server_drains() -> None:
    with serving({"kv_events": "tokens"}, graph_mode="none", max_model_len=512) as served:
        complete(served, PROMPT)
        with reading(served) as batches:
            tokens = [token for event in next(batches)["events"] for token in event.get("token_ids", ())]
            while len(tokens) < 96:
                tokens += [token for event in next(batches)["events"] for token in event.get("token_ids", ())]
            assert tokens[:96] == PROMPT[:96]
            served.loop.call_soon_threadsafe(lambda: served.loop.create_task(served.lifecycle.drain()))
            assert all(batch["replay_left"] is not None for batch in batches)
