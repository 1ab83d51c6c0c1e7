"""vLLM's part of a round: runs in vLLM's own environment, so it imports nothing of this project.

A job on stdin, its result as the last line of stdout, both JSON, like those of `ostinato.bench.engine_driver`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    job = json.loads(sys.stdin.read())
    import vllm

    llm = vllm.LLM(
        model=job["settings"]["model"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"],
        enforce_eager=job["eager"],
        # As in the other engines, which keep the state in float32.
        mamba_ssm_cache_dtype="float32",
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        load_format="auto",
    )
    traces, first_token = [], None
    for batch in job["batches"]:
        traces.append(run_batch(llm.llm_engine, batch["prompts"], batch["output_len"], len(traces)))
        first_token = first_token or time.monotonic()
    result = {"traces": traces, "startup_seconds": first_token - job["began"], "version": vllm.__version__}
    print("\n" + json.dumps(result), flush=True)


def run_batch(engine: Any, prompts: list[list[int]], output_len: int, number: int) -> dict[str, Any]:
    """Adds all prompts at once and steps until they are answered; when each token was there, in seconds since."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.CUMULATIVE
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False, output_kind=kind)
    step_ends: list[float] = []
    token_times: dict[str, list[float]] = {}
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        request = f"{number}-{index}"
        engine.add_request(request, {"prompt_token_ids": prompt}, params)
        token_times[request] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - begin
        step_ends.append(now)
        for output in outputs:
            times = token_times[output.request_id]
            times.extend([now] * (len(output.outputs[0].token_ids) - len(times)))
    assert all(len(times) == output_len for times in token_times.values())
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "token_times": list(token_times.values()),
        "step_ends": step_ends,
    }


if __name__ == "__main__":
    main()
