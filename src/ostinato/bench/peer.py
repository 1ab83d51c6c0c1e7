"""transformers' part of a comparison: its `generate` on the same batches."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
import transformers

from ostinato.bench.trace import Trace
from ostinato.config import EngineConfig
from ostinato.models.checkpoint import resolve_model_dir


class TokenClock(transformers.StoppingCriteria):
    """Never stops, and notes when it was asked: after each token of the batch."""

    def __init__(self, begin: float, device: torch.device) -> None:
        self.begin = begin
        self.device = device
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter() - self.begin)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """A round in this process: a trace of each of the job's batches, as in `ostinato.bench.compare`."""
    transformers.logging.set_verbosity_error()
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    model = _load(EngineConfig(**job["settings"]), job["dtype"], job["device"])
    traces, ends = [], []
    for batch in job["batches"]:
        traces.append(_generate(model, batch["prompts"], batch["output_len"]))
        ends.append(time.monotonic())
    return {
        "traces": [asdict(trace) for trace in traces],
        "startup_seconds": ends[0] - job["began"],
        "version": transformers.__version__,
    }


def _load(config: EngineConfig, dtype: str, device: str) -> Any:
    directory = resolve_model_dir(config.model, config.revision)
    options = {"dtype": getattr(torch, dtype)}
    if config.random_weights:
        torch.manual_seed(config.seed)
        shape = transformers.AutoConfig.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_config(shape, **options)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    # Without an end token, every row runs to the full length and no logits need masking.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()


def _generate(model: Any, prompts: list[list[int]], output_len: int) -> Trace:
    ids = torch.tensor(prompts, device=model.device)
    clock = TokenClock(time.perf_counter(), model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=output_len,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
    assert output.shape[1] - ids.shape[1] == output_len == len(clock.times)
    return Trace(ids.numel(), [clock.times] * len(prompts), clock.times)
