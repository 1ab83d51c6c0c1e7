"""`ostinato batch`: a file of requests to the server's endpoints, answered without a server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato.cli.options import engine_options
from ostinato.cli.output import note
from ostinato.errors import RequestError


@engine_options
def batch(
    settings: dict[str, Any],
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="A request a line, in OpenAI's batch form.")],
    answers: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where answers are added, one a line.")],
    served_model_name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The model's name in requests (that of the checkpoint).")
    ] = None,
) -> None:
    """Answer a file of requests, in the form of OpenAI's batches.

    A line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. A body means what it
    means to `ostinato serve`. Requests that OUT.jsonl already answers are not computed again, so the same command
    continues a run that was stopped. The status is 1 if any request of the file was refused.

    Example: ostinato batch docs/examples/batch.jsonl answers.jsonl
    """
    from ostinato.config import EngineConfig
    from ostinato.engine.process.failures import EngineFailed
    from ostinato.engine.progress import generation_progress, start_progress
    from ostinato.serve.batch.files import AnswerFile, read_lines
    from ostinato.serve.batch.run import URLS, batch_settings, run_batch

    config = EngineConfig(**{"model": "demo", **settings})
    lines = read_lines(requests, URLS)
    if answers.exists() and answers.samefile(requests):
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

                    chosen = batch_settings(served_model_name)
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
