"""Measuring an exported checkpoint: exact match in transformers, and acceptance of the head's drafts."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from ostinato.demo.problems import WordProblem, extract_result, held_out

from .checkpoint import read
from .model import DemoModel
from .tokenizer import END, PAD

ANSWER_TOKENS = 72
TURNS = 4
DRAFTED_PROBLEMS, DEPTHS = 200, 4


def measure(directory: Path, seed: int, count: int) -> dict[str, object]:
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
    return figures | drafted(directory, problems[:DRAFTED_PROBLEMS])


def drafted(directory: Path, problems: list[WordProblem]) -> dict[str, object]:
    """Acceptance of the head's drafts on worked answers, and on the answers that the model itself gives."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    model = read(directory)
    prompts = [tokenizer.encode(f"Q: {problem.question}\nA:").ids for problem in problems]
    worked = [tokenizer.encode(f" {problem.answer}").ids for problem in problems]
    trunk = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    own = _continue(trunk, tokenizer, prompts)
    return {
        f"acceptance_{name}": acceptance(
            model, [(prompt, [*answer, end]) for prompt, answer in zip(prompts, answers, strict=True)], DEPTHS
        )
        for name, answers in [("worked", worked), ("own", own)]
    }


def accuracy(
    directory: Path, prompts: list[str], problems: list[WordProblem], dtype: torch.dtype, rows: int = 50
) -> tuple[float, list[str]]:
    """Share of prompts whose greedy continuation states the problem's result; and the wrong ones."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    wrong: list[str] = []
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        answers = _continue(model, tokenizer, [tokenizer.encode(prompts[index]).ids for index in part])
        for index, answer in zip(part, answers, strict=True):
            text = tokenizer.decode(answer)
            if extract_result(text) != problems[index].result:
                wrong.append(f"{prompts[index]!r} -> {text!r}, expected {problems[index].answer!r}")
    return 1 - len(wrong) / len(prompts), wrong


def _continue(model: torch.nn.Module, tokenizer: Tokenizer, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations up to the end token, prompts padded on the left."""
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=ANSWER_TOKENS)
    rows = output[:, width:].tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


@torch.inference_mode()
def acceptance(model: DemoModel, turns: list[tuple[list[int], list[int]]], depths: int) -> list[float]:
    """For each depth, how often its draft is right, given that the drafts before it are.

    `turns` are the ids of prompts and of the answers, with the end token, that the drafts have to meet.
    """
    kept = torch.zeros(depths)
    offered = torch.zeros(depths)
    for prompt, answer in turns:
        for row in _drafts_right(model, prompt, answer, depths).tolist():
            for depth, correct in enumerate(row):
                offered[depth] += 1
                kept[depth] += correct
                if not correct:
                    break
    return [round(share, 4) for share in (kept / offered).tolist()]


def _drafts_right(model: DemoModel, prompt: list[int], answer: list[int], depths: int) -> Tensor:
    """[positions, depths]: whether the draft of token t + 2 + depth from position t is right, t + 1 in the answer."""
    ids = torch.tensor([prompt + answer])
    positions = torch.arange(len(prompt) - 1, ids.shape[1] - depths - 1)[None]
    drafted = model.mtp.unroll(model.model(ids), model.model.embeddings(ids), positions, depths)
    best = [model.lm_head(hidden)[0].argmax(-1) for hidden in drafted]
    return torch.stack([token == ids[0, positions[0] + 2 + depth] for depth, token in enumerate(best)], -1)
