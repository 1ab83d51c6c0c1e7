"""`ostinato plan`: what an engine would do, without weights and without a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ostinato.cli.options import Model, engine_options, name_model
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.models.checkpoint import load_spec
from ostinato.plain_data import to_plain
from ostinato.plan.device.catalogue import DEVICE_NAMES, DeviceSpec
from ostinato.plan.device.detect import find_device
from ostinato.plan.device.rates import cache_directory, save_rates
from ostinato.plan.graphs.sizing import size_for_traffic
from ostinato.plan.graphs.traffic import Traffic
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.words.render import print_plan, render_launches
from ostinato.plan.words.render_graphs import print_sizing
from ostinato.units import format_bytes, parse_bytes


@engine_options
def plan(
    settings: dict[str, Any],
    target: Model = None,
    device: Annotated[
        str, typer.Option(help=f"auto and cuda (this machine), or one of {', '.join(DEVICE_NAMES)}.")
    ] = "auto",
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the device in place of its own.")
    ] = None,
    traffic: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Choose capture sizes from the batches that an engine counted in this file."),
    ] = None,
    num_sizes: Annotated[
        int | None, typer.Option(metavar="N", help="So many sizes for each ladder (as many as are planned).")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="First measure this machine's kernels, which takes seconds, and keep what came of it: from that plans "
            "predict the time of steps.",
        ),
    ] = False,
    launches: Annotated[
        bool, typer.Option("--launches", help="Also list what Triton kernels start: blocks, warps and stages.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also save the plan, as JSON, to this file.")] = None,
) -> None:
    """Show what an engine would do: memory, limits, graphs, kernels, and every decision with its reason.

    MODEL is `demo`, `demo-vl`, a directory that holds at least a config.json, or a hub id. Nothing is loaded.

    Example: ostinato plan demo --device l4-24gb --max-num-seqs 64
    """
    if num_sizes is not None and traffic is None:
        raise ConfigError("--num-sizes is the number of sizes that --traffic FILE chooses; give both")
    name_model(settings, target)
    config = EngineConfig(**settings)
    spec = load_spec(config)
    made = make_plan(config, spec, _device(device, device_memory))
    if measure:
        _measure(made)
        made = make_plan(config, spec, _device(device, device_memory))
    if output is not None:
        try:
            made.save(output)
        except OSError as error:
            raise ConfigError(f"the plan cannot be saved to {output}: {error.strerror}") from None
    sizing = None
    if traffic is not None:
        limits = {name: getattr(made.settings, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
        sizing = size_for_traffic(Traffic.load(traffic), made.capture, num_sizes=num_sizes, **limits)
    if as_json:
        print(json.dumps(made.to_json() | ({"traffic": to_plain(sizing)} if sizing else {}), indent=2))
        return
    print_plan(made, Console())
    if launches:
        Console().print(render_launches(made))
    if sizing is not None:
        print_sizing(sizing, Console())


def _measure(plan: Plan) -> None:
    """Measures the rates that the plan asks for, and keeps them."""
    from ostinato.bench.probe import measure_rates

    rates, directory = measure_rates(plan), cache_directory()
    try:
        path = save_rates(rates, directory)
    except OSError as error:
        raise ConfigError(f"rates cannot be kept in {directory}: {error.strerror}; set XDG_CACHE_HOME") from None
    print(f"measured, and kept in {path}", file=sys.stderr)


def _device(name: str, memory: str | None) -> DeviceSpec:
    device = find_device(name)
    if memory is None:
        return device
    size = parse_bytes(memory)
    source = f"{device.source}; memory as given, in place of {format_bytes(device.memory_bytes)}"
    return replace(device, memory_bytes=size, source=source)
