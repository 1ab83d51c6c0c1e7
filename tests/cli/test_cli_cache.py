"""`ostinato cache`, and the settings that keep files of the prefix cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.cli.main import main
from ostinato.config import EngineConfig
from ostinato.engine import cache_files as module
from ostinato.errors import ConfigError, Remedy
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import find_device
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.plan import Plan, make_plan
from tests.support.checkpoints import checkpoint
from tests.support.engines import greedy, make_engine, run


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0), *capsys.readouterr()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A directory with the files of two models, and something of a user's."""
    for name in ("nemotron_h", "qwen3"):
        engine = make_engine(name, cache_dir=str(tmp_path), cache_offload="8MiB")
        engine.add_request(list(range(40)), greedy())
        run(engine)
        engine.close()
    (tmp_path / "mine").mkdir()
    return tmp_path


def test_models_are_listed_and_cleared_one_or_all(capsys, filled: Path) -> None:
    status, out, _ = run_cli(capsys, "cache", "ls", str(filled), "--json")
    rows = json.loads(out)
    assert (status, len(rows)) == (0, 2)
    assert all(row["files"] > 0 and row["num_bytes"] > 0 and row["dtype"] == "float32" for row in rows)
    assert {row["model"] for row in rows} == {str(checkpoint(name)) for name in ("nemotron_h", "qwen3")}
    first = Path(rows[0]["path"]).name
    status, out, _ = run_cli(capsys, "cache", "ls", str(filled))
    assert (status, first[:12] in out) == (0, True)
    status, out, _ = run_cli(capsys, "cache", "clear", str(filled), "--id", first[:6])
    assert (status, f"{rows[0]['files']} files removed" in out) == (0, True)
    status, _, err = run_cli(capsys, "cache", "clear", str(filled), "--id", first[:6])
    assert (status, "0 ids" in err) == (2, True)
    assert run_cli(capsys, "cache", "clear", str(filled))[0] == 0
    assert [each.name for each in filled.iterdir()] == ["mine"]
    assert "there are no files" in run_cli(capsys, "cache", "ls", str(filled))[1]


def test_a_list_beside_an_engine_that_removes_files_is_whole(capsys, filled: Path, monkeypatch) -> None:
    def with_one_gone(path: Path) -> list[Path]:
        return [*files_in(path), path / "gone.block"]

    files_in = module._files_in
    monkeypatch.setattr(module, "_files_in", with_one_gone)
    status, out, _ = run_cli(capsys, "cache", "ls", str(filled), "--json")
    assert (status, len(json.loads(out))) == (0, 2)


def test_the_directory_may_be_named_as_engines_name_it(capsys, tmp_path: Path) -> None:
    assert "there are no files" in run_cli(capsys, "cache", "ls", "--cache-dir", str(tmp_path))[1]
    assert "0 files" in run_cli(capsys, "cache", "clear", "--cache-dir", str(tmp_path))[1]
    status, _, err = run_cli(capsys, "cache", "ls", str(tmp_path), "--cache-dir", str(tmp_path))
    assert (status, "two directories" in err) == (2, True)


def test_names_that_are_no_markup_are_shown_as_they_are(capsys, tmp_path: Path) -> None:
    folder = tmp_path / ("0" * 32)
    folder.mkdir()
    (folder / "about.json").write_text(json.dumps({"model": "[/a]", "dtype": "[b]x"}))
    status, out, _ = run_cli(capsys, "cache", "ls", str(tmp_path))
    assert (status, "[/a]" in out, "[b]x" in out, "never" in out) == (0, True, True, True)
    (folder / "about.json").write_text("[]")
    assert "unknown" in run_cli(capsys, "cache", "ls", str(tmp_path))[1]


def test_files_that_cannot_be_removed_are_an_error_and_no_traceback(capsys, filled: Path) -> None:
    [first, *_] = sorted(each for each in filled.iterdir() if each.name != "mine")
    (first / f"{'0' * 32}.block").mkdir()
    status, _, err = run_cli(capsys, "cache", "clear", str(filled))
    assert (status, "cannot be removed" in err, "Traceback" in err) == (2, True, False)


