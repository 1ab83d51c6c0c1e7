"""Acceptance: the output distribution is the target's, whatever distribution the drafts have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import pytest
import torch

from ostinato.sampling.params import SamplingParams
from ostinato.sampling.sampler import select_tokens
from ostinato.sampling.state import PendingToken
from tests.support.draws import draw
from tests.support.toy_requests import Model, Request, random_model, step

pytestmark = pytest.mark.usefixtures("every_draw")

SMALL = 3
# Upper 0.001 points of the chi-square distribution: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.4.
CRITICAL = {6: 22.458, 26: 54.052}
Drafter = Callable[[Sequence[Request], int], list[tuple[int, ...]]]


def from_another_distribution(requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
    """Drafts of a model that looks at the last token alone, chosen with the noise of the target."""
    table = torch.tensor([[2.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    drafts: list[tuple[int, ...]] = [()] * len(requests)
    for _ in range(num_drafts):
        last = [ahead[-1] if ahead else request.known[-1] for request, ahead in zip(requests, drafts, strict=True)]
        pending_tokens = [
            PendingToken(r.state, len(r.known) + len(ahead), ahead) for r, ahead in zip(requests, drafts, strict=True)
        ]
        chosen = select_tokens(table[last], pending_tokens, draw)
        drafts = [(*ahead, chosen[i]) for i, ahead in enumerate(drafts)]
    return drafts


def constant(requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
    return [(1,) * num_drafts] * len(requests)


def lookup(requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
    """What followed the last token where it stood before."""
    drafts = []
    for request in requests:
        known = request.known
        before = next((i for i in range(len(known) - 2, -1, -1) if known[i] == known[-1]), None)
        drafts.append(() if before is None else known[before + 1 :][:num_drafts])
    return drafts


DRAFTERS = pytest.mark.parametrize("drafter", [from_another_distribution, constant, lookup])


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> float:
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


def probabilities(model: Model, known: tuple[int, ...], output: tuple[int, ...], params: SamplingParams) -> list[float]:
    """By the formulas: presence penalty, then temperature."""
    logits = model((*known, *output)).double()
    for token in set(output):
        logits[token] -= params.presence_penalty
    return (logits / params.temperature).softmax(-1).tolist()


@DRAFTERS
@pytest.mark.slow
def test_over_many_seeds_the_output_follows_the_joint_distribution_of_the_target(drafter: Drafter) -> None:
    prompt, count, length = (2, 0, 1, 2, 0), 4000, 3
    params = SamplingParams(temperature=0.8, presence_penalty=0.5)
    model = random_model(5, SMALL, scale=0.8)
    requests = [Request(prompt, params, seed=seed) for seed in range(1, count + 1)]
    num_accepted = 0
    running = requests
    while running:
        results = step(model, running, drafter(running, 2), num_drafts=2)
        num_accepted += sum(len(result.token_ids) - 1 for result in results)
        running = [request for request in running if len(request.output) < length]
    expected = []
    outcomes = list(product(range(SMALL), repeat=length))
    for outcome in outcomes:
        each = [probabilities(model, prompt, outcome[:i], params)[token] for i, token in enumerate(outcome)]
        expected.append(count * math.prod(each))
    observed = Counter(tuple(request.output[:length]) for request in requests)
    assert num_accepted > count / 4
    assert min(expected) > 5
    assert chi_square([observed[outcome] for outcome in outcomes], expected) < CRITICAL[len(outcomes) - 1]


@DRAFTERS
def test_over_many_positions_of_one_request_tokens_follow_the_distribution_behind_the_last(drafter: Drafter) -> None:
    table = torch.randn(SMALL, SMALL, generator=torch.Generator().manual_seed(8))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=None)
    request = Request((0, 2, 1, 0), params)
    num_steps = 0
    while len(request.output) < 3000:
        step(lambda prefix: table[prefix[-1]], [request], drafter([request], 3), num_drafts=3)
        num_steps += 1
    moves = Counter(pairwise(request.output))
    starts = Counter(request.output[:-1])
    expected = (table.double() / params.temperature).softmax(-1).tolist()
    cells = list(product(range(SMALL), repeat=2))
    statistic = chi_square([moves[cell] for cell in cells], [starts[a] * expected[a][b] for a, b in cells])
    assert num_steps < 2500
    assert statistic < CRITICAL[SMALL * (SMALL - 1)]
