"""Other engines' names and values for settings, and the messages for a setting that is refused.

`help()` shows pydantic fields with the texts from here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from ostinato.errors import ConfigError, Remedy
from ostinato.units import number_in

Model = TypeVar("Model", bound=BaseModel)


def describe_fields(model: type[Model]) -> type[Model]:
    """Add each field with its default and description to the docstring, which is all that `help()` shows of it."""
    lines = ["", "", "Fields:", ""]
    for name, field in model.model_fields.items():
        default = "" if field.is_required() else f" = {field.get_default(call_default_factory=True)!r}"
        lines.append(f"{name}{default}")
        lines += textwrap.wrap(field.description or "", 100, initial_indent="    ", subsequent_indent="    ")
    model.__doc__ = inspect.cleandoc(model.__doc__ or "") + "\n".join(lines)
    return model


ALIASES = {
    "mamba_ssm_cache_dtype": "ssm_state_dtype",
    "gpu_memory_utilization": "memory_utilization",
    "kv_cache_memory_bytes": "cache_memory",
    "mamba_cache_mode": "state_cache_mode",
    "mamba_block_size": "state_block_size",
    "cudagraph_capture_sizes": "capture_sizes",
    "max_cudagraph_capture_size": "max_capture_size",
    "speculative_config": "speculative",
    "encoder_cudagraph_token_budgets": "encoder_token_budgets",
    "encoder_cudagraph_max_vision_items_per_batch": "encoder_max_items_per_batch",
}
"""vLLM's names for settings of the same meaning. They work wherever a setting is named."""

_NO_BEAMS = "leave it out; there is no beam search"
_GUIDE = "here it is guide={'json_schema': SCHEMA}, or regex, choice, json_object or lark"
_SAMPLERS = "leave it out; there are temperature, top_k, top_p and min_p"

SAMPLING_NAMES = {
    **dict.fromkeys(("structured_outputs", "guided_decoding", "response_format"), _GUIDE),
    **{f"guided_{kind}": _GUIDE for kind in ("json", "regex", "choice", "grammar")},
    **dict.fromkeys(("json_schema", "json_object", "regex", "choice", "grammar", "lark"), _GUIDE),
    "logits_processors": "there are logit_bias, penalties and guide; no code of a request runs in a step",
    "bad_words": "there is logit_bias={TOKEN_ID: -100}, for words of one token",
    "allowed_token_ids": "there are logit_bias, and guide={'choice': [...]}",
    **dict.fromkeys(("best_of", "num_return_sequences"), "here it is n, and every output comes back"),
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping", "num_beams", "beam_width"), _NO_BEAMS),
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "max_completion_tokens", "n_predict", "num_predict"), "here it is max_tokens"
    ),
    "min_new_tokens": "here it is min_tokens",
    "do_sample": "temperature=0 is greedy, and any other temperature samples",
    "temp": "here it is temperature",
    "repeat_penalty": "here it is repetition_penalty",
    "random_seed": "here it is seed",
    **dict.fromkeys(("stop_strings", "stop_sequences"), "here it is stop"),
    "eos_token_id": "here it is stop_token_ids",
    **dict.fromkeys(("top_logprobs", "n_probs"), "here it is logprobs"),
    **dict.fromkeys(("typical_p", "tfs_z", "mirostat", "xtc_probability", "dry_multiplier"), _SAMPLERS),
    **dict.fromkeys(("detokenize", "output_kind", "flat_logprobs", "extra_args", "pad_token_id"), "leave it out"),
    "spaces_between_special_tokens": "leave it out; text is what the tokenizer decodes",
    "truncate_prompt_tokens": "leave it out; shorten the prompt, since nothing is cut",
    "echo": "leave it out; the output has prompt and prompt_logprobs",
}
"""Other engines' names for sampling parameters -> advice what to use here."""

