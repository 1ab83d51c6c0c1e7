"""`ostinato plan`: what an engine would do, without weights and without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ostinato.cli.flags import Model, check_model, engine_options, name_model
from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject, to_json_data
from ostinato.plan.device.gpu_catalogue import DEVICE_NAMES

if TYPE_CHECKING:
    from ostinato.plan.plan import Plan
    from ostinato.plan.traffic import Traffic


@engine_options
def plan(
    settings: JsonObject,
    target: Model = None,
    device: Annotated[
        str, typer.Option(help=f"auto and cuda (this machine), or one of {', '.join(DEVICE_NAMES)}.")
    ] = "auto",
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the device in place of its own.")
    ] = None,
    traffic: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What an engine counted, or you wrote down: from its batches capture sizes are chosen, from its "
            "requests follows what engines carry.",
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]", help="Of the engine, for the requests of --traffic (with --rate the fewest that do)."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="R", min=1e-6, help="Requests of --traffic per second, in all.")
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TTFT:ITL",
            help="Milliseconds to the first token and, in the mean, between tokens, that requests of --traffic may "
            "take.",
        ),
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
    counted = None
    if traffic is not None:
        from ostinato.plan.traffic import Traffic

        counted = Traffic.load(traffic)
    if num_sizes is not None and counted is not None and not counted.has_steps:
        raise ConfigError(
            f"--num-sizes is about steps, of which {traffic} counts none; ostinato generate --save-traffic FILE does"
        )
    _check_offered(counted, traffic, {"--replicas": replicas, "--rate": rate, "--deadline": deadline})
    name_model(settings, target)
    config, spec = check_model(settings, plans=False)
    # Imported here: help, and the errors above, need no planner.
    from ostinato.engine.planning import device_of, plan_on
    from ostinato.plan.render.tables import print_plan, render_launches

    found = device_of(device, device_memory, "--device-memory")
    made = plan_on(config, spec, found, device_memory is not None)
    if measure:
        _measure(made)
        found = device_of(device, device_memory, "--device-memory")
        made = plan_on(config, spec, found, device_memory is not None)
    if output is not None:
        made.save(output)
    sizing = layouts = None
    if counted is not None and counted.has_steps:
        from ostinato.plan.traffic import size_for_traffic

        limits = {name: getattr(made.settings, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
        sizing = size_for_traffic(counted, made.capture, num_sizes=num_sizes, **limits)
    is_asked = not (replicas is rate is deadline is None)
    if counted is not None and counted.requests is not None and (made.prediction.steps or is_asked):
        from ostinato.plan.capacity.estimate import OfferedLoad, estimate_layouts, parse_deadline

        within = None if deadline is None else parse_deadline(deadline)
        offered = OfferedLoad(counted.requests, rate, within)
        layouts = estimate_layouts(config, spec, found, made, offered, _counts(replicas))
    if as_json:
        of_traffic = {"traffic": to_json_data(sizing)} if sizing else {}
        print(
            json.dumps(
                {**made.to_json(), **of_traffic, **({"layouts": to_json_data(layouts)} if layouts else {})}, indent=2
            )
        )
        return
    print_plan(made, Console())
    if launches:
        Console().print(render_launches(made))
    if sizing is not None:
        from ostinato.plan.render.graph_tables import print_sizing

        print_sizing(sizing, Console())
    if layouts is not None:
        from ostinato.plan.render.graph_tables import print_layouts

        print_layouts(layouts, Console())
    elif counted is not None and counted.requests is not None:
        print(f"what engines carry of the requests is not estimated: {made.prediction.reason}", file=sys.stderr)


def _check_offered(counted: Traffic | None, path: Path | None, flags: Mapping[str, object]) -> None:
    """Raise ConfigError if one of `flags` is given without the requests that it applies to."""
    given = [name for name, value in flags.items() if value is not None]
    if given and (counted is None or counted.requests is None):
        where = "there is none" if counted is None else f"{path} counts none"
        raise ConfigError(
            f"{given[0]} is about the requests of a --traffic FILE, and {where}; such a file is "
            '{"requests": {"prompt_tokens": {"512": 1}, "output_tokens": {"128": 1}}}, or what --save-traffic writes'
        )


def _counts(text: str | None) -> tuple[int, ...]:
    """Return the numbers in `N[,N...]`. ConfigError for other text."""
    from ostinato.plan.capacity.estimate import MAX_REPLICAS

    try:
        counts = tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        counts = (0,)
    if any(not 1 <= count <= MAX_REPLICAS for count in counts):
        raise ConfigError(f"--replicas {text!r} should be whole numbers from 1 to {MAX_REPLICAS}, such as 1,2,4")
    return counts


def _measure(plan: Plan) -> None:
    """Measure the rates that the plan asks for, and save them."""
    from ostinato.bench.measure_rates import measure_rates
    from ostinato.plan.device.measured_rates import cache_directory, save_rates

    rates, directory = measure_rates(plan), cache_directory()
    try:
        path = save_rates(rates, directory)
    except (OSError, ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"rates cannot be kept in {directory}: {why}; set XDG_CACHE_HOME") from None
    print(f"measured, and kept in {path}", file=sys.stderr)
