"""Throughput compared with another engine, alternating on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from ostinato.bench.engine_driver import Workload, bench_config, run_batch, run_in_process, with_room
from ostinato.bench.report import (
    BenchReport,
    Column,
    ProgressCallback,
    Table,
    engine_facts,
    engine_lines,
    spread_columns,
)
from ostinato.bench.statistics import RoundTrace, median_ratio
from ostinato.bench.throughput import LENGTHS, NAMES, RATES, name_of, throughput_figures
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject
from ostinato.models.checkpoint import checkpoint_of, load_spec

PEERS = ("transformers",)
COLUMNS = (*NAMES, Column("engine", "engine", is_text=True), *spread_columns("rate", "count"))


def check_peer(peer: str) -> None:
    """Raise ConfigError if `peer` is not known or not installed."""
    if peer not in PEERS:
        raise ConfigError(f"cannot compare with {peer!r}; the known ones are {', '.join(PEERS)}")
    if find_spec(peer) is None:
        raise ConfigError(f"comparing with {peer} needs it installed: pip install {peer}")


def compare(settings: dict[str, object], workload: Workload, peer: str, say: ProgressCallback) -> BenchReport:
    """Measure both engines, and the ratio of their median rates (above 1: Ostinato is faster).

    Each round is a process of Ostinato, then one of the peer; both load the model, warm up and run one counted batch of
    each size, with the same prompts, dtype and number of threads.
    """
    check_peer(peer)
    vocab_size = load_spec(bench_config(settings, workload)).vocab_size
    answers: dict[str, list[JsonObject]] = {"ostinato": [], peer: []}
    for number in range(workload.rounds):
        job = {"settings": settings, "batches": _batches(workload, vocab_size, number)}
        say(f"round {number + 1}: ostinato")
        answers["ostinato"].append(run_in_process("ostinato", job))
        effective = answers["ostinato"][0]["settings"]
        same = {name: effective[name] for name in ("dtype", "threads", "device")}
        say(f"round {number + 1}: {peer}")
        answers[peer].append(run_in_process(peer, {**job, **same}))
    results, rows = [], []
    for index, batch_size in enumerate(workload.batch_sizes):
        figures = {name: _figures(given, index) for name, given in answers.items()}
        ratio = {rate: median_ratio(figures["ostinato"][rate], figures[peer][rate]) for rate in RATES}
        results.append({"batch_size": batch_size, **figures, "ratio": ratio})
        for rate in RATES:
            row = {"batch_size": batch_size, "name": name_of(rate)}
            rows.append({**row, "engine": "ostinato", "rate": figures["ostinato"][rate], "ratio": ratio[rate]})
            rows.append({**row, "engine": peer, "rate": figures[peer][rate], "ratio": None})
    ours = answers["ostinato"][0]
    data = {
        **{name: ours[name] for name in ("command", "command_line", "date", "model", "settings", "machine")},
        "compare": {"peer": peer, "version": answers[peer][0]["version"]},
        "results": results,
    }
    data["settings"] |= asdict(workload)
    ratios = Column("ratio", "ratio", "{:,.2f}", help=f"median of ostinato over that of {peer}")
    return BenchReport(data, engine_lines(data, LENGTHS), [Table((*COLUMNS, ratios), rows)])


def run_job(job: JsonObject) -> JsonObject:
    """Run Ostinato's part of a round in this process: return a trace of each of the job's batches, one after the other.

    A batch has `prompts`, lists of token ids, and `output_len`. `startup_seconds` is the time from `began` until the
    first batch was answered: the start-up to the first token, if that batch is one prompt and one token of output.
    """
    batches = job["batches"]
    config = with_room(
        job["settings"],
        max_num_seqs=max(len(batch["prompts"]) for batch in batches),
        max_model_len=max(len(batch["prompts"][0]) + batch["output_len"] for batch in batches),
    )
    from ostinato.engine.core import EngineCore

    engine = EngineCore(config)
    figures = _run_all(job, lambda prompts, output_len: run_batch(engine, prompts, output_len))
    return {**figures, **engine_facts("throughput", config, engine.plan)}


def answer_by_transformers(job: JsonObject) -> JsonObject:
    """Run the same with transformers' `generate`, with the `dtype`, `device` and number of `threads` of the job."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    model = _load(EngineConfig(**job["settings"]), job["dtype"], job["device"])
    figures = _run_all(job, lambda prompts, output_len: _generate(model, prompts, output_len))
    return {**figures, "version": transformers.__version__}


def _run_all(job: JsonObject, run: Callable[[list[list[int]], int], RoundTrace]) -> JsonObject:
    traces, ends = [], []
    for batch in job["batches"]:
        traces.append(asdict(run(batch["prompts"], batch["output_len"])))
        ends.append(time.monotonic())
    return {"traces": traces, "startup_seconds": ends[0] - job["began"]}


def _load(config: EngineConfig, dtype: str, device: str) -> object:
    import torch
    import transformers

    directory = checkpoint_of(config)
    options = {"dtype": getattr(torch, dtype)}
    if config.random_weights:
        torch.manual_seed(config.seed)
        shape = transformers.AutoConfig.from_pretrained(directory)
        with torch.device(device):  # billions of weights are drawn there in no time
            model = transformers.AutoModelForCausalLM.from_config(shape, **options)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    # If no end token is set, every row runs to the full length and no logits need masking.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()


def _generate(model: Any, prompts: list[list[int]], output_len: int) -> RoundTrace:
    import torch
    import transformers

    ids = torch.tensor(prompts, device=model.device)
    begin = time.perf_counter()
    moments: list[float] = []

    class Clock(transformers.StoppingCriteria):
        """Stopping criterion that never stops, and notes when it was asked: after each token of the batch."""

        def __call__(self, input_ids: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            moments.append(time.perf_counter() - begin)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=output_len,
            stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
        )
    assert output.shape[1] - ids.shape[1] == output_len == len(moments)
    return RoundTrace(ids.numel(), [moments] * len(prompts), moments)


def _batches(workload: Workload, vocab_size: int, number: int) -> list[JsonObject]:
    """Return the batches of one round: for each batch size one to warm up, and one that is counted."""
    return [
        {"prompts": workload.prompts(size, vocab_size, turn), "output_len": output_len}
        for size in workload.batch_sizes
        for turn, output_len in ((-1, workload.warm_up().output_len), (number, workload.output_len))
    ]


def _figures(answers: Sequence[JsonObject], index: int) -> JsonObject:
    traces = [RoundTrace(**answer["traces"][1::2][index]) for answer in answers]
    peak = max(answer["peak_memory_bytes"] for answer in answers)
    return {**throughput_figures(traces), "peak_memory_bytes": peak}
