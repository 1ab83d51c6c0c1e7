"""Input processor: prompts and sampling parameters in all accepted forms, checked before the scheduler sees them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, SupportsIndex, TypeVar, cast

from ostinato.engine.text.chat_marks import list_of_marks
from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import Remedy, RequestError, short_repr
from ostinato.json_io import JsonMapping
from ostinato.kv_cache.marks import DEFAULT_TTL, MAX_MARKS, Mark
from ostinato.media.media_input import RenderedChat
from ostinato.media.media_prompt import MediaPrompt
from ostinato.other_engines import LEFT_OUT
from ostinato.plan.plan import Plan
from ostinato.sampling.grammar import Grammar, GrammarCompiler
from ostinato.sampling.params import SamplingParams, check_token_ids, sampling_advice
from ostinato.scheduler.limits import check_prompt_length
from ostinato.setting_names import plain_numbers

P = ParamSpec("P")
Result = TypeVar("Result")

Prompt = str | Sequence[int] | JsonMapping
"""Text; token ids; or `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
Prompts = Prompt | Iterable[Prompt]
Message = JsonMapping
ConversationsInput = Sequence[Message] | Sequence[Sequence[Message]]
"""One conversation, or several."""
Params = SamplingParams | Sequence[SamplingParams] | None
"""Parameters for all prompts, or one for each."""

_OTHER_KEYWORDS = {
    "chat_template_kwargs": "give its entries themselves, chat(messages, enable_thinking=False)",
    "use_tqdm": "leave it out; progress is shown on terminals and in notebooks alone",
    "lora_request": "leave it out; adapters are not served",
    "prompt_token_ids": "token ids are a prompt, generate([[1, 2, 3]])",
    "chat_template": "it is a setting, LLM(model, chat_template=FILE)",
    "chat_template_content_format": "leave it out; the template gets what it takes",
    "tokenization_kwargs": "leave it out, or give token ids as the prompt",
    "priority": "leave it out; the requests of an LLM are served as they come",
    "pooling_params": "give pooling, normalize or dimensions to embed",
    "stream": "call stream or stream_chat, which yield the text as it is generated",
}
"""Keywords of other engines' calls -> advice what to do here."""


class PromptInput(NamedTuple):
    """Arguments of `EngineCore.add_request` for one prompt."""

    prompt: str | Sequence[int]
    add_special_tokens: bool = True
    media: MediaPrompt | None = None
    marks: Sequence[Mark] = ()

    @classmethod
    def parse(cls, prompt: Prompt, checkpoints: Sequence[int] = (), checkpoint_ttl: float = DEFAULT_TTL) -> PromptInput:
        """Return a prompt in any form, with marks at the positions `checkpoints`. RequestError if that is no list."""
        has_none = isinstance(checkpoints, tuple) and not checkpoints  # as almost all prompts
        positions = [] if has_none else list_of_marks(checkpoints, "checkpoints")
        ttl = checkpoint_ttl if type(checkpoint_ttl) is float else plain_numbers(checkpoint_ttl)
        if type(ttl) not in (int, float):
            message = f"checkpoint_ttl {short_repr(ttl)} should be a number of seconds"
            raise RequestError(message, setting="checkpoint_ttl")
        given = _unwrap_mapping(prompt)
        token_ids = given if isinstance(given, str) else as_token_ids(given)
        return cls(token_ids, marks=[Mark(position, ttl) for position in positions])

    @classmethod
    def parse_all(
        cls, prompts: Prompts, checkpoints: Sequence[int] = (), checkpoint_ttl: float = DEFAULT_TTL
    ) -> list[PromptInput]:
        """Return prompts in any form, as `parse`. RequestError names the one that is refused."""
        inputs: list[PromptInput] = []
        for prompt in (given := as_prompts(prompts)):
            with numbered(len(inputs), len(given)):
                inputs.append(cls.parse(prompt, checkpoints, checkpoint_ttl))
        return inputs

    @classmethod
    def from_chat(cls, chat: RenderedChat, marks: Sequence[Mark] = ()) -> PromptInput:
        return cls(chat.text, False, chat.media, marks)


def as_conversations(messages: ConversationsInput) -> Sequence[Sequence[Message]]:
    """Return a list of conversations. RequestError for a message without a list around it."""
    if isinstance(messages, Mapping):
        raise RequestError("a conversation is a list of messages; put the one message into a list")
    if isinstance(messages, str):
        raise RequestError("a conversation is a list of messages, not str; for a text, generate")
    items = _items(messages, "a conversation is a list of messages")
    alone = not items or not all(isinstance(item, list | tuple) for item in items)
    return [items] if alone else items


def as_conversation(messages: ConversationsInput) -> Sequence[Message]:
    """Return the one conversation of a stream. RequestError for several."""
    conversations = as_conversations(messages)
    if len(conversations) != 1 or not all(isinstance(message, Mapping) for message in conversations[0]):
        raise RequestError("stream_chat answers one conversation, a list of messages; several go to chat")
    return conversations[0]


def _items(given: object, what: str) -> list[Any]:
    """Return the items of what should be a list, in their order. RequestError for what has no items, or no order."""
    is_number = getattr(given, "ndim", 1) == 0  # an array without dimensions, which says that it can be iterated
    if (
        is_number
        or isinstance(given, set | frozenset | bytes | bytearray | memoryview)
        or not isinstance(given, Iterable)
    ):
        raise RequestError(f"{what}, not {type(given).__name__}")
    return list(given)


@contextmanager
def numbered(index: int, count: int) -> Iterator[None]:
    """Give the error of one prompt of several the number of the prompt."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"prompt {index + 1} of {count}: {error.message}", error.remedies) from error


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """Return a list of prompts. A single prompt is a string, a mapping, or token ids (of any integer type)."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = _items(prompts, "a prompt is text or a list of token ids, and several come in a list")
    if not items:
        return []
    # An array's row has `__index__` too, but is a prompt.
    if all(isinstance(item, SupportsIndex) and getattr(item, "ndim", 0) == 0 for item in items):
        return [items]
    return items


def _unwrap_mapping(prompt: Prompt) -> str | Sequence[int]:
    """Return the text or token ids of a prompt, which may be a mapping in vLLM's form."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    if isinstance(first, Mapping) and {"role", "content"} & first.keys():
        raise RequestError("messages of a conversation go to chat or stream_chat, and here goes a prompt")
    if isinstance(first, str | list | Mapping) and first is not prompt:
        raise RequestError("a prompt is text or a list of token ids; several prompts go to generate or embed")
    if not isinstance(prompt, Mapping):
        return prompt
    known = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    others = [name for name in prompt if name not in ("prompt", "prompt_token_ids")]
    if others:
        remedy = "images go into the messages of chat" if "multi_modal_data" in others else "leave it out"
        raise RequestError(f"a prompt has prompt or prompt_token_ids, and not {', '.join(map(str, others))}; {remedy}")
    if len(known) != 1:
        raise RequestError("a prompt has either prompt, its text, or prompt_token_ids")
    given = prompt[known[0]]
    if isinstance(given, str) != (known[0] == "prompt"):
        raise RequestError("prompt is text, and prompt_token_ids is a list of token ids")
    return cast(str | Sequence[int], given)


def merge_params_alias(params: Params, sampling_params: Params) -> Params:
    """Return the given parameters; `sampling_params` is vLLM's name for the same. RequestError if both are given."""
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params are two names of one thing; give one of them")
    return sampling_params if params is None else params


def single_params(params: SamplingParams | None, sampling_params: SamplingParams | None) -> SamplingParams | None:
    """Return the parameters of a stream. RequestError for several of them, and for more than one output."""
    given = merge_params_alias(params, sampling_params)
    if given is not None and not isinstance(given, SamplingParams):
        raise RequestError(f"params should be SamplingParams, not {short_repr(given)}")
    if given is not None and given.n != 1:
        raise RequestError(f"stream gives one output, and n is {given.n}; use generate for several")
    return given


def advised(method: Callable[P, Result]) -> Callable[P, Result]:
    """Make a method raise RequestError, with advice, in place of the TypeError for arguments that it does not have."""
    signature = inspect.signature(method)

    def check(*args: object, **kwargs: object) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            known = list(signature.parameters)[1:]
            raise _call_error(method.__name__, known, [name for name in kwargs if name not in known], error) from None

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Result:
        check(*args, **kwargs)
        return method(*args, **kwargs)

    @wraps(method)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> object:
        check(*args, **kwargs)
        return await cast(Awaitable[object], method(*args, **kwargs))

    return cast(Callable[P, Result], awaited if inspect.iscoroutinefunction(method) else checked)


def _call_error(call: str, known: list[str], others: list[str], error: TypeError) -> RequestError:
    """Return the error for a call with the keywords `others`, which it does not have, or with another `error`."""
    advised, unknown = [], []
    for name in others:
        advice = _OTHER_KEYWORDS.get(name) or (sampling_advice(name) if "params" in known else LEFT_OUT.get(name))
        if advice is None:
            unknown.append(name)
        else:
            advised.append(f"{call} has no keyword {name}: {advice}")
    if unknown:
        advised.append(f"{call} has no keyword {', '.join(unknown)}: its keywords are {', '.join(known)}")
    if not advised:
        advised.append(f"{call}: {error}; its arguments are {', '.join(known)}")
    return RequestError("\n".join(advised), setting=next(iter(others), None))


def check_template_kwargs(chat_template_kwargs: Mapping[str, object], template: ChatTemplate) -> None:
    """Raise RequestError for names that are not template variables, which the template would ignore in silence."""
    try:
        template.check_arguments(chat_template_kwargs)
    except RequestError as error:
        known = {name: _OTHER_KEYWORDS.get(name) or sampling_advice(name) for name in chat_template_kwargs}
        advised = [f"{name} is no variable of a chat template: {text}" for name, text in known.items() if text]
        if error.setting is None or known.get(error.setting) is None:
            raise
        raise RequestError("\n".join(advised), setting=error.setting) from None


def params_per_prompt(params: Params, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(isinstance(each, SamplingParams | None) for each in params):
        form = "SamplingParams or a list of them, one for each prompt"
        raise RequestError(f"params should be {form}, not {short_repr(params)}")
    if len(params) != count:
        raise RequestError(f"{count} prompts came with {len(params)} sampling parameters; give one, or one for each")
    return params


class ProcessedInput(NamedTuple):
    """A request that was checked."""

    text: str | None
    """The prompt, if it came as text."""
    token_ids: list[int]
    params: SamplingParams
    grammar: Grammar | None
    """Grammar of the guide of `params`."""


class InputProcessor:
    """Turns the arguments of `EngineCore.add_request` into token ids and parameters, or refuses them."""

    def __init__(
        self,
        plan: Plan,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        default_params: SamplingParams,
        grammars: GrammarCompiler,
    ) -> None:
        """Keep what requests are checked against. `default_params` are for requests without parameters."""
        self._plan, self._tokenizer, self._vocab_size = plan, tokenizer, vocab_size
        self._eos_token_ids, self._default_params, self._grammars = eos_token_ids, default_params, grammars

    def process(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        *,
        add_special_tokens: bool,
        cache_salt: str | None,
        priority: int,
        grammar: Grammar | None,
        media: MediaPrompt | None,
        marks: Sequence[Mark] = (),
    ) -> ProcessedInput:
        """Encode the prompt, and compile the guide of `params` unless `grammar` is the compiled one.

        Raises RequestError if the request can never be served, except for its length, which the scheduler checks.
        """
        check_salt(cache_salt)
        check_priority(priority, self._plan.settings.scheduling_policy)
        params = params or self._default_params
        if media is not None:
            token_ids = media.token_ids
        elif isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt, add_special_tokens)
        else:
            token_ids = as_token_ids(prompt)
        check_token_range(token_ids, self._vocab_size)
        if marks:
            check_marks(marks, len(token_ids), self._plan)
        if media is not None and media.spans and self._plan.encoder is None:
            raise RequestError("the prompt has images, and this model takes text only; choose a model with vision")
        check_token_ids(params, self._vocab_size, self._eos_token_ids)
        if grammar is None and params.guide is not None:
            grammar = self._grammars.compile(params.guide)
        if (None if grammar is None else grammar.guide) != params.guide:
            raise RequestError("the grammar that came with the request is not that of its guide")
        return ProcessedInput(prompt if isinstance(prompt, str) else None, token_ids, params, grammar)


def check_salt(cache_salt: str | None) -> None:
    message = f"cache_salt {short_repr(cache_salt)} should be text that is not empty, or left out"
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise RequestError(message)
    try:
        (cache_salt or "").encode()  # as the prefix index hashes it
    except UnicodeEncodeError as error:
        raise RequestError(f"{message}: it cannot be encoded in UTF-8 ({error.reason})") from None


def check_marks(marks: Sequence[Mark], num_tokens: int, plan: Plan) -> None:
    """Raise RequestError for marks on a prompt of `num_tokens` tokens that the engine cannot keep."""
    if plan.hit_law.min_shared == 0:
        name = "enable_prefix_caching" if not plan.settings.enable_prefix_caching else "state_cache_mode"
        value = True if name == "enable_prefix_caching" else "auto"
        raise RequestError(f"checkpoints cannot be kept: {plan.hit_law}; set {name}", [Remedy(name, value)])
    if len(marks) > MAX_MARKS:
        raise RequestError(f"{len(marks)} checkpoints are too many; a request may have {MAX_MARKS}")
    for mark in marks:
        position, ttl = mark.position, mark.ttl
        if type(position) is not int or not 0 < position <= num_tokens:
            raise RequestError(
                f"checkpoint {short_repr(position)} is no position of the prompt; positions are from 1 to "
                f"{num_tokens}, the number of its tokens"
            )
        if type(ttl) not in (int, float) or not 0 < ttl <= plan.pins.max_ttl:
            raise RequestError(
                f"a checkpoint cannot be pinned for {ttl!r} seconds; max_checkpoint_ttl allows up to "
                f"{plan.pins.max_ttl}",
                [Remedy("checkpoint_ttl", plan.pins.max_ttl)],
            )


def check_priority(priority: int, scheduling_policy: str) -> None:
    if not isinstance(priority, int):
        raise RequestError(f"priority {short_repr(priority)} should be a whole number; lower ones come first")
    if priority != 0 and scheduling_policy == "fcfs":
        message = f"priority {priority} has no effect under scheduling_policy fcfs; choose the policy priority"
        raise RequestError(message, [Remedy("scheduling_policy", "priority")], "priority")


def as_token_ids(prompt: Sequence[int]) -> list[int]:
    """Return the token ids of a prompt that is not text."""
    items = _items(prompt, "a prompt is text or a list of token ids")  # a byte is an integer, but no token id
    try:
        items = items if isinstance(prompt, list) or not hasattr(prompt, "tolist") else prompt.tolist()
        if bool in set(map(type, items)):
            raise TypeError("True and False are none")
        return [operator.index(token) for token in items]
    except TypeError as error:
        raise RequestError(f"a prompt is text or a list of token ids, which are integers: {error}") from None


def check_token_range(token_ids: Sequence[int], vocab_size: int) -> None:
    outside = [token for token in token_ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(
            f"the prompt holds token ids outside the model's vocabulary, such as {outside[0]}; "
            f"they must be from 0 to {vocab_size - 1}"
        )


def check_length(prompt: str | Sequence[int], max_model_len: int, longest_token: int, has_output: bool = True) -> None:
    """Refuse at once a prompt that is too long in any case, since tokenizing it first may take seconds.

    No token has more than `longest_token` characters.
    """
    longest = longest_token if isinstance(prompt, str) else None
    check_prompt_length(len(prompt), max_model_len, has_output=has_output, longest_token=longest)