def test_a_directory_that_is_not_there_is_named(capsys, tmp_path: Path) -> None:
    status, _, err = run_cli(capsys, "cache", "ls", str(tmp_path / "nowhere"))
    assert (status, "there is no directory" in err) == (2, True)
    (tmp_path / "file").write_text("")
    status, _, err = run_cli(capsys, "cache", "clear", str(tmp_path / "file"))
    assert (status, "Not a directory" in err) == (2, True)


def plan_of(device: str = "cpu", name: str = "nemotron_h", **settings: object) -> Plan:
    config = EngineConfig(model=str(checkpoint(name)), **settings)
    found = CATALOGUE[device] if device in CATALOGUE else find_device(device)
    return make_plan(config, load_spec(config), found)


def test_the_plan_says_what_goes_to_files(capsys) -> None:
    files = plan_of(cache_offload="1GiB").cache_files
    assert files is not None
    assert (files.limit, files.directory) == (2**30, None)
    assert plan_of().cache_files is None
    default = plan_of(cache_dir="/somewhere")
    assert default.cache_files is not None
    assert default.cache_files.limit == 8 * 2**30
    assert any(each.topic == "cache_offload" for each in default.decisions)
    status, out, _ = run_cli(capsys, "plan", str(checkpoint("nemotron_h")), "--cache-offload", "1GiB")
    assert (status, "at most 1 GiB in ~/.cache/ostinato/prefixes" in " ".join(out.split())) == (0, True)


def test_the_plan_counts_the_window_blocks_of_a_window(capsys) -> None:
    plan = plan_of(name="gemma3_text", cache_offload="1GiB")
    assert plan.cache_files is not None
    assert plan.cache_files.window_block_bytes == plan.memory.window_block > 0
    _, out, _ = run_cli(capsys, "plan", str(checkpoint("gemma3_text")), "--cache-offload", "1GiB")
    assert "for a block and" in " ".join(out.split())
    assert "for a window block; read from" in " ".join(out.split())
    with pytest.raises(ConfigError, match="no room for two files"):
        plan_of(name="gemma3_text", cache_offload=2 * plan.memory.window_block - 1)


def test_the_plan_reads_where_blocks_and_the_window_blocks_of_one_window_take_less_time_than_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pays_from() -> list[float]:
        """With processors of these speeds."""
        found = []
        for rate in (1e9, 4e9, 16e9, 64e9, 256e9):
            monkeypatch.setattr("ostinato.plan.cache_files.CORE_RATE", rate)
            files = plan_of(name="gemma3_text", cache_offload="1GiB").cache_files
            assert files is not None
            found.append(float("inf") if files.min_tokens_to_read is None else files.min_tokens_to_read)
        return found

    with_window_blocks = pays_from()
    monkeypatch.setattr("ostinato.kv_cache.sliding_window.SlidingWindowSpec.blocks_per_window", 0)
    without = pays_from()
    assert with_window_blocks != without
    assert all(one >= other for one, other in zip(with_window_blocks, without, strict=True))


@pytest.mark.parametrize(
    ("device", "settings", "word", "remedy"),
    [
        ("cpu", {"enable_prefix_caching": False}, "no prompt can hit", Remedy("enable_prefix_caching", True)),
        ("cpu", {"state_cache_mode": "none"}, "state_cache_mode is none", Remedy("cache_offload", None)),
        ("h100-80gb", {}, "not yet from a GPU's", Remedy("cache_offload", None)),
        ("cpu", {"cache_offload": 10}, "no room for two files", None),
    ],
)
def test_what_would_never_be_hit_is_refused(device: str, settings: dict[str, object], word: str, remedy) -> None:
    with pytest.raises(ConfigError, match=word) as error:
        plan_of(device, **{"cache_offload": "1GiB", **settings})
    assert error.value.remedies
    assert remedy is None or remedy in error.value.remedies
    one = error.value.remedies[0]
    plan_of(device, **{"cache_offload": "1GiB", **settings, one.setting: one.value})


def test_an_empty_directory_name_is_not_the_present_one() -> None:
    with pytest.raises(ConfigError, match="cache_dir"):
        EngineConfig(cache_dir="")
