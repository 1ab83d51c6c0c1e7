"""Predictions of the plan for the steps that a benchmark measures."""

from __future__ import annotations

from dataclasses import replace

from ostinato.bench.reports import ProgressCallback
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.prediction import StepPredictor, make_machine


def machine_of(spec: ModelSpec, plan: Plan, measure: bool, say: ProgressCallback) -> StepPredictor | None:
    """Return the predictor, with rates that are measured now, or with the plan's; None if it has none."""
    rates = plan.prediction.rates
    if measure:
        from ostinato.bench.probe import measure_rates

        say("measuring the kernels' rates")
        rates = measure_rates(plan)
    model = replace(spec, quantization=plan.settings.quantization)
    settings = plan.settings
    return make_machine(model, plan.device, rates, settings.dtype, settings.ssm_state_dtype, settings.kv_cache_dtype)
