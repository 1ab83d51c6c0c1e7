"""Flags and commands of other engines that have another name here, for the message that an unknown one gets."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

_EQUIVALENTS = {
    "--model": "-m --model-path --model-id --model-name-or-path -mu --model-url",
    "--model OWNER/NAME": "-hf -hfr --hf-repo",
    "--model OWNER/NAME:FILE.gguf": "-hff --hf-file",
    "--tokenizer": "--tokenizer-path",
    "the environment variable HF_TOKEN": "--hf-token",
    "the environment variable HF_HUB_OFFLINE=1": "--offline",
    "--download-dir": "--huggingface-hub-cache",
    "the prompt as an argument: ostinato generate MODEL PROMPT": "-p --prompt",
    "ostinato chat": "-cnv --conversation -i --interactive",
    "--system": "-sys --system-prompt",
    "--file": "-f --prompts-file",
    "--image": "--mmproj-image",
    "--raw": "-no-cnv --no-conversation",
    "--graph-mode none": "--enforce-eager --disable-cuda-graph",
    "--graph-mode, --capture-sizes and --max-capture-size": "--compilation-config -O -cc",
    "--max-capture-size": "--cuda-graph-max-bs",
    "--capture-rows": "--cuda-graph-bs --cuda-graphs",
    "--dtype": "--torch-dtype --precision",
    "--quantization": "-q --quantize",
    "--quantization int8": "--load-in-8bit",
    "--quantization int4": "--load-in-4bit",
    "--kv-cache-dtype int8, for keys and values": "-ctk --cache-type-k -ctv --cache-type-v",
    "--max-model-len": "-c --ctx-size --num-ctx --context-length --max-total-tokens --max-seq-len --max-input-length",
    "--max-num-seqs": "-np --parallel --max-running-requests --max-concurrent-requests --max-batch-size",
    "--max-num-batched-tokens": "-ub --ubatch-size -b --batch-size --chunked-prefill-size --max-prefill-tokens"
    " --max-batch-prefill-tokens --max-batch-total-tokens",
    "--max-waiting": "--max-queued-requests",
    "--max-tokens": "-n --predict --n-predict --max-new-tokens --num-predict",
    "--max-body": "--payload-limit",
    "--threads": "-t -tb --threads-batch --n-threads --cpu-threads",
    "--device cuda": "-ngl --gpu-layers --n-gpu-layers --gpus",
    "--tensor-parallel-size": "-tp --tp --tp-size --num-shard --num-gpus",
    "--replicas": "--data-parallel-size -dp --dp --dp-size",
    "--memory-utilization": "--mem-fraction-static --cuda-memory-fraction",
    "--overlap on, which is automatic": "--async-scheduling",
    "--seed": "-s --random-seed",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--stop": "-r --reverse-prompt --stop-sequences",
    "--enable-prefix-caching": "--cache-prompt --prefix-caching --enable-radix-cache",
    "--no-enable-prefix-caching": "--disable-radix-cache --no-cache-prompt",
    "--no-enable-chunked-prefill": "--disable-chunked-prefill",
    "--cache-memory": "--cache-ram --kv-cache-memory",
    "--cache-offload, of what the prefix cache evicts": "--kv-offloading-size --kv-transfer-config",
    "--state-cache-mode": "--ctx-checkpoints",
    "--state-block-size": "--checkpoint-min-step",
    "--scheduling-policy": "--schedule-policy",
    "--speculative draft:PATH:4": "-md --model-draft --spec-draft-model --speculative-model"
    " --speculative-draft-model-path",
    "--speculative ngram:4": "--spec-type --speculative-algorithm --speculate",
    "--served-model-name": "-a --alias",
    "--cors-origin": "--allowed-origins --cors-origins --cors-allow-origin",
    "--host": "--hostname --listen",
    "--port": "-P",
    "--ssl-certfile": "--ssl-cert-file",
    "--ssl-keyfile": "--ssl-key-file",
    "--request-timeout": "-to --timeout",
    "--log-level warning": "--no-enable-log-requests --disable-log-requests --disable-uvicorn-access-log --log-disable",
    "--log-level info": "--enable-log-requests --log-requests",
    "--log-level debug": "-v --verbose --debug -lv --log-verbosity",
    "--log-level": "--uvicorn-log-level",
    "--log-format json": "--json-output",
    "--root-path": "--api-prefix --fastapi-root-path",
    "--guide-lark": "--grammar --grammar-file",
    "--guide-json-schema": "-j --json-schema -jf --json-schema-file",
    "--chat-template": "--chat-template-file",
    "--chat-template-kwargs": "--default-chat-template-kwargs",
    "--random-weights": "--dummy-weights",
    "--allow-remote-images, for those of http and https": "--allowed-media-domains",
    "": "--enable-auto-tool-choice --reasoning-parser --enable-reasoning --trust-remote-code"
    " --load-format --disable-log-stats --jinja --reasoning-format --metrics --enable-metrics -fa --flash-attn --mlock"
    " --no-mmap --mmap -cb --cont-batching --attention-backend --embedding --embeddings --task --runner -mm --mmproj"
    " --no-webui --skip-tokenizer-init --color --keep-alive --disable-custom-all-reduce --guided-decoding-backend"
    " --structured-outputs-config --max-logprobs --limit-mm-per-prompt --max-num-partial-prefills --slots --no-slots"
    " --disable-frontend-multiprocessing --no-warmup",
}
FLAG_EQUIVALENTS = {flag: ours or None for ours, theirs in _EQUIVALENTS.items() for flag in theirs.split()}
"""Flags of vLLM, SGLang, TGI, llama.cpp and Ollama -> flags here; None if nothing has to be given here."""

_ADAPTERS = "adapters are not supported; merge them into the checkpoint"
_ON_DEVICE = "weights lie on the device; --quantization int4 makes them smaller"
REFUSED = {
    **dict.fromkeys(
        ("--pipeline-parallel-size", "-pp", "--pp-size", "-ts", "--tensor-split", "-sm", "--split-mode"),
        "only --tensor-parallel-size cuts a model across devices",
    ),
    "--generation-config": "the checkpoint's generation_config.json has the defaults of requests, which set others",
    **dict.fromkeys(("-mg", "--main-gpu"), "CUDA_VISIBLE_DEVICES chooses the GPU"),
    **dict.fromkeys(
        ("-ep", "--enable-expert-parallel", "--ep-size"), "--tensor-parallel-size cuts experts across devices too"
    ),
    **dict.fromkeys(("--cpu-offload-gb", "-ot", "--override-tensor", "-cmoe", "--cpu-moe"), _ON_DEVICE),
    "--swap-space": "requests that lose their memory are computed again; --cache-offload keeps prefixes in files",
    **dict.fromkeys(("--enable-lora", "--lora", "--lora-modules", "--lora-paths", "--lora-adapters"), _ADAPTERS),
    **dict.fromkeys(
        ("--rope-scaling", "--rope-freq-base", "--rope-freq-scale", "--hf-overrides", "--override-kv"),
        "the checkpoint's config.json says how positions are rotated; change it there",
    ),
    **dict.fromkeys(("--typical-p", "--mirostat", "--dry-multiplier", "--xtc-probability"), "--min-p is the nearest"),
}
"""Flags of other engines -> why there are none here."""

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
    "ps": "ostinato serve's page, or its /metrics: a server has one model, which stays loaded",
    "stop": "Ctrl-C or SIGTERM, which end a server once its requests have ended",
    "create": "--model FILE.gguf with --chat-template and --system: there are no Modelfiles",
    "cp": "--served-model-name NAME, which gives a model another name",
    "push": "hf upload: the hub's own client puts models there",
    "login": "hf auth login",
    "signin": "hf auth login",
    "embed": "POST /v1/embeddings of ostinato serve MODEL, or LLM.embed in Python",
    "embedding": "POST /v1/embeddings of ostinato serve MODEL, or LLM.embed in Python",
    "show": "ostinato inspect MODEL",
    "info": "ostinato inspect MODEL",
    "complete": "ostinato generate",
    "completion": "ostinato generate",
    "cli": "ostinato chat MODEL, or ostinato generate MODEL PROMPT",
    "start": "ostinato serve MODEL",
    "server": "ostinato serve MODEL",
    "launch_server": "ostinato serve MODEL",
    "api_server": "ostinato serve MODEL",
    "run-batch": "ostinato batch IN.jsonl OUT.jsonl",
    "benchmark": "ostinato bench",
    "perplexity": "ostinato eval MODEL",
    "quantize": "--quantization int8, which quantises while loading",
    "convert": "--quantization int8, which quantises while loading; GGUF files are made by llama.cpp",
    "collect-env": "ostinato plan, whose section on the device says what was found",
    "help": "ostinato COMMAND --help",
    "version": "ostinato --version",
}
"""Commands of other engines -> ours."""


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
