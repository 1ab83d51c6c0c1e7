"""Unknown fields of requests: the error with the equivalent here, and reading a body without them.

`unknown_fields` is the setting: they are an error, or are left out, with a header and a log line or in silence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

from ostinato.serve.http.api_errors import ApiError

UNKNOWN = "unknown_parameter"
"""Code of the errors."""
HEADER = "x-ignored-fields"
MAX_IGNORED = 20
"""Unknown names that a request may have where they are left out: it is read again after each."""
_MAX_LISTED = 12
"""Known names that an error lists."""

_MOST = ("max_tokens", "max_output_tokens")
_STOP = ("stop", "stop_sequences")
_PROMPT = ("messages", "input", "prompt")
_SCHEMA = ("response_format", "text.format", "output_config.format", "guided_json", "json")
_THINKING = 'chat_template_kwargs, as {"enable_thinking": false}'
_MODEL_STAYS = "leave it out: the model stays loaded"
_NO_COUNTERPART = "no counterpart is served; leave it out"

FIELD_EQUIVALENTS: dict[str, str | tuple[str, ...]] = {
    # Names of one field in other engines and endpoints; the first one that the endpoint has is named.
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_gen_toks", "max_length", *_MOST), _MOST),
    "max_completion_tokens": _MOST,
    **dict.fromkeys(("min_new_tokens", "min_length"), ("min_tokens",)),
    **dict.fromkeys(("repeat_penalty", "rep_pen", "repetition"), ("repetition_penalty",)),
    **dict.fromkeys(("stop_words", "stop_strings", *_STOP), _STOP),
    **dict.fromkeys(("inputs", "query", "content", *_PROMPT), _PROMPT),
    **dict.fromkeys(
        ("format", "json_schema", "schema", "output_format", "response_schema", "response_format", "guided_json"),
        _SCHEMA,
    ),
    **dict.fromkeys(("regex", "guided_regexp"), ("guided_regex",)),
    **dict.fromkeys(("n_probs", "return_logprob", "details"), ("logprobs",)),
    **dict.fromkeys(("system", "system_prompt", "instruction"), ("instructions", "system", "messages")),
    **dict.fromkeys(("num_return_sequences", "best_of", "num_outputs"), ("n",)),
    "random_seed": ("seed",),
    "return_full_text": ("echo",),
    "t_max_predict_ms": ("timeout",),
    "functions": ("tools",),
    "reasoning_effort": ("reasoning.effort", "output_config.effort"),
    "effort": ("reasoning_effort", "output_config.effort"),
    "logit_bias_tokens": ("logit_bias",),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "bad_words_ids"), ("logit_bias",)),
    # What something else does.
    **dict.fromkeys(("enable_thinking", "thinking", "think", "thinking_budget", "include_reasoning"), _THINKING),
    **dict.fromkeys(("documents", "template_kwargs"), "chat_template_kwargs: it is a variable of the template"),
    **dict.fromkeys(("num_ctx", "n_ctx", "context_length"), "a setting of the server, --max-model-len"),
    **dict.fromkeys(("num_gpu", "n_gpu_layers", "main_gpu"), "a setting of the server, --device"),
    **dict.fromkeys(("num_thread", "n_threads"), "a setting of the server, --threads"),
    **dict.fromkeys(("num_batch", "n_batch"), "a setting of the server, --max-num-batched-tokens"),
    **dict.fromkeys(("cache_prompt", "use_cache"), "a setting of the server, --enable-prefix-caching, which is on"),
    "chat_template": "a setting of the server, --chat-template",
    "prompt_logprobs": "/v1/completions, with echo and logprobs",
    "do_sample": "temperature, where 0 is greedy",
    "options": "Ollama's API, which is not served: give its members as fields of the request",
    "parameters": "TGI's API, which is not served: give its members as fields of the request",
    "sampling_params": "SGLang's API, which is not served: give its members as fields of the request",
    "extra_body": "an argument of OpenAI's client: give its members as fields of the request",
    **dict.fromkeys(("keep_alive", "ttl"), _MODEL_STAYS),
    **dict.fromkeys(("grammar", "ebnf", "guided_grammar"), ("guided_json", "guided_regex")),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), "leave it out: one library does it"),
    **dict.fromkeys(("repeat_last_n", "penalty_last_n"), "leave it out: penalties count all tokens"),
    **dict.fromkeys(
        ("use_beam_search", "length_penalty", "early_stopping", "mirostat", "mirostat_tau", "mirostat_eta", "typical_p",
         "typ_p", "tfs_z", "dynatemp_range", "xtc_probability", "dry_multiplier", "samplers", "n_keep", "num_keep",
         "id_slot", "lora", "raw", "top_a"),
        _NO_COUNTERPART,
    ),
}  # fmt: skip
"""Field in other engines, or at other endpoints -> the fields here, or what does the same."""


def field_advice(name: str, known: Collection[str]) -> str:
    """Return what to give in place of an unknown field; `known` are the fields at its place."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")
    renamed = [field for field, there in FIELD_EQUIVALENTS.items() if isinstance(there, tuple)]
    near = get_close_matches(name, FIELD_EQUIVALENTS, 1, 0.85) + get_close_matches(name, [*known, *renamed], 3)
    for candidate in (name, *near):
        there = FIELD_EQUIVALENTS.get(candidate, ())
        if isinstance(there, str):
            return there if there.startswith(("leave", "no ")) else f"here that is {there}"
        if candidate in known:
            return f"did you mean {candidate}?"
        equivalent = next((field for field in there if field.partition(".")[0] in known), None)
        if equivalent is not None:
            return f"here it is {equivalent}"
    return f"known are {', '.join(known)}" if len(known) <= _MAX_LISTED else "/openapi.json has all that are known"


def unknown_field(place: str, name: str, known: Collection[str]) -> ApiError:
    """Return the error for an unknown field of the object at `place` in the body, which may have the `known` ones."""
    path = f"{place}.{name}" if place else name
    advice = field_advice(name[:100], known)
    return ApiError(400, f"unknown parameter: {path[:500]}; {advice}", param=path, code=UNKNOWN)


def check_members(value: Iterable[str], known: Collection[str], place: str) -> None:
    """Raise the error for an unknown member of an object at `place`."""
    for name in value:
        if name not in known:
            raise unknown_field(place, name, known)


def remove_field(body: Any, path: str) -> str | None:
    """Remove the field at `path` from a body, from all items of the lists on the way; return its name if it was there.

    The name is the path without numbers of items, in printable ASCII.
    """
    pattern = re.sub(r"\[\d+\]", "[]", path)
    return pattern.encode("unicode_escape").decode() if _remove(body, pattern, "") else None


def _remove(value: Any, pattern: str, place: str) -> bool:
    if isinstance(value, list):
        return sum([_remove(item, pattern, f"{place}[]") for item in value]) > 0
    if not isinstance(value, dict):
        return False
    paths = {name: f"{place}.{name}" if place else name for name in value}
    matches = [name for name, path in paths.items() if re.sub(r"\[\d+\]", "[]", path) == pattern]
    for name in matches:
        del value[name]
    inside = [_remove(each, pattern, paths[name]) for name, each in value.items() if pattern.startswith(paths[name])]
    return bool(matches or any(inside))
