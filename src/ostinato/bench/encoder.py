"""The vision encoder over a mixed stream of images, eagerly and with its graphs, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ostinato.bench.encoder_figures import ArrivalTimes, latency_figures, point_of, share_of_padding
from ostinato.bench.encoder_first_token import AROUND, first_tokens
from ostinato.bench.encoder_workload import EncoderBench, make_arrivals, pixel_settings
from ostinato.bench.facts import machine_facts, model_facts
from ostinato.bench.graphs import plan_of
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, ModelError, Remedy
from ostinato.media.settings import load_media_settings
from ostinato.plain_data import to_plain

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.graphs.encoder import EncoderGraphs
    from ostinato.media.item import MediaItem


def encoder(settings: dict[str, Any], bench: EncoderBench, report: Callable[[str], None]) -> dict[str, Any]:
    """The report: milliseconds until the images of an arrival are encoded, without graphs and with them.

    What is timed lies between an arrival's patches and its output tokens: packing, the encoder's inputs, filling the
    buffers and the replay on one side, the model's encoder, image by image, on the other. Both encode the same images
    in turns. Decoding and resizing, which are the same for both, are left out. `first_token` is the time to first token
    of a request with one image, from its arrival at the engine.
    """
    config = EngineConfig(**settings)
    _check_measurable(config)
    import torch

    from ostinato.engine.engine import Engine
    from ostinato.engine.run.encoder_graphing import make_encoder_graphs

    report("loading the model and capturing the encoder's graphs")
    engine = Engine(config.with_settings(capture="lazy"))  # the text part's graphs are none of this
    plan, runner, vision = engine.plan, engine.runner, engine.spec.vision
    graphs = runner.encoder
    assert plan.encoder is not None, "the plan was looked at before"
    assert graphs is not None, "as a model with an encoder has it"
    assert vision is not None, "as above"
    with torch.inference_mode():
        graphs.capture_all()
    off = replace(plan.encoder, graph_mode="none", token_budgets=())
    eager = make_encoder_graphs(off, vision, runner.model)
    largest = min(plan.encoder.max_item_tokens, plan.encoder.num_cells - 1, plan.settings.max_model_len - AROUND - 1)
    pixels = pixel_settings(bench, load_media_settings(engine.directory, vision).image, largest)
    streams = dict(zip(("alone", "together"), make_arrivals(bench, pixels, vision.patch_elements), strict=True))
    results = {}
    for name, arrivals in streams.items():
        report(f"images {name}")
        times, counts = _take_turns(engine, eager, arrivals, bench.rounds, report)
        results[name] = {
            **latency_figures(times),
            "images": sum(map(len, arrivals)),
            "points": [
                point_of(sum(item.num_tokens for item in items), len(items), of_arrival)
                for items, of_arrival in zip(arrivals, times, strict=True)
            ],
            "counts": counts,
            "padding_share": share_of_padding(counts),
        }
    tokens = sorted(item.num_tokens for item in chain.from_iterable(chain.from_iterable(streams.values())))
    first = first_tokens(
        engine, {"eager": eager, "graph": graphs}, [items[0] for items in streams["alone"]], bench.rounds, report
    )
    figures = graphs.figures()
    return {
        "command": "encoder",
        "model": model_facts(config, plan),
        "settings": {**to_plain(plan.settings), **asdict(bench)},
        "machine": machine_facts(plan),
        "backend": plan.encoder.backend,
        "plan": to_plain(plan.encoder),
        "image_tokens": {"min": tokens[0], "median": tokens[len(tokens) // 2], "max": tokens[-1]},
        "results": results,
        "first_token": {**latency_figures(first), "text_tokens": AROUND},
        "choice": figures["timed"],
        "capture": {name: figures[name] for name in ("captured", "capture_seconds", "planned_bytes", "observed_bytes")},
    }


def _take_turns(
    engine: Engine,
    eager: EncoderGraphs,
    arrivals: Sequence[Sequence[MediaItem]],
    rounds: int,
    report: Callable[[str], None],
) -> tuple[list[ArrivalTimes], dict[str, Any]]:
    """Each arrival's seconds both ways, and what the graphs counted. The way that begins changes from round to round;
    a round before the first is not counted."""
    graphs = engine.runner.encoder
    assert graphs is not None, "what is measured"
    seconds: list[dict[str, list[float]]] = [{"eager": [], "graph": []} for _ in arrivals]
    for number in range(rounds + 1):
        report(f"round {number} of {rounds}" if number else "warming up")
        if number == 1:
            graphs.counts.clear()
        for items, own in zip(arrivals, seconds, strict=True):
            ways = [("eager", eager), ("graph", graphs)]
            for way, encoding in ways if number % 2 else reversed(ways):
                taken = _seconds_of(engine, encoding, items)
                if number:
                    own[way].append(taken)
    return [ArrivalTimes(**own) for own in seconds], graphs.counts.to_json()


def _seconds_of(engine: Engine, encoding: EncoderGraphs, items: Sequence[MediaItem]) -> float:
    """From the call until the device is done."""
    import torch

    with torch.inference_mode():
        begin = time.perf_counter()
        encoding.run(items)
        if engine.runner.device.type == "cuda":
            torch.cuda.synchronize(engine.runner.device)
        return time.perf_counter() - begin


def _check_measurable(config: EngineConfig) -> None:
    """ModelError for a model without an encoder, ConfigError if its encoder has no graphs or times say nothing."""
    plan = plan_of(config).encoder
    if plan is None:
        raise ModelError(f"{config.model} has no vision encoder; measure a model that takes images")
    if plan.graph_mode == "none":
        raise ConfigError(
            f"the encoder has no graphs, so there is nothing to compare ({plan.reason})",
            [Remedy("encoder_graph_mode", "auto")] if config.encoder_graph_mode == "none" else [],
        )
    if config.check_replay:
        message = "check_replay encodes every pack twice, so its time says nothing"
        raise ConfigError(message, [Remedy("check_replay", False)])
