"""Writes docs/troubleshooting.md: messages, and the classes of errors with what a client gets.

Run it after a change of an error class: PYTHONPATH=src python tools/troubleshooting_page.py. The commands of the page
are run by tests/test_docs_commands.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ostinato.media.message_media  # noqa: F401  its errors are listed, too
from ostinato import errors
from ostinato.engine.text import chat_template  # noqa: F401
from ostinato.errors import ContextLengthError, OstinatoError
from ostinato.serve.http.api_errors import as_api_error

PAGE = Path(__file__).parent.parent / "docs/troubleshooting.md"
MESSAGES = """# Troubleshooting

A message says what was asked, what is possible and what to change. The lines under it that begin with a dash are
settings that work. Look for your message here by its words, or [by its class](#every-class).

## No such option, no such command

It is of another program, and the message has ours ([vLLM](coming-from-vllm.md),
[llama.cpp](coming-from-llama-cpp.md), [others](flags-of-other-engines.md)), or it is mistyped.

```console
$ ostinato serve demo --enforce-eager
...
Error: No such option: --enforce-eager (here it is --graph-mode none)
$ ostinato pull smollm2
...
Error: No such command 'pull'; here it is ostinato fetch smollm2
```

## There is no directory; holds no config.json

A model is a directory with `config.json`, `*.safetensors` and `tokenizer.json`, a GGUF file, a hub id, or one of [four
names](models.md).

```console
$ ostinato plan llama3.2:1b
ModelError: there is no directory 'llama3.2:1b'; names of Ollama's library are not known here: ...
$ ostinato plan docs
ModelError: docs holds no config.json, so it is no checkpoint; ...
```

## GiB are needed; is beyond what the model can do

It does not fit, or the model has no such positions. Take a setting that the message names, or leave yours out: the plan
then chooses one that fits.

```console
$ ostinato plan benchmarks/models/nemotron-h-300m --device l4-24gb --max-num-seqs 2000
CapacityError: 26.1 GiB are needed, and 20.2 GiB of the 22.5 GiB of l4-24gb may be used: ...
  - --max-num-seqs 1538
$ ostinato plan demo --max-model-len 1000000
ConfigError: max_model_len 1000000 is beyond what the model can do: 4096, max_position_embeddings
  - --max-model-len 4096
```

## Should be; has no setting

```console
$ ostinato plan demo --kv-cache-dtype fp8
ConfigError: kv_cache_dtype = 'fp8': should be 'auto' or 'int8'; ...
  - --kv-cache-dtype int8
$ echo 'max_num_seq: 3' > mistyped.yaml
$ ostinato plan demo --config mistyped.yaml
ConfigError: mistyped.yaml: plan has no setting 'max_num_seq'; did you mean max_num_seqs?
```

## This model's maximum context length is

The prompt does not fit. Shorten it, or start the server with a larger `--max-model-len`, if the model has the
positions and the cache the room.

## No message, but slow or strange

| what | where the reason stands |
|---|---|
| slow always | `ostinato plan MODEL`, kernels: `reference` where a compiler was missing at the installation |
| slow at some batches | the plan's graphs: the batches that run eagerly, and the setting that would cover them |
| slow beside other programs | `--threads` with fewer cores; `ostinato bench contention` |
| prompts are computed again | [the miss report](tutorials/read-a-miss-report.md): each miss has a cause |
| the GPU is not used | the plan's device: why |
| other tokens than elsewhere | [`ostinato verify MODEL`](verifying.md); greedy is the default |
| an answer ends early | its `finish_reason`: `length` is `max_tokens` or the context |
| a request waits | `/metrics` and the server's page: running and waiting requests |

## Every class

A command prints the class before the message, and ends with code 2. Python raises it, from `ostinato.errors`, with
`error.remedies`. A server answers a request with a status, and some with a `code`. What a request did not cause is 500,
and the server's log has more.

"""
END = """
`tools/troubleshooting_page.py` makes this page from the classes.
"""
ADVICE = {
    "ConfigError": "take a value that the message names",
    "CapacityError": "take one of the settings below the message",
    "ModelError": "give another checkpoint, or mend the file that it names",
    "RequestError": "change the field that it names",
    "PromptsFailed": "`error.outputs` has the outputs of the others",
    "ContextLengthError": "shorten the prompt, or raise `max_model_len`",
    "MoveError": "let the first engine end the request",
    "DamagedExport": "export the request again",
    "ForeignExport": "start both engines with the same model and settings",
    "Overloaded": "try again after `Retry-After`, or raise `--max-waiting`",
    "DeadlineExceeded": "raise `timeout`, or `--request-timeout`",
    "BacklogExceeded": "read the answers faster, or raise `--client-backlog`",
    "TemplateTooExpensive": "send fewer messages, or give another `--chat-template`",
    "MediaError": "send an image that can be read, within the limits",
    "RecordError": "give the directory that `--record` named",
    "DamagedRecord": "copy the record again",
    "TruncatedRecord": "replay what stands before the end",
    "RankError": "start it again; the log has the cause",
    "CaptureError": "report it: it is a bug",
    "ForkError": "start processes with `spawn`",
    "ReplicaLost": "send the request again",
    "EngineStopped": "send the request to another server",
    "EngineFailed": "start the server again; its log has the cause",
    "StepFailed": "report it, with the traceback of the log",
}
"""What to do about each class that users meet."""
SERVER = (errors.StepFailed, errors.ReplicaLost, errors.EngineStopped, errors.EngineFailed)
"""Errors beside Ostinato's own that end requests."""


def classes(base: type[Exception] = OstinatoError) -> Iterator[type[Exception]]:
    for kind in sorted(base.__subclasses__(), key=lambda kind: (kind.__module__, kind.__name__)):
        # Those of the plan are raised as their parents.
        if kind.__module__.startswith("ostinato.") and not kind.__module__.startswith("ostinato.plan"):
            yield kind
            yield from classes(kind)


def page() -> str:
    rows = [
        f"| `{kind.__name__}` | {_meaning(kind)} | {ADVICE[kind.__name__]} | {_answer(kind)} |"
        for kind in [*classes(), *SERVER]
        if kind.__name__ != "UnknownMember"  # as its parent
    ]
    return MESSAGES + "\n".join(["| class | error for | what to do | answer |", "|---|---|---|---|", *rows, END])


def _meaning(kind: type[Exception]) -> str:
    """The first sentence of the docstring."""
    text = " ".join((kind.__doc__ or "").split())
    return text.removeprefix("Error for ").partition(". ")[0].partition(" (`")[0].rstrip(".")


def _answer(kind: type[Exception]) -> str:
    error = kind.__new__(kind)
    error.args = error.message, error.setting, error.retry_after = ("",) * 3  # type: ignore[attr-defined]
    if isinstance(error, ContextLengthError):
        return "400 `context_length_exceeded`"
    answer = as_api_error(error)
    if answer.status == 500:
        return "500"
    return f"{answer.status}" + (f" `{answer.code}`" if answer.code else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
