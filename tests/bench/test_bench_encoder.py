"""`ostinato bench encoder`: the images that it asks for, the figures from plain numbers, and the tables."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ostinato import ConfigError, ModelError
from ostinato.bench.encoder import (
    AROUND,
    SIZES,
    EncoderBench,
    encoder,
    encoder_tables,
    make_arrivals,
    pixel_settings,
    prompt_of,
)
from ostinato.bench.statistics import ArrivalTimes, arrival_figures, point_of, share_of_padding, spread_ms
from ostinato.cli.main import main
from ostinato.media.processor_config import PixelSettings
from ostinato.observe.counts import EncoderCounts
from tests.support.checkpoints import checkpoint
from tests.support.recipes import VOCAB_SIZE
from tests.support.vl_models import vl_checkpoint, vl_spec
from tools.plot_bench import draw

PIXELS = PixelSettings(
    "image", min_pixels=32 * 32 * 4, max_pixels=32 * 32 * 400, resample=3, scale=1 / 255, mean=(0.5,) * 3,
    std=(0.5,) * 3, patch_size=16, temporal_patch_size=2, merge_size=2,
)  # fmt: skip
BENCH = EncoderBench(arrivals=30, batch=(2, 4), rounds=1)


def test_images_have_the_sizes_that_the_checkpoint_would_give_them() -> None:
    alone, together = make_arrivals(BENCH, PIXELS, 8)
    assert [len(items) for items in alone] == [1] * 30
    assert {len(items) for items in together} == {2, 3, 4}
    for item in (item for items in alone + together for item in items):
        rows, columns = item.grid
        assert item.patches.shape == (rows * columns, 8)
        assert item.num_tokens == rows * columns // 4
        assert rows % 2 == columns % 2 == 0
        assert 4 <= item.num_tokens <= 400
    tokens = {items[0].num_tokens for items in alone}
    assert len(tokens) > len(SIZES) // 2
    assert len({item.digest for items in alone + together for item in items}) == sum(map(len, alone + together))


def test_the_same_seed_gives_the_same_images_and_another_one_others() -> None:
    first, again = (make_arrivals(BENCH, PIXELS, 8) for _ in range(2))
    other = make_arrivals(EncoderBench(arrivals=30, batch=(2, 4), rounds=1, seed=1), PIXELS, 8)
    grids = [
        [item.grid for items in stream for item in items] for streams in (first, again, other) for stream in streams
    ]
    assert grids[:2] == grids[2:4] != grids[4:]


def test_no_image_is_larger_than_is_served() -> None:
    assert pixel_settings(BENCH, PIXELS, 1000) == PIXELS
    assert pixel_settings(BENCH, PIXELS, 64).max_pixels == 64 * 32 * 32
    small = EncoderBench(arrivals=1, batch=(1, 1), rounds=1, max_pixels=2000)
    assert (pixel_settings(small, PIXELS, 64).min_pixels, pixel_settings(small, PIXELS, 64).max_pixels) == (2000, 2000)
    alone, _ = make_arrivals(BENCH, pixel_settings(BENCH, PIXELS, 64), 8)
    assert max(items[0].num_tokens for items in alone) <= 64


def test_latencies_are_over_all_arrivals_and_turns_and_least_over_each_arrivals_shortest() -> None:
    times = [ArrivalTimes([0.2, 0.4], [0.1, 0.1]), ArrivalTimes([0.3, 0.3], [0.2, 0.6])]
    figures = arrival_figures(times)
    assert figures["arrivals"] == 2
    assert figures["eager_ms"] == pytest.approx({"mean": 300, "p50": 300, "p99": 400})
    assert figures["graph_ms"] == pytest.approx({"mean": 250, "p50": 150, "p99": 600})
    assert figures["speed"] == pytest.approx({"mean": 1.2, "p50": 2, "p99": 2 / 3})
    assert figures["least"]["eager_ms"]["p99"] == pytest.approx(300)
    assert figures["least"]["graph_ms"]["mean"] == pytest.approx(150)
    assert figures["least"]["speed"]["mean"] == pytest.approx(250 / 150)


def test_the_99th_percentile_is_one_of_the_latencies() -> None:
    assert spread_ms([i / 1000 for i in range(1, 101)])["p99"] == pytest.approx(99)
    assert spread_ms([0.5])["p99"] == pytest.approx(500)


def test_padding_is_a_share_of_what_graphs_computed() -> None:
    counts = EncoderCounts()
    assert share_of_padding(counts.to_json()) is None
    counts.count_eager("why", 1, 100, 0.1)
    counts.count_replay(8, 2, 6, 0.1)
    counts.count_replay(4, 1, 3, 0.1)
    assert share_of_padding(counts.to_json()) == pytest.approx(3 / 12)


def report() -> dict[str, Any]:
    """As the benchmark gives it, of two arrivals."""
    counts = EncoderCounts()
    counts.count_replay(64, 2, 60, 0.1)
    counts.count_eager("larger than the largest budget", 1, 100, 0.2)
    times = [ArrivalTimes([0.2], [0.1]), ArrivalTimes([0.4], [0.3])]
    result = {
        **arrival_figures(times), "images": 3, "counts": counts.to_json(), "padding_share": 0.0625,
        "points": [point_of(60, 2, times[0]), point_of(100, 1, times[1])],
    }  # fmt: skip
    return {
        "command": "encoder",
        "backend": "tape",
        "model": {"name": "some/model"},
        "settings": {"dtype": "float32"},
        "plan": {"token_budgets": [64]},
        "results": {"alone": result, "together": result},
        "choice": [{"budget": 64, "graph_seconds": 0.1, "eager_seconds": 0.2, "runs": "graph"}],
        "capture": {"captured": 1, "capture_seconds": 0.5, "planned_bytes": 2048, "observed_bytes": 1024},
        "first_token": arrival_figures(times),
    }


def test_tables_show_latencies_what_served_them_and_the_choice() -> None:
    console = Console(file=io.StringIO(), width=200)
    for table in encoder_tables(report()):
        table.print(console)
    shown = console.file.getvalue()
    for text in (
        "alone",
        "p99",
        "400.0 ms",
        "1.50x",
        "graph of 64 tokens",
        "larger than the largest",
        "1 KiB",
    ):
        assert text in shown


def test_a_picture_is_drawn_of_every_arrival(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(report(), tmp_path / "encoder.png")
    assert (tmp_path / "encoder.png").stat().st_size > 1000


def test_a_model_of_text_alone_cannot_be_measured() -> None:
    with pytest.raises(ModelError, match="has no vision encoder"):
        encoder({"model": str(checkpoint("llama")), "random_weights": True}, BENCH, lambda _: None)


@pytest.mark.parametrize("batch", ["4,2", "3", "0,1", "1,2,3"])
def test_the_images_that_come_together_are_a_range(batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "encoder", str(checkpoint("llama")), "--batch", batch])
    assert "--batch" in capsys.readouterr().err


def test_a_small_model_is_measured_in_full() -> None:
    bench = EncoderBench(arrivals=3, batch=(2, 3), rounds=2, max_pixels=24 * 24)
    settings = {
        "model": str(vl_checkpoint("qwen3_vl")), "threads": 1, "dtype": "float32", "cache_memory": "16MiB",
        "max_num_batched_tokens": 128, "encoder_token_budgets": (4, 8, 16), "encoder_graph_mode": "always",
    }  # fmt: skip
    found = encoder(settings, bench, lambda _: None).data
    assert json.dumps(found)
    for name, least, most in (("alone", 1, 1), ("together", 2, 3)):
        result = found["results"][name]
        assert result["arrivals"] == len(result["points"]) == 3
        assert all(least <= point["images"] <= most for point in result["points"])
        counts = result["counts"]
        assert counts["hits"] + counts["misses"] == 2 * result["images"]
        assert counts["tokens"] == 2 * sum(point["tokens"] for point in result["points"])
        assert result["graph_ms"]["mean"] > 0
    assert found["first_token"]["arrivals"] == 3
    assert found["first_token"]["eager_ms"]["p50"] > 0
    assert [one["budget"] for one in found["choice"]] == [4, 8, 16]
    assert found["capture"]["captured"] == 3
    assert 0 < found["capture"]["observed_bytes"] <= found["capture"]["planned_bytes"]
    assert encoder_tables(found)


def test_a_prompt_of_the_benchmark_has_its_image_between_the_tokens_that_enclose_one() -> None:
    [item], vision = make_arrivals(BENCH, PIXELS, 8)[0][0], vl_spec("qwen3_vl").vision
    prompt = prompt_of(item, vision, VOCAB_SIZE, seed=1)
    [(start, end, placed)] = prompt.spans
    assert placed is item
    assert prompt.token_ids[start:end] == [vision.image_token_id] * item.num_tokens
    assert (prompt.token_ids[start - 1], prompt.token_ids[end]) == (vision.start_token_id, vision.end_token_id)
    assert len(prompt.token_ids) == item.num_tokens + AROUND == len(prompt.rope.prompt)
    special = {vision.image_token_id, vision.video_token_id, vision.start_token_id, vision.end_token_id}
    assert not special.intersection(prompt.token_ids[: start - 1] + prompt.token_ids[end + 1 :])


def test_nothing_is_measured_where_there_is_nothing_to_compare() -> None:
    settings = {"model": str(vl_checkpoint("qwen3_vl")), "encoder_graph_mode": "none"}
    with pytest.raises(ConfigError, match="the encoder has no graphs") as caught:
        encoder(settings, BENCH, lambda _: None)
    assert [(remedy.setting, remedy.value) for remedy in caught.value.remedies] == [("encoder_graph_mode", "auto")]
