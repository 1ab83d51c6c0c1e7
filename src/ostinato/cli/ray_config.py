"""`ostinato ray-config`: an application for a cluster of Ray."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ostinato.cli.options import Model, engine_options, name_model
from ostinato.cli.serve import server_options
from ostinato.serve.settings import ServeSettings


@engine_options
@server_options
def ray_config(
    settings: dict[str, Any],
    serving: dict[str, Any],
    target: Model = None,
    ingresses: Annotated[
        int, typer.Option(min=1, help="Processes that answer HTTP, behind the proxies of Ray Serve.")
    ] = 1,
) -> None:
    """Write the config file of Ray Serve for a model on a cluster, with the flags of `ostinato serve`.

    This machine stands for the cluster's nodes: what the plan finds here, they must have.

    Example: ostinato ray-config demo --replicas 2 > serve.yaml
    """
    name_model(settings, target)
    from ostinato.config import EngineConfig
    from ostinato.serve.replicas.config_file import ray_config as written

    print(written(EngineConfig(**{"model": "demo", **settings}), ServeSettings(**serving), ingresses), end="")
