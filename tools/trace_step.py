"""Traces the way of a request: the Python files that a decode step, or a whole `LLM.generate`, passes.

    .venv/bin/python tools/trace_step.py [--model demo] [--rows 4] [--no-graphs] [--overlap off]
    .venv/bin/python tools/trace_step.py --generate
    .venv/bin/python tools/trace_step.py --write-page

A decode step is traced when nothing new happens in it: no block fills, no graph is captured, no token comes that none
of the requests had before. `--generate` traces a call from its prompt to its last token. Both see the calls on all
threads, and none inside a replayed graph. Calls into other packages are counted, but not listed. `--write-page` writes
the table of docs/architecture/request.md.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from ostinato.config import EngineConfig  # noqa: E402
from ostinato.engine.core import EngineCore  # noqa: E402
from ostinato.engine.executor import OverlapExecutor  # noqa: E402
from ostinato.engine.llm import LLM  # noqa: E402
from ostinato.sampling.params import SamplingParams  # noqa: E402

PACKAGE = ROOT / "src" / "ostinato"
PAGE = ROOT / "docs" / "architecture" / "request.md"
BEGIN, END = "<!-- files of a decode step, by tools/trace_step.py -->\n", "<!-- end of the files -->\n"
STEADY = 36
"""Tokens that each request has then: past the first blocks, and inside one."""
SETTINGS: dict[str, Any] = {"model": "demo", "cache_memory": "64MiB", "threads": 1, "device": "cpu"}


class Trace:
    """Calls on all threads while it is open. It must be made before the threads are."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        """Calls by file of the package."""
        self.others = 0
        """Calls into other packages."""
        self._is_open = False
        threading.setprofile(self._note)

    def __enter__(self) -> Trace:
        self.files, self.others, self._is_open = Counter(), 0, True
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._is_open = False

    def close(self) -> None:
        """Leave threads that are made from now on alone."""
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._is_open:
            return
        path = Path(frame.f_code.co_filename)
        if path == Path(__file__):
            return
        if PACKAGE in path.parents:
            self.files[str(path.relative_to(PACKAGE))] += 1
        else:
            self.others += 1


def trace_step(rows: int = 4, **settings: Any) -> Trace:
    """Trace the first decode step of `rows` requests in which nothing new happens."""
    trace = Trace()
    engine = EngineCore(EngineConfig(**{**SETTINGS, "max_num_seqs": rows, **settings}))
    params = SamplingParams(max_tokens=4 * STEADY, ignore_eos=True)
    for row in range(rows):
        engine.add_request([10 + row] * 4, params)
    for _ in range(STEADY):
        engine.step()
    known: set[int] = set()
    while True:
        _wait_for_thread(engine)
        with trace:
            outputs = engine.step()
            _wait_for_thread(engine)
        tokens = {token for output in outputs for token in output.outputs[0].token_ids}
        # The last token is not computed yet.
        computed = [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs]
        if tokens <= known and all(count % engine.plan.settings.block_size for count in computed):
            break
        known |= tokens
    engine.close()
    trace.close()
    return trace


def _wait_for_thread(engine: EngineCore) -> None:
    """Wait until the executor's thread has launched what was submitted, so that a trace has whole steps."""
    if isinstance(engine.executor, OverlapExecutor):
        engine.executor._thread.submit(int).result()


def trace_generate(**settings: Any) -> Trace:
    """Trace `LLM.generate` of one prompt, after a call for the same prompt that has captured the graphs."""
    trace = Trace()
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=STEADY, ignore_eos=True)
    with LLM(**{**SETTINGS, **settings}) as llm:
        prompt = "Q: Ava has 17 apples and buys 25 more. How many has she?\nA:"
        llm.generate(prompt, params, cache_salt="another, so that the prefix cache has nothing for the next call")
        with trace:
            llm.generate(prompt, params)
    trace.close()
    return trace


def page_table() -> str:
    """Return the table of the page: the files of a decode step, folder by folder in the order of the way."""
    files = trace_step(overlap="off").files
    folders: dict[str, list[str]] = {}
    for name in sorted(files):
        folder, _, file = name.partition("/")
        folders.setdefault(folder, []).append(file)
    order = ["engine", "scheduler", "kv_cache", "runner", "graphs", "models", "layers", "sampling", "ops", "observe"]
    lines = ["| folder | files | what they do in the step |", "|---|---|---|"]
    for folder in [*order, *sorted(folders.keys() - set(order))]:
        if folder in folders:
            names = ", ".join(f"`{name}`" if "/" not in name else f"`{folder}/{name}`" for name in folders[folder])
            lines.append(f"| `{folder}/` | {names} | {WORK.get(folder, '')} |")
    return "\n".join([*lines, "", f"{len(files)} files in all.", ""])


WORK = {
    "engine": "schedule, run, update, deliver; text, up to a stop string",
    "scheduler": "which requests have a row, and the rows",
    "kv_cache": "whether each has its block and its slot",
    "runner": "the batch, written into the buffers; the positions that need logits",
    "graphs": "the graph of this shape, the padding, the replay",
    "models": "the LM head, which stands in no graph",
    "layers": "its matrix, as the kernel takes it",
    "sampling": "the tokens",
    "ops": "the calls of the kernels `linear` and `sample`, the shapes of their results, and the noise",
    "observe": "counts and histograms",
}


def with_table(page: str, table: str) -> str:
    """Return the page with this table between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=4, help="requests that decode together")
    parser.add_argument("--no-graphs", action="store_true", help="trace without graphs")
    parser.add_argument("--overlap", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--generate", action="store_true", help="trace LLM.generate instead of one step")
    parser.add_argument("--write-page", action="store_true", help="write the table of the page")
    arguments = parser.parse_args()
    if arguments.write_page:
        PAGE.write_text(with_table(PAGE.read_text(), page_table()))
        return
    settings = {
        "model": arguments.model,
        "overlap": arguments.overlap,
        "graph_mode": "none" if arguments.no_graphs else "full_and_piecewise",
    }
    trace = trace_generate(**settings) if arguments.generate else trace_step(arguments.rows, **settings)
    for name, count in trace.files.most_common():
        print(f"{count:5}  {name}")
    print(f"{trace.files.total():5}  calls in {len(trace.files)} files, and {trace.others} calls into other packages")


if __name__ == "__main__":
    main()
