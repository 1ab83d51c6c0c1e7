"""Flags of vLLM and llama.cpp that have another name here, for the message that a mistyped flag gets."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

FLAG_EQUIVALENTS = {
    # vLLM's.
    "--enforce-eager": "--graph-mode none",
    "--compilation-config": "--graph-mode, --capture-sizes and --max-capture-size",
    "--allowed-origins": "--cors-origin",
    "--enable-auto-tool-choice": None,
    "--reasoning-parser": None,
    "--data-parallel-size": "--replicas",
    "--trust-remote-code": None,
    "--load-format": None,
    "--disable-log-requests": "--log-level warning",
    "--disable-log-stats": None,
    # llama.cpp's.
    "-m": "--model",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-n": "--max-tokens",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "-ub": "--max-num-batched-tokens",
    "--ubatch-size": "--max-num-batched-tokens",
    "-b": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "-t": "--threads",
    "-ngl": "--device cuda",
    "--gpu-layers": "--device cuda",
    "--n-gpu-layers": "--device cuda",
    "-s": "--seed",
    "--temp": "--temperature",
    "-hf": "--model OWNER/NAME",
    "-hff": "--model OWNER/NAME:FILE.gguf",
    "-md": "--speculative draft:PATH:4",
    "--model-draft": "--speculative draft:PATH:4",
    "--spec-draft-model": "--speculative draft:PATH:4",
    "--spec-type": "--speculative ngram:4",
    "-ctk": "--kv-cache-dtype int8, for keys and values",
    "--cache-type-k": "--kv-cache-dtype int8, for keys and values",
    "-ctv": "--kv-cache-dtype int8, for keys and values",
    "--cache-type-v": "--kv-cache-dtype int8, for keys and values",
    "--cache-prompt": "--enable-prefix-caching",
    "--cache-ram": "--cache-memory",
    "--ctx-checkpoints": "--state-cache-mode",
    "--checkpoint-min-step": "--state-block-size",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "--cors-origins": "--cors-origin",
    "--ssl-cert-file": "--ssl-certfile",
    "--ssl-key-file": "--ssl-keyfile",
    "--grammar": "--guide-lark",
    "--json-schema": "--guide-json-schema",
    "--chat-template-file": "--chat-template",
    "--jinja": None,
    "--reasoning-format": None,
    "--metrics": None,
    "-fa": None,
    "--flash-attn": None,
    "--mlock": None,
    "--no-mmap": None,
}
"""Flags of vLLM and llama.cpp -> flags here; None if nothing has to be given here."""

REFUSED = {
    "--pipeline-parallel-size": "only --tensor-parallel-size cuts a model across devices",
    "--cpu-offload-gb": "weights lie on the device; --quantization int4 makes them smaller",
    "--enable-lora": "adapters are not supported; merge them into the checkpoint",
    "--lora": "adapters are not supported; merge them into the checkpoint",
    "--lora-modules": "adapters are not supported; merge them into the checkpoint",
}
"""Flags of vLLM and llama.cpp -> why there are none here."""

REPLACED = {
    "--plot": "python tools/plot_bench.py REPORT.json FILE.png draws the report that --json prints",
}
"""Flags that were once here -> what does the same."""


COMMANDS_HERE = {
    "run": "ostinato chat MODEL",
    "pull": "ostinato fetch MODEL",
    "download": "ostinato fetch MODEL",
    "list": "hf cache ls, for what came from the hub",
    "ls": "hf cache ls, for what came from the hub",
    "rm": "hf cache rm, for what came from the hub",
    "show": "ostinato inspect MODEL",
    "complete": "ostinato generate",
    "start": "ostinato serve MODEL",
    "benchmark": "ostinato bench",
    "help": "ostinato --help",
    "version": "ostinato --version",
}
"""Commands of vLLM, llama.cpp and Ollama -> ours."""


def advice_on_command(name: str, ours: Sequence[str]) -> str:
    """Return what to type in place of an unknown command."""
    if name in COMMANDS_HERE:
        return f"here it is {COMMANDS_HERE[name]}"
    near = get_close_matches(name, ours, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(ours)}"


def advice(flag: str) -> str | None:
    """Return what to type in place of another engine's flag, or None if that is unknown too."""
    name = flag.partition("=")[0]
    if name in REPLACED:
        return REPLACED[name]
    if name in REFUSED:
        return f"it has no counterpart here: {REFUSED[name]}"
    if name not in FLAG_EQUIVALENTS:
        return None
    ours = FLAG_EQUIVALENTS[name]
    return "leave it out: here that needs no flag" if ours is None else f"here it is {ours}"
