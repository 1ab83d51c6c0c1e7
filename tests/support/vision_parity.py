"""What the parity tests of images share: prompts with images whose tokens transformers decides, engines, and poison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.media.media_item import MediaItem
from ostinato.media.media_prompt import MediaPlacement, MediaPrompt, positions_of
from ostinato.scheduler.batch import Batch, BatchRow
from tests.support.checkpoints import random_prompt
from tests.support.kept import kept
from tests.support.parity import GAP, TOLERANCE
from tests.support.vl_models import (
    END,
    IMAGE,
    START,
    VIDEO,
    VL_RECIPES,
    as_videos,
    image_inputs,
    random_items,
    types_of,
    vl_checkpoint,
    vl_oracle,
    vl_spec,
)

NEW = 32
SPECIAL = {IMAGE, VIDEO, START, END}

Part = int | tuple[str, tuple[tuple[int, int], ...], int]
"""So many tokens of text; or ("image", "slices" or "video", grids in patches, seed): images, one and its slices, or the
temporal patches of one video, all of one size."""


def text(count: int) -> Part:
    return count


def images(*grids: tuple[int, int], seed: int = 0) -> Part:
    return ("image", grids, seed)


def slices(whole: tuple[int, int], each: tuple[int, int], rows: int, seed: int = 0) -> Part:
    """An image, and rows of two slices."""
    return ("slices", (whole, *[each] * (2 * rows)), seed)


def video(frames: int, grid: tuple[int, int], seed: int = 0) -> Part:
    return ("video", (grid,) * frames, seed)


@dataclass(frozen=True, eq=False)
class Case:
    """A prompt, its tokens by transformers, and its logits of each position but the last."""

    prompt: MediaPrompt
    tokens: list[int]
    logits: torch.Tensor

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others of its model."""
        return (self.prompt.token_ids, self.tokens, [(span.start, span.item.digest) for span in self.prompt.spans])

    @property
    def items(self) -> list[MediaItem]:
        return [span.item for span in self.prompt.spans]


@cache
def decided_case(name: str, parts: tuple[Part, ...], before: Case | None = None) -> Case:
    """A prompt, behind that of a turn before and its answer, whose tokens do not depend on rounding.

    Ostinato's plain path proposes them, and each is transformers' best by more than a gap, in one forward pass over the
    whole text. Texts with a step that is too close to call are passed over.
    """
    key = ("seen", VL_RECIPES[name]().to_json_string(), parts, *(() if before is None else before.key))
    return kept(key, lambda: _find_decided(name, parts, before))


def _find_decided(name: str, parts: tuple[Part, ...], before: Case | None) -> Case:
    engine = make_engine(name, enable_prefix_caching=False)
    for seed in range(60):
        prompt = make_prompt(name, parts, seed, before)
        output = add(engine, prompt)
        run(engine)
        tokens = output.outputs[0].token_ids
        if SPECIAL & set(tokens):
            continue
        whole = oracle_logits(name, prompt, tokens[:-1])
        logits = whole[-NEW:]
        best, second = logits.topk(2).values.unbind(-1)
        decided = (best - second > GAP * logits.abs().amax(-1)).all().item()
        if decided and logits.argmax(-1).tolist() == tokens:
            return Case(prompt, tokens, whole)
    raise AssertionError(f"transformers decides for no prompt that Ostinato's plain path gives to {name}")


def make_prompt(name: str, parts: tuple[Part, ...], seed: int, before: Case | None = None) -> MediaPrompt:
    vision = vl_spec(name).vision
    assert vision is not None
    token_ids = [] if before is None else [*before.prompt.token_ids, *before.tokens]
    placed = [] if before is None else list(before.prompt.spans)
    for number, part in enumerate(parts):
        if isinstance(part, int):
            token_ids += [token for token in random_prompt(part + 40, 100 * seed + number) if token not in SPECIAL][
                :part
            ]
            continue
        kind, grids, own_seed = part
        for i, item in enumerate(random_items(name, grids, own_seed)):
            item = replace(item, digest=f"{item.digest} of {item.grid}")
            start, end = START, END
            if kind == "slices" and i:
                assert vision.canvas is not None
                start, end = vision.canvas.slice_start, vision.canvas.slice_end
                token_ids += [vision.canvas.newline] if i % 2 and i > 1 else []
            token_ids.append(start)
            placed.append(MediaPlacement(len(token_ids), len(token_ids) + item.num_tokens, item))
            is_image = kind != "video" or vision.video_token_id is None  # whose videos are images
            token_ids += [IMAGE if is_image else VIDEO] * item.num_tokens + [end]
            # The time of the next temporal patch.
            token_ids += [7, 8 + number] if kind == "video" else []
    return MediaPrompt(token_ids, tuple(placed), positions_of(token_ids, placed, vision))


