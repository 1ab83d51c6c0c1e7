"""What is exported can be read, or is refused with what is wrong with it: damaged, foreign, or nonsense."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.engine.core import EngineCore
from ostinato.engine.migration.wire_format import HEAD, MAGIC, RequestSnapshot, pack_snapshot, unpack_snapshot
from ostinato.errors import DamagedExport, ForeignExport, MoveError, RequestError
from ostinato.kv_cache.marks import Mark
from ostinato.ops.step_inputs import LayerCache
from ostinato.runner.cache_memory import DeviceRows, HostRows, LayerCacheMemory, MemoryRows
from ostinato.sampling.pooler import POOLING_PARAMS
from tests.support.checkpoints import random_prompt
from tests.support.engines import PROMPT, assert_empty, greedy, make_engine, run, sampled, tokens_of
from tests.support.native_sets import skip_unless_planned


def exported(engine: EngineCore, steps: int = 5, prompt: list[int] = PROMPT, **settings: Any) -> bytes:
    name = engine.add_request(prompt, sampled(max_tokens=30, logprobs=1, **settings))
    for _ in range(steps):
        engine.step()
    data = engine.export_request(name)
    assert data is not None
    run(engine)
    return data


def finish(engine: EngineCore, data: bytes) -> list[list[int]]:
    name = engine.import_request(data)
    return [each.token_ids for each in run(engine)[name].outputs]


def test_marks_move_with_their_request_and_are_kept_where_it_computes_them() -> None:
    source, target = (make_engine(max_num_batched_tokens=48, max_num_seqs=2) for _ in range(2))
    prompt = random_prompt(80, seed=4)
    marks = [Mark(33, 20), Mark(70, 20)]
    name = source.add_request(prompt, greedy(max_tokens=3), marks=marks)
    source.step()
    data = source.export_request(name)
    assert data is not None
    run(source)
    assert [entry.end for entry in source.scheduler.cache.store.pins.pinned] == [32]
    name = target.import_request(data)
    output = run(target)[name]
    assert [entry.end for entry in target.scheduler.cache.store.pins.pinned] == [64]
    assert output.cache is not None
    assert output.cache.marks == {32: True, 64: True}
    snapshot, parts = unpack_snapshot(data)
    with pytest.raises(DamagedExport, match="marks that no request may have"):
        target.import_request(pack_snapshot(replace(snapshot, marks=[Mark(999)]), parts))
    short = make_engine(max_num_batched_tokens=48, max_num_seqs=2, max_checkpoint_ttl=15)
    run_of = short.import_request(data)
    assert [mark.ttl for request in short.scheduler.queues.waiting for mark in request.marks] == [15, 15]
    assert len(run(short)[run_of].outputs[0].token_ids) == 3


# Damage


def damaged(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """One of the ways in which an export may not be what it was."""
    kept = bytearray(data)
    way = chance.choice(["flip", "flip", "flip", "cut", "longer", "empty", "swap", "version", "zeros", "moved"])
    match way:
        case "flip":
            for _ in range(chance.randint(1, 3)):
                place = chance.randrange(8 * len(kept))
                kept[place // 8] ^= 1 << place % 8
        case "cut":
            del kept[chance.randrange(len(kept)) :]
        case "longer":
            kept += chance.randbytes(chance.randint(1, 9))
        case "empty":
            kept.clear()
        case "swap":
            place = chance.randrange(HEAD.size, len(kept))
            kept[place:] = other[place:]
        case "version":
            kept[len(MAGIC)] ^= chance.randint(1, 255)
        case "zeros":
            place = chance.randrange(len(kept))
            kept[place:] = bytes(len(kept) - place)
        case "moved":
            place = chance.randrange(1, len(kept))
            kept = kept[place:] + kept[:place]
    return bytes(kept)


def test_a_thousand_damaged_exports_are_all_refused_and_change_nothing() -> None:
    engine, chance = make_engine(), random.Random(5)
    data, other = exported(engine), exported(engine, steps=9, prompt=random_prompt(50, seed=9))
    expected = finish(engine, data)
    refused = 0
    for _ in range(1000):
        broken = damaged(data, other, chance)
        if broken == data:
            continue
        with pytest.raises(MoveError):
            engine.import_request(broken)
        refused += 1
        assert not engine.has_unfinished
    assert engine.stats()["moves"]["refused"] == refused > 950
    assert_empty(engine)
    assert finish(engine, data) == expected


@pytest.mark.slow
def test_nonsense_under_a_right_checksum_is_refused_or_served_and_never_breaks_the_engine() -> None:
    """Whoever makes such bytes may have any tokens; the engine stays as it was."""
    engine, chance = make_engine(), random.Random(6)
    data = exported(engine, n=2)
    expected = finish(engine, data)
    _, parts = unpack_snapshot(data)
    plain = json.loads(data[HEAD.size : HEAD.size + HEAD.unpack_from(data)[3]])
    numbers = [0, 1, -1, 2, 10**6, -(2**70), 2**70, 0.5, "", "x", None, [], {}, [[]], True]
    served = refused = 0
    for _ in range(600):
        told = json.loads(json.dumps(plain))
        for _ in range(chance.randint(1, 2)):
            at: Any = told
            while True:
                keys = list(at) if isinstance(at, dict) else list(range(len(at)))
                key = chance.choice(keys)
                if not isinstance(at[key], (dict, list)) or not at[key] or chance.random() < 0.2:
                    break
                at = at[key]
            at[key] = chance.choice(numbers)
        try:
            name = engine.import_request(sealed(told, parts))
        except RequestError:
            refused += 1
            assert not engine.has_unfinished
            continue
        served += 1
        outputs = run(engine)
        assert name in outputs
    assert refused > 300
    assert served > 0
    engine.reset_prefix_cache()
    assert_empty(engine)
    assert finish(engine, data) == expected


def sealed(told: dict[str, Any], parts: list[memoryview]) -> bytes:
    """The bytes of what may be no request, with the checksum that they should have."""
    from ostinato.engine.migration import wire_format

    text = json.dumps(told).encode()
    whole = bytearray(HEAD.pack(MAGIC, wire_format.VERSION, bytes(16), len(text)) + text + b"".join(parts))
    whole[len(MAGIC) + 1 : len(MAGIC) + 17] = wire_format._checksum(memoryview(whole))
    return bytes(whole)


def test_what_is_exported_is_read_as_it_was_and_equal_requests_give_equal_bytes() -> None:
    engine = make_engine()
    data = exported(engine)
    moved, parts = unpack_snapshot(data)
    assert isinstance(moved, RequestSnapshot)
    assert pack_snapshot(moved, parts) == data
    engine.reset_prefix_cache()
    again, same = unpack_snapshot(exported(engine))
    assert [bytes(part) for part in same] == [bytes(part) for part in parts]
    assert replace(again, arrival=0, scheduled=0, first_token=0, last_token=0, request_id="") == replace(
        moved, arrival=0, scheduled=0, first_token=0, last_token=0, request_id=""
    )


def test_the_bytes_are_no_pickle_and_a_pickle_is_refused() -> None:
    engine = make_engine()
    data = exported(engine)
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)
    with pytest.raises(DamagedExport, match="begins with"):
        engine.import_request(pickle.dumps({"request_id": "a" * 100}))


# Others' exports


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"block_size": 32}, "block_size is 16 there and 32 here"),
        ({"dtype": "bfloat16"}, "dtype is float32 there and bfloat16 here"),
        ({"quantization": "int8"}, "quantization"),
        ({"max_model_len": 64}, "max_model_len is 96 there and 64 here"),
        ({"ssm_state_dtype": "bfloat16"}, "ssm_state_dtype"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is float32 there and int8 here"),
        ({"speculative": "ngram:2"}, "speculative"),
    ],
)
def test_an_engine_of_another_plan_refuses_and_names_the_difference(changes: dict[str, Any], name: str) -> None:
    data = exported(make_engine())
    with pytest.raises(ForeignExport, match=name) as caught:
        make_engine(**changes).import_request(data)
    told = pickle.loads(pickle.dumps(caught.value))  # as it passes between processes
    assert (told.message, told.differences, str(told)) == (caught.value.message, caught.value.differences, str(told))
    assert any(each.startswith(name.split()[0]) for each in told.differences)


def test_a_deterministic_engine_refuses_what_comes_from_one_that_is_not() -> None:
    skip_unless_planned("native")
    data = exported(make_engine())
    with pytest.raises(ForeignExport, match="deterministic"):
        make_engine(deterministic=True).import_request(data)


def test_another_model_refuses_and_names_the_files_that_differ() -> None:
    with pytest.raises(ForeignExport, match=r"weights is .*model\.safetensors") as caught:
        make_engine("bamba").import_request(exported(make_engine()))
    assert len(caught.value.differences) >= 2


def test_other_memory_is_no_other_plan() -> None:
    data = exported(make_engine())
    expected = finish(make_engine(), data)
    other = make_engine(cache_memory="4MiB", max_num_seqs=2, graph_mode="none", enable_prefix_caching=False)
    assert finish(other, data) == expected


# The engine


def test_an_export_ends_the_request_and_gives_its_memory_back() -> None:
    engine = make_engine()
    name = engine.add_request(PROMPT, greedy())
    for _ in range(4):
        engine.step()
    output = engine.output(name)
    data = engine.export_request(name)
    assert data is not None
    assert output is not None
    assert output.outputs[0].finish_reason == "moved"
    assert engine.has_unfinished  # it is still to be told of
    assert engine.step() == [output]
    assert_empty(engine)
    assert engine.export_request(name) is None
    assert engine.stats()["finished"]["moved"] == 1
    assert engine.import_request(data) == name  # it may take back what nobody else has taken
    with pytest.raises(RequestError, match="choose another id"):
        engine.import_request(data)
    assert engine.import_request(data, request_id="another") == "another"
    found = run(engine)
    assert found[name].outputs[0].token_ids == found["another"].outputs[0].token_ids == tokens_of(engine, greedy())


def test_a_request_that_the_step_on_its_way_ends_is_not_exported_and_its_output_is_told() -> None:
    engine = make_engine(overlap="on")
    name = engine.add_request(PROMPT, greedy(max_tokens=2))
    while (output := engine.output(name)) is not None and len(output.outputs[0].token_ids) < 1:
        engine.step()
    assert output is not None
    if engine.export_request(name) is None:
        assert engine.step() == [output]
        assert output.outputs[0].finish_reason == "length"
    run(engine)


def test_unseeded_requests_take_their_seed_along() -> None:
    first, second, third = make_engine(), make_engine(seed=9), make_engine()
    params = sampled(seed=None, max_tokens=30)
    expected = tokens_of(first, params)
    second.add_request(PROMPT, params)
    run(second)
    name = third.add_request(PROMPT, params)
    for _ in range(6):
        third.step()
    data = third.export_request(name)
    assert data is not None
    assert finish(second, data) == [expected]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_embeddings_move_in_the_midst_of_their_prompt(pooling: Any, steps: int) -> None:
    here, there = (make_engine(max_num_seqs=1, max_num_batched_tokens=17) for _ in range(2))
    expected = here.add_request(PROMPT, POOLING_PARAMS, pooling=pooling)
    vector = run(here)[expected].embedding
    here.reset_prefix_cache()
    name = here.add_request(PROMPT, POOLING_PARAMS, pooling=pooling)
    for _ in range(steps):
        here.step()
    data = here.export_request(name)
    assert data is not None
    found = run_imported(there, data)
    np.testing.assert_allclose(found.embedding, vector, rtol=1e-5, atol=1e-6)
    computed = unpack_snapshot(data)[0].samples[0].num_computed
    assert (computed > 0) == (steps > 0)
    assert there.stats()["moves"]["recomputed_tokens"] == (computed if pooling == "mean" else 0)


def run_imported(engine: EngineCore, data: bytes) -> Any:
    name = engine.import_request(data)
    return run(engine)[name]


def test_a_request_keeps_how_long_it_has_taken() -> None:
    here, there = make_engine(), make_engine()
    name = here.add_request(PROMPT, greedy())
    for _ in range(3):
        here.step()
    before = here.output(name)
    assert before is not None
    data = here.export_request(name)
    assert data is not None
    after = run_imported(there, data)
    assert before.times.scheduled is not None
    assert before.times.first_token is not None
    waited = before.times.first_token - before.times.arrival
    assert after.times.first_token - after.times.arrival == pytest.approx(waited, abs=1e-6)
    assert there.meter.first_token.total == 0  # its first token was another engine's


def memory_of(rows: Callable[..., MemoryRows]) -> LayerCacheMemory:
    generator = torch.Generator().manual_seed(1)
    layers = [
        LayerCache(
            k_cache=torch.randn(5, 4, 2, 3, generator=generator),
            v_cache=torch.randn(5, 4, 2, 3, generator=generator).bfloat16(),
            states={"conv": torch.randn(3, 7, generator=generator), "ssm": torch.randn(3, 2, 5, generator=generator)},
        ),
        LayerCache(states={"conv": torch.randn(3, 4, generator=generator)}),
        LayerCache(k_cache=torch.randn(6, 4, 1, 3, generator=generator), in_window_blocks=True),
    ]
    return LayerCacheMemory(layers, 4, rows)


def test_bytes_of_a_device_are_those_of_a_host() -> None:
    host, device = memory_of(HostRows), memory_of(DeviceRows)
    sizes = [tuple(each.sizes[kind] for kind in ("block", "window_block", "slot")) for each in (host, device)]
    assert sizes[0] == sizes[1] == (4 * 2 * 3 * (4 + 2), 4 * 3 * 4, (7 + 2 * 5 + 4) * 4)
    for block, count in ((1, None), (2, 3), (4, 1)):
        assert bytes(host.read("block", block, count)) == bytes(device.read("block", block, count))
        assert bytes(host.read("window_block", block, count)) == bytes(device.read("window_block", block, count))
    assert bytes(host.read("block", 2, 3)) != bytes(host.read("block", 2))
    for each in (host, device):
        each.write("block", 3, host.read("block", 1))
        each.write("window_block", 5, host.read("window_block", 1))
        each.write("slot", 2, host.read("slot", 1, into=memoryview(bytearray(host.sizes["slot"]))))
    assert (
        bytes(device.read("window_block", 5))
        == bytes(host.read("window_block", 5))
        == bytes(host.read("window_block", 1))
    )
    assert bytes(device.read("block", 3)) == bytes(host.read("block", 3)) == bytes(host.read("block", 1))
    assert bytes(device.read("slot", 2)) == bytes(host.read("slot", 2)) == bytes(host.read("slot", 1))
