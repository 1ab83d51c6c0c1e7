"""What a record holds is run again, batch for batch, and what comes out otherwise is found at its step."""

from __future__ import annotations

import os
import random
import resource
import shutil
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.engine.flight import flight_recorder
from ostinato.engine.flight.record_files import MAGIC, RecordHead, find_run, read_pieces, segments_of
from ostinato.errors import ConfigError, DamagedRecord, RecordError
from ostinato.kv_cache.marks import Mark
from ostinato.observe.counts import RecordCounts
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.request_queues import Client
from ostinato.verify.record_reader import Record
from ostinato.verify.replay import Replay, Replayed, minimise, replay_config
from tests.support.checkpoints import checkpoint, random_prompt
from tests.support.engines import greedy, make_engine, run, sampled
from tests.support.serving import serving

SMALL = {"max_model_len": 96, "max_num_seqs": 3, "cache_memory": "400KiB", "threads": 1, "dtype": "float32"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("nemotron_h", {"max_num_batched_tokens": 64}),
    ("nemotron_h", {"overlap": "on"}),
    ("nemotron_h", {"speculative": "ngram:3", "state_block_size": 32}),
    ("nemotron_h_head", {"speculative": "mtp:2"}),
    ("bamba", {"max_num_batched_tokens": 64, "enable_prefix_caching": False}),
    ("gemma3_text", {}),
]


def record_run(directory: Path, name: str, seed: int, **settings: Any) -> EngineCore:
    """A random schedule, recorded: prompts that share prefixes, samples, aborts, preemptions, a reset, clients."""
    rng = random.Random(seed)
    engine = make_engine(name, record=str(directory), **(SMALL | settings))
    pins = engine.plan.hit_law.min_shared > 0
    stems = [random_prompt(rng.randint(20, 50), seed=number) for number in range(3)]
    for number in range(14):
        tail = random_prompt(rng.randint(1, 12), seed=100 + number)
        params = rng.choice(
            [greedy(), sampled(seed=number, n=2), sampled(seed=None, logprobs=2), greedy(prompt_logprobs=1)]
        )
        engine.add_request(
            [*rng.choice(stems), *tail],
            params,
            request_id=f"r{number % 9}" if f"r{number % 9}" not in engine.output_processor.request_states else None,
            client=rng.choice([None, Client("secret name", 2), Client("other")]),
            cache_salt=rng.choice([None, None, "secret salt"]),
            arrival=40.0 * number,  # so that pins end on the way
            marks=rng.choice([[], [Mark(rng.randint(1, 20), ttl=60.0)]]) if pins else [],
        )
        for _ in range(rng.randint(0, 5)):
            engine.step()
        unfinished = list(engine.output_processor.request_states)
        if unfinished and rng.random() < 0.3:
            engine.preempt(rng.choice(unfinished))
        if unfinished and rng.random() < 0.2:
            engine.abort(rng.choice(unfinished))
        if rng.random() < 0.1:
            engine.reset_prefix_cache()
    run(engine)
    engine.close()
    return engine


