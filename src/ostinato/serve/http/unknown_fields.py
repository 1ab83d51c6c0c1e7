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
MAX_ON_LOOP = 5
"""Most unknown fields that the event loop removes from a request: each costs it some milliseconds."""
_MAX_LISTED = 12
"""Known names that an error lists."""

_RENAMED = {
    "max_tokens max_output_tokens": "n_predict num_predict max_new_tokens max_gen_toks max_completion_tokens",
    "min_tokens": "min_new_tokens min_length",
    "repetition_penalty": "repeat_penalty rep_pen repetition",
    "stop stop_sequences": "stop_words stop_strings",
    "instructions system messages": "system_prompt instruction",
    "messages input prompt": "inputs query content",
    "response_format text.format output_config.format guided_json json": "format json_schema schema output_format",
    "guided_json guided_regex": "regex grammar ebnf guided_grammar",
    "logprobs": "n_probs return_logprob details",
    "reasoning_effort reasoning.effort output_config.effort": "effort",
    "logit_bias": "allowed_token_ids bad_words bad_words_ids",
    "n": "num_return_sequences best_of num_outputs",
    "seed": "random_seed",
    "echo": "return_full_text",
    "timeout": "t_max_predict_ms",
    "tools": "functions",
}
"""Fields here, in different endpoints -> names of the same in other engines, beside these."""
_DONE_BY = {
    'chat_template_kwargs, as {"enable_thinking": false}': "enable_thinking thinking think thinking_budget",
    "chat_template_kwargs, as variables of the template": "documents template_kwargs",
    "a setting of the server, --max-model-len": "num_ctx n_ctx context_length",
    "a setting of the server, --device": "num_gpu n_gpu_layers main_gpu",
    "a setting of the server, --threads": "num_thread n_threads",
    "a setting of the server, --max-num-batched-tokens": "num_batch n_batch",
    "a setting of the server, --enable-prefix-caching, which is on": "cache_prompt use_cache",
    "a setting of the server, --chat-template": "chat_template",
    "/v1/completions, with echo and logprobs": "prompt_logprobs",
    "temperature, where 0 is greedy": "do_sample",
    "another API, such as Ollama's: give its members as fields of the request": "options parameters sampling_params",
    "an argument of OpenAI's Python client: give its members as fields of the request": "extra_body",
    "not needed, as the model stays loaded": "keep_alive ttl",
    "not needed, as one library does it": "guided_decoding_backend guided_whitespace_pattern",
    "not needed, as penalties count all tokens": "repeat_last_n penalty_last_n",
    "not needed, as reasoning has its own field": "include_reasoning separate_reasoning",
    "not served, and a prompt that is too long is refused": "truncate_prompt_tokens",
    "not served": "use_beam_search length_penalty early_stopping mirostat mirostat_tau mirostat_eta typical_p typ_p "
    "tfs_z dynatemp_range xtc_probability dry_multiplier samplers n_keep num_keep id_slot lora raw top_a "
    "return_token_ids return_tokens_as_token_ids top_n_tokens add_special_tokens spaces_between_special_tokens",
}
"""Counterparts here -> fields of other engines."""
FIELD_EQUIVALENTS: dict[str, str | tuple[str, ...]] = {
    **{name: tuple(here.split()) for here, names in _RENAMED.items() for name in (names + " " + here).split()},
    **{name: what for what, names in _DONE_BY.items() for name in names.split()},
}
"""Field in other engines, or at other endpoints -> the fields here, or what it is here."""


def field_advice(name: str, known: Collection[str]) -> str:
    """Return what to give in place of an unknown field; `known` are the fields at its place."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")
    near = get_close_matches(name, known, 3, 0.7)
    if name not in FIELD_EQUIVALENTS:
        renamed = [field for field, there in FIELD_EQUIVALENTS.items() if isinstance(there, tuple)]
        near = get_close_matches(name, FIELD_EQUIVALENTS, 1, 0.85) + get_close_matches(name, [*known, *renamed], 3, 0.7)
    for candidate in (name, *near):
        there = FIELD_EQUIVALENTS.get(candidate, ())
        if candidate in known:
            return f"did you mean {candidate}?"
        if isinstance(there, str):
            return f"here that is {there}"
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
