"""Tokenizer of an engine: text to token ids and back, straight from a `tokenizer.json`.

The tokenizer and the chat template are the checkpoint's or those that settings name. The checkpoint's generation
defaults are read here too.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import tokenizers

from ostinato.config import EngineConfig
from ostinato.engine.text.chat_template import ChatTemplate, load_chat_template, read_chat_template
from ostinato.errors import ModelError, RequestError
from ostinato.files import expand, find_in_checkpoint
from ostinato.formats.checkpoint_json import is_gguf, read_checkpoint_json
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.checkpoint import tokenizer_source
from ostinato.sampling.params import SamplingParams
from ostinato.setting_names import plain_numbers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
CHAT_SAMPLING = {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.1}
"""Sampling of `ostinato chat` and of the page if the checkpoint's author says nothing about sampling.

Greedy answers of small models repeat themselves. The API and `generate` are greedy then.
"""


@dataclass(frozen=True)
class GenerationDefaults:
    """Generation settings from a checkpoint's generation_config.json and config.json."""

    eos_token_ids: frozenset[int] = frozenset()
    sampling: JsonObject = field(default_factory=dict)
    """Settings of SamplingParams: those that the files name if they ask for sampling, else a temperature of 0."""
    says_nothing: bool = False
    """True if generation_config.json has neither `do_sample` nor a sampling setting."""


class TokenText(NamedTuple):
    """Properties of a token that do not depend on its neighbours."""

    text: str
    """`decode` of the token alone."""
    has_text: bool
    """True if `decode` does not leave the token out."""
    is_byte: bool
    """True if the token is one byte, to be decoded together with the bytes next to it."""


class TokenTextCache(dict[int, TokenText]):
    """Cache of tokens that outputs have had, each looked up once, with or without the text of special tokens."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self.decode: Callable[[Sequence[int]], str] = tokenizer.decoder(skip_special_tokens)
        """Decoder of several tokens."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> TokenText:
        has_text = not self._tokenizer.has_no_text(token_id, self._skip_special_tokens)
        found = self[token_id] = TokenText(self.decode([token_id]), has_text, self._tokenizer.is_byte(token_id))
        return found


