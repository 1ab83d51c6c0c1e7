"""`ostinato serve`, `ostinato batch`, `ostinato route` and `ostinato ray-config`.

`serve` is the OpenAI-compatible server. `batch` answers a file of requests to the server's endpoints without a server.
`route` passes requests on to several servers. `ray-config` writes an application for a cluster of Ray.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic.fields import FieldInfo

from ostinato.child_process import SECRET_VARIABLES
from ostinato.cli.flags import (
    AS_TEXT,
    SIZE,
    Model,
    check_model,
    described,
    engine_options,
    name_model,
    setting_flag,
    with_flags,
)
from ostinato.cli.help import SERVER
from ostinato.cli.output import note
from ostinato.errors import RequestError
from ostinato.json_io import JsonObject
from ostinato.serve.settings import BYTE_SETTINGS, ServeSettings, UnknownFields


@engine_options
def batch(
    settings: JsonObject,
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="A request a line, in OpenAI's batch form.")],
    answers: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where answers are added, one a line.")],
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="The model's name in requests (that of the checkpoint); several may be given."
        ),
    ] = None,
    unknown_fields: Annotated[
        UnknownFields, typer.Option(help="Unknown fields of a request: an error, ignored with a log line, or ignored.")
    ] = "error",
) -> None:
    """Answer a file of requests, in the form of OpenAI's batches.

    A line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. A body means what it
    means to `ostinato serve`. Requests that OUT.jsonl already answers are not computed again, so the same command
    continues a run that was stopped. The status is 1 if any request of the file was refused.

    Example: ostinato batch docs/examples/batch.jsonl answers.jsonl
    """
    import asyncio

    from ostinato.config import EngineConfig
    from ostinato.engine.progress import generation_progress, start_progress
    from ostinato.errors import EngineFailed
    from ostinato.files import exists
    from ostinato.serve.batch.files import AnswerFile, read_lines
    from ostinato.serve.batch.run import URLS, batch_settings, run_batch

    config = EngineConfig(**{"model": "demo", **settings})
    lines = read_lines(requests, URLS)
    if exists(answers) and answers.samefile(requests):
        raise RequestError(f"{answers} holds the requests; name another file for the answers")
    with AnswerFile(answers) as file:
        ids = {line.custom_id for line in lines}
        if others := file.statuses.keys() - ids:
            message = f"{answers} answers {min(others)!r}, which {requests} does not ask; name another file"
            raise RequestError(message)
        left = [line for line in lines if line.custom_id not in file.statuses]
        before = f", of which {len(file.statuses)} are answered" if file.statuses else ""
        note(f"{requests}: {len(lines)} requests{before}")
        if left:
            check_model(settings, plans=False)
            num_tokens, begin = 0, 0.0

            def ready() -> None:
                nonlocal begin
                begin = time.perf_counter()
                note(f"computing {len(left)} answers")

            note(f"loading {config.model}")
            try:
                with start_progress() as loading, generation_progress(len(left)) as advance:

                    def answered(tokens: int) -> None:
                        nonlocal num_tokens
                        num_tokens += tokens
                        advance(tokens)

                    chosen = batch_settings(served_model_name or (), unknown_fields)
                    asyncio.run(run_batch(config, chosen, requests, left, file, loading, ready, answered))
            except (KeyboardInterrupt, EngineFailed) as error:
                note(f"stopped: {answers} has {len(file.statuses)} of {len(lines)}; the same command goes on")
                if isinstance(error, KeyboardInterrupt):
                    raise
                note(str(error))
                raise typer.Exit(1) from None
            seconds = time.perf_counter() - begin
            note(f"{len(left)} answers in {seconds:.1f} s, {num_tokens / seconds:,.0f} tokens/s")
        refused = file.num_refused
    note(f"{answers}: {len(lines)} answers" + (f", {refused} of them refusals" if refused else ""))
    raise typer.Exit(1 if refused else 0)


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each of ServeSettings; `serving: JsonObject` receives the given ones."""
    flags = _server_flags(ServeSettings.model_fields)
    return with_flags(command, "serving", flags, check=lambda given: ServeSettings(**given))


def _server_flags(names: Iterable[str]) -> list[inspect.Parameter]:
    return [_flag(name, ServeSettings.model_fields[name]) for name in names]


def _announce(settings: ServeSettings, url: str) -> None:
    """Say where the server listens, and how other devices reach it."""
    from ostinato.serve.http.listener import reach_text

    note(f"listening on {url} (Ctrl-C ends it)")
    reach = reach_text(url, settings)
    if reach is not None:
        note(f"({reach})")


