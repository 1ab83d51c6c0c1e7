"""deterministic=True with ranks: for one number of ranks, a request's log-probabilities are the same bits, whatever is
in its batch, however its prompt is cut, cached, preempted or speculated, in graphs or without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ostinato.distributed.process_group import RankProcessGroup
from ostinato.ops.dispatch import select_ops
from ostinato.plan.device.detect import detect
from ostinato.plan.tensor_parallel import Rank
from tests.models.test_ranks import CASES
from tests.parity.test_deterministic import NAMES, Scores, ask, deterministic_engine, scores
from tests.support.parity import has_state, run, run_with_preemptions
from tests.support.rank_threads import Threads

QUICK = ("olmo_hybrid",)
"""Its norms are over channels of all ranks."""


@pytest.fixture(autouse=True)
def _native() -> None:
    facts = detect("cpu").native
    if facts.isa is None:
        pytest.skip(facts.reason)


def test_sums_in_order_are_the_same_bits_wherever_a_number_stands(tmp_path: Path) -> None:
    """Numbers whose sum depends on the order, at each place of tensors of many sizes."""
    given = [1e8, 1.0, -1e8]

    def sums(number: int) -> list[torch.Tensor]:
        group = RankProcessGroup(Rank(number, 3), tmp_path / "meeting", torch.device("cpu"), in_order=True)
        return [group.all_reduce(torch.full((size,), given[number])) for size in (1, 2, 3, 7, 64, 1001)]

    with ThreadPoolExecutor(3) as threads:
        for of_rank in threads.map(sums, range(3)):
            for total in of_rank:
                assert torch.equal(total, torch.full_like(total, 0.0))


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_a_row_of_a_gated_norm_over_ranks_has_the_same_bits_in_any_batch(norm_before_gate: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    x, gate = torch.randn(9, 86, generator=generator), torch.randn(9, 86, generator=generator)
    weight = torch.randn(86, generator=generator)

    def norm(rows: slice) -> torch.Tensor:
        meeting, channels = Threads(2), torch.arange(86).chunk(2)

        def part(number: int) -> torch.Tensor:
            ops = select_ops({}, detect("cpu").native.isa, deterministic=True, ranks=meeting.of(number))
            own = channels[number]
            return ops.sharded_rms_norm(x[rows, own], weight[own], 1e-5, 2, gate[rows, own], norm_before_gate)

        with ThreadPoolExecutor(2) as threads:
            return torch.cat(list(threads.map(part, range(2))), -1)

    together = norm(slice(0, 9))
    for row in range(9):
        assert torch.equal(norm(slice(row, row + 1))[0], together[row])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=() if name in QUICK and ranks == 2 else pytest.mark.ranks)
        for name, ranks in CASES
        if name in (*NAMES, *QUICK)
    ],
)
def test_neither_the_batch_nor_cuts_nor_hits_nor_drafts_change_a_bit(name: str, ranks: int) -> None:
    expected = alone(name, ranks)
    mode = {"state_cache_mode": "all"} if has_state(name) else {}
    engine = deterministic_engine(
        name, tensor_parallel_size=ranks, graph_mode="full_and_piecewise", max_num_batched_tokens=33, max_num_seqs=4,
        speculative="ngram:3", speculative_adaptive="off", **mode,
    )  # fmt: skip
    try:
        others = [ask(engine, 5 + 7 * i, seed=20 + i) for i in range(3)]
        for _ in range(3):
            engine.step()
        cold = ask(engine)
        run_with_preemptions(engine, [cold], at=(3, 8, 17))
        warm = ask(engine)
        run(engine)
    finally:
        engine.close()
    assert scores(cold) == scores(warm) == expected
    assert all(each.error is None for each in others)


def alone(name: str, ranks: int) -> Scores:
    """The plain path: no graph, no cache, the prompt at once, nobody else."""
    engine = deterministic_engine(name, tensor_parallel_size=ranks, enable_prefix_caching=False)
    try:
        output = ask(engine)
        run(engine)
    finally:
        engine.close()
    return scores(output)
