"""What each engine is asked in a round, and the figures made of when its tokens came."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.bench.statistics import RoundTrace


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens. Prompts are random, end tokens are ignored, the likeliest token is taken."""

    batch_sizes: tuple[int, ...] = (1, 8, 32)
    prompt_len: int = 128
    output_len: int = 64
    prefill_len: int = 512
    prefills: int = 3
    """Of which a round's figure is the median."""
    warm_up_len: int = 8

    @property
    def max_num_seqs(self) -> int:
        return max(self.batch_sizes)

    @property
    def max_model_len(self) -> int:
        return max(self.prompt_len + self.output_len, self.prefill_len + 1)

    def batches(self, vocab_size: int, number: int) -> list[dict[str, Any]]:
        """What a process is to run in round `number`, one after the other: prompts, and how many tokens of each.

        First the request whose first token ends the start-up; then prefills, then for each batch size the decode,
        each after a shorter one that is not counted. No prompt comes twice, so none is found in a cache.
        """
        rng = random.Random(number)

        def batch(size: int, length: int, output_len: int) -> dict[str, Any]:
            prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(size)]
            return {"prompts": prompts, "output_len": output_len}

        decodes = []
        for size in self.batch_sizes:
            decodes += [batch(size, self.prompt_len, length) for length in (self.warm_up_len, self.output_len)]
        prefills = [batch(1, self.prefill_len, 1) for _ in range(1 + self.prefills)]
        return [batch(1, self.prompt_len, 1), *prefills, *decodes]

    def rates(self, traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The rates of a round, in tokens/s, of the traces of its `batches`.

        Prefill: the prompt's tokens over the time from handing it over to its first token. Decode: the tokens that came
        after every request had its first, over the time since then.
        """
        kept = [RoundTrace(**trace) for trace in traces]
        prefills = kept[2 : 2 + self.prefills]
        decodes = kept[2 + self.prefills :][1::2]
        return {
            "prefill": statistics.median([trace.prompt_tokens / trace.prefill_end for trace in prefills]),
            "decode": {
                str(size): trace.decode_tokens / (trace.end - trace.prefill_end)
                for size, trace in zip(self.batch_sizes, decodes, strict=True)
            },
        }
