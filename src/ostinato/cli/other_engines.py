"""Flags of vLLM and llama.cpp that have another name here, for the message that a mistyped flag gets."""

from __future__ import annotations

HERE = {
    # vLLM's.
    "--enforce-eager": "--graph-mode none",
    "--compilation-config": "--graph-mode, --capture-sizes and --max-capture-size",
    "--allowed-origins": "--cors-origin",
    "--enable-auto-tool-choice": None,
    "--tool-call-parser": None,
    "--reasoning-parser": None,
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
    "--jinja": None,
    "--reasoning-format": None,
    "--metrics": None,
    "-fa": None,
    "--flash-attn": None,
    "--mlock": None,
    "--no-mmap": None,
}
"""Their flag -> ours; None where nothing has to be said here."""

REFUSED = {
    "--tensor-parallel-size": "a model runs on one device",
    "--pipeline-parallel-size": "a model runs on one device",
    "--data-parallel-size": "a server has one engine",
    "--kv-cache-dtype": "keys and values have the dtype of the model (--dtype)",
    "-ctk": "keys and values have the dtype of the model (--dtype)",
    "--cache-type-k": "keys and values have the dtype of the model (--dtype)",
    "-ctv": "keys and values have the dtype of the model (--dtype)",
    "--cache-type-v": "keys and values have the dtype of the model (--dtype)",
    "--cpu-offload-gb": "weights lie on the device; --quantization int4 makes them smaller",
    "--chat-template": "the chat template is the checkpoint's own; --chat-template-kwargs sets its variables",
    "--enable-lora": "adapters are not supported; merge them into the checkpoint",
    "--lora": "adapters are not supported; merge them into the checkpoint",
    "--lora-modules": "adapters are not supported; merge them into the checkpoint",
}
"""Their flag -> why there is none here."""


def advice(flag: str) -> str | None:
    """What to write for a flag of theirs; None if it is not known either."""
    name = flag.partition("=")[0]
    if name in REFUSED:
        return f"it has no counterpart here: {REFUSED[name]}"
    if name not in HERE:
        return None
    ours = HERE[name]
    return "leave it out: here that needs no flag" if ours is None else f"here it is {ours}"
