"""The fields that all generating endpoints share, and what they mean to the engine."""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from ostinato.sample.params import SamplingParams
from ostinato.serve.http.errors import ApiError
from ostinato.serve.settings import ServeSettings

T = TypeVar("T")

MAX_ERRORS = 100
"""Errors of a body up to which the one to tell is looked for."""
MAX_MESSAGES = 2**14
"""Messages of a conversation."""
MAX_SALT = 256
"""Characters of a cache_salt, which every look into the prefix index compares."""
MAX_LOGPROBS = 20
"""Most likely tokens that a request may ask for at each place."""


class Body(BaseModel):
    """A request's body; an unknown field is an error that names it."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def _few_errors(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """A body can be wrong in a million places, and to tell them all takes a kilobyte each."""
        try:
            return validate(value)
        except ValidationError as error:
            if error.error_count() <= MAX_ERRORS:
                raise
        raise ValueError(f"more than {MAX_ERRORS} things are wrong with it")


class Echoed(Body):
    """What clients give back as they got it: their classes know more fields than are served, and dump them as null."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


def unserved(instead: str) -> BeforeValidator:
    """Of a field that OpenAI's clients know and that is not served: null is taken, and anything else refused."""

    def refuse(value: Any) -> None:
        if value is not None:
            raise ValueError(f"not served; {instead}")

    return BeforeValidator(refuse)


Ignored = Annotated[Any, Field(description="Taken for OpenAI's clients; it changes nothing.")]


class _FailFast(FailFast):
    """Pydantic's own, so that it may stand in a union."""

    __hash__ = object.__hash__


Several = Annotated[list[T], _FailFast()]
"""A list whose first wrong item is the only one that is told."""


class StreamOptions(Body):
    include_usage: bool = False
    """A last event with the number of tokens."""
    include_obfuscation: Ignored = None


def check_model(asked: str | None, model_name: str) -> None:
    """ApiError for another model's name."""
    if asked is not None and asked != model_name:
        message = f"the model {asked!r} is not served here; this server has {model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


class Generating(Body):
    """What asks for generated text. A field that is null or left out is as the checkpoint's generation_config.json
    says, else as SamplingParams has it."""

    model: str | None = None
    """The served model's name, or nothing."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Several[str] | None = None
    stop_token_ids: Several[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = 0
    """Lower is served first, where the engine's scheduling_policy is priority."""
    timeout: float | None = Field(None, gt=0)
    """Seconds after which the request is ended."""
    cache_salt: str | None = None
    """Only requests of the same salt share the prefix cache."""
    guided_json: dict[str, Any] | str | None = None
    """The output is JSON of this schema."""
    guided_regex: str | None = None
    """The whole output matches this regular expression."""
    guided_choice: Several[str] | None = None
    """The output is one of these strings."""
    user: Ignored = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self, settings: ServeSettings, model_name: str, num_prompts: int = 1) -> None:
        """ApiError for another model's name, and for more than the server allows."""
        check_model(self.model, model_name)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream", param="stream_options")
        count = num_prompts * (self.n or 1)
        if count > settings.max_n:
            message = f"{count} outputs are asked for (prompts times n), and a request may have {settings.max_n}"
            raise ApiError(400, message, param="n")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        _check_count("stop", "stop strings", len(stop), settings.max_stop)
        longest = max(map(len, stop), default=0)
        _check_count("stop", "characters of a stop string", longest, settings.max_stop_length)
        _check_count("logit_bias", "biased tokens", len(self.logit_bias or ()), settings.max_logit_bias)
        _check_count("stop_token_ids", "stop tokens", len(self.stop_token_ids or ()), settings.max_logit_bias)
        _check_count("cache_salt", "characters of a cache_salt", len(self.cache_salt or ""), MAX_SALT)

    def deadline(self, settings: ServeSettings) -> float:
        """Seconds that the request has."""
        return min(self.timeout or settings.request_timeout, settings.request_timeout)

    def sampling(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """What the fields ask for, beside `defaults`; `more` are settings of the endpoint. RequestError."""
        names = SamplingParams.model_fields.keys() & Generating.model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return defaults.replace(**given, **more)


def _check_count(param: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise ApiError(400, f"{param}: {count} {what} are given, and a request may have {most}", param=param)
