"""The tokenizer.json, tokenizer_config.json and end tokens that the metadata of a GGUF file stand for."""

from __future__ import annotations

from typing import Any

from ostinato.errors import ModelError
from ostinato.formats.gguf.header import Header

_PREFIX = "tokenizer.ggml."
# Kinds of tokens, as `tokenizer.ggml.token_type` numbers them.
_CONTROL, _USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


_DIGITS = [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]
_LLAMA3 = _split(_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST)
_QWEN2 = _split(_CONTRACTIONS + _WORDS + r"\p{N}" + _REST)

PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _DIGITS,
}
"""How text is cut before it is merged, by `tokenizer.ggml.pre`; the patterns of the models' own tokenizers."""

_NORMALIZERS = {"qwen2": {"type": "NFC"}}
# Whole words are taken as they stand in the vocabulary, and a text begins with `bos` where the file does not say.
_LIKE_LLAMA3 = ("llama-bpe",)


def tokenizer_of(header: Header) -> dict[str, Any]:
    """tokenizer.json. ModelError for a kind of tokenizer that is not implemented."""
    metadata = header.metadata
    kind, pre = metadata.get(f"{_PREFIX}model"), metadata.get(f"{_PREFIX}pre")
    if kind != "gpt2":
        raise ModelError(f"{header.path} has a tokenizer of model {kind!r}; implemented: 'gpt2' (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"{header.path} has tokenizer.ggml.pre = {pre!r}; implemented: {known}")
    tokens, merges = metadata.get(f"{_PREFIX}tokens"), metadata.get(f"{_PREFIX}merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise ModelError(f"{header.path} lacks the tokens or the merges of its tokenizer")
    types = metadata.get(f"{_PREFIX}token_type")
    kinds = [1] * len(tokens) if types is None else types.tolist()
    if len(kinds) != len(tokens):
        raise ModelError(f"{header.path} has {len(tokens)} tokens and the types of {len(kinds)}")
    added = [
        {
            "id": number,
            "content": token,
            "special": kinds[number] == _CONTROL,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, token in enumerate(tokens)
        if kinds[number] in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": _NORMALIZERS.get(pre),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": pre in _LIKE_LLAMA3,
            "fuse_unk": False,
            "byte_fallback": False,
        },
    }


def tokenizer_config_of(header: Header) -> dict[str, Any]:
    """tokenizer_config.json: special tokens, whether texts begin or end with them, and the chat templates."""
    metadata = header.metadata
    tokens = metadata.get(f"{_PREFIX}tokens") or ()
    settings: dict[str, Any] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        number = metadata.get(f"{_PREFIX}{key}_token_id")
        if type(number) is int and number < len(tokens):
            settings[name] = tokens[number]
    begins = metadata.get(f"{_PREFIX}add_bos_token")
    settings["add_bos_token"] = metadata.get(f"{_PREFIX}pre") in _LIKE_LLAMA3 if begins is None else begins
    settings["add_eos_token"] = metadata.get(f"{_PREFIX}add_eos_token", False)
    template = metadata.get("tokenizer.chat_template")
    others = {
        name.removeprefix("tokenizer.chat_template."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.chat_template.")
    }
    if others:
        named = {"default": template, **others} if template is not None else others
        settings["chat_template"] = [{"name": name, "template": value} for name, value in named.items()]
    elif template is not None:
        settings["chat_template"] = template
    return settings


def generation_config_of(header: Header) -> dict[str, Any]:
    """generation_config.json: every token that ends an output."""
    names = [f"{_PREFIX}{key}_token_id" for key in ("eos", "eot", "eom")]
    ends = {value for name in names if type(value := header.metadata.get(name)) is int}
    return {"eos_token_id": sorted(ends)} if ends else {}