class Tokenizer:
    """The tokenizer of one checkpoint.

    A checkpoint without tokenizer.json has one too, with `has_text` False: it decodes to nothing, and `encode` is a
    RequestError, so that requests in token ids still run.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        settings: JsonMapping | None = None,
        defaults: GenerationDefaults | None = None,
    ) -> None:
        """Wrap `backend` with the settings of tokenizer_config.json and the tokens of special_tokens_map.json.

        The post-processor of tokenizer.json decides which tokens `encode` adds. Beyond it, only an `add_bos_token` or
        `add_eos_token` that is true is honoured, where the post-processor did not add the token (older checkpoints rely
        on it). One that is false removes nothing that the post-processor adds.
        """
        self.settings = settings = settings or {}
        defaults = defaults or GenerationDefaults()
        self._backend = backend
        self.special_tokens = _special_tokens(settings)
        """Special tokens, name -> text, such as `bos_token` -> `<s>`."""
        self.bos_token, self.bos_token_id = self._named("bos_token")
        self.eos_token, self.eos_token_id = self._named("eos_token")
        self.eos_token_ids = defaults.eos_token_ids | (
            frozenset() if self.eos_token_id is None else {self.eos_token_id}
        )
        """All tokens that end an output: generation_config.json's, config.json's and `eos_token_id`."""
        self.sampling_defaults = defaults.sampling
        self.chat_defaults = CHAT_SAMPLING if defaults.says_nothing else {}
        """Settings that the chat and the page have in place of `sampling_defaults`; empty if the author chose some."""
        self._prefix = [self.bos_token_id] if settings.get("add_bos_token") is True else []
        self._suffix = [self.eos_token_id] if settings.get("add_eos_token") is True else []
        self._special_ids: frozenset[int] = frozenset()
        self._falls_back_to_bytes = False
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
            added = backend.get_added_tokens_decoder()
            self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
            self._falls_back_to_bytes = _has_byte_fallback(backend)
        self.texts = {skip: TokenTextCache(self, skip) for skip in (True, False)}
        """Token texts, by whether special tokens are left out."""

    @property
    def has_text(self) -> bool:
        return self._backend is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens with a text; the model's vocabulary may be padded beyond it."""
        return 0 if self._backend is None else self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token's text, at least 1. No text is longer than its tokens times this."""
        vocabulary = {} if self._backend is None else self._backend.get_vocab(with_added_tokens=True)
        return max((len(text.encode()) for text in vocabulary), default=1) or 1

    @property
    def max_token_id(self) -> int:
        """Highest id that has a text; -1 if there is none."""
        return -1 if self._backend is None else max(self._backend.get_vocab(True).values(), default=-1)

    def end_tokens(self, vocab_size: int) -> frozenset[int]:
        """Return the `eos_token_ids` within a vocabulary of this size."""
        return frozenset(token for token in self.eos_token_ids if 0 <= token < vocab_size)

    def to_json(self) -> str | None:
        """Return tokenizer.json as text, without truncation and padding; None if there is none."""
        return None if self._backend is None else self._backend.to_str()

    def agrees_with(self, other: Tokenizer) -> bool:
        """Return whether every token id that has a text in both tokenizers has the same one."""
        if self._backend is None or other._backend is None:
            return True
        own = {token_id: text for text, token_id in self._backend.get_vocab(True).items()}
        return all(own.get(token_id, text) == text for text, token_id in other._backend.get_vocab(True).items())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. RequestError without a tokenizer, or if the text is not valid Unicode."""
        if self._backend is None:
            raise RequestError(
                "this checkpoint has no tokenizer.json: give the prompt as token ids, not as text, or take another "
                "checkpoint's tokenizer, such as demo's (the setting tokenizer)"
            )
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            reason = (
                error
                if isinstance(error, UnicodeEncodeError)
                else "it holds half of a surrogate pair, or bytes of another encoding"
            )
            raise RequestError(f"the prompt is not text that can be encoded in UTF-8: {reason}") from None
        except Exception as error:  # the library raises nothing more specific, such as for a word without a token
            raise RequestError(f"the tokenizer cannot encode this prompt: {error}") from None
        if add_special_tokens:
            ids = _with_ends(ids, self._prefix, self._suffix)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids without a text give none. RequestError for what are no ids."""
        try:
            return self.texts[bool(skip_special_tokens)].decode(plain_numbers(token_ids))
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids are a list of numbers from 0 to {2**32 - 1}: {error}") from None

    def decoder(self, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
        """Return `decode` as a function that does not go through this class: each step of each output calls it."""
        if self._backend is None:
            return lambda token_ids: ""
        return partial(self._backend.decode, skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int, skip_special_tokens: bool) -> str:
        """Return the text of a token alone."""
        return self.texts[skip_special_tokens][token_id].text

    def token_text(self, token_id: int) -> str | None:
        """Return the vocabulary's entry of a token, which is not yet text (a leading space may be `Ġ` or `▁`)."""
        return None if self._backend is None else self._backend.id_to_token(token_id)

    def token_id(self, text: str) -> int | None:
        """Return the id of a vocabulary entry."""
        return None if self._backend is None else self._backend.token_to_id(text)

    def has_no_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Return whether `decode` leaves the token out, whatever its neighbours are."""
        if skip_special_tokens and token_id in self._special_ids:
            return True
        return self.token_text(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Return whether the token is one byte, to be decoded together with the bytes next to it."""
        if not self._falls_back_to_bytes:
            return False
        return _BYTE_TOKEN.fullmatch(self.token_text(token_id) or "") is not None

    def _named(self, name: str) -> tuple[str | None, int | None]:
        text = self.special_tokens.get(name)
        return text, None if text is None else self.token_id(text)


def load_tokenizer(directory: Path, checkpoint: Path | None = None) -> Tokenizer:
    """Return the tokenizer of a checkpoint: a directory or a GGUF file.

    End tokens and sampling defaults come from `checkpoint`, if that is another one. ModelError if one of their files is
    damaged.
    """
    path = directory / "tokenizer.json"
    backend = None
    try:
        if find_in_checkpoint(directory, path.name) is not None:
            backend = tokenizers.Tokenizer.from_file(str(path))
        elif is_gguf(directory):
            backend = tokenizers.Tokenizer.from_str(json.dumps(read_checkpoint_json(directory, "tokenizer.json")))
            _trim_malloc()
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
    settings = read_checkpoint_json(directory, "special_tokens_map.json") | read_checkpoint_json(
        directory, "tokenizer_config.json"
    )
    return Tokenizer(backend, settings, generation_defaults(checkpoint or directory))


def load_default_params(tokenizer: Tokenizer, directory: Path) -> SamplingParams:
    """Return the parameters of generation_config.json. ModelError if they are not possible."""
    try:
        return SamplingParams(**tokenizer.sampling_defaults)
    except RequestError as error:
        path = directory / "generation_config.json"
        raise ModelError(f"{path} asks for sampling that cannot be done: {error.message}") from None


def _trim_malloc() -> None:
    """Have glibc's allocator return its unused memory to the system.

    Making a tokenizer takes two fifths more memory than the tokenizer, which glibc would keep allocated next to the
    weights. Other allocators have no such call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def generation_defaults(directory: Path) -> GenerationDefaults:
    """Return the end tokens and sampling settings of a checkpoint directory. ModelError if a file is damaged."""
    config = read_checkpoint_json(directory, "config.json")
    generation = read_checkpoint_json(directory, "generation_config.json")
    ends: set[int] = set()
    for source in (generation, config, config.get("text_config") or {}):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int for token_id in ids):
            raise ModelError(f"{directory} has eos_token_id = {value!r}, which should be a token id or a list of them")
        ends.update(ids)
    sampling = {name: generation[name] for name in _SAMPLING_SETTINGS if generation.get(name) is not None}
    says_nothing = not sampling and generation.get("do_sample") is None
    if not generation.get("do_sample"):
        sampling = {name: sampling[name] for name in sampling if name == "repetition_penalty"}
        sampling["temperature"] = 0.0
    return GenerationDefaults(frozenset(ends), sampling, says_nothing)


def _special_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the entries named `*_token`. Each is a string, or an object with the string as `content`."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _with_ends(ids: list[int], prefix: list[int | None], suffix: list[int | None]) -> list[int]:
    before = [token for token in prefix if token is not None and ids[:1] != [token]]
    after = [token for token in suffix if token is not None and ids[-1:] != [token]]
    return before + ids + after


def _has_byte_fallback(backend: tokenizers.Tokenizer) -> bool:
    """Return whether the decoder joins tokens such as `<0xE2>` into characters."""
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    return any(part["type"] == "ByteFallback" for part in decoder.get("decoders", [decoder]))


def load_tokenizer_and_template(config: EngineConfig, checkpoint: Path) -> tuple[Tokenizer, ChatTemplate]:
    """Return the tokenizer and chat template of a configuration whose model is `checkpoint`.

    End tokens always come from `checkpoint`, also with another tokenizer. ModelError if a file is damaged or not there;
    ConfigError if a given chat template cannot be read.
    """
    place = tokenizer_source(config, checkpoint)
    tokenizer = load_tokenizer(place, checkpoint)
    if config.chat_template is None:
        return tokenizer, load_chat_template(place, tokenizer.special_tokens)
    text = read_chat_template(expand(config.chat_template))
    return tokenizer, ChatTemplate({"default": text}, tokenizer.special_tokens)
