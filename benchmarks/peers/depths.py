"""Decode steps after long prompts, beside llama.cpp: `run.py --depths`.

Ours are steps whose memory holds keys of a prompt (`ostinato.bench.step_timing`), with the LM head and without
sampling, as `llama-batched-bench` decodes. Its prompt is computed once and copied to every row (`-pps`), which it
cannot do with states.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.llama import decode_rates
from benchmarks.peers.places import Places
from benchmarks.peers.process import PeerError, run
from ostinato.errors import CapacityError

KEYS = {"auto": "f16", "int8": "q8_0"}
"""Values of kv_cache_dtype that are compared (auto: bfloat16), and llama.cpp's types of as many bits."""
STEPS = 12
"""Steps of each cell; the first two are not counted."""
AIMS = {"floor": 0.8, "llama.cpp": 1.3}


def ours(checkpoint: Path, keys: str, depths: Sequence[int], sizes: Sequence[int], threads: int) -> dict[str, Any]:
    """Our tokens/s and the bytes of a step by "depth rows", the memory's bandwidth, and the cells without memory."""
    from ostinato.bench.engine_driver import with_room
    from ostinato.bench.roofline import decode_bytes, measure_bandwidth
    from ostinato.bench.step_timing import make_decode_steps
    from ostinato.engine.core import EngineCore

    with TemporaryDirectory(dir=checkpoint.parent) as directory:
        for file in checkpoint.iterdir():
            if file.name != "config.json":
                (Path(directory) / file.name).hardlink_to(file)
        # Shapes state the length of their other benchmarks, which changes nothing of a step.
        longer = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        longer["max_position_embeddings"] = 2 * max(depths)
        (Path(directory) / "config.json").write_text(json.dumps(longer), encoding="utf-8")
        settings = {"model": directory, "dtype": "bfloat16", "kv_cache_dtype": keys, "threads": threads}
        settings["enable_prefix_caching"] = False
        engine = EngineCore(with_room(settings, max_num_seqs=max(sizes), max_model_len=max(depths) + STEPS))
    runner, spec, cells, refused = engine.runner, engine.spec, {}, []
    bandwidth = measure_bandwidth("cpu", isa=engine.plan.device.native.isa).best
    for depth in depths:
        for rows in sizes:
            try:
                step = make_decode_steps(runner, (rows,), depth, spec.vocab_size)[rows]
            except CapacityError:
                refused.append(f"{depth} {rows}")
                continue
            seconds = []
            for _ in range(STEPS):
                begin = time.perf_counter()
                runner.model.compute_logits(runner.execute_model(step).hidden[:rows])
                seconds.append(time.perf_counter() - begin)
            needed = decode_bytes(spec, engine.plan, rows, depth)
            num_bytes = None if needed is None else needed.total
            cells[f"{depth} {rows}"] = {"rate": rows / statistics.median(seconds[2:]), "bytes": num_bytes}
    has_states = bool(engine.plan.memory.num_slots)
    return {"cells": cells, "bandwidth": bandwidth, "without_memory": refused, "has_states": has_states}


def theirs(
    tool: Path, file: Path, keys: str, depth: int, sizes: Sequence[int], threads: int, timeout: float, *, shares: bool
) -> dict[str, float]:
    """llama.cpp's tokens/s by rows; the prompt of one is copied to all if it `shares`."""
    command = [str(tool), "-m", str(file), "-fa", "on", "-t", str(threads), "-tb", str(threads)]
    command += ["-npp", str(depth), "-ntg", str(STEPS), *(["-pps"] if shares else [])]
    command += ["-npl", ",".join(map(str, sizes)), "-c", str(max(sizes) * (depth + STEPS)), "--output-format", "jsonl"]
    command += ["-ctk", KEYS[keys], "-ctv", KEYS[keys]]
    return decode_rates(run(command, timeout, {"OMP_NUM_THREADS": str(threads)}).lines, sizes)


def measure_depths(
    places: Places, models: Sequence[str], depths: Sequence[int], sizes: Sequence[int], threads: int, timeout: float
) -> list[dict[str, Any]]:
    """Each cell: model, keys, depth, rows, our rate, its share of the floor, and llama.cpp's rate."""
    found = []
    for model in models:
        for keys in KEYS:
            with get_context("spawn").Pool(1) as process:
                mine = process.apply(ours, (places.checkpoint(model), keys, depths, sizes, threads))
            for depth in depths:
                fitting = [rows for rows in sizes if f"{depth} {rows}" in mine["cells"]]
                try:
                    where = places.llama_tool("llama-batched-bench"), places.gguf(model, "bf16"), keys, depth, fitting
                    peer = theirs(*where, threads, timeout, shares=not mine["has_states"]) if fitting else {}
                except (PeerError, OSError) as error:
                    print(f"llama.cpp, {model}, {keys}, depth {depth}: {error}", flush=True)
                    peer = {}
                for rows in fitting:
                    cell = mine["cells"][f"{depth} {rows}"]
                    floor = cell["bytes"] and cell["bytes"] / mine["bandwidth"] * cell["rate"] / rows
                    row = {"model": model, "keys": keys, "depth": depth, "rows": rows, "ostinato": cell["rate"]}
                    found.append({**row, "floor": floor, "llama.cpp": peer.get(str(rows))})
                    print(depth_table(found).splitlines()[-1], flush=True)
            for cell in mine["without_memory"]:
                depth_, rows_ = cell.split()
                print(f"{model}, {keys}: the memory does not hold {rows_} rows of {depth_} tokens", flush=True)
    return found


def cell_name(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[part] for part in ("model", "keys", "depth", "rows"))


def depth_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Cells as Markdown; a figure under its aim is bold."""
    lines = ["| model | keys | depth | rows | tokens/s | of the floor | llama.cpp | ratio |", "|---|---|" + "---:|" * 6]
    for cell in cells:
        peer = cell["llama.cpp"]
        ratio = peer and cell["ostinato"] / peer
        aims = {**AIMS, "llama.cpp": AIMS["llama.cpp"] if cell["rows"] >= 8 else 0}
        shown = [
            "-" if value is None else f"**{value:.2f}**" if value < aims[name] else f"{value:.2f}"
            for name, value in (("floor", cell["floor"]), ("llama.cpp", ratio))
        ]
        rate = "-" if peer is None else f"{peer:.1f}"
        start = f"| `{cell['model']}` | {cell['keys']} | {cell['depth']:,} | {cell['rows']} | {cell['ostinato']:.1f}"
        lines.append(f"{start} | {shown[0]} | {rate} | {shown[1]} |")
    return "\n".join(lines) + "\n"
