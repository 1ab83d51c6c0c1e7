"""Runs Ostinato and its peers on the same shapes, in turns, and writes this processor's record: report, table and plot.

    python benchmarks/run.py --peers-dir DIR --rounds 3

See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.depths import cell_name, depth_table, measure_depths
from benchmarks.peers.engines import ENGINES, Round, floor
from benchmarks.peers.places import Places
from benchmarks.peers.plot import draw
from benchmarks.peers.prepare import named_kind, prepare, vocab_size
from benchmarks.peers.process import PeerError, busy_share
from benchmarks.peers.processor import processor_here
from benchmarks.peers.record import Record
from benchmarks.peers.report import FLOOR, make_report
from benchmarks.peers.table import markdown
from benchmarks.peers.workload import Workload
from benchmarks.records import PAGE, RESULTS, write_page
from ostinato.bench.contention import busy_processes
from ostinato.models.named_models import NAMED, find_file

SHAPES = Path(__file__).resolve().parent / "models"
MODELS = (
    "nemotron-h-300m",
    "granite-dense-180m",
    "falcon-h1-170m",
    "qwen3-410m",
    "qwen3-moe-450m",
    "granite-swa-300m",
    "lfm3-300m",
    "gemma3-270m",
)
DEEP = ("qwen3-410m", "nemotron-h-300m")
"""Models of `--depths`: attention in every layer, and in few."""
USUAL = ("ostinato", "ostinato-int8", "vllm", "llama.cpp", "llama.cpp-q8_0")


def main() -> None:
    # So that what it started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    options = _options()
    places = Places(options.peers_dir.resolve())
    sizes = numbers(options.batch_sizes or ("1,8" if options.depths else "1,8,32"))
    workload = Workload(batch_sizes=sizes)
    models = options.models.split(",") if options.models else list(DEEP) if options.depths else _usual_models()
    engines = {model: options.engines.split(",") if options.engines else usual_engines(model) for model in models}
    processor = processor_here()
    folder = options.output / processor.folder
    if options.depths:
        _depths(options, places, models, sizes, folder)
        return
    setup = {"workload": asdict(workload), "threads": options.threads, "rounds": options.rounds}
    setup["processor"] = asdict(processor)
    if options.busy:
        setup["busy_processes"] = options.busy
    path = folder / "measurements.jsonl"
    if options.anew:
        path.unlink(missing_ok=True)
    _say(f"{processor.name} ({processor.kind}): {folder}")
    try:
        record = Record(path, setup)
    except ValueError as error:
        sys.exit(str(error))
    every = dict.fromkeys(name for names in engines.values() for name in names)
    skipped = {name: why for name in every if (why := ENGINES[name].missing(places))}
    for name, why in skipped.items():
        _say(f"{name} is skipped: {why}")
    here = {model: [name for name in names if name not in skipped] for model, names in engines.items()}
    refused = _prepare(places, here)
    began = time.monotonic()
    for number in range(options.rounds):
        for model in models:
            one = Round(places, model, vocab_size(SHAPES / model), number, workload, options.threads, options.timeout)
            for name in (FLOOR, *here[model]):
                # What failed once on a model will do so again.
                earlier = [record.measurements.get((before, model, name), {}) for before in range(number)]
                if record.is_done((number, model, name)) or any("error" in each for each in earlier):
                    continue
                if name == FLOOR:
                    work = partial(_floors, one, [name for name in here[model] if (model, name) not in refused])
                else:
                    work = partial(_figures, one, name, refused.get((model, name)))
                with busy_processes(0 if name == FLOOR else options.busy):
                    record.add(_measure(one, name, work))
    _say(f"all measured, {time.monotonic() - began:.0f} s")
    report = make_report(setup, record.measurements.values(), skipped)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(markdown(report), encoding="utf-8")
    draw(report, folder / "plot.png")
    print(markdown(report))
    if options.output.resolve() == RESULTS:
        write_page()
        _say(f"{PAGE} shows the records of all processors")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _depths(
    options: argparse.Namespace, places: Places, models: Sequence[str], sizes: Sequence[int], folder: Path
) -> None:
    """Measures decode steps after long prompts, beside llama.cpp, and adds them to `depths.json`."""
    path = folder / "depths.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not options.anew else []
    _prepare(places, {model: ["llama.cpp"] for model in models})
    facts = {"date": time.strftime("%Y-%m-%d"), "threads": options.threads, "busy": busy_share()}
    cells = measure_depths(places, models, numbers(options.depths), sizes, options.threads, options.timeout)
    measured = {cell_name(cell) for cell in cells}
    cells = [*(cell for cell in kept if cell_name(cell) not in measured), *({**cell, **facts} for cell in cells)]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    print(depth_table(cells))


def usual_engines(model: str) -> Sequence[str]:
    """Those that are measured unless others are named: of a model that is one file, the two that run its kind."""
    if model not in NAMED:
        return USUAL
    return [name for name, engine in ENGINES.items() if engine.gguf == named_kind(model)]


def _usual_models() -> list[str]:
    absent = [model for model in MODELS if model in NAMED and find_file(model) is None]
    for model in absent:
        _say(f"{model} is skipped: its file is not here; `ostinato fetch {model}` brings it")
    return [model for model in MODELS if model not in absent]


def _prepare(places: Places, engines: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], str]:
    """Makes the files of models for their engines. Returns why, for each (model, engine) that cannot have its own."""
    refused = {}
    for model, names in engines.items():
        kinds = {name: kind for name in names if (kind := ENGINES[name].gguf)}
        try:
            reasons = prepare(places, SHAPES / model, tuple(dict.fromkeys(kinds.values())), _say)
        except PeerError as error:
            sys.exit(f"no checkpoint of {model}: {error}")
        refused |= {(model, name): reasons[kind] for name, kind in kinds.items() if kind in reasons}
    return refused


def _measure(one: Round, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The measurement of one engine, or of the floor: with the `figures` of `work`, or the `error` that it ended in."""
    result: dict[str, Any] = {"round": one.number, "model": one.model, "engine": name, "busy": busy_share()}
    result["date"] = time.strftime("%Y-%m-%d")
    began = time.monotonic()
    try:
        result["figures"] = work()
        said = _line(name, result["figures"])
    except (PeerError, OSError, ValueError, LookupError) as error:
        result["error"] = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
        said = f"failed: {error}"
    result["seconds"] = time.monotonic() - began
    _say(f"round {one.number + 1}, {one.model}, {name}: {said} ({result['seconds']:.0f} s)")
    return result


