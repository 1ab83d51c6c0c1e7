"""Show that fast equals slow: the same tokens alone and in a batch, with a cold and a warm cache, and with drafts.

Run it:    .venv/bin/python examples/verify.py

`ostinato verify MODEL` does this for hundreds of combinations of settings. It prints:

    a cold cache: 4 of 4 answers are those of the plain path
    a warm cache: 4 of 4 answers are those of the plain path, 64 prompt tokens were cached
"""

import sys

from ostinato import LLM, SamplingParams

PROMPTS = [
    f"Q: Tom has {marbles} marbles and finds 30 more. He gives 5 of them to Ava. How many marbles does he have?\nA:"
    for marbles in (12, 17, 25, 40)
]
PLAIN = {"max_num_seqs": 1, "graph_mode": "none", "enable_prefix_caching": False}
FAST = {"max_num_seqs": 4, "speculative": "ngram:4", "max_num_batched_tokens": 64}


def main() -> bool:
    """Compare the tokens, print the comparison, and return whether all were equal."""
    params = SamplingParams(temperature=0, max_tokens=32)
    with LLM("demo", dtype="float32", **PLAIN) as llm:
        plain = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS]
    equal = 0
    with LLM("demo", dtype="float32", **FAST) as llm:
        for cache in ("cold", "warm"):
            outputs = llm.generate(PROMPTS, params)
            same = sum(output.outputs[0].token_ids == ids for output, ids in zip(outputs, plain, strict=True))
            cached = sum(output.cache.cached_tokens for output in outputs)
            remark = f", {cached} prompt tokens were cached" if cache == "warm" else ""
            print(f"a {cache} cache: {same} of {len(PROMPTS)} answers are those of the plain path{remark}")
            equal += same
    return equal == 2 * len(PROMPTS)


if __name__ == "__main__" and not main():
    sys.exit(1)
