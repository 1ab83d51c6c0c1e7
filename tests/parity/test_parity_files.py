"""What files bring back is what was computed: for every architecture, after a restart and after an eviction, tokens and
log-probabilities are those of transformers."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostinato.engine.cache_files import HEAD_BYTES, weights_identity
from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import ConfigError
from ostinato.kv_cache.offload.directory import FILE_KINDS
from tests.support import vision_parity as vision
from tests.support.checkpoints import RECIPES, checkpoint
from tests.support.damaged_files import WAYS, damage
from tests.support.parity import (
    BLOCK,
    PROMPT,
    add,
    cached,
    check,
    complete,
    decided_case,
    has_state,
    make_engine,
    shrink,
    warm,
)
from tests.support.parity import run as run_all
from tests.support.vl_models import random_items

LAST = (PROMPT - 1) // BLOCK * BLOCK


def filing_engine(name: str, directory: Path, **settings: Any) -> EngineCore:
    return make_engine(name, cache_dir=str(directory), cache_offload="64MiB", **settings)


def from_files(engine: EngineCore) -> int:
    return engine.stats()["prefix_cache"]["file_tokens"]


@pytest.fixture
def quick_reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of these tests compute a prompt in less time than a disk would take for it."""
    monkeypatch.setattr("ostinato.plan.cache_files.CORE_RATE", 1.0)
    return


@pytest.mark.usefixtures("quick_reading")
@pytest.mark.parametrize("name", RECIPES)
def test_a_prompt_hits_after_a_restart_and_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    case = decided_case(name, PROMPT)
    first = filing_engine(name, tmp_path)
    assert cached(complete(first, case)) == 0
    first.close()
    second = filing_engine(name, tmp_path)
    assert cached(complete(second, case)) == LAST
    assert from_files(second) == LAST
    # The same again is in memory; so is what begins alike, as far as a state was kept.
    assert cached(complete(second, case)) == LAST
    assert from_files(second) == LAST
    assert second.stats()["cache_files"]["damaged"] == 0
    second.close()


@pytest.mark.usefixtures("quick_reading")
@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize(
    "name", ["nemotron_h", "qwen3", "qwen3_next", "lfm2", "mamba2", "gemma3_text", "lfm3", "qwen2", "mistral"]
)
def test_what_made_room_comes_back_while_others_run(name: str, mode: str, tmp_path: Path) -> None:
    if not has_state(name):
        mode = "auto"
    engine = filing_engine(name, tmp_path, state_cache_mode=mode, max_num_seqs=2)
    check_coming_back(engine, name, num_slots=5 if name == "mamba2" else 9)
    engine.close()


def check_coming_back(engine: EngineCore, name: str, num_slots: int) -> None:
    """Two requests at a time, whose prefixes make room for each other."""
    files = engine.scheduler.cache.store.files
    # Of a model with windows in all layers, what has to stay of four texts is less than that of one that is computed.
    shrink(engine, num_blocks=26 if name == "mistral" else 30, num_slots=num_slots)
    engine.scheduler.cache.store.files = files
    cases = [decided_case(name, length) for length in (PROMPT, 130, 144, 145)]
    for _ in range(2):
        for number in range(len(cases)):
            pair = [number, (number + 1) % len(cases)]
            outputs = [add(engine, cases[each], salt=str(each)) for each in pair]  # whose texts share no block
            run_all(engine)
            for each, output in zip(pair, outputs, strict=True):
                check(cases[each], output)
    assert from_files(engine) > 0


@pytest.mark.usefixtures("quick_reading")
@pytest.mark.parametrize(
    ("name", "speculative"),
    [
        ("nemotron_h_head", "mtp:3"),
        ("mamba2", "ngram:2"),
        ("falcon_h1", "draft:nemotron_h:2"),
        ("gemma3_text", "ngram:2"),
    ],
)
def test_with_drafts_too(name: str, speculative: str, tmp_path: Path) -> None:
    method, *model, k = speculative.split(":")
    speculative = ":".join((method, *(str(checkpoint(each)) for each in model), k))
    case = decided_case(name, PROMPT)
    for hit in (0, LAST):
        engine = filing_engine(name, tmp_path, speculative=speculative, speculative_adaptive="off")
        assert cached(complete(engine, case)) == hit
        engine.close()


