"""What the parity tests share: prompts whose tokens transformers decides, engines, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.startup import make_scheduler
from ostinato.models.checkpoint import model_spec
from ostinato.ops import noise
from ostinato.ops.arrays import noise_keys
from tests.support.checkpoints import RECIPES, checkpoint, oracle_logits, random_prompt, recipe
from tests.support.kept import kept

PROMPT = 150
NEW = 64
GAP = 1e-3
"""Of the largest logit: what the two best tokens of every oracle step must differ by, so that the test decides."""
TOLERANCE = 1e-4
"""Of the largest logit: what log-probabilities may differ by."""
TOP = 3
BLOCK = 16


NARROW = (3, 50)
"""What sampled tokens are chosen from: so few that guesses are right now and then, whoever makes them."""
TEMPERATURE = 1.5


@dataclass(frozen=True)
class Case:
    """A prompt, its 64 tokens by transformers, greedy if nothing else is set, and its logits of each position but the
    last."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor
    settings: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})


@cache
def decided_case(name: str, length: int, before: tuple[int, ...] = ()) -> Case:
    """A prompt of `length` tokens that begins with `previous_hidden` and whose tokens do not depend on rounding.

    Ostinato's plain path proposes the tokens, and transformers' logits of the whole text at once decide: each token
    must be the best there. Prompts with a step that is too close to call are passed over.
    """
    key = ("decided", recipe(name).to_json_string(), length, before)
    return kept(key, lambda: _find_decided(name, length, before))


def _find_decided(name: str, length: int, before: tuple[int, ...]) -> Case:
    engine = plain_engine(name, length)
    for seed in range(40):
        own = random_prompt(length - len(before), seed + 100 * length if before else seed)
        prompt = [*before, *own]
        tokens = proposed(engine, prompt, {"temperature": 0})
        whole = oracle_logits(name, prompt + tokens, prompt=length)[:-1]
        logits = whole[length - 1 :]
        best, second = logits.topk(2).values.unbind(-1)
        decided = (best - second > GAP * logits.abs().amax(-1)).all().item()
        if decided and logits.argmax(-1).tolist() == tokens:
            return Case(prompt, tokens, whole)
    raise AssertionError(
        f"transformers decides for no prompt of {length} tokens that Ostinato's plain path gives to {name}"
    )


def plain_engine(name: str, length: int) -> EngineCore:
    """For prompts of that length, each at once and for itself."""
    settings = {"graph_mode": "none", "enable_prefix_caching": False}
    return make_engine(name, **settings, max_model_len=max(256, length + NEW), max_num_batched_tokens=512)


def proposed(engine: EngineCore, prompt: list[int], settings: dict[str, Any]) -> list[int]:
    """The tokens that an engine gives to a prompt."""
    output = engine.output(engine.add_request(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True, **settings)))
    assert output is not None
    run(engine)
    return output.outputs[0].token_ids


@cache
def sampled_case(name: str, length: int, before: tuple[int, ...] = ()) -> Case:
    """The same for tokens that are sampled, from few: transformers' logits with the noise of the request decide."""
    key = ("sampled", recipe(name).to_json_string(), length, before)
    return kept(key, lambda: _find_sampled(name, length, before))


def _find_sampled(name: str, length: int, before: tuple[int, ...]) -> Case:
    engine = plain_engine(name, length)
    allowed = torch.tensor(NARROW)
    for seed in range(40):
        prompt = [*before, *random_prompt(length - len(before), seed + 1000 * length)]
        settings = {"temperature": TEMPERATURE, "seed": seed, "logit_bias": dict.fromkeys(NARROW, 100.0)}
        tokens = proposed(engine, prompt, settings)
        whole = oracle_logits(name, prompt + tokens, prompt=length)[:-1]
        keys = noise_keys([(seed, length + i) for i in range(NEW)])
        drawn = torch.from_numpy(noise.gumbel(keys[:, None], allowed.int().numpy()))
        chances = whole[length - 1 :, allowed] / TEMPERATURE + drawn
        best, second = chances.topk(2).values.unbind(-1)
        decided = (best - second > GAP * whole[length - 1 :].abs().amax(-1)).all().item()
        if decided and allowed[chances.argmax(-1)].tolist() == tokens:
            return Case(prompt, tokens, whole, settings)
    raise AssertionError(
        f"transformers decides for no sample of {length} tokens that Ostinato's plain path gives to {name}"
    )


@cache
def has_state(name: str) -> bool:
    """Whether the recipe has layers with a recurrent state, so that a hit needs a checkpoint."""
    return bool(model_spec(recipe(name).to_dict()).state_layers)


CACHING = [(name, mode) for name in RECIPES for mode in (("align", "all") if has_state(name) else ("none",))]
"""Every recipe with every mode of the state cache in which its prompts can hit."""


