"""Rates of this machine, measured in seconds, and the step times that the plan predicts from them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ostinato.bench.report import ProgressCallback
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.plan.device.linux import processor_of
from ostinato.plan.device.measured_rates import Rates, kernels_of
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.prediction import StepPredictor, make_machine

NUM_BYTES = 3 * 2**26
"""Bytes that kernels cycle through: 192 MiB, well above the caches of a few cores, which may keep a part of less."""
ENGINE_ROWS = (1, 32)
ENGINE_STEPS = 12
CONTEXT = 32
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 32000,
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
"""A tiny model with a vocabulary of a usual size: the time of its steps is the engine's own."""


def measure_rates(plan: Plan) -> Rates:
    """Measure the rates with the plan's threads, kernels and dtype. ConfigError if there are no native kernels."""
    import torch

    from ostinato.bench.kernel_rates import KernelProbe
    from ostinato.bench.roofline import measure_bandwidth
    from ostinato.ops.dispatch import load_extension

    isa, threads = plan.device.native.isa, plan.settings.threads
    if plan.device.kind != "cpu" or isa is None or threads is None:
        message = f"rates are measured on a CPU with native kernels: {plan.device.native.reason}"
        raise ConfigError(message, [Remedy("device", "cpu")])
    torch.set_num_threads(threads)
    clock = _OtherWork()
    bandwidth = measure_bandwidth("cpu", max(NUM_BYTES, 2**22), isa)
    probe = KernelProbe(load_extension(isa), getattr(torch, plan.settings.dtype), NUM_BYTES)
    with torch.inference_mode():
        empty = probe.empty_call()
        probe = KernelProbe(probe.extension, probe.dtype, NUM_BYTES, call_seconds=empty)
        rates = tuple(probe.rates())
    of_step, of_row = _engine_seconds(threads, NUM_BYTES)
    return Rates(
        processor=processor_of(),
        kernels=kernels_of(isa),
        threads=threads,
        dtype=plan.settings.dtype,
        measured=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        bandwidth=bandwidth.best,
        product_rate=max(rate.flops_per_second for rate in rates),
        call_seconds=empty,
        step_seconds=of_step,
        row_seconds=of_row,
        other_load=clock.share(),
        rates=rates,
    )


class _OtherWork:
    """Share of all processors' time that other processes take from now on, by /proc/stat (see proc(5))."""

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float:
        spent = [late - early for early, late in zip(self._begin, self._now(), strict=True)]
        spent_here, idle, everything = spent
        return max(0.0, 1 - (spent_here + idle) / everything) if everything else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Return the ticks of this process, the idle ones, and all."""
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(each) for each in file.readline().split()[1:9]]
        return time.process_time() * os.sysconf("SC_CLK_TCK"), sum(ticks[3:5]), sum(ticks)


def _engine_seconds(threads: int, num_bytes: int) -> tuple[float, float]:
    """Return the engine's seconds per step around the model's kernels, and per additional row.

    Waking the threads for a model is part of it. Between steps the caches are filled with other data, as a model's
    weights would fill them.
    """
    import torch

    from ostinato.bench.step_phases import decode_phases, phase_figures
    from ostinato.engine.core import EngineCore

    other = torch.ones(num_bytes // 4, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        most = max(ENGINE_ROWS)
        config = EngineConfig(
            model=folder,
            random_weights=True,
            threads=threads,
            max_num_seqs=most,
            max_model_len=CONTEXT + 2 * ENGINE_STEPS,
            cache_memory=2**24,
            enable_prefix_caching=False,
            capture="lazy",
        )
        engine = EngineCore(config)
        around = []
        for rows in ENGINE_ROWS:
            steps = decode_phases(engine, rows, CONTEXT, ENGINE_STEPS, before_each=lambda: float(other.sum()))
            around.append(sum(each for name, each in phase_figures(steps).items() if name != "logits"))
    one, many = around
    of_row = max(0.0, (many - one) / (ENGINE_ROWS[1] - ENGINE_ROWS[0]))
    return one - of_row, of_row


def machine_of(spec: ModelSpec, plan: Plan, measure: bool, say: ProgressCallback) -> StepPredictor | None:
    """Return the predictor, with rates that are measured now, or with the plan's; None if it has none."""
    rates = plan.prediction.rates
    if measure:
        say("measuring the kernels' rates")
        rates = measure_rates(plan)
    model = replace(spec, quantization=plan.settings.quantization)
    settings = plan.settings
    dtypes = settings.dtype, settings.ssm_state_dtype, settings.kv_cache_dtype
    machine = make_machine(model, plan.device, rates, *dtypes)
    if measure and machine is None:
        say("nothing is predicted: the speed of one of the model's kernels is not measured")
    return machine