UNSUPPORTED_SETTINGS = {
    "enforce_eager": "here it is graph_mode='none'",
    "trust_remote_code": "leave it out; no code of a checkpoint is ever run",
    "swap_space": "leave it out; requests that lose their memory are computed again",
    "disable_log_stats": "leave it out; stats() has them",
    "compilation_config": "here it is graph_mode, capture_sizes and max_capture_size",
    "async_scheduling": "here it is overlap='on' or 'off'",
    "distributed_executor_backend": "leave it out; tensor_parallel_size starts the processes",
    "disable_custom_all_reduce": "leave it out; the sums of ranks need no setting",
    "pipeline_parallel_size": "only tensor_parallel_size cuts a model across devices",
    "data_parallel_size": "make several LLMs, or `ostinato serve --replicas N`",
    "cpu_offload_gb": "weights lie on the device; quantization='int4' makes them smaller",
    "num_gpu_blocks_override": "here it is cache_memory, in bytes",
    "preemption_mode": "leave it out; requests that lose their memory are computed again",
    "load_format": "leave it out; the files show it",
    "tokenizer_mode": "leave it out; the checkpoint's files show it",
    "skip_tokenizer_init": "leave it out; prompts may be token ids in any case",
    "hf_overrides": "change config.json",
    "hf_token": "set the environment variable HF_TOKEN",
    "generation_config": "leave it out, and give SamplingParams with each call",
    "override_generation_config": "leave it out, and give SamplingParams with each call",
    "speculative_model": "here it is speculative='draft:PATH:4'",
    "num_speculative_tokens": "here it is a part of speculative, such as 'ngram:4'",
    **dict.fromkeys(("task", "runner", "convert"), "leave it out; any model generates and embeds"),
    **dict.fromkeys(("guided_decoding_backend", "structured_outputs_config"), "leave it out; there is one for guides"),
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank"), "adapters are not supported; merge them into the checkpoint"
    ),
    "limit_mm_per_prompt": "leave it out; a conversation may have as many images as fit",
    "mm_processor_kwargs": "give max_pixels or min_pixels in the part of the message that has the image",
    "max_logprobs": "leave it out; a request may ask for any number",
    "served_model_name": "it is a flag of `ostinato serve`",
    "model_path": "here it is model",
    "n_ctx": "here it is max_model_len",
    "n_batch": "here it is max_num_batched_tokens",
    "n_threads": "here it is threads",
    "n_gpu_layers": "here it is device='cuda'",
    "torch_dtype": "here it is dtype",
    "device_map": "here it is device",
    "load_in_8bit": "here it is quantization='int8'",
    "load_in_4bit": "here it is quantization='int4'",
}
"""Other engines' names for settings that do not exist here -> advice what to use instead."""

_FLOATS = {
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
}
_BLOCKS = "a GGUF file keeps the format that it has; others are made here while loading"
OTHER_VALUES: dict[str, dict[str, tuple[str, str]]] = {
    "dtype": {
        **{word: (here, "") for word, here in _FLOATS.items()},
        **dict.fromkeys(("int8", "fp8", "int4"), ("auto", "weights of fewer bits are a matter of quantization")),
    },
    "ssm_state_dtype": {word: (here, "") for word, here in _FLOATS.items()},
    "quantization": {
        **dict.fromkeys(("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_0", "q5_1"), ("int8_g128", _BLOCKS)),
        **dict.fromkeys(("q4_0", "q4_1", "q4_k_m", "q4_k_s", "q4_k", "q3_k_m", "q2_k", "mxfp4"), ("int4_g32", _BLOCKS)),
        **dict.fromkeys(("fp8", "8bit", "w8a8", "w8a16", "q8"), ("int8", "")),
        **dict.fromkeys(("4bit", "w4a16", "bitsandbytes", "nf4", "q4"), ("int4", "")),
        **dict.fromkeys(("awq", "gptq", "compressed-tensors"), ("auto", "a quantised checkpoint says so itself")),
        **dict.fromkeys(
            (*_FLOATS, *_FLOATS.values()), ("none", "the dtype of weights that are not quantised is dtype")
        ),
    },
    "graph_mode": {"full": ("full_decode_only", ""), "eager": ("none", "")},
    "scheduling_policy": {"fifo": ("fcfs", "")},
    "device": {
        **dict.fromkeys(("gpu", "nvidia", "cuda:0"), ("cuda", "CUDA_VISIBLE_DEVICES chooses among several GPUs")),
        **dict.fromkeys(("h100", "h200", "a100", "b200", "l4", "l40s"), ("cuda", "only `plan` takes names of GPUs")),
    },
    "kv_cache_dtype": {
        **dict.fromkeys(
            ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"),
            ("int8", "8-bit keys and values are int8, which keeps more of each number in as many bytes"),
        ),
        **dict.fromkeys(("q8", "8bit", "int4"), ("int8", "")),
        "q8_0": ("int8", "8-bit keys and values are int8, with one scale for each token's head"),
        **dict.fromkeys(
            ("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"), ("int8", "keys and values have no fewer than 8 bits, as int8")
        ),
        **dict.fromkeys(
            (*_FLOATS, *_FLOATS.values()),
            ("auto", "keys and values that are not int8 have the dtype of the model (dtype)"),
        ),
    },
}
"""Setting -> values that it has in vLLM and llama.cpp, each with the value to use here, and why."""

