"""What the speculation benchmark runs, and on which prompts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ostinato.bench.drive import Workload
from ostinato.config import EngineConfig
from ostinato.demo.problems import held_out
from ostinato.errors import ConfigError
from ostinato.models.checkpoint import load_spec, resolve_model_dir


@dataclass(frozen=True)
class SpeculativeBench:
    """What is compared: each of `num_drafts` (0 is no speculation) with the controller off, and the largest with it on.

    `method` is what stands before the number in `speculative`: `mtp`, `ngram` or `draft:PATH`. Prompts are the lines
    of `prompts`, else word problems for the embedded model, else `prompt_len` random tokens.
    """

    method: str
    num_drafts: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    prompt_len: int
    output_len: int
    rounds: int
    prompts: Path | None = None


@dataclass(frozen=True)
class Prompts:
    """Token ids by batch size and number of round, -1 being the one to warm up; where they came from; and whether end
    tokens are ignored, as they are where the prompts say nothing."""

    by_round: dict[tuple[int, int], list[list[int]]]
    source: str
    ignore_eos: bool


def make_prompts(config: EngineConfig, bench: SpeculativeBench) -> Prompts:
    """The prompts of all rounds; as far as there are enough of them, each is used once.

    ConfigError if a file has none, or cannot be read.
    """
    keys = list(product(bench.batch_sizes, range(-1, bench.rounds)))
    if bench.prompts is None and config.model != "demo":
        vocab_size = load_spec(config).vocab_size
        workload = Workload(bench.prompt_len, bench.output_len, bench.batch_sizes, bench.rounds)
        by_round = {(size, number): workload.prompts(size, vocab_size, number) for size, number in keys}
        return Prompts(by_round, f"{bench.prompt_len} random tokens", True)
    if bench.prompts is None:
        texts = [f"Q: {problem.question}\nA:" for problem in held_out(0, sum(size for size, _ in keys))]
    else:
        texts = _lines(bench.prompts)
    from ostinato.engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model_dir(config.model, config.revision))
    ids = [tokenizer.encode(text) for text in texts]
    taken: dict[tuple[int, int], list[list[int]]] = {}
    first = 0
    for size, number in keys:
        taken[size, number] = [ids[(first + i) % len(ids)] for i in range(size)]
        first += size
    return Prompts(taken, "word problems" if bench.prompts is None else str(bench.prompts), False)


def _lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not lines:
        raise ConfigError(f"{path} holds no prompts, one per line")
    return lines
