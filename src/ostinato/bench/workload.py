"""What a benchmark runs: batches of random prompts of one length, continued to one length."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Workload:
    """Requests of `prompt_len` random tokens and `output_len` greedy ones, end tokens ignored."""

    prompt_len: int
    output_len: int
    batch_sizes: tuple[int, ...]
    rounds: int

    @property
    def max_model_len(self) -> int:
        return self.prompt_len + self.output_len

    def warm_up(self) -> Workload:
        """The round that is not counted: the same prompts, few tokens of output."""
        return replace(self, output_len=min(self.output_len, WARM_UP_TOKENS))

    def prompts(self, batch_size: int, vocab_size: int, number: int) -> list[list[int]]:
        """Token ids of round `number`: others in each round, so that none finds its prefix cached."""
        rng = random.Random(f"{number} {batch_size}")
        return [[rng.randrange(vocab_size) for _ in range(self.prompt_len)] for _ in range(batch_size)]
