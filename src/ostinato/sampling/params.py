"""Sampling parameters of a request: `SamplingParams`, checked when made. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Unpack

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ostinato.errors import Remedy, RequestError, short_repr
from ostinato.other_engines import SAMPLING_ADVICE
from ostinato.sampling.guide import Guide
from ostinato.setting_names import describe_fields, plain_numbers, validation_problem

if TYPE_CHECKING:
    from ostinato.setting_types import GuideSettings, SamplingSettings

    class _Settings(SamplingSettings, total=False):
        guide: Guide | GuideSettings | None
        structured_outputs: Mapping[str, object] | None


_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")
VLLM_GUIDES = {"json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice"}
"""vLLM's fields of `structured_outputs`, and the fields of a Guide that mean the same."""


@describe_fields
class SamplingParams(BaseModel):
    """Settings for sampling the tokens of one request, and for its end.

    An unknown name or an illegal value is a RequestError. The order in which the settings act on the logits is in
    `sampling.logits_processing`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    temperature: float = Field(1.0, ge=0)
    """Logits are divided by it; 0 takes the most likely token (greedy)."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens, and those as likely as the k-th; 0 (or -1) keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens that together reach this probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely, relative to the most likely one."""
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    """Logits of tokens in the prompt or the output: positive ones are divided by it, negative ones
    multiplied."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens in the output, once per occurrence."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Token id -> a number from -100 to 100 that is added to its logit."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    """Same seed, same tokens, whatever else is in the batch.

    Without one (or with -1, as elsewhere) it is derived from the engine's seed and the number of the request.
    """
    stop: tuple[str, ...] = ()
    """Strings that end the output; also given as one string."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, besides the model's end tokens."""
    min_tokens: int = Field(0, ge=0)
    """Tokens before which neither end tokens nor `stop_token_ids` nor `stop` end the output."""
    max_tokens: int | None = Field(256, ge=1)
    """Most tokens of output; None is as many as `max_model_len` leaves."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    guide: Guide | None = None
    """Rule for the text of the output: JSON of a schema, a regular expression, one of some strings; see `Guide`.

    The output ends where nothing can follow, and may end, with an end token, where it is complete.
    """
    n: int = Field(1, ge=1, le=1024)
    """Number of outputs to sample for the prompt."""
    logprobs: int | None = Field(None, ge=0)
    """Give the log-probability of each output token and of this many most likely ones."""
    prompt_logprobs: int | None = Field(None, ge=0)
    """Give the log-probability of each prompt token and of this many most likely ones."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the output at the end of its text."""

    def __init__(self, **settings: Unpack[_Settings]) -> None:
        """Check the settings. `structured_outputs`, vLLM's name, is another form of `guide`."""
        if settings.get("structured_outputs") is not None:
            if settings.get("guide") is not None:
                raise RequestError("guide and structured_outputs are given, which is twice the same; leave one out")
            settings["guide"] = _guide_of_vllm(settings["structured_outputs"])
        settings.pop("structured_outputs", None)
        try:
            super().__init__(**plain_numbers(settings))
        except ValidationError as error:
            raise _request_error(error, type(self).model_fields) from None

    if not TYPE_CHECKING:  # a type checker knows that they are frozen

        def __setattr__(self, name: str, value: object) -> None:
            message = f"SamplingParams stay as they are made; replace({name}=...) returns a changed copy"
            raise RequestError(message, setting=name)

    @field_validator("top_k", mode="before")
    @classmethod
    def _minus_one_means_all(cls, value: object) -> object:
        return 0 if type(value) is int and value == -1 else value

    @field_validator("seed", mode="before")
    @classmethod
    def _minus_one_means_none(cls, value: object) -> object:
        return None if type(value) is int and value == -1 else value

    @field_validator("guide", mode="before")
    @classmethod
    def _fields_to_guide(cls, value: object) -> object:
        return Guide(**{str(name): each for name, each in value.items()}) if isinstance(value, dict) else value

    @field_validator("stop", mode="before")
    @classmethod
    def _strings_to_tuple(cls, value: object) -> object:
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _ids_to_tuple(cls, value: object) -> object:
        if value is None:
            return ()
        return tuple(value) if isinstance(value, (list, set, frozenset)) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _read_json_keys(cls, value: object) -> object:
        """Convert string keys to token ids, since JSON objects have string keys: `"17"`, but not `"017"`."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            return value
        bias = {int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else key: v for key, v in value.items()}
        if len(bias) < len(value):
            raise ValueError("it has a token twice, as a number and as text")
        return bias

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty string would stop at once; leave it out")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias_in_range(cls, value: dict[int, float]) -> dict[int, float]:
        for token, bias in value.items():
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token} must lie between -100 and 100, not {bias}")
        return value

    @model_validator(mode="after")
    def _min_within_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            parts = [("min_tokens", f" ({self.min_tokens}) is above "), ("max_tokens", f" ({self.max_tokens})")]
            raise RequestError.of_parts(parts)
        return self

    @model_validator(mode="after")
    def _guide_can_end(self) -> SamplingParams:
        if self.guide is not None and self.ignore_eos:
            other = "ignore_eos", " that it does not: leave one out"
            raise RequestError.of_parts([("guide", " says where the output ends, and "), other])
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def draw_settings(self) -> tuple[float, float, float, float]:
        """Settings of one row for the kernel `sample`."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def has_penalties(self) -> bool:
        """True if the tokens seen so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def replace(self, **changes: Unpack[_Settings]) -> SamplingParams:
        """Return a checked copy with `changes`; what was not set stays not set."""
        if "structured_outputs" in changes:
            given = changes.pop("structured_outputs")
            changes.setdefault("guide", None if given is None else _guide_of_vllm(given))
        return SamplingParams(**{**self.model_dump(exclude_unset=True), **changes})


def _guide_of_vllm(given: object) -> Guide:
    """Return the guide of `structured_outputs`: a mapping, or vLLM's object, whose fields are attributes."""
    fields = given if isinstance(given, Mapping) else getattr(given, "__dict__", None)
    asked = {str(name): value for name, value in (fields or {}).items() if value is not None and value is not False}
    if not asked:
        raise RequestError(
            "structured_outputs should be a mapping such as {'json': SCHEMA}, or vLLM's object, not "
            f"{short_repr(given)}; it may have {', '.join(VLLM_GUIDES)}",
            setting="structured_outputs",
        )
    if unknown := sorted(asked.keys() - VLLM_GUIDES.keys()):
        raise RequestError(
            f"structured_outputs has {', '.join(unknown)}; here it may have {', '.join(VLLM_GUIDES)}, and a grammar is "
            "guide={'lark': GRAMMAR}",
            setting="structured_outputs",
        )
    try:
        return Guide.model_validate({VLLM_GUIDES[name]: value for name, value in asked.items()})
    except RequestError as error:
        names = {f"guide.{ours}": f"structured_outputs.{name}" for name, ours in VLLM_GUIDES.items()}
        raise error.renamed({"guide": "structured_outputs", **names}) from None


