"""The config file of Ray Serve for a cluster: `ostinato ray-config`. Without ray."""

from __future__ import annotations

import yaml

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.json_io import JsonObject
from ostinato.serve.ray.layout import END_SECONDS, app_name, deployment_options, lay_out
from ostinato.serve.settings import ServeSettings

NOT_THERE = {
    **dict.fromkeys(
        ("uds", "uds_mode", "header_timeout", "keep_alive_timeout", "max_connections", "max_connections_per_address"),
        "the proxies of Ray Serve have the connections",
    ),
    **dict.fromkeys(
        ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
        "the proxies of Ray Serve speak plain HTTP; give TLS to what is in front of them",
    ),
    "ray_address": "the file is for the cluster that reads it",
    "api_key": "the file may be read by others; give api_key_file, a path on every node, or the variable "
    "OSTINATO_API_KEY to the nodes",
    "on_stall": "Ray Serve replaces a replica that gives no sign of life",
}
"""Settings of the server that an application on Ray Serve does not have -> why."""


def ray_config(config: EngineConfig, settings: ServeSettings, ingresses: int = 1) -> str:
    """Return the file, as YAML. ConfigError for a setting that does not apply on a cluster, and the plan's errors."""
    for name in sorted(settings.model_fields_set & NOT_THERE.keys()):
        raise ConfigError(f"{name} does not apply on a cluster: {NOT_THERE[name]}", [Remedy(name, None)])
    if settings.port == 0:
        raise ConfigError("port 0 does not apply on a cluster: all nodes listen on one", [Remedy("port", None)])
    layout = lay_out(config, settings.most_replicas, on_one_machine=False)
    name = app_name(settings.name_of(config.model))
    outside = {"host", "port"}
    server = settings.model_dump(mode="json", include=settings.model_fields_set - outside)
    # Keys are asked for by RequestMiddleware, wherever the proxies listen.
    names = settings.served_model_name or (settings.name_of(config.model),)
    server |= {"host": settings.host, "served_model_name": names[0] if len(names) == 1 else list(names)}
    whole: JsonObject = {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings.host, "port": settings.port, "request_timeout_s": None},
        "applications": [
            {
                "name": name,
                "route_prefix": "/",
                "import_path": "ostinato.serve.ray.deployments:build",
                "args": {"name": name, "engine": layout.engine_settings, "server": server},
                "deployments": [
                    {"name": "Engine", **deployment_options(layout, settings)},
                    {
                        "name": "Ingress",
                        "num_replicas": ingresses,
                        "max_ongoing_requests": 10_000,
                        "ray_actor_options": {"num_cpus": 1},
                        "graceful_shutdown_timeout_s": settings.drain_timeout + END_SECONDS,
                    },
                ],
            }
        ],
    }
    return yaml.safe_dump(whole, sort_keys=False, width=120)
