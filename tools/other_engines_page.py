"""Writes docs/flags-of-*.md and docs/coming-from-*.md but one, from other_engines.py and serve/other_paths.py.

other_programs.json has the flags of vLLM 0.33's `vllm serve`, of `llama-server` and `llama-cli` as llama-cpp-python
0.3.36 has them, and of `mlx_lm.generate` and `mlx_lm.server`; and the fields of requests. Run it after a change there:
PYTHONPATH=src python tools/other_engines_page.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from ostinato.other_engines import FIELD_EQUIVALENTS, FLAG_EQUIVALENTS, REFUSED
from ostinato.serve.api.chat_completions import ChatRequest
from ostinato.serve.api.completions import CompletionRequest
from ostinato.serve.other_paths import PATHS

DOCS = Path(__file__).parent.parent / "docs"
PROGRAMS = json.loads(Path(__file__).with_name("other_programs.json").read_text(encoding="utf-8"))
MADE = "`tools/other_engines_page.py` makes this page from the code.\n\n"
OTHERS = """# Flags of other engines

A flag of SGLang, TGI, MLX or Ollama that has another name here, or none, is answered with what does the same. Those of
[vLLM](flags-of-vllm.md) and [llama.cpp](flags-of-llama-cpp.md) have pages of their own. [Coming from another
engine](coming-from-vllm-or-llama-cpp.md) sorts them by what they are for. """
FLAGS = """# Flags of {title} that need nothing here, or have no counterpart

They are of {programs}; the error says the same. [Coming from {title}](coming-from-{name}.md) has those with another
name, and whole command lines. """
COMING = """# Coming from {title}

{intro}

<!-- check: no, endless: the first of each pair is of another program, and the second serves until Ctrl-C -->
```console
{pairs}
```

`ostinato plan` in place of `ostinato serve` says first whether it fits. A flag of {programs} is one here,
has another name (below), or [none](flags-of-{name}.md). [Side by side](coming-from-vllm-or-llama-cpp.md) has them by
what they are for.

{renamed}
## Environment variables

{variables}

## Paths of the server

Those of OpenAI's protocol are the same, and so are `/health`, `/metrics`, `/tokenize` and `/detokenize`.

{paths}

## Fields of requests