@pytest.mark.usefixtures("quick_reading")
@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 32},
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
        {"ssm_state_dtype": "bfloat16"},
        {"ssm_checkpoint_dtype": "int8"},
        {"kv_cache_dtype": "int8"},
    ],
)
def test_an_engine_of_another_layout_finds_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    case = decided_case("nemotron_h", PROMPT)
    first = filing_engine("nemotron_h", tmp_path)
    complete(first, case)
    first.close()
    other = filing_engine("nemotron_h", tmp_path, **changes)
    warm(other, case.prompt)
    run_all(other)
    assert from_files(other) == 0
    assert other.stats()["cache_files"]["files"] == 0
    other.close()


def test_weights_that_differ_in_their_middle_alone_are_others(tmp_path: Path) -> None:
    # As two models that were trained on from one, whose files an archive has given one time.
    directories = [tmp_path / name for name in ("one", "other")]
    middle = bytearray(3 * HEAD_BYTES)
    for directory in directories:
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(middle)
        os.utime(directory / "model.safetensors", (1, 1))
        middle[HEAD_BYTES + HEAD_BYTES // 2 : 2 * HEAD_BYTES] = bytes([1]) * (HEAD_BYTES // 2)
    one, other = map(weights_identity, directories)
    assert [each[:3] for each in one] == [each[:3] for each in other]
    assert one != other


@pytest.mark.usefixtures("quick_reading")
def test_an_engine_of_another_version_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = decided_case("nemotron_h", PROMPT)
    first = filing_engine("nemotron_h", tmp_path)
    complete(first, case)
    first.close()
    monkeypatch.setattr("ostinato.engine.cache_files.__version__", "another")
    other = filing_engine("nemotron_h", tmp_path)
    assert other.stats()["cache_files"]["files"] == 0
    other.close()


@pytest.mark.usefixtures("quick_reading")
def test_files_of_other_salts_are_not_found(tmp_path: Path) -> None:
    case = decided_case("nemotron_h", PROMPT)
    first = filing_engine("nemotron_h", tmp_path)
    complete(first, case, salt="one")
    first.close()
    second = filing_engine("nemotron_h", tmp_path)
    for salt, hit in ((None, 0), ("two", 0), ("one", LAST)):
        assert cached(complete(second, case, salt=salt)) == hit
    second.close()


@pytest.mark.usefixtures("quick_reading")
def test_damaged_files_are_computed_again_and_named(tmp_path: Path) -> None:
    case = decided_case("nemotron_h", PROMPT)
    first = filing_engine("nemotron_h", tmp_path)
    complete(first, case)
    first.close()
    for state in tmp_path.glob("*/*.state"):
        whole = bytearray(state.read_bytes())
        whole[len(whole) // 2] ^= 1
        state.write_bytes(whole)
    second = filing_engine("nemotron_h", tmp_path)
    output = complete(second, case)
    assert output.cache is not None
    assert (cached(output), output.cache.misses["damaged"]) == (0, LAST)
    second.close()


@pytest.mark.usefixtures("quick_reading")
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3", "gemma3_text", "mistral"])
@pytest.mark.slow
def test_whatever_happens_to_files_the_tokens_are_the_same(name: str, tmp_path: Path) -> None:
    chance = random.Random(11)
    cases = [decided_case(name, length) for length in (PROMPT, 130, 144)]
    first = filing_engine(name, tmp_path)
    for case in cases:
        complete(first, case)
    first.close()
    [folder] = tmp_path.iterdir()
    whole = {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix[1:] in FILE_KINDS}
    kept = tmp_path.parent / f"{tmp_path.name}.kept"
    shutil.copytree(folder, kept)
    num_hit = num_damaged = 0
    # Names differ from run to run, and so do the files that are hit: none is damaged first, and all are last.
    for num_files, ways in ((0, WAYS), *[(8, WAYS)] * 5, (len(whole), ("flip",))):
        for each, contents in whole.items():
            if (folder / each).is_dir():
                (folder / each).rmdir()
            (folder / each).write_bytes(contents)
        for each in chance.sample(sorted(whole), num_files):
            other = chance.choice([name for name in whole if Path(name).suffix == Path(each).suffix])
            damage(folder / each, kept / other, chance, ways)
        engine = filing_engine(name, tmp_path)
        for case in cases:
            complete(engine, case)
        num_hit += from_files(engine)
        num_damaged += engine.stats()["cache_files"]["damaged"]
        engine.close()
    assert min(num_hit, num_damaged) > 0


@pytest.mark.usefixtures("quick_reading")
def test_two_engines_that_run_share_a_directory(tmp_path: Path) -> None:
    cases = [decided_case("nemotron_h", length) for length in (PROMPT, 130, 144, 145)]
    engines = []
    for _ in range(2):
        engine = make_engine("nemotron_h", cache_dir=str(tmp_path), cache_offload="400KiB", max_num_seqs=2)
        files = engine.scheduler.cache.store.files
        shrink(engine, num_blocks=15, num_slots=5)
        engine.scheduler.cache.store.files = files
        engines.append(engine)
    for case in [*cases, *reversed(cases), *cases]:
        for engine in engines:
            complete(engine, case)
        engines[0].scheduler.cache.store.files.directory._rescan()  # type: ignore[union-attr]
    assert all(from_files(engine) > 0 for engine in engines)
    assert all(engine.stats()["cache_files"]["damaged"] == 0 for engine in engines)
    for engine in engines:
        engine.close()


@pytest.mark.usefixtures("quick_reading")
def test_images_come_back_as_those_that_they_were(tmp_path: Path) -> None:
    name, grid = "qwen3_vl", (8, 8)
    one = vision.decided_case(name, (vision.text(20), vision.images(grid, seed=1), vision.text(60)))
    # Another image in the same place: all tokens are the same.
    [item] = random_items(name, (grid,), 2)
    [span] = one.prompt.spans
    prompt = replace(one.prompt, spans=(span._replace(item=replace(item, digest="another")),))
    other = replace(one, prompt=prompt)

    def serve_other(engine: EngineCore) -> RequestOutput:
        output = vision.add(engine, other)
        vision.run(engine)
        assert output.error is None
        return output

    plain = vision.make_engine(name, enable_prefix_caching=False)
    expected = serve_other(plain)
    plain.close()
    first = vision.make_engine(name, cache_dir=str(tmp_path), cache_offload="64MiB")
    vision.serve(first, one)
    first.close()
    second = vision.make_engine(name, cache_dir=str(tmp_path), cache_offload="64MiB")
    given = serve_other(second)
    [again] = vision.serve(second, one)
    assert given.outputs[0].token_ids == expected.outputs[0].token_ids
    assert (cached(given), cached(again)) == (BLOCK, (len(prompt.token_ids) - 1) // BLOCK * BLOCK)
    assert from_files(second) == sum(map(cached, (given, again))) - BLOCK  # which the first has brought back
    second.close()


def test_where_computing_is_faster_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.plan.cache_files.CORE_RATE", 1e18)
    case = decided_case("nemotron_h", PROMPT)
    for _ in range(2):
        engine = filing_engine("nemotron_h", tmp_path)
        assert engine.plan.cache_files is not None
        assert engine.plan.cache_files.min_tokens_to_read is None
        assert cached(complete(engine, case)) == 0
        engine.close()


def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        filing_engine("nemotron_h", tmp_path / "file")