@torch.inference_mode()
def oracle_logits(name: str, prompt: MediaPrompt, tokens: list[int]) -> torch.Tensor:
    """[prompt and tokens, vocab]"""
    return vl_oracle(name)(**oracle_inputs(name, prompt, tokens), use_cache=False).logits[0]


def oracle_inputs(name: str, prompt: MediaPrompt, tokens: list[int]) -> dict[str, Any]:
    """What transformers' model takes."""
    ids = torch.tensor([[*prompt.token_ids, *tokens]])
    inputs: dict[str, Any] = {}
    for token in (IMAGE, VIDEO):
        own = [span.item for span in prompt.spans if prompt.token_ids[span.start] == token]
        if own:
            given = image_inputs(name, own)
            inputs |= given if token == IMAGE else as_videos(vl_oracle(name), given)
    return {"input_ids": ids, **types_of(name, ids), **inputs}


def make_engine(name: str, **settings: Any) -> EngineCore:
    """In float32, without graphs unless told otherwise."""
    defaults = {"max_model_len": 320, "max_num_seqs": 4, "cache_memory": "16MiB", "threads": 1, "graph_mode": "none"}
    defaults |= {"dtype": "float32", "encoder_graph_mode": "none", "max_num_batched_tokens": 256}
    return EngineCore(EngineConfig(model=str(vl_checkpoint(name)), **(defaults | settings)))


def add(engine: EngineCore, case: Case | MediaPrompt, prompt_logprobs: bool = False, **fields: Any) -> RequestOutput:
    """A request for the case's tokens and log-probabilities -> its output, which steps update."""
    prompt = case.prompt if isinstance(case, Case) else case
    params = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1, prompt_logprobs=1 if prompt_logprobs else None
    )
    media = prompt if prompt.spans else None
    output = engine.output(engine.add_request(prompt.token_ids, params, media=media, **fields))
    assert output is not None
    return output


def run(engine: EngineCore, preempt_at: tuple[int, ...] = ()) -> None:
    """Steps until nothing is left; at some of them all that run lose their memory."""
    step = 0
    while engine.has_unfinished:
        engine.step()
        step += 1
        if step in preempt_at:
            for request in list(engine.scheduler.queues.running):
                engine.scheduler.preempt(request.request_id)
        engine.scheduler.check_integrity()


def check(case: Case, output: RequestOutput, tolerance: float = TOLERANCE) -> None:
    """The tokens, and the log-probabilities of each position that has them, are those of the whole text at once."""
    assert output.error is None, output.error
    [only] = output.outputs
    assert only.token_ids == case.tokens
    scored = [*(output.prompt_logprobs or [])[1:], *(only.logprobs or [])]
    given = [each for each in scored if each is not None]
    assert len(given) == NEW + (0 if output.prompt_logprobs is None else len(case.prompt.token_ids) - 1)
    following = [*case.prompt.token_ids, *case.tokens][-len(given) :]
    logits = case.logits[-len(given) :]
    expected = logits.log_softmax(-1)[torch.arange(len(given)), following]
    own = torch.tensor([each.logprob for each in given])
    torch.testing.assert_close(own, expected, atol=tolerance * logits.abs().max().item(), rtol=0)


def serve(engine: EngineCore, *cases: Case, preempt_at: tuple[int, ...] = ()) -> list[RequestOutput]:
    """All at once, each compared with transformers."""
    outputs = [add(engine, case) for case in cases]
    run(engine, preempt_at)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)
    return outputs


def cache_counts(engine: EngineCore) -> tuple[int, int]:
    """Misses and hits of the encoder cache."""
    counters = engine.stats()["encoder"]["cache"]
    return counters["misses"], counters["hits"]


class _MostlyRight:
    """Knows what follows each prompt, and proposes it but for each fifth token."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.texts = {tuple(case.prompt.token_ids): [*case.prompt.token_ids, *case.tokens] for case in cases}

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        return [self._of(row) if i < batch.num_decode_rows else () for i, row in enumerate(batch.rows)]

    def _of(self, row: BatchRow) -> tuple[int, ...]:
        text = self.texts[tuple(row.sampling_state.prompt_token_ids)][row.end : row.end + row.num_drafts]
        return tuple(5 if (row.end + i) % 5 == 0 else token for i, token in enumerate(text))


def draft_from(engine: EngineCore, cases: Sequence[Case]) -> None:
    """Lets steps get drafts that are right but for each fifth token."""
    assert engine.runner.drafter is not None
    engine.runner.drafter = replace(engine.runner.drafter, proposer=_MostlyRight(cases))
