"""Where prompts come from: a user's file, the embedded model's word problems, or random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.config import EngineConfig
from ostinato.demo.problems import held_out
from ostinato.engine.text.chat_template import ChatTemplate, load_chat_template
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer
from ostinato.errors import RequestError
from ostinato.models.checkpoint import resolve_model_dir
from ostinato.plan.model import ModelSpec

NUM_EXAMPLES = 24
"""Word problems with their answers in the text that prompts are cut from."""
NUM_TOKENS = 4096
"""Of a random text."""
NUM_WORDS = 48
"""Distinct tokens of a random text: few, so that it repeats itself and prompt lookup finds something."""
SHORTEST, LONGEST = 5, 160
"""Tokens of a random prompt."""


@dataclass(frozen=True)
class Texts:
    """Tokens that prompts are cut from, and prompts as they are. `ends`: an end token among them ends an output."""

    text: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    ends: bool


def make_texts(config: EngineConfig, model: ModelSpec, lines: Sequence[str], num_prompts: int, seed: int) -> Texts:
    """`lines` if there are any, `num_prompts` word problems for the embedded model, so many random prompts for others.

    RequestError if there are lines and the checkpoint has no tokenizer.
    """
    if not lines and config.model != "demo":
        return _random(model, num_prompts, seed)
    directory = resolve_model_dir(config.model, config.revision)
    tokenizer = load_tokenizer(directory)
    template = load_chat_template(directory, tokenizer.special_tokens)
    if lines:
        others = [_question(line, tokenizer, template) for line in lines]
        return Texts(tuple(token for other in others for token in other), tuple(others), ends=True)
    problems = held_out(seed, NUM_EXAMPLES + num_prompts)
    examples = [
        {"role": role, "content": text}
        for problem in problems[num_prompts:]
        for role, text in (("user", problem.question), ("assistant", problem.answer))
    ]
    text = tokenizer.encode(template.render(examples, add_generation_prompt=False), add_special_tokens=False)
    return Texts(
        tuple(text),
        tuple(_question(problem.question, tokenizer, template) for problem in problems[:num_prompts]),
        ends=True,
    )


def _question(text: str, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[int, ...]:
    """A prompt as a user's message, or as it is where the checkpoint has no chat template."""
    if template.has_default:
        rendered = template.render([{"role": "user", "content": text}])
        token_ids = tokenizer.encode(rendered, add_special_tokens=False)
    else:
        token_ids = tokenizer.encode(text)
    if not token_ids:
        raise RequestError(f"the prompt {text!r} has no tokens; leave it out")
    return tuple(token_ids)


def _random(model: ModelSpec, num_prompts: int, seed: int) -> Texts:
    rng = random.Random(f"verify {seed}")
    words = rng.sample(range(model.vocab_size), min(model.vocab_size, NUM_WORDS))
    others = [tuple(rng.choices(words, k=rng.randint(SHORTEST, LONGEST))) for _ in range(num_prompts)]
    return Texts(tuple(rng.choices(words, k=NUM_TOKENS)), tuple(others), ends=False)
