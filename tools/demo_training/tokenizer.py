"""The embedded model's tokenizer: bytes, single digits, and the whole words that its problems use.

A BPE without merges: a piece of text that is an entry of the vocabulary is one token, any other is spelled in
bytes. So every text can be encoded, and decodes to itself.
"""

from __future__ import annotations

import collections
import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ostinato.demo.problems import training_problem

PAD, END = "<|pad|>", "<|end|>"
MARKS = ["\nA:", "\nQ:", "Q:", " + ", " - ", " * ", " = ", ". ####", ". "]
PIECES = r"\nA:|\nQ:|Q:| [-+*=] (?=[0-9])|\. ####|\. (?=[0-9])|'\p{L}+| ?\p{L}+|[0-9]|[\s\S]"
VOCABULARY = 768


def build_tokenizer(seed: int = 0, problems: int = 20_000, vocabulary: int = VOCABULARY) -> Tokenizer:
    """The tokenizer whose words are the most frequent pieces of generated problems. Deterministic."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rng = random.Random(f"vocabulary {seed}")
    counts: collections.Counter[str] = collections.Counter()
    for _ in range(problems):
        problem = training_problem(rng, unseen=0.0)
        counts.update(piece for piece, _ in splitter.pre_tokenize_str(problem.question))
    entries = [PAD, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += [splitter.pre_tokenize_str(mark + "1")[0][0] for mark in MARKS]
    known = set(entries)
    words = sorted((piece for piece in counts if piece not in known), key=lambda piece: (-counts[piece], piece))
    entries += words[: vocabulary - len(entries)]
    tokenizer = Tokenizer(
        models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END])
    return tokenizer


def spellings(tokenizer: Tokenizer) -> dict[int, list[int]]:
    """For every whole word, its token id -> the ids of its bytes."""
    return {
        index: [tokenizer.token_to_id(character) for character in entry]
        for entry, index in tokenizer.get_vocab().items()
        if len(entry) > 1 and any(map(str.isalpha, entry[1:])) and entry not in (PAD, END) and ":" not in entry
    }
