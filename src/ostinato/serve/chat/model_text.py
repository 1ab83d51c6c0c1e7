"""Facts about the model's text for the endpoints: tokenizer, chat template, and formats of the answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import RequestError
from ostinato.media.input import MediaInput
from ostinato.media.load import MediaSources
from ostinato.serve.chat.calls.forms import known_forms
from ostinato.serve.chat.detection import detect_formats, takes_tools
from ostinato.serve.chat.token_texts import TokenStrings
from ostinato.serve.http.errors import ApiError
from ostinato.serve.settings import ServeSettings

log = logging.getLogger("ostinato.serve")


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
        self.formats = detect_formats(chat_template)
        self.special_tags = _special_tags(tokenizer, self.formats.tags)
        """The tags of the formats that are special tokens, which decoding usually leaves out, with their ids."""
        self.takes_tools = takes_tools(chat_template)
        if self.takes_tools and self.formats.tools is None:
            log.warning(
                "the chat template takes tools, but writes calls in none of the known forms, so requests with tools "
                "are refused; known are those of %s",
                known_forms(),
            )
        self.knows_developer = "developer" in template
        self.token_texts = TokenStrings(tokenizer)
        self.media = _for_clients(media, settings)
        self.vocab_size, self.max_model_len = vocab_size, max_model_len

    def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Return the token ids of a text. ApiError, which names `param`, if there are none or too many.

        A text that is too long for the model in any case is refused first: tokenising it may take seconds.
        """
        most = self.max_model_len * self.tokenizer.longest_token
        if len(text) > most:
            room = f"max_model_len ({self.max_model_len}) has room for at most {most}"
            raise ApiError(400, f"the prompt has {len(text)} characters, and {room}", param=param)
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
            message = f"{param} holds token id {outside}; the model's lie between 0 and {self.vocab_size - 1}"
            raise ApiError(400, message, param=param)


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
