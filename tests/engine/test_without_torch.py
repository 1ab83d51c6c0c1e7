"""A CPU's engine runs on numpy: nothing imports torch where it is installed, and all works where it is not."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.ops.dispatch import REQUIRED, operation_parameters, reference_kernel
from ostinato.ops.operations import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
"""
"""Program that makes this process one in which torch is not installed."""

PROGRAMS = {
    "requests of all kinds": """
import numpy as np
from ostinato import LLM, Guide, SamplingParams
llm = LLM("demo", threads=1, seed=1)
params = [
    SamplingParams(max_tokens=8, temperature=0, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, n=2),
    SamplingParams(max_tokens=8, guide=Guide(regex="[0-9]{3}")),
    SamplingParams(max_tokens=8, frequency_penalty=0.5, logit_bias={5: 2.0}, min_tokens=3),
]
done = llm.generate(["Tom has 3 apples and buys 4 more. How many?"] * len(params), params)
assert all(output.error is None for output in done)
assert len(done[0].outputs[0].logprobs) == len(done[0].outputs[0].token_ids)
assert done[2].outputs[0].text.isdigit()
again = llm.generate("Tom has 3 apples and buys 4 more. How many?", params[0])[0]
assert again.outputs[0].token_ids == done[0].outputs[0].token_ids
(vector,) = llm.embed(["Tom has 3 apples."])
assert np.isfinite(vector).all()
""",
    "speculation": """
from ostinato import LLM, SamplingParams
plain = LLM("demo", threads=1, graph_mode="none")
params = SamplingParams(max_tokens=24, temperature=0)
expected = plain.generate("Ava has 17 apples.", params)[0].outputs[0].token_ids
for method in ("ngram", "mtp"):
    drafting = LLM("demo", threads=1, speculative={"method": method, "num_speculative_tokens": 2})
    assert drafting.generate("Ava has 17 apples.", params)[0].outputs[0].token_ids == expected
""",
    "images": """
import io
from PIL import Image
from ostinato import LLM, SamplingParams
llm = LLM("demo-vl", threads=1)
picture = Image.new("RGB", (64, 64), "red")
content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
(output,) = llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=4, temperature=0))
assert output.error is None and output.outputs[0].token_ids
""",
    "evaluation": """
import sys
from ostinato.cli.main import main
sys.argv = ["ostinato", "eval", "demo", "--num-problems", "8", "--threads", "1"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
""",
    "a measurement": """
import sys
from ostinato.cli.main import main
sys.argv = ["ostinato", "bench", "throughput", "demo", "--batch-sizes", "1", "--output-len", "8", "--threads", "1"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
""",
}


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow
def test_nothing_imports_torch(name: str) -> None:
    done = run(PROGRAMS[name] + "\nimport sys; assert 'torch' not in sys.modules, 'it was imported'")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_where_torch_is_not_installed_an_engine_runs() -> None:
    done = run(WITHOUT + PROGRAMS["requests of all kinds"])
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


@pytest.mark.parametrize(
    ("settings", "need"),
    [({"kernels": "reference"}, "reference kernels need"), ({"tensor_parallel_size": 2}, "2 ranks need")],
)
def test_what_needs_torch_says_so_with_the_command(settings: dict[str, object], need: str) -> None:
    program = f"{WITHOUT}\nfrom ostinato import LLM\nLLM('demo', **{settings!r})"
    done = run(program)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError" in last
    assert f"{need} PyTorch, which is not installed: pip install 'ostinato[torch]'" in last


@pytest.mark.slow
def test_a_command_that_needs_torch_says_so() -> None:
    command = "from ostinato.cli.main import main; main(['bench', 'profile', 'demo'])"
    done = run(f"{WITHOUT}\n{command}")
    assert done.returncode == 2
    assert "this command needs PyTorch, which is not installed: pip install 'ostinato[torch]'" in done.stderr


@pytest.mark.parametrize("name", [name for name, row in OPERATIONS.items() if row.native is not None])
def test_parameters_read_from_the_source_are_those_of_the_reference(name: str) -> None:
    expected = {
        each.name: REQUIRED if each.default is each.empty else each.default
        for each in inspect.signature(reference_kernel(name)).parameters.values()
    }
    assert list(operation_parameters(name).items()) == list(expected.items())
