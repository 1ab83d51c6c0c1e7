"""What the prefix cache's files gain after a restart, and what writing them costs an engine under load.

    python benchmarks/cache_files.py MODEL [MODEL ...] --output FILE.json

Restart: seconds to the first token of a prompt that nothing has seen, of the same prompt from memory, and of the same
prompt in an engine that started again on the same directory. Files are still in the page cache then, as after a
restart of the process, not of the machine.

Load: prompts that share nothing, through a cache too small for them, so that each one evicts others; output tokens per
second with files over those without. Both engines stand beside each other and are asked in turns, so that what else a
machine does meets both; a turn ends when all that it evicted is written. A shape's config.json is enough: weights are
random.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ostinato import LLM, SamplingParams
from ostinato.cli.output import note
from ostinato.plan.device.linux import processor_of

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
TURNS = 4
"""In which the requests of the load are asked."""
RESTART_COLUMNS = ("model", "cold, s", "from memory, s", "after a restart, s", "cold / restart", "tokens from files")
LOAD_COLUMNS = ("model", "without files, tokens/s", "with files, tokens/s", "with / without", "written, MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("restart", "load"))
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="of the prompt after a restart")
    parser.add_argument("--requests", type=int, default=48, help="of the load")
    parser.add_argument("--load-prompt-tokens", type=int, default=256)
    parser.add_argument("--load-output-tokens", type=int, default=64)
    parser.add_argument("--load-cache", default="512MiB", help="memory of the cache under load")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    settings = vars(given) | {"output": str(given.output)}
    found: dict[str, Any] = {"processor": processor_of(Path("/")), "settings": settings, "restart": [], "load": []}
    for model in given.models:
        for number in range(given.rounds):
            note(f"{model}, round {number + 1}")
            for part in ("restart", "load") if given.only is None else (given.only,):
                measured = (restarted if part == "restart" else loaded)(model, given, seed=number)
                found[part].append({"model": _name(model), "round": number, **measured})
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=2) + "\n")
    print(restart_table(found["restart"]))
    print()
    print(load_table(found["load"]))


def restarted(model: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Seconds to the first token: `cold`, from `memory`, and from `files` after a restart."""
    with tempfile.TemporaryDirectory() as directory:
        length = given.prompt_tokens + 64
        settings: dict[str, Any] = {"cache_dir": directory, "max_model_len": length, "max_num_seqs": 4}
        with engine(model, settings) as llm:
            warm, prompt = prompts(llm, 2, given.prompt_tokens, seed)
            llm.generate(warm, ONE_TOKEN)
            cold, _ = first_token(llm, prompt)
            # The last tokens are computed again, unless another prompt has gone on from there.
            memory, _ = first_token(llm, prompt)
        with engine(model, settings) as llm:
            llm.generate(prompts(llm, 1, given.prompt_tokens, seed + 1000)[0], ONE_TOKEN)
            files, tokens = first_token(llm, prompt)
            return {"cold": cold, "memory": memory, "files": files, "tokens_from_files": tokens}


def first_token(llm: LLM, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds until a prompt's first token, and how many of its tokens came from files."""
    begin = time.perf_counter()
    [output] = llm.generate(list(prompt), ONE_TOKEN)
    return time.perf_counter() - begin, output.cache.from_files


def loaded(model: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Output tokens per second `without` and `with` files, the `ratios` of each turn, and what was written."""
    params = SamplingParams(max_tokens=given.load_output_tokens, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {
        "cache_memory": given.load_cache,
        "max_model_len": given.load_prompt_tokens + given.load_output_tokens,
        "max_num_seqs": 8,
    }
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        engines = {
            name: stack.enter_context(engine(model, settings | more))
            for name, more in (("without", {}), ("with", {"cache_dir": directory}))
        }
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        asked = prompts(engines["with"], given.requests, given.load_prompt_tokens, seed)
        for llm in engines.values():
            _fill(llm, min(64, given.load_prompt_tokens))
            llm.generate(prompts(llm, 8, given.load_prompt_tokens, seed=2000), params)  # the first of all is slower
            _flush(llm)
        before = engines["with"].stats()["cache_files"]["written_bytes"]
        for turn in range(TURNS):
            share = asked[turn::TURNS]
            for name in ("with", "without") if (turn + seed) % 2 else ("without", "with"):
                begin = time.perf_counter()
                engines[name].generate(share, params)
                _flush(engines[name])
                seconds[name].append(time.perf_counter() - begin)
        files = engines["with"].stats()["cache_files"]
        ratios = [one / other for one, other in zip(seconds["without"], seconds["with"], strict=True)]
        tokens = given.requests * given.load_output_tokens
        written = {"written_bytes": files["written_bytes"] - before, "dropped": files["dropped"]}
        found: dict[str, Any] = {name: tokens / sum(each) for name, each in seconds.items()}
        return found | {"ratios": ratios, "files": written}


def _fill(llm: LLM, length: int) -> None:
    """Fills the cache, with short texts, so that all that follows evicts."""
    number = 0
    while not llm.stats()["prefix_cache"]["evicted_checkpoints"] + llm.stats()["prefix_cache"]["evicted_blocks"]:
        number += 1
        llm.generate(prompts(llm, 8, length, seed=1000 + number), ONE_TOKEN)


def _flush(llm: LLM) -> None:
    """Waits until all that was evicted is written."""
    files = llm.engine.scheduler.cache.store.files
    if files is not None:
        files.directory.flush()


def engine(model: str, settings: dict[str, Any]) -> LLM:
    """With random weights where there is a config alone, and all graphs captured before anything is timed."""
    path = Path(model)
    is_shape = path.is_dir() and not any(path.glob("*.safetensors"))
    return LLM(model, random_weights=is_shape, capture="startup", **settings)


def prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    size = llm.plan.model.vocab_size
    return [[rng.randrange(size) for _ in range(length)] for _ in range(count)]


def restart_table(found: Sequence[dict[str, Any]]) -> str:
    """Medians over the rounds; the ratio's least and most too."""
    rows = []
    for model, runs in by_model(found).items():
        ratios = [run["cold"] / run["files"] for run in runs]
        figures = [f"{median(runs, key):.3f}" for key in ("cold", "memory", "files")]
        rows.append([model, *figures, spread(ratios), f"{median(runs, 'tokens_from_files'):.0f}"])
    return table(RESTART_COLUMNS, rows)


def load_table(found: Sequence[dict[str, Any]]) -> str:
    rows = []
    for model, runs in by_model(found).items():
        ratios = [each for run in runs for each in run["ratios"]]
        written = statistics.median(run["files"]["written_bytes"] for run in runs) / 2**20
        rows.append(
            [model, f"{median(runs, 'without'):.1f}", f"{median(runs, 'with'):.1f}", spread(ratios), f"{written:.0f}"]
        )
    return table(LOAD_COLUMNS, rows)


def by_model(found: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [run for run in found if run["model"] == name] for name in dict.fromkeys(run["model"] for run in found)
    }


def median(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def _name(model: str) -> str:
    return Path(model).name


if __name__ == "__main__":
    main()
