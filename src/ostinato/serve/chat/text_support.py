"""Facts about the model's text for the endpoints: tokenizer, chat template, and formats of the answers.

For log-probabilities, single tokens are text, bytes and JSON.
"""

from __future__ import annotations

import codecs
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.engine.text.template_sandbox import PROBE_BUDGET
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import RequestError
from ostinato.media.load import MediaSources
from ostinato.media.media_input import MediaInput
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.scheduler.limits import check_prompt_length
from ostinato.serve.chat.answer_formats import AnswerFormats
from ostinato.serve.chat.answer_parser import detect_formats, takes_tools
from ostinato.serve.chat.tool_calls.formats import EQUATION, GENERIC, form_problem
from ostinato.serve.chat.tools import Tool
from ostinato.serve.http.api_errors import ApiError, field_error
from ostinato.serve.settings import ServeSettings

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
LOWEST = -9999.0
"""Log-probability written for an impossible token: JSON has no number for minus infinity."""


class TokenStrings:
    """Texts of one tokenizer's tokens. Each is looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes | None] = {}
        self._chat: dict[int, str] = {}
        self._names: dict[int, str] = {}

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the token's UTF-8 bytes in a text, which may be a part of a character; None if they are not known."""
        if token_id not in self._bytes:
            self._bytes[token_id] = _bytes_of(self._tokenizer, token_id)
        return self._bytes[token_id]

    def text_of(self, token_id: int) -> str:
        """Return the token's text, also of special tokens; U+FFFD for parts of characters."""
        if not self._tokenizer.has_text:
            return f"token_id:{token_id}"
        found = self.bytes_of(token_id)
        return self._tokenizer.decode_token(token_id, False) if found is None else found.decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        r"""Return the text; for parts of characters, whose texts are all the same, `bytes:\xe2\x80`."""
        if token_id not in self._names:
            text, found = self.text_of(token_id), self.bytes_of(token_id)
            if _REPLACEMENT in text and found is not None and found != text.encode():
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
            self._names[token_id] = text
        return self._names[token_id]

    def chat_parts(self, logprobs: Iterable[TokenLogprobs | None]) -> Iterator[str]:
        """Yield the parts of the `content` list of a chat answer's logprobs, one for each token."""
        return json_list(self._chat_token(each) for each in logprobs if each is not None)

    def _chat_token(self, logprob: TokenLogprobs) -> str:
        top = ",".join(f"{{{self._chat_head(token)}{number(value)}}}" for token, value in logprob.top)
        return f'{{{self._chat_head(logprob.token_id)}{number(logprob.logprob)},"top_logprobs":[{top}]}}'

    def _chat_head(self, token_id: int) -> str:
        if token_id not in self._chat:
            found = self.bytes_of(token_id)
            listed = json.dumps(None if found is None else list(found), separators=(",", ":"))
            self._chat[token_id] = f'"token":{json.dumps(self.text_of(token_id))},"bytes":{listed},"logprob":'
        return self._chat[token_id]


