"""Commands of `ostinato bench` that measure inside steps: graphs, the vision encoder, and single kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ostinato.bench.encoder import EncoderBench, encoder
from ostinato.bench.graphs import GraphBench, graphs
from ostinato.bench.profile import ProfileBench, profile
from ostinato.cli.bench_common import BatchSizes, Measure, sizes
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject

MeasureRates = Annotated[
    bool, typer.Option("--measure", help="Predict from rates measured in this run, not from those that are kept.")
]

MAX_ROWS = 32
"""Largest batch size that graphs are measured for by default."""


def graphs_command(
    settings: dict[str, object],
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Rows of the steps. [default: every number from 1 to 32, or to --max-num-seqs if that is less]",
            show_default=False,
        ),
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Random tokens that each row has before it.")] = 128,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds that are counted; each does every step twice both ways.")
    ] = 6,
    budgets: Annotated[
        str | None,
        typer.Option(
            "--off-stride",
            metavar="N,N[,N...]",
            help="Also compare prefill with these values of max_num_batched_tokens, such as 700,768.",
        ),
    ] = None,
    measure: MeasureRates = False,
) -> Measure:
    """Measure milliseconds of a decode step by batch size, eagerly and as a graph, alternating.

    A step is measured from the batch to its hidden states; logits and sampling, which are the same for both, are left
    out. The time in kernels is measured in a separate pass; the rest is Python, and torch between kernels. A cliff is
    how many times longer than its neighbour a batch size takes. On a busy machine the minima are more reliable than the
    medians.

    The report also shows the plan's prediction (`ostinato plan --measure`) and its ratio to the measured time.

    With --off-stride, prefill runs strictly and with graphs for every step, with one engine for each value.

    Example: ostinato bench graphs demo

    Example: ostinato bench graphs demo --rows 1,8,32 --off-stride 700,768
    """
    bench = GraphBench(
        rows=_rows(settings, rows),
        prompt_len=prompt_len,
        rounds=rounds,
        off_stride=() if budgets is None else _budgets(budgets),
        measure=measure,
    )
    return lambda say: graphs(settings, bench, say)


def encoder_command(
    settings: dict[str, object],
    arrivals: Annotated[int, typer.Option(min=1, help="Arrivals of one image, and as many of several.")] = 16,
    batch: Annotated[str, typer.Option(metavar="LEAST,MOST", help="Images that come together.")] = "2,4",
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="Larger images are made smaller. [default: the checkpoint's limit]")
    ] = None,
    image_seed: Annotated[int, typer.Option(help="Of sizes, their order, and patches.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are counted, after one to warm up.")] = 3,
) -> Measure:
    """Measure milliseconds until images are encoded, eagerly and with graphs by token budget.

    Both are measured alternately. Images of mixed sizes come alone and, a few at once, together. The time runs from an
    arrival's patches to its tokens: eagerly image by image, with graphs in packs. Decoding and resizing, which are the
    same for both, are left out. Then the time to first token of requests with one image each, alone on the engine.
    Latencies are over all arrivals and rounds; minima are over each arrival's shortest times, which other work on the
    machine disturbs least.

    Example: ostinato bench encoder demo-vl

    Example: ostinato bench encoder PATH --random-weights --encoder-graph-mode always
    """
    bench = EncoderBench(arrivals, _range(batch), rounds, image_seed, max_pixels)
    return lambda say: encoder(settings, bench, say)


def profile_command(
    settings: dict[str, object],
    batch_sizes: BatchSizes = "1,8,32",
    context: Annotated[
        int, typer.Option("--context", "--prompt-len", min=1, help="Tokens before each row of a decode step.")
    ] = 128,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that is computed in one step.")] = 512,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds that are counted, after one to warm up; the shortest is shown.")
    ] = 20,
    measure: MeasureRates = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the steps' calls as a trace for Perfetto.")
    ] = None,
) -> Measure:
    """Measure a step's time by kernel against the roofline, and the engine's work around the model.

    A kernel's roofline time is the bytes that it must move (weights, states, keys and values; not intermediate results)
    over the memory's bandwidth, or its operations over the rate of large matmuls, whichever takes longer; both rates
    are measured in the same run. What fits into the caches may take less. Decode steps are replayed from a tape, call
    by call, where they have a full graph; a prompt runs eagerly. The last table shows medians of real steps of the
    engine.

    Example: ostinato bench profile benchmarks/models/nemotron-h-300m --random-weights --batch-sizes 1,32

    Example: ostinato bench profile demo --trace steps.json
    """
    bench = ProfileBench(tuple(sorted(set(sizes(batch_sizes)))), context, prefill, rounds, measure)
    return lambda say: profile(settings, bench, say, trace)


def _rows(settings: JsonObject, text: str | None) -> tuple[int, ...]:
    """Return row counts, ascending, each once."""
    if text is not None:
        return tuple(sorted(set(sizes(text, "--rows"))))
    most = EngineConfig(**settings).max_num_seqs
    return tuple(range(1, min(MAX_ROWS, most or MAX_ROWS) + 1))


def _budgets(text: str) -> tuple[int, ...]:
    """Return at least two values of `max_num_batched_tokens`, each once. ConfigError for fewer."""
    budgets = tuple(dict.fromkeys(sizes(text, "--off-stride", "700,768")))
    if len(budgets) < 2:
        raise ConfigError(f"--off-stride {text!r} should be several sizes to compare, such as 700,768")
    return budgets


def _range(text: str) -> tuple[int, int]:
    found = sizes(text, "--batch", "2,4")
    if len(found) != 2 or found[0] > found[1]:
        raise ConfigError(f"--batch {text!r} should be the least and the most images that come together, such as 2,4")
    return found[0], found[1]
