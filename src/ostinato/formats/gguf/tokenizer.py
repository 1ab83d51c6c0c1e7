"""The tokenizer.json, tokenizer_config.json and end tokens that correspond to the metadata of a GGUF file.

SentencePiece has two kinds of model (github.com/google/sentencepiece). One joins, again and again, the two neighbours
that make the piece of the highest score; its scores are 0, -1, -2 and so on, the order in which pieces were learnt. The
other finds the pieces whose scores, logarithms of probabilities, have the highest sum. Neither knows words: blanks are
characters like others, written as U+2581. Imports no torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ostinato.errors import ModelError
from ostinato.formats.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer, byte_level
from ostinato.formats.gguf.reader import Header, LazyStrings
from ostinato.json_io import JsonObject

log = logging.getLogger("ostinato.engine")

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens, as `tokenizer.ggml.token_type` numbers them."""


def sentencepiece_model(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], unknown: int
) -> JsonObject:
    """Return the `model` of a tokenizer.json. Raises ModelError for scores that give no order."""
    normal = [number for number, kind in enumerate(kinds) if kind == NORMAL]
    values = [scores[number] for number in normal]
    longer = {value for number, value in zip(normal, values, strict=True) if len(tokens[number]) > 1}
    if len(longer) < 2 and len(normal) > 2:
        raise ModelError("the scores of its tokens are all the same, so that they say no order of merges")
    has_bytes = BYTE in kinds
    if all(float(value).is_integer() for value in values):
        return {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": list(_merges(tokens, scores, normal)),
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": has_bytes,
            "ignore_merges": False,
        }
    # Bytes encode text without pieces. With the lowest score they are not used for text that reads as their name.
    lowest = min(values, default=0.0)
    chosen = (scores[number] if kinds[number] == NORMAL else lowest for number in range(len(tokens)))
    return {
        "type": "Unigram",
        "vocab": [[token, float(score)] for token, score in zip(tokens, chosen, strict=True)],
        "unk_id": unknown,
        "byte_fallback": has_bytes,
    }


def _merges(tokens: Sequence[str], scores: Sequence[float], normal: Iterable[int]) -> Iterable[list[str]]:
    """Yield every pair of pieces that makes a piece, those of the highest score first."""
    pieces = {tokens[number]: number for number in normal}
    find = pieces.get
    for number in sorted(pieces.values(), key=lambda number: (-scores[number], number)):
        piece, pairs = tokens[number], []
        for i in range(1, len(piece)):  # A plain loop, as a vocabulary of 262,144 has 1.7 million such pairs.
            left = find(piece[:i])
            if left is not None and (right := find(piece[i:])) is not None:
                pairs.append((left, right))
        for left, right in sorted(pairs):
            yield [tokens[left], tokens[right]]


def normalizer(adds_space: bool) -> JsonObject:
    """Return the normalizer: it adds a blank before the text if asked to, and writes all blanks as pieces have them."""
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}, replaced] if adds_space else [replaced]
    return {"type": "Sequence", "normalizers": steps}