_SWITCHES = {
    **dict.fromkeys(("on", "true", "yes", "1", "enable", "enabled"), True),
    **dict.fromkeys(("off", "false", "no", "0", "none", "disable", "disabled"), False),
}


def nearest_value(name: str, given: Any, kind: str, expected: Iterable[str] = ()) -> Any:
    """Return the value that was probably meant by `given`, which is none of the setting `name`; None without a guess.

    `kind` is pydantic's type of the problem. `expected` are the values of a setting that has names for them.
    """
    word = str(given).strip().lower()
    if kind == "literal_error":
        known = {value.lower(): value for value in expected}
        switch = {True: "on", False: "off", None: None}[_SWITCHES.get(word)]
        near = [known[word]] if word in known else get_close_matches(word, known, 1)
        return (
            OTHER_VALUES.get(name, {}).get(word, (None,))[0]
            or (switch if switch in known else None)
            or (known[near[0].lower()] if near else None)
        )
    if kind.startswith("bool_"):
        return _SWITCHES.get(word)
    if not kind.startswith(("int_", "float_")) or isinstance(given, bool):
        return None
    number = number_in(word, is_time=name.endswith(("_timeout", "_seconds", "timeout")))
    if number is None or kind.startswith("float_"):
        return number
    return int(number) if number == int(number) else None


def validation_problem(found: Mapping[str, Any], equals: str = " = ") -> tuple[str, list[Remedy]]:
    """Return pydantic's problem with one setting as text, and the nearest legal value as a remedy, if there is one."""
    # A wrong key of an object is the problem's input: pydantic marks its location by `[key]`.
    loc = found["loc"][:-2] if found["loc"][-1:] == ("[key]",) else found["loc"]
    name, said = ".".join(map(str, loc)), str(found["msg"]).removeprefix("Value error, ").partition(", unable")[0]
    about, given = found.get("ctx", {}), found["input"]
    nearest = [about[key] for key in ("nearest", "ge", "le") if key in about]
    if about.get("le") == 1 and 2 < given <= 100:
        nearest = [given / 100]  # a percentage
    guess = nearest_value(name, given, found["type"], re.findall("'([^']+)'", str(about.get("expected", ""))))
    text = f"{name}{equals}{given!r}: {said[:1].lower()}{said[1:]}" if name else said
    if guess is not None and not nearest:
        why = OTHER_VALUES.get(name, {}).get(str(given).lower(), ("", ""))[1]
        text += f"; {why + ': ' if why else ''}did you mean {str(guess).lower() if isinstance(guess, bool) else guess}?"
        nearest = [guess]
    return text, [*about.get("remedies", ()), *(Remedy(name, value) for value in nearest[:1])]


def by_canonical_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by the names that they have here. ConfigError if one is given under both its names."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        canonical = ALIASES.get(name, name)
        if canonical in named:
            alias = next(alias for alias, setting in ALIASES.items() if setting == canonical)
            raise ConfigError(f"{canonical} and {alias} are two names of one setting; give one of them")
        named[canonical] = value
    return named


def config_error(problems: list[ErrorDetails], settings: Iterable[str]) -> ConfigError:
    """Return an error with all problems, one per line, and the nearest legal values. `settings` are the known names."""
    lines, remedies = [], []
    for problem in problems:
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown_setting(name, settings))
            continue
        text, nearest = validation_problem(problem)
        lines.append(problem["msg"] if problem["type"] in ("capture_sizes", "speculative") else text)
        if name == "memory_utilization" and problem["type"] == "greater_than":
            nearest = [Remedy(name, 0.01)]
        if name == "cache_offload":
            nearest = [Remedy(name, None)]  # only the plan knows how many bytes are enough
        remedies += nearest
    return ConfigError("\n".join(lines), remedies)


def _unknown_setting(name: str, settings: Iterable[str]) -> str:
    if name in UNSUPPORTED_SETTINGS:
        return f"{name} is not a setting: {UNSUPPORTED_SETTINGS[name]}"
    known = [*settings, *ALIASES]
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"the known ones are {', '.join(known)}"
    return f"{name} is not a setting: {hint}"
