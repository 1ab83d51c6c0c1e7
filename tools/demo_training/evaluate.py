"""Measuring an exported checkpoint: exact match in transformers, and acceptance of the head's drafts."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from ostinato.demo.problems import Problem, extract_result, held_out

from .model import DemoModel
from .tokenizer import END, PAD

ANSWER_TOKENS = 72
TURNS = 4


def measure(directory: Path, model: DemoModel, seed: int, count: int) -> dict[str, object]:
    """Accuracy in each prompt format on `count` held-out problems, what went wrong, acceptance."""
    problems = held_out(seed, count)
    asked = [f"Q: {problem.question}\nA:" for problem in problems]
    bare = [problem.question for problem in problems]
    talks = [problems[index : index + TURNS] for index in range(0, count - TURNS + 1, TURNS)]
    told = [
        "".join(f"Q: {problem.question}\nA: {problem.answer}{END}\n" for problem in talk[:-1])
        + f"Q: {talk[-1].question}\nA:"
        for talk in talks
    ]
    last = [talk[-1] for talk in talks]
    figures: dict[str, object] = {}
    for name, prompts, expected, dtype in [
        ("asked_float32", asked, problems, torch.float32),
        ("asked_bfloat16", asked, problems, torch.bfloat16),
        ("bare_bfloat16", bare, problems, torch.bfloat16),
        ("fourth_turn_bfloat16", told, last, torch.bfloat16),
    ]:
        figures[name], figures[f"{name}_wrong"] = accuracy(directory, prompts, expected, dtype)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    figures["acceptance"] = acceptance(model, tokenizer, problems[:100])
    return figures


def accuracy(
    directory: Path, prompts: list[str], problems: list[Problem], dtype: torch.dtype, rows: int = 50
) -> tuple[float, list[str]]:
    """Share of prompts whose greedy continuation states the problem's result; and the wrong ones."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    wrong: list[str] = []
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        texts = _continue(model, tokenizer, [prompts[index] for index in part])
        for index, text in zip(part, texts, strict=True):
            if extract_result(text) != problems[index].result:
                wrong.append(f"{prompts[index]!r} -> {text!r}, expected {problems[index].answer!r}")
    return 1 - len(wrong) / len(prompts), wrong


def _continue(model: torch.nn.Module, tokenizer: Tokenizer, prompts: list[str]) -> list[str]:
    """Greedy continuations up to the end token, prompts padded on the left."""
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    width = max(map(len, encoded))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=ANSWER_TOKENS)
    rows = output[:, width:].tolist()
    return [tokenizer.decode(row[: row.index(end)] if end in row else row) for row in rows]


@torch.inference_mode()
def acceptance(model: DemoModel, tokenizer: Tokenizer, problems: list[Problem], depths: int = 3) -> list[float]:
    """For each depth, how often its draft is right, given that the drafts before it are, on worked answers.

    The worked answer stands for the target's own tokens, which it equals where the target is right.
    """
    end = tokenizer.token_to_id(END)
    kept = torch.zeros(depths)
    offered = torch.zeros(depths)
    for problem in problems:
        prompt = tokenizer.encode(f"Q: {problem.question}\nA:").ids
        ids = torch.tensor([prompt + tokenizer.encode(f" {problem.answer}").ids + [end]])
        right = _drafts_right(model, ids, depths)[len(prompt) - 1 :]
        for row in right.tolist():
            for depth, correct in enumerate(row):
                offered[depth] += 1
                kept[depth] += correct
                if not correct:
                    break
    return (kept / offered).tolist()


def _drafts_right(model: DemoModel, ids: Tensor, depths: int) -> Tensor:
    """[positions, depths]: whether the draft of token t + 2 + depth from position t is right."""
    length = ids.shape[1] - depths - 1
    embedded = model.model.embeddings(ids)
    chain = [embedded[:, 1 + depth : 1 + depth + length] for depth in range(depths)]
    drafted = model.mtp.unroll(model.model(ids)[:, :length], chain)
    best = [model.lm_head(hidden)[0].argmax(-1) for hidden in drafted]
    return torch.stack([token == ids[0, 2 + d : 2 + d + length] for d, token in enumerate(best)], -1)
