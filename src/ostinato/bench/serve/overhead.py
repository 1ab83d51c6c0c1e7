"""Cost of serving: Ostinato's server under load compared with `LLM.generate` on the same prompts, alternating."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from ostinato.bench.engine_driver import run_in_process, with_room
from ostinato.bench.report import (
    BenchReport,
    Column,
    ProgressCallback,
    Table,
    engine_facts,
    engine_lines,
    spread_columns,
)
from ostinato.bench.serve.cpu_profile import (
    ENGINE,
    GENERATED,
    PROCESSES,
    PROGRAM,
    Used,
    cost_figures,
    cost_tables,
    profiled,
    sampled,
)
from ostinato.bench.serve.load_generator import LoadRun, Target, run_load, run_on_loop
from ostinato.bench.serve.sweep import count_tokens, find_model, load_settings, serve_figures, try_server
from ostinato.bench.serve.workload import LoadSpec, ScriptedConversation, TokenEstimate, make_conversations
from ostinato.bench.statistics import paired_ratio, spread
from ostinato.child_process import SECRET_VARIABLES
from ostinato.config import EngineConfig
from ostinato.config_fields import setting_flags
from ostinato.errors import ModelError, RequestError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.serve.http.listener import free_port

PATIENCE = 30.0
"""Seconds that a server has to end after the request to do so."""
MAX_OUTPUT = 2000
"""Characters of a failed server's output that are shown."""


@dataclass(frozen=True)
class OverheadBench:
    """The compared load: with `concurrency` requests at a time in the server, and all at once in `LLM.generate`."""

    load: LoadSpec
    concurrency: int
    rounds: int
    ignore_eos: bool
    profile: bool = False
    """True to profile processor time, which takes some of it."""


@dataclass(frozen=True)
class OverheadRound:
    """Output tokens per second of both, and the number of equal answers.

    With a profile, also their tokens and the processor time of each process.
    """

    served: float
    generated: float
    same: int
    served_tokens: int = 0
    generated_tokens: int = 0
    used: Mapping[str, Used] = field(default_factory=dict)


def overhead(settings: dict[str, object], bench: OverheadBench, say: ProgressCallback) -> BenchReport:
    """Measure output tokens per second of both in each round, and the server's rate over that of `LLM.generate`.

    In each round both load the model in separate processes, one after the other, and warm up with prompts of another
    run. The load generator shares the server's cores. Raises RequestError if the server fails any request.
    """
    room = with_room(settings, max_num_seqs=bench.concurrency)
    settings = {**settings, "model": room.model, "max_num_seqs": room.max_num_seqs}
    ruler: TokenEstimate | None = None
    rounds, runs = [], []
    for number in range(bench.rounds):
        say(f"round {number + 1}: the server")
        with ExitStack() as stack:
            directory = Path(stack.enter_context(TemporaryDirectory())) if bench.profile else None
            base_url = stack.enter_context(server_process(settings, directory=directory))
            model = find_model(base_url, None)
            target = Target(base_url, model, chat=False, ignore_eos=bench.ignore_eos)
            # Each round does this, so that all servers have done the same before.
            tried, _ = try_server(target, bench.load)
            ruler = ruler or tried
            warm_up, counted = (
                make_conversations(bench.load, ruler, chat=False, number=each) for each in (2 * number, 2 * number + 1)
            )
            run_on_loop(run_load(target, warm_up[: bench.concurrency], bench.concurrency))
            used = stack.enter_context(profiled(directory)) if directory is not None else {}
            run = run_on_loop(run_load(target, counted, bench.concurrency))
        say(f"round {number + 1}: LLM.generate")
        batches = [_batch(warm_up[: bench.concurrency]), _batch(counted)]
        asked = {"settings": settings, "batches": batches, "ignore_eos": bench.ignore_eos, "profile": bench.profile}
        generated = run_in_process("generate", asked)
        rounds.append(compare_round(run, generated, used))
        runs.append(run)
    figures = [serve_figures(run, None) for run in runs]
    data = {
        **generated["facts"],
        **overhead_figures(rounds),
        "served": [{name: value for name, value in figure.items() if name != "outcomes"} for figure in figures],
    }
    more = {"concurrency": bench.concurrency, "rounds": bench.rounds}
    data["settings"] = {**load_settings(target, bench.load), **data["settings"], **more}
    lines = engine_lines(data, "{requests} requests, {concurrency} at a time, {output_tokens} new")
    return BenchReport(data, lines, overhead_tables(data))


def compare_round(run: LoadRun, answer: JsonObject, used: Mapping[str, Used] | None = None) -> OverheadRound:
    """Return one round from the server's run and `answer`, that of the engine's process to the same prompts.

    `used` is the processor time of the server and the generator, if they were profiled. Raises RequestError if a
    request failed.
    """
    failed = [outcome for outcome in run.outcomes if outcome.error is not None]
    if failed:
        said = f"{failed[0].error}, {failed[0].detail}"
        raise RequestError(f"the server failed {len(failed)} of {len(run.outcomes)} requests: {said}")
    tokens = sum(map(count_tokens, run.outcomes))
    same = sum(outcome.text == text for outcome, text in zip(run.outcomes, answer["texts"], strict=True))
    made = answer["output_tokens"]
    if used:
        used = {**used, GENERATED: Used(**answer["used"])}
    return OverheadRound(tokens / run.seconds, made / answer["seconds"], same, tokens, made, used or {})


