"""Guides for tests, compiled for small tokenizers, and what an output that follows one has to be."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema_rs
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.sampling.grammar import Grammar, GrammarCompiler
from ostinato.sampling.guide import Guide

PAD, EOS = 0, 1
TOY_TEXTS = [
    "a",
    "b",
    "c",
    "d",
    "0",
    "1",
    "2",
    "-",
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    " ",
    "ab",
    "bc",
    "abc",
    '":',
    "12",
]
"""Of tokens 2 and on; with room for one more id, which has no text, in a vocabulary of 24."""

SCHEMAS: dict[str, dict[str, Any]] = {
    "nested objects": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "size": {
                "type": "object",
                "properties": {
                    "width": {"type": "integer", "minimum": 1, "maximum": 400},
                    "unit": {"enum": ["mm", "in"]},
                },
                "required": ["width", "unit"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "size"],
        "additionalProperties": False,
    },
    "bounded arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "minItems": 2,
        "maxItems": 4,
    },
    "numbers": {
        "type": "object",
        "properties": {
            "even": {"type": "integer", "minimum": -10, "maximum": 10, "multipleOf": 2},
            "part": {"type": "number", "minimum": 0, "maximum": 1},
            "none": {"type": "null"},
        },
        "required": ["even", "part", "none"],
        "additionalProperties": False,
    },
    "patterns": {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,3}$"},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["code"],
        "additionalProperties": False,
    },
    "references": {
        "$defs": {
            "leaf": {"enum": ["x", 1, None, {"y": [True]}]},
            "node": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
        },
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#/$defs/node"}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    "alternatives": {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": 99},
            {
                "type": "object",
                "properties": {"kind": {"const": "none"}},
                "required": ["kind"],
                "additionalProperties": False,
            },
        ]
    },
}
GUIDES = {
    **{name: Guide(json_schema=schema) for name, schema in SCHEMAS.items()},
    "a regex": Guide(regex=r"[A-Z][a-z]{2,5}, [0-9]{1,3}(\.[0-9]{2})?"),
    "a regex of any text": Guide(regex=r"(.|\n){20,30}"),
    "choices": Guide(choice=["yes", "no", "perhaps", "per se", 'a "quote" \\ and\nmore', "é or 漢"]),
    "Lark": Guide(
        lark='start: item ("," item){1,3}\nitem: NAME "=" NUMBER\nNAME: /[a-d]{1,4}/\nNUMBER: /[0-9]{1,3}/\n'
    ),
}


def assert_follows(text: str, guide: Guide) -> None:
    """A whole output is of its guide's form."""
    if guide.json_schema is not None:
        jsonschema_rs.validate(json.loads(guide.json_schema), json.loads(text))
    elif guide.json_object:
        assert isinstance(json.loads(text), dict)
    elif guide.regex is not None:
        assert re.fullmatch(guide.regex, text), text
    elif guide.choice:
        assert text in guide.choice
    else:
        assert re.fullmatch(r"[a-d]{1,4}=\d{1,3}(,[a-d]{1,4}=\d{1,3}){1,3}", text), text


def toy_text(token: int) -> str:
    """What a token of the toy vocabulary stands for."""
    return TOY_TEXTS[token - 2] if 2 <= token < 2 + len(TOY_TEXTS) else ""


@cache
def toy_tokenizer() -> Tokenizer:
    """A byte-level BPE of `TOY_TEXTS` behind two special tokens; tests sample its tokens and never encode."""
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {"<pad>": PAD, "<end>": EOS}
    for text in TOY_TEXTS:
        vocabulary[bytes_of.pre_tokenize_str(text)[0][0]] = len(vocabulary)
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ('"', ":"), ("1", "2")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<end>"])
    return Tokenizer(backend)


@cache
def toy_grammar(guide: Guide, vocab_size: int = 24) -> Grammar:
    """A guide compiled for the toy vocabulary."""
    return GrammarCompiler(toy_tokenizer(), vocab_size, [EOS]).compile(guide)


def token_ids(mask: bytes | None) -> set[int]:
    """The tokens that a mask allows."""
    return set(np.unpackbits(np.frombuffer(mask or b"", np.uint8), bitorder="little").nonzero()[0].tolist())