{fields}
"""
_KEY, _SAME = "`OSTINATO_API_KEY`", "the same"
VARIABLES = {
    "vllm": {
        "`--cache-memory 40GiB`, of keys, values and states together (open: 4GiB on a CPU)": "VLLM_CPU_KVCACHE_SPACE",
        "`taskset -c 0-15 ostinato ...` or `numactl` for which cores, `--threads N` for how many": ""
        "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU OMP_NUM_THREADS",
        "`--kernels`; the plan chooses them, and `ostinato kernels` shows them": "VLLM_ATTENTION_BACKEND"
        " VLLM_CPU_SGL_KERNEL VLLM_CPU_MOE_PREPACK",
        "`--log-level debug`": "VLLM_LOGGING_LEVEL",
        _KEY: "VLLM_API_KEY",
        _SAME: "HF_HOME HF_TOKEN HF_HUB_OFFLINE CUDA_VISIBLE_DEVICES",
    },
    "llama-cpp": {
        "flags, or a file of settings: `--config FILE.yaml`": "LLAMA_ARG_...",
        _KEY: "LLAMA_API_KEY",
        "`HF_HOME`, or `--download-dir`": "LLAMA_CACHE",
        _SAME: "HF_TOKEN CUDA_VISIBLE_DEVICES",
    },
}
"""Program -> what takes the place of its environment variables here -> their names."""
FIELDS = """Unknown fields are errors that name the field meant; `--unknown-fields warn` ignores them. """
PAGES = {
    "vllm": (
        "vLLM",
        "`vllm serve`",
        "The same clients work. Most settings have vLLM's names, and a value that does not fit is an error\n"
        "before anything is loaded. Three servers there, and the same here:",
        [
            "vllm serve ibm-granite/granite-4.0-h-tiny --max-model-len 32768 --gpu-memory-utilization 0.9",
            "ostinato serve ibm-granite/granite-4.0-h-tiny --max-model-len 32768 --gpu-memory-utilization 0.9",
            "vllm serve Qwen/Qwen3.5-4B --enable-auto-tool-choice --tool-call-parser qwen3_coder",
            "ostinato serve Qwen/Qwen3.5-4B",
            "vllm serve nvidia/NVIDIA-Nemotron-Nano-9B-v2 --kv-cache-dtype fp8 --enforce-eager",
            "ostinato serve nvidia/NVIDIA-Nemotron-Nano-9B-v2 --kv-cache-dtype int8 --graph-mode none",
        ],
    ),
    "llama-cpp": (
        "llama.cpp",
        "`llama-server` and `llama-cli`",
        "[GGUF files](gguf.md) run as they lie. The server has OpenAI's endpoints at `/v1`. `-c` is shared by all\n"
        "slots there, and `--max-model-len` is of each request here. Three commands there, and the same here:",
        [
            "llama-server -m granite-4.0-h-tiny-Q4_K_M.gguf -c 32768 -np 4 -t 8",
            "ostinato serve granite-4.0-h-tiny-Q4_K_M.gguf --max-model-len 8192 --max-num-seqs 4 --threads 8",
            "llama-cli -hf LiquidAI/LFM2-1.2B-GGUF -hff LFM2-1.2B-Q4_K_M.gguf -sys 'Be brief.' --temp 0.3",
            "ostinato chat LiquidAI/LFM2-1.2B-GGUF:LFM2-1.2B-Q4_K_M.gguf --system 'Be brief.' --temperature 0.3",
            "llama-server -m Falcon-H1-1.5B.gguf -ctk q8_0 -ctv q8_0 -a falcon --api-key SECRET",
            "ostinato serve Falcon-H1-1.5B.gguf --kv-cache-dtype int8 --served-model-name falcon --api-key SECRET",
        ],
    ),
}
"""Page -> title, programs, introduction, and pairs of command lines: theirs, ours."""


def pages() -> dict[str, str]:
    """Name -> text."""
    vllm, llama = _flags("vllm"), _flags("llama.cpp")
    mine = {"vllm": vllm, "llama-cpp": llama}
    others = {*FLAG_EQUIVALENTS, *REFUSED} - vllm - llama
    made = {"flags-of-other-engines.md": OTHERS + MADE + _renamed(others) + "\n" + _none(others)}
    for name, (title, programs, intro, pairs) in PAGES.items():
        asked = "\n".join(f"$ {line}" for line in pairs)
        fields = _fields(PROGRAMS["llama.cpp" if name == "llama-cpp" else name]["fields"])
        words = {"title": title, "name": name, "programs": programs, "intro": intro, "pairs": asked, "fields": fields}
        words["renamed"] = _renamed(mine[name])
        for part, answers in (("variables", VARIABLES[name]), ("paths", PATHS[name])):
            rows = [f"| `{' '.join(theirs.split())}` | {here} |" for here, theirs in answers.items()]
            words[part] = "\n".join(["| theirs | here |", "|---|---|", *rows])
        made[f"coming-from-{name}.md"] = COMING.format(**words)
        made[f"flags-of-{name}.md"] = FLAGS.format(**words) + MADE + _none(mine[name])
    return made


def _flags(program: str) -> set[str]:
    return set(" ".join(PROGRAMS[program]["flags"]).split())


def _renamed(flags: Collection[str]) -> str:
    answers = {flag: _code(ours) for flag, ours in FLAG_EQUIVALENTS.items() if ours is not None and flag in flags}
    return _table("Flags with another name", "here", answers)


def _none(flags: Collection[str]) -> str:
    needless = {flag: "needs no flag" for flag, ours in FLAG_EQUIVALENTS.items() if ours is None and flag in flags}
    refused = {flag: _code(why) for flag, why in REFUSED.items() if flag in flags}
    return _table("Leave out", "here", needless) + "\n" + _table("No counterpart", "why", refused)


def _table(title: str, column: str, answers: dict[str, str]) -> str:
    """Flags with the same answer share a row."""
    rows: dict[str, list[str]] = {}
    for flag, answer in answers.items():
        rows.setdefault(answer, []).append(flag)
    lines = [f"| `{' '.join(flags)}` | {answer} |" for answer, flags in rows.items()]
    return "\n".join([f"## {title}", "", f"| theirs | {column} |", "|---|---|", *lines, ""]) if rows else ""


def _fields(names: list[str]) -> str:
    ours = {**ChatRequest.model_fields, **CompletionRequest.model_fields}
    given = " ".join(names).split()
    same = [name for name in given if name in ours]
    rows: dict[str, list[str]] = {}
    for name in given:
        if name not in ours:
            there = FIELD_EQUIVALENTS.get(name, "not known")
            answer = (
                there
                if isinstance(there, str)
                else " or ".join(f"`{field}`" for field in dict.fromkeys(there) if field.split(",")[0] in ours)
            )
            rows.setdefault(_code(answer), []).append(f"`{name}`")
    table = "\n".join(f"| {', '.join(fields)} | {answer} |" for answer, fields in rows.items())
    return f"{FIELDS}These are the same here: `{'`, `'.join(same)}`.\n\n| theirs | here |\n|---|---|\n{table}"


def _code(answer: str) -> str:
    """Flags of ours as code, with the value that one has."""
    return re.sub(r"(?<!`)--[^,;)]+?(?= and |[,;)]|$| (?=[a-z]+ ))", r"`\g<0>`", answer)


if __name__ == "__main__":
    for page, text in pages().items():
        (DOCS / page).write_text(text, encoding="utf-8")
