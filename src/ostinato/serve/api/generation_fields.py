"""Fields that every generating endpoint takes, their meaning for the engine, and prompts in all forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field

from ostinato.errors import RequestError
from ostinato.json_io import JsonObject
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.limits import check_prompt_length
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.guides import GuidePlan, GuideRequest
from ostinato.serve.http.api_errors import ApiError, check_count, field_error
from ostinato.serve.http.json_bodies import Body, Ignored, ListOf, unsupported_field
from ostinato.serve.settings import ServeSettings

MAX_SALT = 256
"""Characters of a cache_salt: every look-up in the prefix index compares it."""
MAX_LOGPROBS = 20
"""Most likely tokens that a request may ask for at each place."""


class StreamOptions(Body):
    include_usage: bool | None = None
    """A last event with the number of tokens."""
    continuous_usage_stats: bool | None = None
    """The number of tokens so far in each event; needs include_usage."""
    include_obfuscation: Ignored = None


class StructuredOutputs(Body):
    """The form of an output, as vLLM's clients ask for it: one of the fields."""

    model_config = ConfigDict(serialize_by_alias=True)

    schema_: JsonObject | str | None = Field(None, alias="json")
    """The output is JSON of this schema."""
    json_object: bool | None = None
    """The output is any JSON object."""
    regex: str | None = None
    """The whole output matches this regular expression."""
    choice: ListOf[str] | None = None
    """The output is one of these strings."""
    grammar: Annotated[None, unsupported_field("give json, regex or choice")] = None
    structural_tag: Annotated[None, unsupported_field("give json, regex or choice")] = None

    def requests(self) -> list[GuideRequest]:
        """Return the guides that the fields ask for."""
        values = {
            "json": ("json_schema", self.schema_),
            "json_object": ("json_object", self.json_object or None),
            "regex": ("regex", self.regex),
            "choice": ("choice", self.choice),
        }
        return [
            GuideRequest(f"structured_outputs.{name}", kind, value)
            for name, (kind, value) in values.items()
            if value is not None
        ]


def check_model(name: str | None, model_name: str, settings: ServeSettings) -> None:
    """Raise ApiError for another model's name."""
    names = settings.served_model_name or (model_name,)
    if name is not None and name not in names:
        message = f"the model {name!r} is not served here; this server has {' and '.join(map(repr, names))}"
        raise ApiError(404, message, param="model", code="model_not_found")


KEPT = frozenset({"n", "stream", "stream_options", "priority", "timeout", "cache_salt"})
"""Fields that every generating endpoint still needs once the request is prepared."""


