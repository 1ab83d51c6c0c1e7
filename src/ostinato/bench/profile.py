"""Where a step's time goes: by kernel, beside the least that each could take, and around the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ostinato.bench.drive import with_room
from ostinato.bench.facts import machine_facts, model_facts
from ostinato.bench.floor import measure_bandwidth, measure_flops
from ostinato.bench.graphs import graph_of, plan_of
from ostinato.bench.profile_figures import Calls, Roofs, kernel_figures, phase_figures, total_figures
from ostinato.errors import ConfigError, Remedy
from ostinato.plain_data import to_plain
from ostinato.plan.memory.kernel_work import StepShape, kernel_work
from ostinato.plan.plan import Plan

if TYPE_CHECKING:
    from ostinato.config import EngineConfig
    from ostinato.engine.engine import Engine


@dataclass(frozen=True)
class ProfileBench:
    """Decode steps of each of `batch_sizes` rows with `context` tokens before each, and a prompt of `prefill` tokens
    at once; the best of `rounds` rounds."""

    batch_sizes: tuple[int, ...]
    context: int
    prefill: int
    rounds: int


def profile(settings: dict[str, Any], bench: ProfileBench, report: Callable[[str], None]) -> dict[str, Any]:
    """The report: of each step the kernels, with calls, seconds, bytes, FLOPs and floor, and of decode steps the phases
    in the engine's loop.

    A decode step that has a full graph is replayed as a tape whose calls are timed one by one; other steps run eagerly,
    with a stopwatch at every kernel, and what is left is the torch and the Python between kernels. The last of a step's
    kernels is `logits`, the LM head's product.
    """
    from ostinato.engine.engine import Engine

    config = _config_for(settings, bench)
    report("loading the model and capturing its graphs")
    engine = Engine(config)
    plan = engine.plan
    report("measuring the memory's bandwidth and the rate of matrix products")
    bandwidth = measure_bandwidth(engine.runner.device, isa=plan.device.native.isa)
    roofs = Roofs(bandwidth.best, measure_flops(plan.settings.dtype))
    return {
        "command": "profile",
        "model": model_facts(config, plan),
        "settings": {**to_plain(plan.settings), **asdict(bench)},
        "machine": {
            **machine_facts(plan),
            "read_bytes_per_second": bandwidth.read,
            "copy_bytes_per_second": bandwidth.copy,
            "flops_per_second": roofs.flops_per_second,
        },
        "kernels": {name: choice.implementation for name, choice in plan.kernels.items()},
        "decode": _decode(engine, bench, roofs, report),
        "prefill": _prefill(engine, bench, roofs, report),
    }


def _decode(engine: Engine, bench: ProfileBench, roofs: Roofs, report: Callable[[str], None]) -> list[dict[str, Any]]:
    from ostinato.bench.decode_steps import make_decode_steps
    from ostinato.bench.kernel_profile import profile_eagerly, profile_tape
    from ostinato.bench.phases import decode_phases

    plan, runner = engine.plan, engine.runner
    figures = []
    report("computing the prompts")
    steps = make_decode_steps(runner, bench.batch_sizes, bench.context, engine.spec.vocab_size)
    for rows, step in steps.items():
        report(f"decoding, batch size {rows}")
        mode, size = graph_of(plan, rows)
        if mode == "full" and size is not None:
            calls, seconds = profile_tape(runner, step, size, bench.rounds)
        else:
            calls, seconds = profile_eagerly(runner, step, rows, bench.rounds)
        shape = StepShape(rows, 1, bench.context, decodes=True)
        one = _step_figures(engine, plan, shape, calls, seconds, roofs)
        figures.append({"batch_size": rows, "way": "tape" if mode == "full" else "eager", "graph_rows": size, **one})
    # Last: requests write to the blocks and slots that the steps above read.
    for one in figures:
        report(f"the engine's loop, batch size {one['batch_size']}")
        one["phases"] = phase_figures(decode_phases(engine, one["batch_size"], bench.context, _loop_steps(bench)))
    return figures


def _prefill(engine: Engine, bench: ProfileBench, roofs: Roofs, report: Callable[[str], None]) -> dict[str, Any]:
    from ostinato.bench.kernel_profile import profile_eagerly, prompt_step

    report(f"prefill, {bench.prefill} tokens")
    step = prompt_step(engine.runner, bench.prefill, engine.spec.vocab_size)
    calls, seconds = profile_eagerly(engine.runner, step, 1, max(3, bench.rounds // 4))
    shape = StepShape(1, bench.prefill, 0, decodes=False)
    return {
        "tokens": bench.prefill,
        "way": "eager",
        **_step_figures(engine, engine.plan, shape, calls, seconds, roofs),
    }


def _step_figures(
    engine: Engine, plan: Plan, shape: StepShape, calls: Calls, seconds: float, roofs: Roofs
) -> dict[str, Any]:
    settings = plan.settings
    work = kernel_work(engine.spec, settings.dtype, settings.ssm_state_dtype, shape)
    kernels = kernel_figures(calls, work, roofs)
    in_model = sum(each["seconds"] for each in kernels if each["kernel"] != "logits")
    return {
        "kernels": kernels,
        "total": total_figures(kernels),
        "step_seconds": seconds,
        "between_kernels_seconds": max(0.0, seconds - in_model),
    }


def _config_for(settings: dict[str, Any], bench: ProfileBench) -> EngineConfig:
    """`settings` with room for the steps. ConfigError where they give less, or ask for what is not profiled."""
    needed = {
        "max_num_seqs": max(bench.batch_sizes),
        "max_model_len": max(bench.context + _loop_steps(bench) + 4, bench.prefill + 1),
    }
    config = with_room(settings, **needed)
    plan = plan_of(config)
    if plan.settings.max_num_batched_tokens < bench.prefill:
        config = with_room(settings, **needed, max_num_batched_tokens=bench.prefill)
    if plan.device.kind != "cpu":
        raise ConfigError("kernels are profiled on a CPU", [Remedy("device", "cpu")])
    if plan.speculative is not None:
        raise ConfigError("the profile is of steps without drafts; leave speculative out")
    return config


def _loop_steps(bench: ProfileBench) -> int:
    """Steps of the engine's loop of which a median is taken."""
    return max(bench.rounds, 8)
