"""The tokenizer of the vision-language model: bytes, single digits, and the words that its conversations use.

A BPE without merges, as that of the text model: a piece of text that is an entry is one token, any other is spelled
in bytes. The special tokens have the names that Qwen3-VL's have.
"""

from __future__ import annotations

import collections
import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ostinato.demo.asking import WORDINGS
from ostinato.demo.drawings import training_conversation
from ostinato.demo.scenes import COLOURS

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = (PAD, START, END, VISION_START, VISION_END, IMAGE, VIDEO)
ROLES = ("user\n", "assistant\n")
SECONDS = " seconds>"
PIECES = r"(?:user|assistant)\n| seconds>| ?\p{L}+|[0-9]|[\s\S]"
CONVERSATIONS = 4000

CHAT_TEMPLATE = """\
{#- A system message is ignored: the model knows questions about pictures only. -#}
{%- macro write(content) -%}
{%- if content is string -%}
{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part.type in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- else -%}
{{- raise_exception("a part of a message must be text, image, image_url or video, not " + part.type | string) -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role in ('user', 'assistant') -%}
{{- '<|im_start|>' + message.role + '\\n' + write(message.content) | trim + '<|im_end|>\\n' -}}
{%- elif message.role != 'system' -%}
{{- raise_exception("a message's role must be system, user or assistant, not " + message.role | string) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer(seed: int = 0) -> Tokenizer:
    """The tokenizer whose words are those of the questions and answers. Deterministic."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rng = random.Random(f"vocabulary {seed}")
    texts = [text.format("", "", "") for wordings in WORDINGS.values() for text in wordings]
    texts += [text.lower() for text in texts] + list(COLOURS)
    for _ in range(CONVERSATIONS):
        for turn in training_conversation(rng):
            texts += [turn.question.text, turn.question.answer]
    counts = collections.Counter(piece for text in texts for piece, _ in splitter.pre_tokenize_str(text))
    entries = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += [splitter.pre_tokenize_str(text)[0][0] for text in (*ROLES, SECONDS)]
    known = set(entries)
    entries += sorted(piece for piece in counts if piece not in known)
    tokenizer = Tokenizer(
        models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens that a config.json names."""
    names = {
        "pad": PAD,
        "end": END,
        "image": IMAGE,
        "video": VIDEO,
        "vision_start": VISION_START,
        "vision_end": VISION_END,
    }
    return {name: tokenizer.token_to_id(token) for name, token in names.items()}