def _figures(one: Round, name: str, refused: str | None) -> dict[str, Any]:
    if refused is not None:
        raise PeerError(refused)
    return ENGINES[name].measure(one)


def _floors(one: Round, engines: Iterable[str]) -> dict[str, Any]:
    """The bandwidth, and the bytes of decode steps by what the weights are kept in, of the engines that can tell."""
    figures: dict[str, Any] = {}
    needed = {}
    # The peers' floor is that of bfloat16, which a model that is one file does not have.
    first = ["bfloat16"] if one.places.checkpoint(one.model).exists() else []
    for kind in dict.fromkeys([*first, *(kind for name in engines if (kind := ENGINES[name].floor))]):
        if figures and one.number > 0:
            break  # steps move as many bytes in every round
        try:
            found = floor(one, kind)
        except PeerError as error:
            _say(f"no floor for {kind}: {error}")
            continue
        figures = figures or found
        needed[kind] = found["decode_bytes"]
    if not figures:
        raise PeerError("no engine that was asked for tells what its steps must move")
    return {**figures, "decode_bytes": needed}


def _line(name: str, figures: dict[str, Any]) -> str:
    if name == FLOOR:
        return f"memory reads {figures['read'] / 1e9:.1f} GB/s, copies {figures['copy'] / 1e9:.1f} GB/s"
    rates = "/".join(f"{rate:.1f}" for rate in figures["decode"].values())
    start = figures.get("startup_seconds", figures.get("first_start_seconds"))
    memory = figures["peak_memory_bytes"] / 1e6
    return f"prefill {figures['prefill']:.0f}, decode {rates} tokens/s, start {start:.1f} s, {memory:.0f} MB"


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peers-dir", type=Path, required=True, help="what setup_peers.py filled; holds the models too"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="a folder in which each kind of processor has one (%(default)s)"
    )
    parser.add_argument(
        "--anew", action="store_true", help="forget what an earlier run measured on this kind of processor"
    )
    parser.add_argument(
        "--models",
        help=f"folders of benchmarks/models, and {', '.join(NAMED)} (default: {','.join(MODELS)}; of the names, what "
        "was fetched)",
    )
    known = ", ".join(ENGINES)
    parser.add_argument(
        "--engines", help=f"of {known} (default: {','.join(USUAL)}; of a model with a name, those of its kind of file)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every process")
    parser.add_argument("--batch-sizes", help="of decode (1,8,32; with --depths 1,8)")
    parser.add_argument("--depths", help="measures decode steps after prompts of these lengths alone: 2048,8192")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside every engine (%(default)s)")
    parser.add_argument("--timeout", type=float, default=400, help="seconds that one process may take")
    options = parser.parse_args()
    if options.busy and options.output.resolve() == RESULTS:
        parser.error("--busy N needs an --output of its own: the records are of machines that do nothing else")
    unknown = [name for name in (options.engines or USUAL[0]).split(",") if name not in ENGINES]
    if unknown:
        parser.error(f"there is no engine {unknown[0]}; there are {known}")
    absent = [
        model
        for model in (options.models or MODELS[0]).split(",")
        if model not in NAMED and not (SHAPES / model / "config.json").exists()
    ]
    if absent:
        parser.error(f"there is no {SHAPES / absent[0] / 'config.json'}, and no such name among {', '.join(NAMED)}")
    return options


if __name__ == "__main__":
    main()