ROUTE_SETTINGS = (
    "host", "port", "uds", "uds_mode", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "root_path", "api_key",
    "api_key_file", "insecure", "routing", "max_body", "request_timeout", "body_workers", "worker_seconds",
    "worker_memory", "client_seconds", "client_pixels", "header_timeout", "keep_alive_timeout", "max_connections",
    "max_connections_per_address", "drain_timeout", "metrics_prefix", "log_level", "log_format", "access_log",
    "trusted_proxy",
)  # fmt: skip
"""Settings of the server that a router has too."""


def _route_options(command: Callable[..., None]) -> Callable[..., None]:
    def check(given: JsonObject) -> None:
        ServeSettings(**{name: value for name, value in given.items() if name != "routing"})  # which is of its own here

    return with_flags(command, "serving", _server_flags(ROUTE_SETTINGS), check=check, reads_file=True)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    metavar = SIZE if name in BYTE_SETTINGS else AS_TEXT.get(name)
    return setting_flag(
        name,
        field,
        described(field, metavar),
        metavar,
        envvar=SECRET_VARIABLES.get(name),
        show_envvar=True,
        rich_help_panel=SERVER,
    )


@engine_options
@server_options
def serve(
    settings: JsonObject,
    serving: JsonObject,
    target: Model = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings as a file for --config, and exit.")
    ] = False,
) -> None:
    """Serve a model to OpenAI clients, with a page to try it on and to watch it work.

    SIGTERM and Ctrl-C let running requests end, and then exit with status 0.

    Example: ostinato serve demo --port 8000
    """
    name_model(settings, target)
    chosen = ServeSettings(**serving)
    from ostinato.config import EngineConfig

    config = EngineConfig(**{"model": "demo", **settings})
    if print_config:
        from ostinato.cli.flags import print_config as lines

        for each in (config, chosen):
            print("\n".join(lines(each)))
        return
    if not chosen.is_replicated:  # a cluster's nodes have the model, and this machine may not
        check_model(settings, plans=False)
    from ostinato.serve.http.listener import EarlyAnswers, listening

    with ExitStack() as opened:
        early = None
        if chosen.ssl_certfile is None:  # what follows takes seconds, and a probe should learn that the server starts
            listener = opened.enter_context(listening(chosen))
            early = listener, EarlyAnswers(listener)
            opened.callback(early[1].close)
        from ostinato.engine.progress import start_progress
        from ostinato.serve.server import serve as run

        with start_progress() as progress:
            status = run(config, chosen, progress, partial(_announce, chosen), early=early)
    raise typer.Exit(status)


@engine_options
@server_options
def ray_config(
    settings: JsonObject,
    serving: JsonObject,
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
    from ostinato.serve.ray.config_file import ray_config as written

    print(written(EngineConfig(**{"model": "demo", **settings}), ServeSettings(**serving), ingresses), end="")


@_route_options
def route(
    serving: JsonObject,
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The servers' checkpoint on this machine.", show_default=False),
    ] = None,
    backends: Annotated[
        str, typer.Option(metavar="URL,URL,...", help="The servers, such as http://127.0.0.1:8001.")
    ] = "",
    backend_key: Annotated[
        str | None,
        typer.Option(
            envvar=SECRET_VARIABLES["backend_key"], help="A key for the servers, in place of the clients' own."
        ),
    ] = None,
    ext_proc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Serve Envoy's external processing there too, as an endpoint picker of llm-d."
        ),
    ] = None,
) -> None:
    """Pass requests on to the one of several servers that has most of the prompt cached, within its share of the work.

    The servers tell what they have cached if they run with --kv-events hashes. MODEL is the checkpoint whose tokenizer
    is used (that of the servers' plan).

    Example: ostinato route --backends http://127.0.0.1:8001,http://127.0.0.1:8002 --port 8000
    """
    from ostinato.serve.route.proxy import RouteLifecycle, RouteSettings, make_route_app
    from ostinato.serve.server import run_server

    policy = serving.pop("routing", "prefix")
    settings = ServeSettings(**serving)
    urls = tuple(url.strip() for url in backends.split(",") if url.strip())
    chosen = RouteSettings(urls, target, backend_key, policy, ext_proc)
    lifecycle = RouteLifecycle(settings, chosen)
    status = run_server(lambda: (lifecycle, make_route_app(lifecycle)), settings, partial(_announce, settings))
    raise typer.Exit(status)