def replayed(directory: Path, **changes: Any) -> Replayed:
    record = Record(directory)
    return Replay(record, replay_config(record, changes)).run()


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_random_schedule_is_replayed_batch_for_batch(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    for seed in range(2):
        directory = tmp_path / str(seed)
        engine = record_run(directory, name, seed, **settings)
        result = replayed(directory)
        assert not result.differences, result.differences[0].text
        assert not result.reasons
        assert not result.notes
        assert result.batches == result.steps == engine.stats()["steps"]
        assert engine.stats()["record"]["lost"] == 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("record")
    record_run(directory, "nemotron_h", seed=5)
    return directory


def test_a_record_is_for_its_owner_and_holds_no_name_and_no_text(recorded: Path) -> None:
    folder = find_run(recorded)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for segment in segments_of(folder):
        assert stat.S_IMODE(segment.stat().st_mode) == 0o600
        assert not [kind for kind, payload in read_pieces(segment) if b"secret" in payload or b"other" in payload]


@pytest.mark.parametrize(
    "changes", [{"kernels": "reference"}, {"graph_mode": "none"}, {"enable_prefix_caching": False}], ids=str
)
def test_other_settings_give_the_same_tokens(recorded: Path, changes: dict[str, Any]) -> None:
    result = replayed(recorded, **changes)
    assert result.requests == 14
    assert all(each.is_tie for each in result.differences), [each.text for each in result.differences]
    assert bool(result.reasons) == ("kernels" not in changes), "other schedules, but with the reference the same one"


def mutated(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made from now on have a fault: in a step, the first row's logits are those of other tokens."""
    made = EngineCore.__init__

    def init(engine: EngineCore, *args: Any, **others: Any) -> None:
        made(engine, *args, **others)
        compute, count = engine.runner.model.compute_logits, 0

        def broken(hidden: Any) -> Any:
            nonlocal count
            count += 1
            logits = compute(hidden)
            return np.roll(logits, 1, axis=-1) if count == step else logits

        engine.runner.model.compute_logits = broken  # type: ignore[method-assign]

    monkeypatch.setattr(EngineCore, "__init__", init)


def test_a_planted_fault_is_found_at_its_step(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutated(20, monkeypatch)
    result = replayed(recorded)
    [difference] = result.differences
    assert difference.kind == "tokens"
    assert difference.step == result.steps
    assert result.batches == result.steps - 1
    assert 20 <= result.steps <= 30, "some steps need no logits"
    assert not difference.is_tie


def test_a_step_that_fails_here_alone_is_found(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute, count = EngineCore._submit, 0

    def failing(engine: EngineCore, batch: Any) -> Any:
        nonlocal count
        count += 1
        if count == 7:
            monkeypatch.setattr(engine.runner, "execute", lambda batch: 1 / 0)
        return execute(engine, batch)

    monkeypatch.setattr(EngineCore, "_submit", failing)
    [difference] = replayed(recorded).differences
    assert (difference.kind, difference.step) == ("failure", 7)


def test_another_weight_is_named_and_its_first_token_found(recorded: Path) -> None:
    other = checkpoint("nemotron_h", seed=1)
    result = replayed(recorded, model=str(other))
    assert any(note.startswith("weights is") for note in result.notes)
    assert result.differences
    assert not result.differences[0].is_tie


def test_a_change_of_the_cache_is_found_in_a_batch(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens stay the same: the blocks are others."""
    made = EngineCore.__init__

    def init(engine: EngineCore, *args: Any, **others: Any) -> None:
        made(engine, *args, **others)
        engine.scheduler.cache.blocks.allocate(1)

    monkeypatch.setattr(EngineCore, "__init__", init)
    [difference] = replayed(recorded).differences
    assert (difference.kind, difference.step) == ("batch", 1)


def test_until_stops_at_a_step(recorded: Path) -> None:
    record = Record(recorded)
    result = Replay(record, replay_config(record, {})).run(until=9)
    assert result.steps == 9
    assert result.last_step
    assert not result.differences


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "PERIOD", 0.001)
    monkeypatch.setattr(flight_recorder, "SEGMENTS", 500)


@pytest.mark.usefixtures("small_segments")
def test_old_segments_go_and_those_that_are_left_are_compared_by_tokens(tmp_path: Path) -> None:
    record_run(tmp_path, "nemotron_h", seed=3, record_limit="1MiB")
    segments = segments_of(find_run(tmp_path))
    assert len(segments) > 2
    whole = replayed(tmp_path)
    assert not whole.differences
    assert whole.batches == whole.steps
    segments[0].unlink()
    rest = replayed(tmp_path)
    assert not rest.differences, rest.differences[0].text
    assert rest.reasons
    assert rest.requests
    segments[2].unlink()
    assert any("--segment 3" in note for note in replayed(tmp_path).notes)
    with pytest.raises(RecordError, match="has no segment 2; it has 1, 3"):
        Record(tmp_path, 2)


def test_a_directory_stays_within_its_limit_and_the_oldest_segments_go_alone(tmp_path: Path) -> None:
    def write(name: str, data: bytes, age: int = 0) -> Path:
        (path := tmp_path / name).parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(age, age))
        return path

    segment = MAGIC + bytes(2**17 - len(MAGIC))
    for number in range(10):
        write(f"20200101-00000{number % 3}-7/{number:06}.rec", segment, number)
    foreign = [
        write("imagenet/train.rec", segment),
        write("imagenet/000000.rec", segment),
        write("20200101-000000-7-old/000000.rec", segment),
        write("20200101-000000-7/train.rec", segment),
        write("20200101-000000-7/000100.rec", bytes(2**20)),
    ]
    engine = make_engine(record=str(tmp_path), record_limit="1MiB", **SMALL)
    assert isinstance(engine.step_log, flight_recorder.FlightRecorder)
    _wait_for_segments(engine.step_log.folder)
    left = sorted(path.name for path in tmp_path.glob("20200101-00000?-7/*.rec") if path not in foreign)
    assert left == [f"{number:06}.rec" for number in range(3, 10)]
    assert all(path.exists() for path in foreign)
    engine.close()


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[flight_recorder._Writer]]:
    """Two writers of a directory with room for 1 MiB, whose threads do not run."""
    head = RecordHead(0, False, "", {}, {}, {}, {}, [])
    made = [flight_recorder._Writer(tmp_path, 2**20, head, deque(), RecordCounts()) for _ in range(2)]
    yield made
    for each in made:
        each.end()
        each.run()


def test_the_open_segment_of_another_engine_stays_and_a_folder_that_is_gone_is_made_again(
    writers: list[flight_recorder._Writer],
) -> None:
    other, mine = writers
    other._open_segment(follows=False)
    other._write(bytes(2**20))
    mine._open_segment(follows=False)
    assert [path.name for path in segments_of(other.folder)] == ["000000.rec"], "it is older, and alone too large"
    other._open_segment(follows=True)
    mine._open_segment(follows=True)
    names = [[path.name for path in segments_of(each.folder)] for each in (other, mine)]
    assert names[0] == ["000001.rec"], "what is finished goes"
    shutil.rmtree(mine.folder)
    mine._open_segment(follows=True)
    assert [path.name for path in segments_of(mine.folder)] == ["000002.rec"]


def test_a_segment_as_large_as_the_limit_leaves_its_run_a_folder(writers: list[flight_recorder._Writer]) -> None:
    only = writers[0]
    for number in range(3):
        only._open_segment(follows=True)
        only._write(bytes(2**20))
        assert [path.name for path in segments_of(only.folder)] == [f"{number:06}.rec"]


def test_a_record_that_ends_within_a_block_is_replayed_to_there(recorded: Path, tmp_path: Path) -> None:
    [segment] = segments_of(find_run(recorded))
    data = segment.read_bytes()
    (tmp_path / segment.name).write_bytes(data[:-20])
    result = replayed(tmp_path)
    assert [note for note in result.notes if "within the block that begins at byte" in note]
    assert not result.differences
    (tmp_path / segment.name).write_bytes(data[:3])
    with pytest.raises(DamagedRecord, match="before its first block"):
        Record(tmp_path)


@pytest.mark.parametrize("place", [0, 3, 20, 900, -5])
def test_a_damaged_record_is_an_error_that_names_the_place(recorded: Path, tmp_path: Path, place: int) -> None:
    [segment] = segments_of(find_run(recorded))
    data = bytearray(segment.read_bytes())
    data[place] ^= 0x41
    (tmp_path / segment.name).write_bytes(data)
    with pytest.raises(DamagedRecord, match=f"{segment.name}"):
        replayed(tmp_path)


def test_other_bytes_than_a_record_are_named_errors(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no record"):
        Record(tmp_path)
    (tmp_path / "000000.rec").write_bytes(b"OSTREC99" + bytes(100))
    with pytest.raises(RecordError, match="has version b'99', and this program reads b'01'"):
        Record(tmp_path)


def outputs_of(engine: EngineCore) -> list[list[int]]:
    for number in range(6):
        engine.add_request(random_prompt(30, seed=number), sampled(seed=number), request_id=str(number))
    done = run(engine)
    engine.close()
    return [done[str(number)].outputs[0].token_ids for number in range(6)]


def test_a_full_disk_ends_the_record_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flight_recorder, "PERIOD", 0.001)
    plain = outputs_of(make_engine())
    engine = make_engine(record=str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    [segment] = _wait_for_segments(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (segment.stat().st_size + 300, limits[1]))
    try:
        assert outputs_of(engine) == plain
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert engine.stats()["record"]["failed"] == 1
    assert isinstance(engine.step_log, flight_recorder.FlightRecorder)
    for number in range(3):
        engine.add_request(random_prompt(30, seed=number), greedy(), request_id=str(number))
        engine.abort(str(number))
    assert not [*engine.step_log._outputs, *engine.step_log._ended], "a record that has failed keeps no request"
    assert len([line for line in caplog.records if "the record in" in line.message]) == 1
    assert not replayed(tmp_path).differences, "what was written before is whole"


def _wait_for_segments(directory: Path) -> list[Path]:
    while True:  # the writer begins the first segment by itself
        segments = [path for path in directory.rglob("*.rec") if path.stat().st_size > 1000]
        if segments:
            return segments


def test_a_directory_that_cannot_be_made_is_an_error_before_anything_is_served(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no folder can be made"):
        make_engine(record=str(tmp_path / "file"))


def test_a_writer_that_falls_behind_leaves_a_gap_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MAX_PIECES", 12)
    monkeypatch.setattr(flight_recorder, "PERIOD", 0.001)
    monkeypatch.setattr(flight_recorder._Writer, "start", lambda writer: None)
    engine = make_engine(record=str(tmp_path), **SMALL)
    for number in range(6):
        engine.add_request(random_prompt(30, seed=number), greedy())
    for _ in range(20):
        engine.step()
    assert engine.stats()["record"]["gaps"] == 1
    assert engine.stats()["record"]["lost"] > 0
    monkeypatch.undo()
    assert isinstance(engine.step_log, flight_recorder.FlightRecorder)
    engine.step_log._writer._write_pending()
    engine.step()
    monkeypatch.setattr(flight_recorder._Writer, "close", flight_recorder._Writer.run)
    engine.step_log._writer._ends.set()
    run(engine)
    engine.close()
    result = Replay(record := Record(tmp_path, 1), replay_config(record, {})).run()
    assert not result.differences
    assert result.requests


def test_guides_are_replayed(tmp_path: Path) -> None:
    engine = EngineCore(EngineConfig(model="demo", record=str(tmp_path), threads=1, cache_memory="16MiB"))
    for number in range(3):
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=20, guide=Guide(regex="[ab]{5,9}c"))
        engine.add_request("How many?", params)
        engine.add_request("Why?", SamplingParams(max_tokens=20, stop=("a",), temperature=1, seed=number))
        engine.step()
    run(engine)
    engine.close()
    result = replayed(tmp_path)
    assert not result.differences
    assert result.batches == result.steps


@pytest.mark.parametrize("has_images", [True, False])
def test_images_are_replayed_if_their_pixels_were_recorded(tmp_path: Path, has_images: bool) -> None:
    settings = {"threads": 1, "cache_memory": "64MiB", "encoder_graph_mode": "none"}
    engine = EngineCore(EngineConfig(model="demo-vl", record=str(tmp_path), record_images=has_images, **settings))
    for number in range(2):
        drawing = Image.effect_noise((64, 48), 40 + number)
        content = [{"type": "image", "image": drawing}, {"type": "text", "text": "What is it?"}]
        chat = engine.render_chat_media([{"role": "user", "content": content}])
        engine.add_request(chat.text, greedy(), request_id=f"i{number}", media=chat.media, add_special_tokens=False)
        engine.step()
    engine.add_request("Hello", greedy(), request_id="text")
    run(engine)
    engine.close()
    result = replayed(tmp_path)
    assert not result.differences
    assert result.left_out == ([] if has_images else ["i0", "i1"])
    assert result.requests == (3 if has_images else 1)
    assert (result.batches == result.steps) == has_images


def test_a_replay_leaves_the_files_of_the_recorded_engine_alone(tmp_path: Path) -> None:
    settings = SMALL | {"cache_dir": str(tmp_path / "cache")}
    engine = make_engine(record=str(tmp_path / "record"), **settings)
    engine.add_request(random_prompt(60, seed=1), greedy())
    run(engine)
    engine.reset_prefix_cache()
    engine.close()
    later = make_engine(**settings)
    later.add_request(random_prompt(60, seed=2), greedy())
    run(later)
    later.close()
    files = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert files
    result = replayed(tmp_path / "record")
    assert {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()} == files
    assert not result.differences
    assert [note.split(" was ")[0] for note in result.notes] == ["cache_dir"]
    assert any("may have come from files" in reason for reason in result.reasons)
    replayed(tmp_path / "record", enable_prefix_caching=False, state_cache_mode="none")
    record = Record(tmp_path / "record")
    own = {"record": str(tmp_path), "record_images": True, "download_dir": str(tmp_path), "cache_offload": 2**23}
    record.head.settings.update(own)
    assert not {*own, "cache_dir"} & replay_config(record, {}).model_fields_set
    assert replay_config(record, {"cache_dir": str(tmp_path / "mine")}).cache_dir == str(tmp_path / "mine")


def test_minimise_keeps_the_requests_that_the_difference_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault, a request that finds a cached prefix is wrong: two requests are needed, of six."""
    import ostinato.scheduler.request as requests

    made = requests.make_row

    def wrong(request: Any, *args: Any, **others: Any) -> Any:
        row = made(request, *args, **others)
        if request.cache_report is not None and request.cache_report.cached_tokens and len(row.token_ids) > 1:
            return row._replace(token_ids=(1, *row.token_ids[1:]))
        return row

    monkeypatch.setattr("ostinato.scheduler.prefill.make_row", wrong)
    monkeypatch.setattr("ostinato.scheduler.decode.make_row", wrong)
    engine = make_engine(record=str(tmp_path / "all"), **SMALL)
    shared = random_prompt(40, seed=1)
    prompts = [random_prompt(30, seed=number) for number in (5, 6, 7)] + [shared, random_prompt(20, seed=9)]
    for number, prompt in enumerate([*prompts, [*shared, *random_prompt(12, seed=10)]]):
        engine.add_request(prompt, greedy(), request_id=f"r{number}")
        run(engine)
    engine.close()
    record = Record(tmp_path / "all")
    kept, replay = minimise(record, {"enable_prefix_caching": False}, tmp_path / "less", lambda *_: None)
    assert kept == ["r3", "r5"]
    assert replay.requests == 2
    assert not replayed(tmp_path / "less").differences, "with the fault, the smaller record is what it was"
    assert replayed(tmp_path / "less", enable_prefix_caching=False).differences
    with pytest.raises(RecordError, match="nothing differs"):
        minimise(record, {}, tmp_path / "none", lambda *_: None)


@pytest.mark.slow
def test_what_a_server_did_is_replayed(tmp_path: Path) -> None:
    with serving(record=str(tmp_path), cache_memory="16MiB") as served:
        client = served.client()
        for number in range(3):
            client.completions.create(model="demo", prompt=f"Leo had {number}", n=2, max_tokens=8, seed=number)
        with client.completions.create(model="demo", prompt="Why?", max_tokens=200, stream=True) as stream:
            next(iter(stream))
        served.until(lambda: served.engine.num_unfinished == 0)
        assert served.stats()["record"]["failed"] == 0
    result = replayed(tmp_path)
    assert not result.differences
    assert result.batches == result.steps
    assert result.requests == 5, "the first step of the start is one"
