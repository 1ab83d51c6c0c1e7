"""A model in ranks is the model: each has its part of the weights, and together they compute what one does. The ranks
here are threads; tests/parity/test_parity_ranks.py has processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ostinato.engine.run.inputs import step_inputs
from ostinato.layers.build import Build, checkpoint_views
from ostinato.models import loader
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.models.shares import shares_of
from ostinato.models.table import with_table
from ostinato.ops.kernels import module_of, select_ops
from ostinato.plan.cuts import ALONE, WIDTHS, Rank, problems, share_of
from ostinato.plan.model import ModelSpec
from ostinato.schedule.batch import Batch, Row
from tests.models.test_models import BLOCK_SIZE, CPU, poisoned_memory
from tests.support.checkpoints import RECIPES, checkpoint, random_prompt, recipe
from tests.support.patience import PATIENCE


def whole_spec(name: str) -> ModelSpec:
    return model_spec(read_config(checkpoint(name)))


CASES = [
    (name, ranks)
    for name in RECIPES
    for spec in [model_spec(recipe(name).to_dict())]
    if spec.architecture in WIDTHS
    for ranks in (2, 3, 4)
    if not problems(spec, ranks)
]


class Sum:
    """What ranks that are threads add up: the sum of all their tensors, for each."""

    def __init__(self, ranks: int) -> None:
        self.count = 0
        self._all: list[torch.Tensor | None] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)

    def of(self, rank: Rank, x: torch.Tensor) -> torch.Tensor:
        self._all[rank.number] = x.clone()
        self._barrier.wait()
        total = sum(each for each in self._all if each is not None)
        self._barrier.wait()
        self.count += rank.leads
        return x.copy_(total)  # type: ignore[arg-type]


def load(name: str, rank: Rank, sums: Sum | None = None) -> CausalLM:
    spec = whole_spec(name)
    if rank.of > 1:
        spec = with_table(share_of(spec, rank.of))
    ops = select_ops({}, all_reduce=None if sums is None else lambda x: sums.of(rank, x))
    model = build_model(Build(ops, torch.float32, CPU, rank=rank), spec)
    load_weights(model, checkpoint(name))
    return model


@torch.inference_mode()
def logits(model: CausalLM) -> torch.Tensor:
    """Of a prompt in two chunks, and of tokens that are decoded one by one behind it."""
    prompt, memory, parts, start = random_prompt(70, seed=3), poisoned_memory(model.spec), [], 0
    for end in (33, 64, *range(65, 71)):
        table = tuple(range(1, -(-end // BLOCK_SIZE) + 1))
        row = Row("r", tuple(prompt[start:end]), start, table, read_slot=2 if start else 0, write_slots=(2,))
        step = step_inputs(Batch((row,), num_decode_rows=int(end - start == 1)), BLOCK_SIZE, CPU)
        parts.append(model.logits(model(step, memory)))
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_ranks_together_compute_what_one_does(name: str, ranks: int) -> None:
    sums = Sum(ranks)
    models = [load(name, Rank(number, ranks), sums) for number in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(logits, models))
    expected = logits(load(name, ALONE))
    assert sums.count > 0
    for each in found:
        assert torch.equal(each, found[0])
        torch.testing.assert_close(each, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_parts_of_all_ranks_are_the_whole_and_each_has_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    # Rows stay as the checkpoint has them.
    monkeypatch.setattr(loader, "bring_together", lambda model: None)
    whole = dict(checkpoint_views(load(name, ALONE)))
    models = [load(name, Rank(number, ranks)) for number in range(ranks)]
    shares = [shares_of(model) for model in models]
    covered = {each: torch.zeros(share.shape) for each, share in shares[0].items()}
    for model, own in zip(models, shares, strict=True):
        for each, view in checkpoint_views(model):
            assert isinstance(view, torch.Tensor)
            expected = whole[each]
            assert isinstance(expected, torch.Tensor)
            if each in own:
                assert torch.equal(view, own[each].read(expected))
                for first, end in own[each].parts:
                    covered[each].narrow(own[each].dim, first, end - first).add_(1)
            else:
                assert torch.equal(view, expected)
        taken = sum(tensor.nbytes for tensor in model.parameters())
        assert taken == model.spec.weight_bytes("float32") < model.spec.whole.weight_bytes("float32")  # type: ignore[union-attr]
    kept = (a.num_kv_heads for a in whole_spec(name).attention_layers if not a.values_in_keys)
    kv_heads = min(kept, default=ranks)
    for each, times in covered.items():
        is_shared = each.split(".")[-2] in ("k_proj", "v_proj")
        assert (times == (max(1, ranks // kv_heads) if is_shared else 1)).all(), each


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_a_norm_whose_group_ranks_share_is_that_of_the_whole_group(norm_before_gate: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(5, 24, generator=generator), torch.randn(5, 24, generator=generator)
    weight = torch.randn(24, generator=generator)
    expected = module_of("gated_rms_norm").reference(x, gate, weight, 1e-3, 24, norm_before_gate)
    sums, parts = Sum(3), torch.arange(24).chunk(3)

    def part(number: int) -> torch.Tensor:
        own, rank = parts[number], Rank(number, 3)
        of_ranks = module_of("rms_norm_of_ranks").reference
        arguments = (x[:, own], weight[own], 1e-3, 3, gate[:, own], norm_before_gate)
        return of_ranks(*arguments, ranks=lambda squares: sums.of(rank, squares))

    with ThreadPoolExecutor(3) as threads:
        found = torch.cat(list(threads.map(part, range(3))), 1)
    torch.testing.assert_close(found, expected)
