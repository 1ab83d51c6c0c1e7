"""The vision encoder over a mixed stream of images, eagerly and with its graphs, in one run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.bench.engine_driver import plan_of, rotated_order, run_batch
from ostinato.bench.report import (
    BenchReport,
    Column,
    ProgressCallback,
    Table,
    capture_table,
    engine_facts,
    engine_lines,
)
from ostinato.bench.statistics import STATISTICS, WAYS, ArrivalTimes, arrival_figures, point_of, share_of_padding
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, ModelError, Remedy
from ostinato.json_io import JsonMapping, JsonObject, to_json_data
from ostinato.media.media_item import MediaItem
from ostinato.media.media_prompt import MediaPlacement, MediaPrompt, positions_of
from ostinato.media.processor_config import PixelSettings, load_media_settings
from ostinato.media.resize import image_size
from ostinato.plan.layer_specs import VisionSpec

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore
    from ostinato.graphs.encoder_graphs import EncoderGraphs

SIZES = (
    (224, 224), (336, 336), (448, 448), (512, 512), (640, 480), (800, 600), (1024, 768), (1280, 720), (1920, 1080),
    (320, 64), (768, 256),
)  # fmt: skip
"""Width and height in pixels: thumbnails, screens, photographs, lines of text. Each is also used upright."""

TEXT = 16
"""Tokens of text before an image, and the same number after it."""
AROUND = 2 * TEXT + 2
"""All tokens of a prompt that are not an image's."""


@dataclass(frozen=True)
class EncoderBench:
    """The measured workload: `arrivals` with one image each, and the same number with `batch` images at once.

    It is the same in each of `rounds`. `max_pixels` bounds an image's size further than the checkpoint does; None: it
    does not.
    """

    arrivals: int
    batch: tuple[int, int]
    rounds: int
    seed: int = 0
    max_pixels: int | None = None


