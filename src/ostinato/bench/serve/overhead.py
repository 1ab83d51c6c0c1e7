"""What serving costs: Ostinato's server under load beside `LLM.generate` on the same prompts, in turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.bench.drive import with_room
from ostinato.bench.reports import (
    Column,
    Report,
    Say,
    Table,
    count,
    digits,
    engine_facts,
    engine_lines,
    milliseconds,
    percent,
    spread_columns,
)
from ostinato.bench.serve.figures import count_tokens, serve_figures
from ostinato.bench.serve.sending import Run, Target, run_load, run_on_loop
from ostinato.bench.serve.server_process import ServerProcess
from ostinato.bench.serve.sweep import find_model, load_settings, try_server
from ostinato.bench.serve.workload import Conversation, Load, Ruler, make_conversations
from ostinato.bench.trace import spread
from ostinato.bench.worker import ask
from ostinato.config import EngineConfig
from ostinato.errors import RequestError


@dataclass(frozen=True)
class OverheadBench:
    """What is compared: all of `load`, with `concurrency` requests at a time in the server, and handed over at once to
    `LLM.generate`."""

    load: Load
    concurrency: int
    rounds: int
    ignore_eos: bool


@dataclass(frozen=True)
class Round:
    """Output tokens per second of both, and how many of their answers are the same text."""

    served: float
    generated: float
    same: int


def overhead(settings: dict[str, Any], bench: OverheadBench, say: Say) -> Report:
    """Output tokens per second of both in each round, and the server's over those of `LLM.generate`.

    In each round both load the model in a process of their own, one after the other, and warm up with prompts of
    another run. The load generator runs beside the server, on the same cores. RequestError if the server fails any.
    """
    room = with_room(settings, max_num_seqs=bench.concurrency)
    settings = {**settings, "model": room.model, "max_num_seqs": room.max_num_seqs}
    ruler: Ruler | None = None
    rounds, runs = [], []
    for number in range(bench.rounds):
        say(f"round {number + 1}: the server")
        with ServerProcess(settings) as server:
            model = find_model(server.base_url, None)
            target = Target(server.base_url, model, chat=False, ignore_eos=bench.ignore_eos)
            # In every round, so that the servers of all have done the same before.
            tried, _ = try_server(target, bench.load)
            ruler = ruler or tried
            warm_up, counted = (
                make_conversations(bench.load, ruler, chat=False, number=each) for each in (2 * number, 2 * number + 1)
            )
            run_on_loop(run_load(target, warm_up[: bench.concurrency], bench.concurrency))
            run = run_on_loop(run_load(target, counted, bench.concurrency))
        say(f"round {number + 1}: LLM.generate")
        batches = [_batch(warm_up[: bench.concurrency]), _batch(counted)]
        generated = ask("generate", {"settings": settings, "batches": batches, "ignore_eos": bench.ignore_eos})
        rounds.append(compare_round(run, generated))
        runs.append(run)
    figures = [serve_figures(run, None) for run in runs]
    data = {
        **generated["facts"],
        **overhead_figures(rounds),
        "served": [{name: value for name, value in each.items() if name != "outcomes"} for each in figures],
    }
    more = {"concurrency": bench.concurrency, "rounds": bench.rounds}
    data["settings"] = {**load_settings(target, bench.load), **data["settings"], **more}
    lines = engine_lines(data, "{requests} requests, {concurrency} at a time, {output_tokens} new")
    return Report(data, lines, overhead_tables(data))


def compare_round(run: Run, answer: dict[str, Any]) -> Round:
    """One round; `answer` is of `work`, whose second batch had the same prompts. RequestError if a request failed."""
    failed = [outcome for outcome in run.outcomes if outcome.error is not None]
    if failed:
        said = f"{failed[0].error}, {failed[0].detail}"
        raise RequestError(f"the server failed {len(failed)} of {len(run.outcomes)} requests: {said}")
    tokens = sum(map(count_tokens, run.outcomes))
    same = sum(outcome.text == text for outcome, text in zip(run.outcomes, answer["texts"], strict=True))
    return Round(tokens / run.seconds, answer["output_tokens"] / answer["seconds"], same)


def overhead_figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Median, least and greatest of both rates (output tokens per second), and of their ratio round by round."""
    return {
        "server_tokens_per_second": spread([each.served for each in rounds]),
        "generate_tokens_per_second": spread([each.generated for each in rounds]),
        "ratio": spread([each.served / each.generated for each in rounds]),
        "same_answers": [each.same for each in rounds],
    }


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """The part of `LLM.generate`, in this process: the job's batches, one after the other, the last one timed."""
    from ostinato.engine.llm import LLM
    from ostinato.sample.params import SamplingParams

    config = EngineConfig(**job["settings"])
    llm = LLM(**job["settings"])
    greedy = SamplingParams(temperature=0, ignore_eos=job["ignore_eos"])
    for batch in job["batches"]:
        params = [greedy.model_copy(update={"max_tokens": tokens}) for tokens in batch["output_tokens"]]
        begin = time.perf_counter()
        outputs = llm.generate(batch["prompts"], params)
        seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "texts": [output.outputs[0].text for output in outputs],
        "facts": engine_facts("serve-overhead", config, llm.plan),
    }


def _batch(conversations: Sequence[Conversation]) -> dict[str, Any]:
    turns = [conversation.turns[0] for conversation in conversations]
    return {"prompts": [turn.text for turn in turns], "output_tokens": [turn.output_tokens for turn in turns]}


def overhead_tables(data: Mapping[str, Any]) -> list[Table]:
    """Both rates and their ratio; then what the server and the generator did, round by round."""
    rates = [
        {"name": name, "rate": {key: format(value) for key, value in data[key_of].items()}}
        for name, key_of, format in (
            ("server", "server_tokens_per_second", count),
            ("LLM.generate", "generate_tokens_per_second", count),
            ("ratio", "ratio", digits(3)),
        )
    ]
    rounds = [
        {**served, "round": number, "same": f"{same} of {data['settings']['requests']}"}
        for number, (served, same) in enumerate(zip(data["served"], data["same_answers"], strict=True), start=1)
    ]
    columns = (
        Column("round", "round"),
        Column("first token p50", "time_to_first_token.p50", milliseconds),
        Column("per token p50", "time_per_output_token.p50", milliseconds),
        Column("at once", "at_once.mean", digits(1)),
        Column("generator's CPU", "generator.cpu_share", percent),
        Column("same answers", "same"),
    )
    return [Table((Column("output tokens/s", "name"), *spread_columns("rate", str)), rates), Table(columns, rounds)]