class Offsets:
    """The places of one text's tokens, in characters."""

    def __init__(self, texts: TokenStrings, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._texts, self._tokenizer = texts, tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.end = 0
        """The end of the last token."""

    def next(self, token_id: int) -> int:
        """Return where the next token begins. A character of several tokens belongs to the last of them."""
        begin = self.end
        if not self._tokenizer.has_no_text(token_id, self._skip_special_tokens):
            found = self._texts.bytes_of(token_id)
            text = self._texts.text_of(token_id) if found is None else self._decoder.decode(found)
            self.end += len(text)
        return begin


class CompletionLogprobs:
    """Writer of the `logprobs` objects of a completion's choice, piece by piece, with each token's text offset."""

    def __init__(self, texts: TokenStrings, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._offsets = Offsets(texts, tokenizer, skip_special_tokens)

    def parts(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Iterator[str]:
        """Yield the parts of the next tokens' object. A token without a log-probability, a prompt's first, has null."""
        name = self._texts.name_of
        yield '{"tokens":'
        yield from json_list(json.dumps(name(token_id)) for token_id in token_ids)
        yield ',"token_logprobs":'
        yield from json_list("null" if each is None else number(each.logprob) for each in logprobs)
        yield ',"top_logprobs":'
        yield from json_list("null" if each is None else self._top(each) for each in logprobs)
        yield ',"text_offset":'
        yield from json_list(str(self._offsets.next(token_id)) for token_id in token_ids)
        yield "}"

    def _top(self, logprob: TokenLogprobs) -> str:
        """Return the best tokens and the sampled one. Of several with the same text, the best one counts."""
        found: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            found.setdefault(self._texts.name_of(token_id), value)
        return "{" + ",".join(f"{json.dumps(name)}:{number(value)}" for name, value in found.items()) + "}"


def json_list(items: Iterable[str]) -> Iterator[str]:
    """Yield the parts of a JSON list; `items` are JSON texts."""
    before = "["
    for item in items:
        yield before + item
        before = ","
    yield "[]" if before == "[" else "]"


def number(value: float) -> str:
    """Return a log-probability as JSON."""
    return repr(value if math.isfinite(value) else LOWEST)


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    entry = tokenizer.token_text(token_id)
    if entry is None:
        return b"" if tokenizer.has_text else None
    if tokenizer.is_byte(token_id):
        return bytes([int(entry[3:5], 16)])
    text = tokenizer.decode_token(token_id, False)
    if _REPLACEMENT in text and all(character in _BYTE_OF for character in entry):
        return bytes(_BYTE_OF[character] for character in entry)
    # A decoder that strips the first space of a text takes it from a single token too.
    if entry.startswith(_SPACE_MARK) and not text.startswith(" "):
        text = " " + text
    return text.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the characters that stand for bytes in vocabularies of byte-level BPE (GPT-2).

    Printable ones stand for themselves, the characters from 256 on for the other bytes, in order.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


log = logging.getLogger("ostinato.serve")
_PROBE = "Zanzibar!"


class ModelText:
    """Text side of one model, made once in the server and once in the process that workers are forked from."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        media: MediaInput | None,
        vocab_size: int,
        max_model_len: int,
        settings: ServeSettings,
    ) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template
        template = chat_template.text
        chat_template.compile()
        self.formats = detect_formats(chat_template, tokenizer.token_id, settings.tool_call_parser)
        self.special_tags = _special_tags(tokenizer, self.formats.tags)
        """The tags of the formats that are special tokens, which decoding usually leaves out, with their ids."""
        self.describes_tools = self.formats.tools != GENERIC and takes_tools(chat_template)
        """True if the chat template describes tools to the model."""
        if self.formats.tools == GENERIC:
            log.info(
                "tools are described in the generic form, in the system message, and a grammar enforces calls; the "
                "model may not have learnt it (tool_call_parser)"
            )
        if self.describes_tools and self.formats.tools is None:
            log.warning(
                "the chat template takes tools, but %s; requests with tools are refused unless tool_choice demands a "
                "call; tool_call_parser can name a form",
                form_problem(template),
            )
        self.knows_developer = "developer" in template
        self.token_texts = TokenStrings(tokenizer)
        self.media = _for_clients(media, settings)
        self.vocab_size, self.max_model_len = vocab_size, max_model_len

    def formats_with(self, tools: Sequence[Tool]) -> AnswerFormats:
        """Return the formats of an answer that may call these tools.

        If the model's form is not known, or cannot write them, a grammar forces calls in ours (`checked_tools`).
        """
        form = self.formats.tools
        return self.formats if not tools or (form and form.can_call(tools)) else replace(self.formats, tools=GENERIC)

    @cached_property
    def renders_system(self) -> bool:
        """True if the chat template gives out a system message."""
        messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]
        try:
            return _PROBE in self.chat_template.render(messages, budget=PROBE_BUDGET)
        except RequestError:
            return False

    @property
    def takes_tools(self) -> bool:
        """True if the model can call tools of its own accord; `EQUATION` needs no description of them."""
        return self.formats.tools in (GENERIC, EQUATION) or (self.describes_tools and self.formats.tools is not None)

    def encode(self, text: str, add_special_tokens: bool, param: str, has_output: bool = True) -> list[int]:
        """Return the token ids of a text. ApiError, which names `param`, if there are none.

        ContextLengthError for a text that is too long for the model in any case: tokenising it may take seconds.
        """
        longest = self.tokenizer.longest_token
        check_prompt_length(len(text), self.max_model_len, param, has_output=has_output, longest_token=longest)
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except RequestError as error:
            raise ApiError(400, error.message, param=param) from None

    def shows_tags(self, skip_special_tokens: bool | None) -> dict[str, bool]:
        """Return the sampling parameter that keeps special tokens in the answer if tags are among them.

        Empty if none are, or if the request sets the parameter.
        """
        return {"skip_special_tokens": False} if self.special_tags and skip_special_tokens is None else {}

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise ApiError unless all ids are in the model's vocabulary."""
        outside = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise field_error(param, f"holds token id {outside}; the model's lie between 0 and {self.vocab_size - 1}")


def _for_clients(media: MediaInput | None, settings: ServeSettings) -> MediaInput | None:
    """Return how the server takes in images: no client can make it read files of this machine."""
    if media is None:
        return None
    sources = MediaSources(files=False, remote=media.sources.remote, max_pixels=settings.max_image_pixels)
    return replace(media, sources=sources, max_images=settings.max_images, max_pixels=settings.max_request_pixels)


def _special_tags(tokenizer: Tokenizer, tags: Sequence[str]) -> dict[str, int]:
    """Return the tags that are special tokens, with their ids."""
    ids = {tag: tokenizer.token_id(tag) for tag in tags}
    return {tag: id for tag, id in ids.items() if id is not None and tokenizer.has_no_text(id, True)}