def sampling_advice(name: str) -> str | None:
    """Return what to do with a sampling parameter, or a name close to one, that was given elsewhere, else None."""
    if name in SAMPLING_ADVICE:
        return SAMPLING_ADVICE[name].replace("here it is", "it belongs into SamplingParams, where it is")
    close = difflib.get_close_matches(name, SamplingParams.model_fields, n=1, cutoff=0.8)
    return f"it belongs into params, SamplingParams({close[0]}=...)" if close else None


def check_token_ids(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
    """Raise RequestError if a setting names a token that the model does not have, or rules out all tokens.

    `logit_bias` and `stop_token_ids` name tokens; `min_tokens` may rule out all.
    """
    for setting, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        outside = sorted(token for token in ids if not 0 <= token < vocab_size)
        if outside:
            raise RequestError(
                f"{setting} names token ids {_shortened(outside)}; the model's lie between 0 and {vocab_size - 1}",
                setting=setting,
            )
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if params.min_tokens and len(ends) == vocab_size:
        raise RequestError(
            f"every token ends the output, and min_tokens is {params.min_tokens}: leave a token out of stop_token_ids",
            [Remedy("min_tokens", 0)],
        )


def _shortened(ids: list[int]) -> str:
    shown = ", ".join(str(token) for token in ids[:8])
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"


def _request_error(error: ValidationError, known: Iterable[str]) -> RequestError:
    """Return one error for everything that is wrong, with the nearest legal value of each number out of range."""
    parts: list[tuple[str, str]] = []
    remedies: list[Remedy] = []
    known = list(known)
    details = error.errors()
    for detail in details:
        if parts:
            parts.append(("", "; "))
        setting = str(detail["loc"][0]) if detail["loc"] else ""
        if detail["type"] == "extra_forbidden":
            if setting in SAMPLING_ADVICE:
                parts.append(("", f"{setting} is no sampling parameter: {SAMPLING_ADVICE[setting]}"))
                continue
            close = difflib.get_close_matches(setting, known, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            parts.append(("", f"unknown sampling parameter {setting}{meant}; known are {', '.join(known)}"))
            continue
        text, nearest = validation_problem(detail, equals="=")
        parts.append((setting, text.removeprefix(setting)))
        remedies += nearest
    of_first = details[0]["loc"]
    return RequestError.of_parts(parts, remedies, str(of_first[0]) if of_first else None)
