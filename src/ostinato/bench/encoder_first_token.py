"""Time to first token of a prompt with one image, with the encoder's graphs and without them, on one engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ostinato.bench.encoder_figures import ArrivalTimes
from ostinato.media.item import MediaItem
from ostinato.media.prompt import MediaPrompt, PlacedItem
from ostinato.media.rope import rope_positions
from ostinato.plan.model import VisionSpec

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.graphs.encoder import EncoderGraphs

TEXT = 16
"""Tokens of text before an image, and as many behind it."""
AROUND = 2 * TEXT + 2
"""All tokens of a prompt that no image stands for."""


def first_tokens(
    engine: Engine,
    ways: Mapping[str, EncoderGraphs],
    items: Sequence[MediaItem],
    rounds: int,
    report: Callable[[str], None],
) -> list[ArrivalTimes]:
    """Seconds from a request's arrival to its first token, alone on the engine, for each image and each of the `ways`
    of encoding it, in turns. Every request brings an image that was never seen. A round before the first is not
    counted: it captures the graphs of the text part."""
    encoding = engine.runner.encoding
    assert encoding is not None, "the model takes images"
    own = encoding.graphs
    seconds: list[dict[str, list[float]]] = [{way: [] for way in ways} for _ in items]
    try:
        for number in range(rounds + 1):
            report(f"first tokens: round {number} of {rounds}" if number else "first tokens: warming up")
            for index, (item, taken) in enumerate(zip(items, seconds, strict=True)):
                for way in ways if number % 2 else reversed(list(ways)):
                    encoding.graphs = ways[way]
                    named = replace(item, digest=f"{item.digest} {way} {number}")
                    one = _first_token(engine, prompt_of(named, engine.spec.vision, engine.spec.vocab_size, index))
                    if number:
                        taken[way].append(one)
    finally:
        encoding.graphs = own
    return [ArrivalTimes(**each) for each in seconds]


def prompt_of(item: MediaItem, vision: VisionSpec | None, vocab_size: int, seed: int) -> MediaPrompt:
    """An image with random tokens around it."""
    assert vision is not None, "the model takes images"
    rng = random.Random(seed)
    named = (vision.image_token_id, vision.video_token_id, vision.start_token_id, vision.end_token_id)
    text = [token for token in rng.choices(range(vocab_size), k=4 * TEXT + 64) if token not in named][: 2 * TEXT]
    before, behind = [*text[:TEXT], vision.start_token_id], [vision.end_token_id, *text[TEXT:]]
    placed = PlacedItem(len(before), len(before) + item.num_tokens, item)
    token_ids = [*before, *[vision.image_token_id] * item.num_tokens, *behind]
    return MediaPrompt(token_ids, (placed,), rope_positions(len(token_ids), [placed], vision.merge_size))


def _first_token(engine: Engine, prompt: MediaPrompt) -> float:
    from ostinato.sample.params import SamplingParams

    engine.reset_prefix_cache()
    begin = time.perf_counter()
    engine.add(prompt.token_ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), media=prompt)
    taken = None
    while engine.has_unfinished:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if taken is None and output.outputs[0].token_ids:
                taken = time.perf_counter() - begin
    assert taken is not None, "a request that ended has a token"
    return taken
