"""The token of each pick, from its logits: processed as its request asks, with the noise of its seed and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ostinato.ops import noise
from ostinato.sample.processing import adjust, row_settings
from ostinato.sample.state import Pick

Draw = Callable[..., torch.Tensor]
"""The kernel `sample` (`ops/sample.py`)."""


def choose(logits: torch.Tensor, picks: Sequence[Pick], draw: Draw) -> dict[int, int]:
    """Index of a pick in `picks`, and of its row in `logits` [picks, vocab], left unchanged -> its token.

    A pick's token depends on its own logits and itself alone: a proposer that chooses a draft for the same pick, by
    logits of its own, therefore shares the noise with the target, and often the token. Picks without a finite best
    logit are left out.
    """
    if all(pick.state.is_simple for pick in picks):
        return _tokens(draw(logits))
    if not all(pick.plain for pick in picks):
        logits = logits.clone()
        adjust(logits, picks)
    params = [pick.state.params for pick in picks]
    if all(each.greedy for each in params):
        tokens = draw(logits)
    else:
        settings = row_settings(params)
        tokens = draw(logits, settings, noise.keys([(pick.state.seed, pick.position) for pick in picks]))
    return _tokens(tokens)


def _tokens(drawn: torch.Tensor) -> dict[int, int]:
    return {place: token for place, token in enumerate(drawn.tolist()) if token >= 0}
