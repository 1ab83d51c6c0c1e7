"""The tokenizer and the chat template of an engine: its checkpoint's, or those that settings name."""

from __future__ import annotations

from pathlib import Path

from ostinato.config import EngineConfig
from ostinato.engine.text.chat_template import ChatTemplate, load_chat_template, read_chat_template
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer
from ostinato.models.checkpoint import tokenizer_source


def load_tokenizer_and_template(config: EngineConfig, checkpoint: Path) -> tuple[Tokenizer, ChatTemplate]:
    """Return the tokenizer and chat template of a configuration whose model is `checkpoint`.

    End tokens always come from `checkpoint`, also with another tokenizer. ModelError if a file is damaged or not there;
    ConfigError if a given chat template cannot be read.
    """
    place = tokenizer_source(config, checkpoint)
    tokenizer = load_tokenizer(place, checkpoint)
    if config.chat_template is None:
        return tokenizer, load_chat_template(place, tokenizer.special_tokens)
    text = read_chat_template(Path(config.chat_template).expanduser())
    return tokenizer, ChatTemplate({"default": text}, tokenizer.special_tokens)