def encoder(settings: JsonObject, bench: EncoderBench, say: ProgressCallback) -> BenchReport:
    """Measure milliseconds until the images of an arrival are encoded, without graphs and with them.

    The measured time is from an arrival's patches to its output tokens: packing, the encoder's inputs, filling the
    buffers and the replay with graphs; the model's encoder, image by image, without. Both encode the same images,
    alternating. Decoding and resizing, which are the same for both, are left out. `first_token` is the time to first
    token of a request with one image, from its arrival at the engine.
    """
    config = EngineConfig(**settings)
    _check_measurable(config)
    from ostinato.bench.step_timing import seconds_of
    from ostinato.engine.core import EngineCore
    from ostinato.runner.graph_setup import make_encoder_graphs

    say("loading the model and capturing the encoder's graphs")
    engine = EngineCore(config.with_settings(capture="lazy"))  # the text part's graphs are not measured
    plan, runner, vision = engine.plan, engine.runner, engine.spec.vision
    graphs = runner.encoder_graphs
    assert plan.encoder is not None, "the plan was looked at before"
    assert graphs is not None, "as a model with an encoder has it"
    assert vision is not None, "as above"
    with runner.arrays.inference_mode():
        graphs.capture_all()
    off = replace(plan.encoder, graph_mode="none", token_budgets=())
    ways = {"eager": make_encoder_graphs(off, vision, runner.model), "graph": graphs}
    largest = min(plan.encoder.max_item_tokens, plan.encoder.num_cells - 1, plan.settings.max_model_len - AROUND - 1)
    pixels = pixel_settings(bench, load_media_settings(engine.directory, vision).image, largest)
    streams = dict(zip(("alone", "together"), make_arrivals(bench, pixels, vision.patch_elements), strict=True))
    results = {}

    def encode(way: str, number: int, items: Sequence[MediaItem]) -> float:
        with runner.arrays.inference_mode():
            seconds = seconds_of(runner, partial(ways[way].run, items))
        if number == 0:
            graphs.counts.clear()
        return seconds

    for name, arrivals in streams.items():
        taken = _in_turns(encode, arrivals, bench.rounds, say, f"images {name}")
        counts = graphs.counts.to_json()
        results[name] = {
            **arrival_figures(taken),
            "images": sum(map(len, arrivals)),
            "points": [
                point_of(sum(item.num_tokens for item in items), len(items), of_arrival)
                for items, of_arrival in zip(arrivals, taken, strict=True)
            ],
            "counts": counts,
            "padding_share": share_of_padding(counts),
        }
    tokens = sorted(item.num_tokens for item in chain.from_iterable(chain.from_iterable(streams.values())))
    first = _first_tokens(engine, ways, [items[0] for items in streams["alone"]], bench.rounds, say)
    figures = graphs.figures()
    data = {
        **engine_facts("encoder", config, plan, **asdict(bench)),
        "backend": plan.encoder.backend,
        "plan": to_json_data(plan.encoder),
        "image_tokens": {"min": tokens[0], "median": tokens[len(tokens) // 2], "max": tokens[-1]},
        "results": results,
        "first_token": {**arrival_figures(first), "text_tokens": AROUND},
        "choice": figures["timed"],
        "capture": {name: figures[name] for name in ("captured", "capture_seconds", "planned_bytes", "observed_bytes")},
    }
    lines = engine_lines(data, "{arrivals} arrivals of one image and {arrivals} of several")
    return BenchReport(data, lines, encoder_tables(data))


def _in_turns(
    seconds_of: Callable[[str, int, Any], float],
    things: Sequence[object],
    rounds: int,
    say: ProgressCallback,
    what: str,
) -> list[ArrivalTimes]:
    """Call `seconds_of(way, round, thing)` for each of `things`, alternating between both ways.

    Every round begins with the other way than the round before. Round 0 warms up and is not counted.
    """
    taken: list[dict[str, list[float]]] = [{way: [] for way in WAYS} for _ in things]
    for number in range(rounds + 1):
        say(f"{what}: {f'round {number} of {rounds}' if number else 'warming up'}")
        for thing, own in zip(things, taken, strict=True):
            for way in rotated_order(WAYS, number + 1):
                own[way].append(seconds_of(way, number, thing))
    return [ArrivalTimes(own["eager"][1:], own["graph"][1:]) for own in taken]


def _first_tokens(
    engine: EngineCore,
    ways: Mapping[str, EncoderGraphs],
    items: Sequence[MediaItem],
    rounds: int,
    say: ProgressCallback,
) -> list[ArrivalTimes]:
    """Return the seconds from a request's arrival to its first token, for each image and each of the `ways` to encode.

    The request is alone on the engine and has an image that was never seen. The round that warms up captures the graphs
    of the text part.
    """
    encoding, spec = engine.runner.image_encoder, engine.spec
    assert encoding is not None, "the model takes images"

    def seconds_of(way: str, number: int, numbered: tuple[int, MediaItem]) -> float:
        index, item = numbered
        encoding.graphs = ways[way]
        engine.reset_prefix_cache()
        named = replace(item, digest=f"{item.digest} {way} {number}")
        prompt = prompt_of(named, spec.vision, spec.vocab_size, index)
        return run_batch(engine, [prompt.token_ids], 1, media=prompt).prefill_end

    graphs = encoding.graphs
    try:
        return _in_turns(seconds_of, list(enumerate(items)), rounds, say, "first tokens")
    finally:
        encoding.graphs = graphs


def _check_measurable(config: EngineConfig) -> None:
    """Raise an error if the encoder cannot be measured.

    ModelError for a model without an encoder, ConfigError if its encoder has no graphs or times say nothing.
    """
    plan = plan_of(config).encoder
    if plan is None:
        raise ModelError(f"{config.model} has no vision encoder; measure a model that takes images, such as demo-vl")
    if plan.graph_mode == "none":
        raise ConfigError(
            f"the encoder has no graphs, so there is nothing to compare ({plan.reason})",
            [Remedy("encoder_graph_mode", "auto")] if config.encoder_graph_mode == "none" else [],
        )
    if config.check_replay:
        message = "check_replay encodes every pack twice, so its time says nothing"
        raise ConfigError(message, [Remedy("check_replay", False)])


def pixel_settings(bench: EncoderBench, checkpoint: PixelSettings, max_item_tokens: int) -> PixelSettings:
    """Return the checkpoint's settings, with no image larger than is served."""
    limits = (checkpoint.max_pixels, max_item_tokens * checkpoint.factor**2, bench.max_pixels or checkpoint.max_pixels)
    most = max(min(limits), checkpoint.factor**2)
    return replace(checkpoint, max_pixels=most, min_pixels=min(checkpoint.min_pixels, most))


def make_arrivals(
    bench: EncoderBench, pixels: PixelSettings, patch_elements: int
) -> tuple[list[list[MediaItem]], list[list[MediaItem]]]:
    """Return the images of each arrival, single ones and batches. The patches are random, seeded."""
    rng, values = random.Random(bench.seed), np.random.default_rng(bench.seed)

    def image() -> MediaItem:
        width, height = rng.choice(SIZES)
        if rng.random() < 0.5:
            width, height = height, width
        rows, columns = (side // pixels.patch_size for side in image_size(height, width, pixels))
        patches = values.standard_normal((rows * columns, patch_elements), dtype=np.float32)
        return MediaItem(patches, (rows, columns), rows * columns // pixels.merge_size**2, f"image {rng.random()}")

    alone = [[image()] for _ in range(bench.arrivals)]
    together = [[image() for _ in range(rng.randint(*bench.batch))] for _ in range(bench.arrivals)]
    return alone, together


def prompt_of(item: MediaItem, vision: VisionSpec | None, vocab_size: int, seed: int) -> MediaPrompt:
    """Return an image with random tokens around it."""
    assert vision is not None, "the model takes images"
    rng = random.Random(seed)
    named, (start, end) = vision.token_ids, (vision.start_token_id, vision.end_token_id)
    text = [token for token in rng.choices(range(vocab_size), k=4 * TEXT + 64) if token not in named][: 2 * TEXT]
    before = text[:TEXT] if start is None else [*text[:TEXT], start]
    behind = text[TEXT:] if end is None else [end, *text[TEXT:]]
    placed = MediaPlacement(len(before), len(before) + item.num_tokens, item)
    token_ids = [*before, *[vision.image_token_id] * item.num_tokens, *behind]
    return MediaPrompt(token_ids, (placed,), positions_of(token_ids, [placed], vision))


def encoder_tables(data: JsonMapping) -> list[Table]:
    backend = data["backend"]
    latencies = [
        {"name": name, "statistic": statistic, **_one(result, statistic), "least": _one(result["least"], statistic)}
        for name, result in (*data["results"].items(), ("first token", data["first_token"]))
        for statistic in STATISTICS
    ]
    in_ms = "{:,.1f} ms"
    columns = (
        Column("images", "name", is_text=True),
        Column("", "statistic"),
        Column("eager", "eager_ms", in_ms),
        Column(backend, "graph_ms", in_ms),
        Column("speed", "speed", "times"),
        Column("least eager", "least.eager_ms", in_ms),
        Column(backend, "least.graph_ms", in_ms),
        Column("speed", "least.speed", "times"),
    )
    packs = []
    for name, result in data["results"].items():
        counts = result["counts"]
        packs += [{**one, "name": name, "by": f"graph of {one['budget']} tokens"} for one in counts["budgets"]]
        packs += [{**one, "name": name, "by": f"eager: {one['reason']}"} for one in counts["eager"]]
    served = (("packs", "packs"), ("images", "items"), ("tokens", "tokens"), ("padding", "padding"))
    choice = (
        Column("budget", "budget", "{:,.0f} tokens"),
        Column("eager", "eager_seconds", "ms"),
        Column(backend, "graph_seconds", "ms"),
        Column("runs", "runs"),
    )
    capture = data["capture"]
    return [
        Table(columns, latencies),
        Table(
            (
                Column("images", "name", is_text=True),
                Column("served by", "by", is_text=True),
                *(Column(heading, key, "count") for heading, key in served),
            ),
            packs,
        ),
        Table(choice, data["choice"]),
        capture_table(
            "capture of the encoder",
            *(capture[name] for name in ("captured", "capture_seconds", "planned_bytes", "observed_bytes")),
        ),
    ]


def _one(figures: JsonMapping, statistic: str) -> dict[str, float]:
    return {name: figures[name][statistic] for name in ("eager_ms", "graph_ms", "speed")}