def overhead_figures(rounds: Sequence[OverheadRound]) -> JsonObject:
    """Return median, least and greatest of both rates (output tokens per second), and of their ratio round by round."""
    return {
        "server_tokens_per_second": spread([round_.served for round_ in rounds]),
        "generate_tokens_per_second": spread([round_.generated for round_ in rounds]),
        "ratio": paired_ratio([round_.served for round_ in rounds], [round_.generated for round_ in rounds]),
        "same_answers": [round_.same for round_ in rounds],
        **({"microseconds_per_token": _cost(rounds)} if rounds[0].used else {}),
    }


def _cost(rounds: Sequence[OverheadRound]) -> JsonObject:
    served, generated = (
        sum(getattr(round_, name) for round_ in rounds) for name in ("served_tokens", "generated_tokens")
    )
    tokens = {name: generated if name == GENERATED else served for name in PROCESSES}
    return cost_figures([round_.used for round_ in rounds], tokens)


def run_job(job: JsonObject) -> JsonObject:
    """Run `LLM.generate` in this process: the job's batches, one after the other, the last one timed."""
    from ostinato.engine.llm import LLM
    from ostinato.sampling.params import SamplingParams

    config = EngineConfig(**job["settings"])
    llm = LLM(**job["settings"])
    greedy = SamplingParams(temperature=0, ignore_eos=job["ignore_eos"])
    for batch in job["batches"]:
        params = [greedy.model_copy(update={"max_tokens": tokens}) for tokens in batch["output_tokens"]]
        with sampled(ENGINE) if job["profile"] else nullcontext(list[Used]()) as used:
            begin = time.perf_counter()
            outputs = llm.generate(batch["prompts"], params)
            seconds = time.perf_counter() - begin
    return {
        "used": asdict(used[0]) if used else None,
        "seconds": seconds,
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "texts": [output.outputs[0].text for output in outputs],
        "facts": engine_facts("serve-overhead", config, llm.plan),
    }


def _batch(conversations: Sequence[ScriptedConversation]) -> JsonObject:
    turns = [conversation.turns[0] for conversation in conversations]
    return {"prompts": [turn.text for turn in turns], "output_tokens": [turn.output_tokens for turn in turns]}


def overhead_tables(data: JsonMapping) -> list[Table]:
    """Return tables of both rates and their ratio, then of the server and the generator, round by round."""
    rates = [
        {"name": "server", "rate": data["server_tokens_per_second"]},
        {"name": "LLM.generate", "rate": data["generate_tokens_per_second"]},
        {"name": "ratio", "rate": {name: f"{value:.3f}" for name, value in data["ratio"].items()}},
    ]
    rounds = [
        {**served, "round": number, "same": f"{same} of {data['settings']['requests']}"}
        for number, (served, same) in enumerate(zip(data["served"], data["same_answers"], strict=True), start=1)
    ]
    columns = (
        Column("round", "round"),
        Column("first token p50", "time_to_first_token.p50", "ms"),
        Column("per token p50", "time_per_output_token.p50", "ms"),
        Column("at once", "at_once.mean", "{:,.1f}"),
        Column("generator's CPU", "generator.cpu_share", "percent"),
        Column("same answers", "same"),
    )
    own = [Table((Column("output tokens/s", "name"), *spread_columns("rate", "count")), rates), Table(columns, rounds)]
    return own + (cost_tables(data["microseconds_per_token"]) if "microseconds_per_token" in data else [])


@contextmanager
def server_process(settings: Mapping[str, object], directory: Path | None = None) -> Iterator[str]:
    """Yield the base URL of an `ostinato serve` that is ready, on a free loopback port, and ends with the context.

    With a `directory` the server is profiled (`cpu_profile.py`). Raises ModelError, with the end of the server's
    output, if it ended or was not ready in time.
    """
    port = free_port()
    command, job = ostinato_command("serve", port, setting_flags(settings)), b""
    if directory is not None:
        command = [sys.executable, "-c", PROGRAM]
        job = json.dumps({"settings": settings, "port": port, "directory": str(directory)}).encode()
    with running(command, port, job=job) as url:
        yield f"{url}/v1"


def ostinato_command(name: str, port: int, flags: Sequence[str]) -> list[str]:
    """Return the command line of a server on a loopback port."""
    return [sys.executable, "-m", "ostinato.cli.main", name, "--host", "127.0.0.1", "--port", str(port), *flags]


@contextmanager
def running(command: Sequence[str], port: int, ready_within: float = 600.0, job: bytes = b"") -> Iterator[str]:
    """Yield the URL of a server that `command` starts on `port`, once it is ready; `job` is what it reads.

    ModelError as `server_process`.
    """
    import httpx2

    # The keys are of the user's own servers, and not for this one.
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES.values()}
    with TemporaryFile() as asked, TemporaryFile() as output:
        asked.write(job)
        asked.seek(0)
        process = subprocess.Popen(command, stdin=asked, stdout=output, stderr=subprocess.STDOUT, env=environment)

        def said() -> str:
            output.seek(0)
            return output.read().decode(errors="replace")[-MAX_OUTPUT:].strip()

        def is_ready() -> bool:
            if process.poll() is not None:
                raise ModelError(f"the server ended with status {process.returncode}; it said:\n{said()}")
            try:
                # The request goes straight to the server, whatever proxies the environment names.
                health = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False)
            except httpx2.HTTPError:
                return False
            return health.status_code == 200

        try:
            deadline = time.monotonic() + ready_within
            while not is_ready():
                if time.monotonic() > deadline:
                    raise ModelError(f"the server was not ready after {ready_within:g} s; it said:\n{said()}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
