"""Writes docs/which-machine.md: plans of published models on the machines of the catalogue.

published_models.json has the sizes of their config.json, of the text part, by hub id. Run it after a change of the
planner: PYTHONPATH=src python tools/machines_page.py
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.gpu_catalogue import CATALOGUE, DeviceSpec
from ostinato.plan.device.kernel_support import NativeFacts
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.prediction import PredictedStep
from ostinato.units import GiB

HEAD = """# Which model for which machine

The table says with how many bits per weight a model fits, how many requests run at once, and how many tokens the cache
holds, for requests of up to {context:,} tokens. `16: 256, 1.6M` are 16 bits, 256 requests and 1.6 million tokens. Fewer
bits are only taken where more do not fit: 8 is `--quantization int8`, 4 is `--quantization int4_g32`. `-` does not fit.

"""
MIDDLE = """
For your machine and your limits, ask for the plan. It fetches the `config.json` alone, and loads nothing:

<!-- check: no, seconds: it fetches a config.json from the hub -->
```console
$ ostinato plan ibm-granite/granite-4.0-h-tiny --device l4-24gb --max-model-len {context}
```

A CPU runs at most 32 requests at once, and its cache has at most 4 GiB, unless you set `--max-num-seqs` and
`--cache-memory`. Several GPUs share a model with `--tensor-parallel-size`.

## How fast, and what is slow

Tokens per second of one request and of all, and the kernels that take most of such a step. These are upper bounds, from
the published rates of each GPU: no GPU has run the engine yet. On a CPU `ostinato plan MODEL --measure` predicts from
this machine's own kernels.

"""
END = """
`linear` reads all weights, so fewer bits make it faster. `state_update` and `delta_update` read and write the states of
all requests, and `attention` their keys and values: `--kv-cache-dtype int8` halves the latter. `moe` reads the experts
that the step's tokens chose.

Sizes are those of the text part of each `config.json` on the hub. Encoders of images, which Qwen3.5 and Gemma 3 have,
are not in the table. None of these checkpoints could be run here: [`ostinato doctor MODEL`](verifying.md) tries one.
`tools/machines_page.py` makes this page with the planner.
"""
FAST = ("l4-24gb", "h100-80gb")
"""Machines whose speed the page shows."""
PAGE = Path(__file__).parent.parent / "docs/which-machine.md"
MODELS = json.loads(Path(__file__).with_name("published_models.json").read_text(encoding="utf-8"))
CONTEXT = 32768
"""Tokens of one request, its output included."""
QUANTIZATIONS = {"none": "16", "int8": "8", "int4_g32": "4"}
"""What weights are made into while loading -> bits that the page shows."""


def _cpu(memory: int) -> DeviceSpec:
    native = NativeFacts("x86_64_v4_bf16", "a CPU that is only described")
    return DeviceSpec(f"cpu, {memory} GiB", "cpu", memory * GiB, 8, None, None, "described", native)


MACHINES = {device.name: device for device in (_cpu(16), _cpu(64), *CATALOGUE.values())}


@cache
def model(name: str, quantization: str) -> tuple[EngineConfig, ModelSpec]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
        config = EngineConfig(model=folder, quantization=quantization, max_model_len=CONTEXT)
        return config, load_spec(config)


@cache
def plan(name: str, machine: str) -> tuple[str, Plan] | None:
    """The bits of the weights and the plan, of the most bits with which the model fits; None if it does not."""
    for quantization, bits in QUANTIZATIONS.items():
        config, spec = model(name, quantization)
        try:
            return bits, make_plan(config, spec, MACHINES[machine])
        except CapacityError:
            continue
    return None


def cell(name: str, machine: str) -> str:
    """Bits of the weights, requests at once, and tokens of the cache."""
    planned = plan(name, machine)
    if planned is None:
        return "-"
    bits, made = planned
    tokens = (made.memory.num_blocks - 1) * made.settings.block_size
    return f"{bits}: {made.settings.max_num_seqs}, {_short(tokens)}"


def slow(name: str, machine: str) -> str:
    """Tokens per second of one request and of all, at most, and what takes longest in a step."""
    planned = plan(name, machine)
    if planned is None:
        return "-"
    steps = [step for step in planned[1].prediction.steps if step.tokens_per_row == 1]
    one, most = min(steps, key=lambda step: step.rows), max(steps, key=lambda step: step.rows)
    return f"{one.tokens_per_second:,.0f} / {most.tokens_per_second:,.0f}; {_largest(one)} / {_largest(most)}"


def _largest(step: PredictedStep) -> str:
    return f"`{step.largest}` {step.parts[step.largest] / step.seconds:.0%}"


def _short(tokens: int) -> str:
    return f"{tokens / 1e6:.1f}M" if tokens >= 1e6 else f"{tokens / 1e3:.0f}k"


def page() -> str:
    linked = {name: f"[{_model_name(name)}](https://huggingface.co/{name})" for name in MODELS}
    fits = _table(["", *MACHINES], [[linked[name], *(cell(name, machine) for machine in MACHINES)] for name in MODELS])
    speed = _table(["", *FAST], [[_model_name(name), *(slow(name, machine) for machine in FAST)] for name in MODELS])
    return HEAD.format(context=CONTEXT) + fits + MIDDLE.format(context=CONTEXT) + speed + END


def _model_name(hub_id: str) -> str:
    return hub_id.partition("/")[2]


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
