"""A model in ranks is the model: each has its part of the weights, and together they compute what one does. The ranks
here are threads; tests/parity/test_parity_ranks.py has processes."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from ostinato.layers.allocation import WeightAllocator, checkpoint_views
from ostinato.models import loader
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.models.weight_shards import tensor_shards
from ostinato.models.weight_table import with_weight_table
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import reference_kernel, select_ops
from ostinato.ops.reference.collectives import rms_norm_gathered
from ostinato.plan.model import ModelSpec
from ostinato.plan.tensor_parallel import SINGLE_RANK, Rank, shard, sharding_problems, vocabulary_part
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.models.test_models import BLOCK_SIZE, CPU, poisoned_memory
from tests.support.checkpoints import RECIPES, checkpoint, random_prompt, recipe
from tests.support.rank_threads import Threads


def whole_spec(name: str) -> ModelSpec:
    return model_spec(read_config(checkpoint(name)))


CASES = [
    (name, ranks)
    for name in RECIPES
    for spec in [model_spec(recipe(name).to_dict())]
    if spec.sharded_dims is not None
    for ranks in (2, 3, 4)
    if not sharding_problems(spec, ranks)
]


def load(name: str, rank: Rank, threads: Threads | None = None) -> CausalLM:
    spec = whole_spec(name)
    if rank.of > 1:
        spec = with_weight_table(shard(spec, rank.of))
    ops = select_ops({}, ranks=None if threads is None else threads.of(rank.number))
    model = build_model(WeightAllocator(ops, TorchArrays("cpu"), "float32", rank=rank), spec)
    load_weights(model, checkpoint(name))
    return model


@torch.inference_mode()
def logits(model: CausalLM) -> torch.Tensor:
    """Of a prompt in two chunks, and of tokens that are decoded one by one behind it."""
    prompt, memory, parts, start = random_prompt(70, seed=3), poisoned_memory(model.spec), [], 0
    for end in (33, 64, *range(65, 71)):
        table = tuple(range(1, -(-end // BLOCK_SIZE) + 1))
        row = BatchRow("r", tuple(prompt[start:end]), start, table, read_slot=2 if start else 0, write_slots=(2,))
        step = make_step_inputs(Batch((row,), num_decode_rows=int(end - start == 1)), BLOCK_SIZE, CPU)
        parts.append(model.compute_logits(model(step, memory)))
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_ranks_together_compute_what_one_does(name: str, ranks: int) -> None:
    meeting = Threads(ranks)
    models = [load(name, Rank(number, ranks), meeting) for number in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        first, *others = threads.map(logits, models)
    expected = logits(load(name, SINGLE_RANK))
    assert meeting.calls["all_reduce"] > 0
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(first, expected, atol=atol, rtol=0)
    for number, each in enumerate(others, 1):
        part = vocabulary_part(expected.shape[1], Rank(number, ranks))
        torch.testing.assert_close(each, first[:, part.first : part.first + part.rows], atol=atol, rtol=0)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_parts_of_all_ranks_are_the_whole_and_each_has_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    # Rows stay as the checkpoint has them.
    monkeypatch.setattr(loader, "deinterleave", lambda model: None)
    whole = dict(checkpoint_views(load(name, SINGLE_RANK)))
    models = [load(name, Rank(number, ranks)) for number in range(ranks)]
    shares = [tensor_shards(model) for model in models]
    covered = {each: torch.zeros(share.shape) for each, share in shares[0].items()}
    for model, own in zip(models, shares, strict=True):
        for each, view in checkpoint_views(model):
            assert isinstance(view, torch.Tensor)
            expected = whole[each]
            assert isinstance(expected, torch.Tensor)
            if each in own:
                assert np.array_equal(view, own[each].read(expected.numpy()))
                for first, end in own[each].parts:
                    covered[each].narrow(own[each].dim, first, end - first).add_(1)
            else:
                assert torch.equal(view, expected)
        taken = sum(tensor.nbytes for tensor in model.parameters())
        assert taken == model.spec.weight_bytes("float32") < model.spec.unsharded.weight_bytes("float32")  # type: ignore[union-attr]
    kept = (a.num_kv_heads for a in whole_spec(name).attention_layers if not a.values_in_keys)
    kv_heads = min(kept, default=ranks)
    size = whole_spec(name).vocab_size
    for each, times in covered.items():
        is_shared = each.split(".")[-2] in ("k_proj", "v_proj", "k_norm")
        if times.shape[0] == size:
            assert (times >= 1).all(), each  # the last ranks reach back
            assert times[:, 0].sum() == ranks * -(-size // ranks), each
            continue
        found = re.match(r"model\.layers\.(\d+)\.self_attn\.", each)
        attention = None if found is None else whole_spec(name).layers[int(found[1])].attention
        copies = max(1, ranks // (kv_heads if attention is None else attention.num_kv_heads))
        if ".qkv_proj." in each:  # queries, then keys and values
            first_attention = whole_spec(name).attention_layers[0]
            queries = first_attention.num_heads * first_attention.head_dim
            assert (times[:queries] == 1).all(), each
            assert (times[queries:] == copies).all(), each
            continue
        assert (times == (copies if is_shared else 1)).all(), each


@pytest.mark.parametrize("is_by_kernels", [False, True])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_a_norm_whose_group_ranks_share_is_that_of_the_whole_group(norm_before_gate: bool, is_by_kernels: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(5, 24, generator=generator), torch.randn(5, 24, generator=generator)
    weight = torch.randn(24, generator=generator)
    expected = reference_kernel("gated_rms_norm")(x, gate, weight, 1e-3, 24, norm_before_gate)
    meeting, parts = Threads(3), torch.arange(24).chunk(3)
    norm = reference_kernel("sharded_rms_norm")
    kernels = {name: reference_kernel(name) for name in ("rms_norm", "gated_rms_norm")}
    of_ranks = partial(rms_norm_gathered, **kernels) if is_by_kernels else norm

    def part(number: int) -> torch.Tensor:
        own = parts[number]
        arguments = (x[:, own], weight[own], 1e-3, 3, gate[:, own], norm_before_gate)
        return of_ranks(*arguments, ranks=meeting.of(number))

    with ThreadPoolExecutor(3) as threads:
        found = torch.cat(list(threads.map(part, range(3))), 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("size", "ranks"), [(131, 2), (131, 4), (5, 4), (3, 3), (128, 4)])
def test_every_token_is_one_ranks_and_in_its_rows(size: int, ranks: int) -> None:
    parts = [vocabulary_part(size, Rank(number, ranks)) for number in range(ranks)]
    assert {part.rows for part in parts} == {-(-size // ranks)}
    for token in range(size):
        [giver] = [part for part in parts if part.own[0] <= token < part.own[1]]
        assert giver.first <= token < giver.first + giver.rows
    assert all(0 <= part.first <= size - part.rows for part in parts)


def test_ranks_share_the_rows_of_the_vocabulary() -> None:
    for name in ("llama", "nemotron_h"):  # the first has one matrix for both ends
        whole, part = load(name, SINGLE_RANK), load(name, Rank(1, 2))
        heads = [each.embedding if each.spec.tied_embeddings else each.lm_head for each in (whole, part)]
        assert part.embedding.weight.shape[0] == heads[1].weight.shape[0] == 66
        assert torch.equal(part.embedding.weight, whole.embedding.weight[65:])
        assert torch.equal(heads[1].weight, heads[0].weight[65:])
