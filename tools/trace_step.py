"""Traces one steady decode step: the Python files that it passes, and the calls in each.

    .venv/bin/python tools/trace_step.py [--model demo] [--rows 4] [--no-graphs]

Requests decode until nothing new happens in a step: no block fills, no graph is captured, no token comes that none of
them had before. That step is traced. Calls into other packages are counted, but not listed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from ostinato.config import EngineConfig  # noqa: E402
from ostinato.engine.core import EngineCore  # noqa: E402
from ostinato.engine.outputs import RequestOutput  # noqa: E402
from ostinato.sampling.params import SamplingParams  # noqa: E402

PACKAGE = ROOT / "src" / "ostinato"
STEADY = 36
"""Tokens that each request has then: past the first blocks, and inside one."""


def traced_step(engine: EngineCore) -> tuple[Counter[str], int]:
    """(calls by file of the package, calls into other files) of the engine's next step in which nothing new happens."""
    known: set[int] = set()
    while True:
        files, others, outputs = _trace(engine)
        tokens = {token for output in outputs for token in output.outputs[0].token_ids}
        # The last token is not computed yet.
        computed = [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs]
        if tokens <= known and all(count % engine.plan.settings.block_size for count in computed):
            return files, others
        known |= tokens


def _trace(engine: EngineCore) -> tuple[Counter[str], int, list[RequestOutput]]:
    """Of the next step: calls by file, calls into other files, and the outputs."""
    files: Counter[str] = Counter()
    others = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal others
        if event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            files[str(path.relative_to(PACKAGE))] += 1
        else:
            others += 1

    sys.setprofile(note)
    try:
        outputs = engine.step()
    finally:
        sys.setprofile(None)
    return files, others, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=4, help="requests that decode together")
    parser.add_argument("--no-graphs", action="store_true", help="trace the step without its graph")
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.model,
        max_num_seqs=arguments.rows,
        graph_mode="none" if arguments.no_graphs else "full_and_piecewise",
    )
    engine = EngineCore(config)
    params = SamplingParams(max_tokens=4 * STEADY, ignore_eos=True)
    for row in range(arguments.rows):
        engine.add_request([10 + row] * 4, params)
    for _ in range(STEADY):
        engine.step()
    files, others = traced_step(engine)
    for name, count in files.most_common():
        print(f"{count:5}  {name}")
    print(f"{sum(files.values()):5}  calls in {len(files)} files, and {others} calls into other packages")


if __name__ == "__main__":
    main()