def decoder(adds_space: bool) -> JsonObject:
    steps: list[JsonObject] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Special tokens of SentencePiece where a file names none, as its trainer and llama.cpp have them."""
_NO_TOKEN = (-1, 2**32 - 1)
"""Ids by which a file says that it has no such token."""

PREFIX = "tokenizer.ggml."
"""Prefix of the keys that describe a file's tokenizer."""
MODELS = ("gpt2", "llama", "gemma4")
"""Kinds of tokenizers: byte-level BPE, SentencePiece, and BPE of characters."""
_END_TEXTS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
"""Tokens that end an output in any vocabulary that contains them; llama.cpp knows them by their text."""
_OTHER_TEXTS = """
<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
"""Further tokens that llama.cpp takes for control tokens, whatever type a file gives them."""
_ENDS = frozenset(_END_TEXTS.split())
_CONTROL = _ENDS.union(_OTHER_TEXTS.split())


def _control_tokens(header: Header, tokens: Sequence[str]) -> dict[str, int]:
    """Return the ids of the tokens in `_CONTROL`, except those that are text, or mean something else beside others.

    Text is what merges make, unless the file calls it a control token: in Qwen's vocabularies `</s>` ends a tag.
    """
    found = {token: number for number, token in enumerate(tokens) if token in _CONTROL}
    kinds = _numbers(header, "token_type") or []
    unnamed = {
        token for token, number in found.items() if kinds[number : number + 1] not in ([CONTROL], [USER_DEFINED])
    }
    if unnamed:
        unnamed &= {merge.replace(" ", "") for merge in _texts(header, "merges") or ()}
        found = {token: number for token, number in found.items() if token not in unnamed}
    if found.keys() & {"<|call|>", "<|calls|>"} and found.keys() & {"<|return|>", "<|flush|>"}:
        found.pop("<|end|>", None)  # it ends a message
    if "<|tool_response>" in found:
        found.pop("</s>", None)
    return found


def tokenizer_of(header: Header) -> JsonObject:
    """Return the tokenizer.json. Raises ModelError for a kind of tokenizer that is not implemented."""
    kind = header.metadata.get(f"{PREFIX}model")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ModelError(
            f"{header.path} has a tokenizer of model {kind!r}; implemented: 'gpt2' (byte-level BPE), 'llama' "
            "(SentencePiece), 'gemma4' (BPE of characters)"
        )
    tokens, kinds = _tokens(header)
    if kind == "llama":
        parts = _sentencepiece(header, tokens, kinds)
    else:
        parts = _of_characters(header, tokens) if kind == "gemma4" else _byte_level(header, tokens)
    takes_blanks = kind == "llama" and _is_phi3(header)
    added = [
        {
            "id": number,
            "content": token,
            "special": kinds[number] != USER_DEFINED,
            "rstrip": takes_blanks and token not in _PHI3_LEAVES_BLANKS,
            **dict.fromkeys(("single_word", "lstrip", "normalized"), False),
        }
        for number, token in enumerate(tokens)
        if token and (kinds[number] in (CONTROL, USER_DEFINED) or (kinds[number] == UNKNOWN and kind == "llama"))
    ]
    return {"version": "1.0", "added_tokens": added, "post_processor": None, **parts}


_PHI3_LEAVES_BLANKS = ("<unk>", "<s>", "<|endoftext|>")


def _is_phi3(header: Header) -> bool:
    """Return whether the tokenizer is Phi-3's, whose added tokens take the blanks behind them.

    Files do not hold that. llama.cpp goes by the model's name; a model tuned from Phi-3 has its architecture.
    """
    name = str(header.metadata.get("general.name")).lower()
    return header.metadata.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def _tokens(header: Header) -> tuple[list[str], list[int]]:
    """Return the tokens and their kinds."""
    tokens, kinds = _texts(header, "tokens"), _numbers(header, "token_type")
    if tokens is None:
        raise ModelError(f"{header.path} lacks the tokens of its tokenizer")
    kinds = [NORMAL] * len(tokens) if kinds is None else kinds
    if len(kinds) != len(tokens):
        raise ModelError(f"{header.path} has {len(tokens)} tokens and the types of {len(kinds)}")
    if others := [kind for kind in kinds if kind not in range(BYTE + 1)]:
        raise ModelError(f"{header.path} has a token of type {others[0]}; types are 0 to {BYTE}")
    kinds = [kind or NORMAL for kind in kinds]  # 0 is "undefined", which is text
    last = {token: number for number, token in enumerate(tokens)}
    for number, token in enumerate(tokens):
        if token and last[token] != number:
            raise ModelError(f"{header.path} has the token {token!r} twice, as {number} and as {last[token]}")
    control = _control_tokens(header, tokens)
    if named := [token for token, number in control.items() if kinds[number] not in (CONTROL, USER_DEFINED)]:
        log.warning("%s: taken for control tokens, by their texts: %s", header.path, ", ".join(named))
    for number in control.values():
        kinds[number] = CONTROL
    return tokens, kinds


def _texts(header: Header, name: str) -> list[str] | None:
    """Return a list of strings; None for anything else."""
    value = header.metadata.get(f"{PREFIX}{name}")
    if not isinstance(value, LazyStrings | list):
        return None
    texts = list(value)
    return texts if all(isinstance(text, str) for text in texts) else None


def _numbers(header: Header, name: str) -> list[Any] | None:
    value = header.metadata.get(f"{PREFIX}{name}")
    if value is None:
        return None
    if not hasattr(value, "tolist"):
        raise ModelError(f"{header.path} has {PREFIX}{name} = {value!r:.60}, which should be a list of numbers")
    return list(value.tolist())


def _flag(header: Header, name: str, default: bool) -> bool:
    """Return a setting that is true or false. Raises ModelError for anything else, which would be read as either."""
    value = header.metadata.get(f"{PREFIX}{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"{header.path} has {PREFIX}{name} = {value!r:.60}, which should be true or false")
    return value


def _token_id(header: Header, name: str, num_tokens: int) -> int | None:
    """Return the id of a special token; None without one. Raises ModelError for one that is no token."""
    metadata = header.metadata
    default = _SENTENCEPIECE_IDS.get(name) if metadata.get(f"{PREFIX}model") == "llama" else None
    value = metadata.get(f"{PREFIX}{name}_token_id")
    if value is None:
        return default if default is not None and default < num_tokens else None
    if type(value) is int and value in _NO_TOKEN:
        return None
    if type(value) is not int or not 0 <= value < num_tokens:
        raise ModelError(f"{header.path} has {PREFIX}{name}_token_id = {value!r:.60}, and {num_tokens} tokens")
    return value


def pre_tokenizer_of(header: Header) -> PreTokenizer:
    """Return the pre-tokenizer of byte-level BPE. Raises ModelError for an unknown one."""
    pre = header.metadata.get(f"{PREFIX}pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"{header.path} has tokenizer.ggml.pre = {pre!r}; implemented: {known}")
    return PRE_TOKENIZERS[pre]


def _byte_level(header: Header, tokens: list[str]) -> JsonObject:
    pre, merges = pre_tokenizer_of(header), _texts(header, "merges")
    if merges is None:
        raise ModelError(f"{header.path} lacks the merges of its tokenizer")
    return {
        "normalizer": None if pre.normalizer is None else {"type": pre.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "decoder": byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": pre.takes_whole_words,
            "fuse_unk": False,
            "byte_fallback": False,
        },
    }


def _of_characters(header: Header, tokens: list[str]) -> JsonObject:
    """Return Gemma 4's tokenizer: merges of characters, with bytes for unknown ones.

    A text is split at runs of line breaks alone. A run that the vocabulary has is one token.
    """
    merges = _texts(header, "merges")
    if merges is None:
        raise ModelError(f"{header.path} lacks the merges of its tokenizer")
    return {
        "normalizer": normalizer(adds_space=False),
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[^\n]+|[\n]+"},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": decoder(adds_space=False),
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": True,
            "fuse_unk": False,
            "byte_fallback": True,
        },
    }


def _sentencepiece(header: Header, tokens: list[str], kinds: list[int]) -> JsonObject:
    scores = _numbers(header, "scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{header.path} has {len(tokens)} tokens and scores of {len(scores or ())}")
    if not all(map(math.isfinite, scores)):
        raise ModelError(f"{header.path} has scores of tokens that are no finite numbers")
    unknown = header.metadata.get(f"{PREFIX}unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise ModelError(f"{header.path} has unknown_token_id = {unknown!r}, and {len(tokens)} tokens")
    adds_space = _flag(header, "add_space_prefix", True)
    try:
        model = sentencepiece_model(tokens, scores, kinds, unknown)
    except ModelError as error:
        raise ModelError(f"{header.path} has a tokenizer that cannot be read: {error.message}") from None
    return {
        "normalizer": normalizer(adds_space),
        "pre_tokenizer": None,
        "decoder": decoder(adds_space),
        "model": model,
    }


def tokenizer_config_of(header: Header) -> JsonObject:
    """Return the tokenizer_config.json: special tokens, whether texts begin or end with them, and chat templates."""
    metadata = header.metadata
    tokens = metadata.get(f"{PREFIX}tokens") or ()
    settings: JsonObject = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (number := _token_id(header, key, len(tokens))) is not None:
            settings[name] = tokens[number]
    settings["add_bos_token"] = _flag(header, "add_bos_token", _begins(metadata))
    settings["add_eos_token"] = _flag(header, "add_eos_token", False)
    for key in ("bos", "eos"):
        if metadata.get(f"{PREFIX}add_{key}_token") and f"{key}_token" not in settings:
            raise ModelError(f"{header.path} has {PREFIX}add_{key}_token, and no {key}_token_id to add")
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


def _begins(metadata: JsonObject) -> bool:
    """Return whether a text begins with `bos` when the file does not say."""
    if metadata.get(f"{PREFIX}model") in ("llama", "gemma4"):
        return True
    pre = metadata.get(f"{PREFIX}pre", "default")
    return isinstance(pre, str) and pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].begins


def generation_config_of(header: Header) -> JsonObject:
    """Return the generation_config.json: every token that ends an output, and the author's sampling settings."""
    metadata = header.metadata
    tokens = _texts(header, "tokens") or ()
    numbers = [_token_id(header, key, len(tokens)) for key in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")]
    ends = {number for number in numbers if number is not None}
    control = _control_tokens(header, tokens)
    ends |= {number for token, number in control.items() if token in _ENDS}
    sampling = {name: metadata.get(key) for name, key in _SAMPLING.items() if metadata.get(key) is not None}
    config: JsonObject = {"eos_token_id": sorted(ends)} if ends else {}
    return config | sampling | ({"do_sample": True} if sampling.get("temperature") else {})


_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Sampling settings: name in a generation_config.json -> name in the metadata."""