def make_engine(name: str, **settings: Any) -> EngineCore:
    """In float32 unless told otherwise, with checkpoints every two blocks, so that the prompts have some inside."""
    defaults = {"max_model_len": 256, "max_num_seqs": 4, "cache_memory": "16MiB", "threads": 1, "state_block_size": 32}
    return EngineCore(EngineConfig(model=str(checkpoint(name)), **({"dtype": "float32"} | defaults | settings)))


def shrink(engine: EngineCore, num_blocks: int, num_slots: int, num_packed: int | None = None) -> None:
    """Let an engine that has not begun use so few blocks and slots, the null ones not counted, no more window blocks
    than blocks, and so many packed checkpoints; None: as planned.
    """
    memory = engine.plan.memory
    memory = replace(
        memory,
        num_blocks=min(num_blocks + 1, memory.num_blocks),
        num_slots=min(num_slots + 1, memory.num_slots),
        num_window_blocks=min(num_blocks + 1, memory.num_window_blocks),
        num_packed=memory.num_packed if num_packed is None else num_packed,
    )
    engine.plan = replace(engine.plan, memory=memory)
    speculation = engine.speculation
    scheduler = make_scheduler(engine.plan, None if speculation is None else speculation.controller.choose_num_drafts)
    scheduler.cache.memory = engine.scheduler.cache.memory
    engine.scheduler = engine.output_processor._scheduler = scheduler


def add(engine: EngineCore, case: Case, prompt_logprobs: bool = False, salt: str | None = None) -> RequestOutput:
    """A request for the case's tokens and log-probabilities -> its output, which steps update."""
    params = SamplingParams(
        max_tokens=NEW,
        ignore_eos=True,
        logprobs=TOP,
        prompt_logprobs=TOP if prompt_logprobs else None,
        **case.settings,
    )
    output = engine.output(engine.add_request(case.prompt, params, cache_salt=salt))
    assert output is not None
    return output


def warm(engine: EngineCore, prompt: list[int], salt: str | None = None) -> None:
    """A request that leaves its prompt in the cache, and next to nothing else."""
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), cache_salt=salt)


def run(engine: EngineCore) -> None:
    """Steps until nothing is left."""
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()


def run_with_preemptions(
    engine: EngineCore, outputs: Sequence[RequestOutput], at: tuple[int, ...] = (2, 20, 33)
) -> None:
    """Steps until nothing is left; all requests lose their memory early on and twice while they decode."""
    step = 0
    while engine.has_unfinished:
        engine.step()
        step += 1
        if step in at:
            for output in outputs:
                engine.preempt(output.request_id)
        engine.scheduler.check_integrity()


def serve_one_by_one(
    engine: EngineCore, cases: Sequence[Case], preempt_at: tuple[int, ...] = (), steps_between: int = 3
) -> None:
    """Requests that come one by one, while others decode or are in the middle of their prompts, compared with
    transformers. Beside each, one is aborted after its first steps. At some steps, counted from when all have come, all
    lose their memory."""
    outputs = []
    for case in cases:
        outputs.append(add(engine, case, prompt_logprobs=case is cases[0]))
        aborted = add(engine, case)
        for _ in range(steps_between):
            engine.step()
        engine.abort(aborted.request_id)
    run_with_preemptions(engine, outputs, preempt_at)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


def complete(engine: EngineCore, case: Case, salt: str | None = None) -> RequestOutput:
    """The output of a request for the case that runs to its end, compared with transformers."""
    output = add(engine, case, salt=salt)
    run(engine)
    check(case, output)
    return output


def check(case: Case, output: RequestOutput, tolerance: float = TOLERANCE) -> None:
    """The tokens, and the log-probabilities of each position that has them, are those of the whole text at once. What
    is told of the cache adds up to the prompt."""
    assert output.error is None
    [only] = output.outputs
    assert only.token_ids == case.tokens
    scored = [*(output.prompt_logprobs or [])[1:], *(only.logprobs or [])]
    assert len(scored) == NEW + (0 if output.prompt_logprobs is None else len(case.prompt) - 1)
    given = [each for each in scored if each is not None]
    text = (case.prompt + case.tokens)[-len(scored) :]
    assert [each.token_id for each in given] == text
    logits = case.logits[-len(scored) :]
    expected, atol = logits.log_softmax(-1), tolerance * logits.abs().max().item()
    own = torch.tensor([each.logprob for each in given])
    torch.testing.assert_close(own, expected[torch.arange(len(text)), text], atol=atol, rtol=0)
    top = torch.tensor([[logprob for _, logprob in each.top] for each in given])
    torch.testing.assert_close(top, expected.topk(TOP).values, atol=atol, rtol=0)
    assert cached(output) + sum(misses(output).values()) == len(case.prompt)


def cached(output: RequestOutput) -> int:
    """Tokens of the prompt that were taken from the cache."""
    assert output.cache is not None
    return output.cache.cached_tokens


def misses(output: RequestOutput) -> dict[str, int]:
    """{cause: tokens} of the prompt that were computed."""
    assert output.cache is not None
    assert all(tokens > 0 for tokens in output.cache.misses.values())
    return output.cache.misses