class GenerationBody(Body):
    """Body of a request for generated text.

    A field that is null or left out has the value in the checkpoint's generation_config.json, else the default of
    SamplingParams.
    """

    fields_after_prepare: ClassVar[frozenset[str]] = KEPT
    generates: ClassVar[bool] = True

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
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    """Lower is served first, where the engine's scheduling_policy is priority."""
    timeout: float | None = Field(None, gt=0)
    """Seconds after which the request is ended."""
    cache_salt: str | None = None
    """Only requests of the same salt share the prefix cache."""
    guided_json: JsonObject | str | None = None
    """The output is JSON of this schema."""
    guided_regex: str | None = None
    """The whole output matches this regular expression."""
    guided_choice: ListOf[str] | None = None
    """The output is one of these strings."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the output, as vLLM's clients ask for it: json, json_object, regex or choice."""
    user: Ignored = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def check(self, settings: ServeSettings, model_name: str, num_prompts: int = 1) -> None:
        """Raise ApiError for the name of another model, and for more than the server allows."""
        check_model(self.model, model_name, settings)
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "needs stream")
        if self.continuous_usage and not self.include_usage:
            raise field_error("stream_options.continuous_usage_stats", "needs include_usage to be true")
        count = num_prompts * (self.n or 1)
        if count > settings.max_n:
            message = f"{count} outputs (prompts times n) are too many: max_n allows {settings.max_n}"
            raise ApiError(400, message, param="n")
        param, stop = self.stop_strings()
        for field, what, given, setting in (
            (param, "stop strings", len(stop), "max_stop"),
            (param, "characters of a stop string", max(map(len, stop), default=0), "max_stop_length"),
            ("logit_bias", "biased tokens", len(self.logit_bias or ()), "max_logit_bias"),
            ("stop_token_ids", "stop tokens", len(self.stop_token_ids or ()), "max_logit_bias"),
        ):
            check_count(field, what, given, getattr(settings, setting), setting)
        check_salt(self.cache_salt)

    def stop_strings(self) -> tuple[str, Sequence[str]]:
        """Return the name of the field that holds the stop strings, and the strings."""
        return "stop", [self.stop] if isinstance(self.stop, str) else self.stop or []

    def deadline(self, settings: ServeSettings) -> float:
        """Return the seconds after which the request is ended."""
        return min(self.timeout or settings.request_timeout, settings.request_timeout)

    def guide_request(self) -> GuideRequest | None:
        """Return the form that the output should have. ApiError if several are asked for."""
        fields = (("guided_json", "json_schema"), ("guided_regex", "regex"), ("guided_choice", "choice"))
        given = [
            GuideRequest(param, kind, value) for param, kind in fields if (value := getattr(self, param)) is not None
        ]
        given += self.structured_outputs.requests() if self.structured_outputs is not None else ()
        if (of_format := self._format_request()) is not None:
            given.insert(0, of_format)
        if len(given) > 1:
            named = " and ".join(each.param for each in given)
            raise ApiError(400, f"{named} are given, and an output has one form", param=given[1].param)
        return given[0] if given else None

    def _format_request(self) -> GuideRequest | None:
        """Return the form that the endpoint's own field asks for."""
        return None

    def sampling(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """Return `defaults`, changed by the fields and by `more`, the endpoint's own settings.

        RequestError, by the names of the endpoint's fields, if illegal.
        """
        names = SamplingParams.model_fields.keys() & GenerationBody.model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        try:
            return defaults.replace(**given, **more)
        except RequestError as error:
            raise error.renamed(self.parameter_fields()) from None

    def parameter_fields(self) -> dict[str, str]:
        """Return the fields that set sampling parameters of another name, by the parameter."""
        return {}

    def check_guide(self, guide: GuidePlan | None) -> None:
        """Raise ApiError for a guide whose output would not end where the guide does."""
        if guide is not None and self.ignore_eos:
            raise field_error(guide.param, "says where the output ends, and ignore_eos that it does not: leave one out")


def num_logprobs(top_logprobs: int | None, is_asked: bool, needed: str) -> int | None:
    """Return the number of likely tokens to return at each place, or None for no log-probabilities.

    ApiError for `top_logprobs` without what asks for them, which `needed` says.
    """
    if is_asked:
        return top_logprobs or 0
    if top_logprobs:
        raise field_error("top_logprobs", f"needs {needed}")
    return None


def check_salt(salt: str | None) -> None:
    """Raise ApiError for a salt that is too long."""
    check_count("cache_salt", "characters of a cache_salt", len(salt or ""), MAX_SALT)


def _checked(value: object) -> object:
    """Check a prompt, so that a wrong one gets one message, not one for each form that a prompt may have."""
    if isinstance(value, str) or _are_token_ids(value):
        return value
    if isinstance(value, list) and all(isinstance(each, str) or _are_token_ids(each) for each in value):
        return value
    raise ValueError("a prompt is text or a list of token ids, and several are a list of these")


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


Prompts = Annotated[str | list[int] | list[str | list[int]], BeforeValidator(_checked)]
"""The field of a body."""


def prompts_in(value: Any, param: str) -> list[str | list[int]]:
    """Return each prompt of the field `param`, as text or token ids. ApiError if there is none."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise field_error(param, "is an empty list; a prompt is text or token ids")
    return [value] if isinstance(value[0], int) else list(value)


def token_ids(
    context: RequestContext, prompt: str | list[int], param: str, *, has_output: bool = True, most: int | None = None
) -> list[int]:
    """Return the token ids of one prompt, the first `most` of them.

    ApiError, which names `param`, for tokens that the model cannot take; ContextLengthError for too many.
    """
    if isinstance(prompt, str):
        if most is not None:
            # The first tokens that fit are of these characters; more may take seconds to encode.
            prompt = prompt[: context.text.max_model_len * context.text.tokenizer.longest_token]
        ids = context.encode(prompt, True, param, has_output)
    else:
        context.text.check_ids(prompt, param)
        ids = prompt
    if not ids:
        message = f"{param}: a prompt is empty; give at least one token, such as the BOS token"
        raise ApiError(400, message, param=param)
    ids = ids[:most]
    check_prompt_length(len(ids), context.text.max_model_len, param, has_output=has_output)
    return ids
