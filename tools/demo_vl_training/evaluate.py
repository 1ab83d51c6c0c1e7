"""Measuring an exported checkpoint in transformers: exact answers on held-out conversations of each family."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3VLForConditionalGeneration

from ostinato.demo.drawings import FAMILIES, Conversation, held_out, is_right

from .data import Encoder, Sequence, collate
from .tokenizer import END, IMAGE, PAD, VIDEO

ANSWER_TOKENS = 32
ROWS = 25


def measure(directory: Path, seed: int, count: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    """By family: the share of last answers that are right, given the right ones before, and some that are wrong."""
    figures: dict[str, object] = {}
    for family in FAMILIES:
        conversations = held_out(seed, count, family)
        answers = answer(directory, conversations, dtype)
        wrong = [
            (talk[-1].question, text)
            for talk, text in zip(conversations, answers, strict=True)
            if not is_right(text, talk[-1])
        ]
        asked = Counter(talk[-1].question.family for talk in conversations)
        failed = Counter(question.family for question, _ in wrong)
        figures[family] = 1 - len(wrong) / count
        figures[f"{family}: right by kind of question"] = {
            kind: f"{total - failed[kind]} of {total}" for kind, total in sorted(asked.items())
        }
        figures[f"{family}: wrong"] = [
            f"{question.text!r} -> {text!r}, expected {question.answer!r}" for question, text in wrong[:10]
        ]
    return figures


def answer(directory: Path, conversations: list[Conversation], dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Greedy answers to the last question of each conversation."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoder = Encoder(tokenizer)
    model = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=dtype).eval()
    prompts = [encoder.prompt(conversation) for conversation in conversations]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    answers = [""] * len(prompts)
    for start in range(0, len(order), ROWS):
        part = order[start : start + ROWS]
        for index, ids in zip(part, _generate(model, tokenizer, [prompts[i] for i in part]), strict=True):
            answers[index] = tokenizer.decode(ids)
    return answers


@torch.inference_mode()
def _generate(model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, prompts: list[Sequence]) -> list[list[int]]:
    """Greedy continuations up to the end token, prompts padded on the left."""
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    batch = collate(prompts, pad, tokenizer.token_to_id(IMAGE), tokenizer.token_to_id(VIDEO))
    width = batch.ids.shape[1]
    shifts = [width - len(prompt.ids) for prompt in prompts]
    ids, mask, types = (
        torch.stack([row.roll(shift) for row, shift in zip(rows, shifts, strict=True)])
        for rows in (batch.ids, batch.mask, batch.inputs.pop("mm_token_type_ids"))
    )
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        mm_token_type_ids=types,
        do_sample=False,
        max_new_tokens=ANSWER_TOKENS,
        **batch.inputs,
    )
    rows = output[:, width:].tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]
