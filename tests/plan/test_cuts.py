"""Cuts: what one of several ranks has of a model, which numbers of ranks can share it, and what is said where not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ostinato import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.models.checkpoint import load_spec, model_spec
from ostinato.models.quantized_shards import check_quantized_cut
from ostinato.models.registry import MODELS as ARCHITECTURES
from ostinato.models.weight_table import with_weight_table
from ostinato.ops.operations import COLLECTIVE_OPS
from ostinato.plan.choose_quantization import with_quantization
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.device.kernel_support import NativeFacts
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.plan.tensor_parallel import Rank, shard, sharding_problems, vocabulary_part
from ostinato.units import GiB
from tests.support.assistants import ARCHITECTURES as ASSISTANTS
from tests.support.checkpoints import RECIPES, checkpoint
from tests.support.plan_cases import cpu
from tests.support.vl_models import VL_RECIPES

MODELS = sorted(Path("benchmarks/models").iterdir())
H100 = CATALOGUE["h100-80gb"]


def config(model: Path | str, **settings: object) -> EngineConfig:
    return EngineConfig(model=str(model), **settings)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_a_rank_has_its_part_or_an_error_names_numbers_that_work(model: Path, ranks: int) -> None:
    whole = load_spec(config(model))
    if sharding_problems(whole, ranks):
        with pytest.raises(ConfigError, match="what works is 1") as caught:
            load_spec(config(model, tensor_parallel_size=ranks))
        assert caught.value.remedies
        for remedy in caught.value.remedies:
            assert remedy.setting == "tensor_parallel_size"
            assert load_spec(config(model, tensor_parallel_size=remedy.value)).ranks == remedy.value
        return
    asked = config(model, tensor_parallel_size=ranks)
    part, plan, alone = (
        load_spec(asked),
        make_plan(asked, load_spec(asked), H100),
        make_plan(config(model), whole, H100),
    )
    assert plan.memory.weights == part.weight_bytes(plan.settings.dtype) < alone.memory.weights
    assert plan.model.state_bytes_per_request <= alone.model.state_bytes_per_request
    assert plan.model.kv_bytes_per_token <= alone.model.kv_bytes_per_token
    for own, shared in zip(part.layers, whole.layers, strict=True):
        if own.attention is not None and shared.attention is not None:
            assert own.attention.num_heads * ranks == shared.attention.num_heads
            assert own.attention.num_kv_heads == max(1, shared.attention.num_kv_heads // ranks)
        if isinstance(own.mixer, Mamba2Spec) and isinstance(shared.mixer, Mamba2Spec):
            assert own.mixer.ssm_state_elements * ranks == shared.mixer.ssm_state_elements
            assert own.mixer.norm_spans_ranks == (shared.mixer.num_groups == 1)
    assert [d.topic for d in plan.decisions].count("tensor_parallel_size") == 1


def test_every_architecture_says_which_widths_ranks_share() -> None:
    specs = [model_spec(recipe().to_dict()) for recipe in (RECIPES | VL_RECIPES).values()]
    assert {spec.architecture for spec in specs if spec.sharded_dims is not None} == set(ARCHITECTURES) - ASSISTANTS


def test_a_model_of_an_architecture_without_widths_is_refused_by_name() -> None:
    whole = replace(load_spec(config("benchmarks/models/lfm2-350m")), sharded_dims=None)
    with pytest.raises(ConfigError, match=r"the model is lfm2, whose spec.py names no sharded_dims; what works is 1$"):
        shard(whole, 2)


def test_kernels_that_are_asked_for_are_those_of_all_but_what_ranks_give_each_other() -> None:
    device = replace(cpu(64 * GiB, cores=8), native=NativeFacts("x86_64_v3", "it is the best"))
    asked = config("demo", tensor_parallel_size=2, kernels="native")
    chosen = make_plan(asked, load_spec(asked), device).kernels
    others = {op for op, choice in chosen.items() if choice.implementation != "native"}
    assert {"all_reduce", "sharded_embedding"} <= others <= set(COLLECTIVE_OPS)
    with pytest.raises(ConfigError, match="kernels triton"):
        make_plan(asked.with_settings(kernels="triton"), load_spec(asked), device)


def test_a_step_ahead_is_taken_among_ranks_if_it_is_asked_for() -> None:
    asked = config("demo", tensor_parallel_size=2)
    assert make_plan(asked, load_spec(asked), H100).settings.overlap == "off"
    asked = asked.with_settings(overlap="on")
    assert make_plan(asked, load_spec(asked), H100).settings.overlap == "on"


def test_graphs_across_ranks_are_refused_on_gpus_and_left_out_where_nobody_asked() -> None:
    asked = config("demo", tensor_parallel_size=2)
    assert make_plan(asked, load_spec(asked), H100).settings.graph_mode == "none"
    asked = config("demo", tensor_parallel_size=2, graph_mode="piecewise")
    with pytest.raises(ConfigError, match="all_reduce") as caught:
        make_plan(asked, load_spec(asked), H100)
    assert Remedy("graph_mode", "none") in caught.value.remedies


def test_ranks_on_a_cpu_share_its_memory_and_its_cores() -> None:
    device = cpu(64 * GiB, cores=8)
    alone, asked = config("demo"), config("demo", tensor_parallel_size=2)
    one, two = make_plan(alone, load_spec(alone), device), make_plan(asked, load_spec(asked), device)
    assert two.memory.available <= one.memory.available // 2
    assert (one.settings.threads, two.settings.threads) == (8, 4)


def test_what_drafts_is_cut_too_and_the_plan_counts_one_ranks_part() -> None:
    names = ["nemotron_h_head", "qwen3_5_text_head"]
    asked = [(name, {"speculative": "mtp:2"}) for name in names]
    asked.append(("nemotron_h", {"speculative": f"draft:{checkpoint('llama')}:2"}))
    for name, settings in asked:
        alone, shared = (config(checkpoint(name), tensor_parallel_size=ranks, **settings) for ranks in (1, 2))
        one, two = (make_plan(each, load_spec(each), cpu(64 * GiB, cores=8)).speculative for each in (alone, shared))
        assert one is not None
        assert two is not None
        assert two.weights < one.weights
        assert two.kv_block * 2 == one.kv_block > 0


def test_a_draft_model_that_cannot_be_cut_is_whole_on_each_rank_and_the_plan_says_why() -> None:
    draft = checkpoint("nemotron_h")
    own = load_spec(config(draft))
    asked = config(checkpoint("llama"), tensor_parallel_size=4, speculative=f"draft:{draft}:2")
    plan = make_plan(asked, load_spec(asked), cpu(64 * GiB, cores=8))
    assert plan.speculative is not None
    assert plan.speculative.weights == own.weight_bytes(plan.settings.dtype)
    [decision] = [each for each in plan.decisions if each.topic == "draft.tensor_parallel_size"]
    assert (decision.requested, decision.effective) == (4, 1)
    assert "; ".join(sharding_problems(own, 4)) in decision.reason


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_any_number_divides_a_vocabulary(ranks: int) -> None:
    whole = load_spec(config("benchmarks/models/falcon-h1-170m"))
    assert vocabulary_part(whole.vocab_size, Rank(ranks - 1, ranks)).rows == -(-whole.vocab_size // ranks)
    if sharding_problems(whole, ranks):
        return
    part = load_spec(config("benchmarks/models/falcon-h1-170m", tensor_parallel_size=ranks))
    assert part.vocab_size == whole.vocab_size
    assert part.lm_head.shape == (-(-whole.vocab_size // ranks), whole.hidden_size)


def in_super_blocks(ranks: int) -> None:
    """A model whose matrices all lie in super-blocks of 256 elements."""
    asked = config("benchmarks/models/qwen3-410m", tensor_parallel_size=ranks)
    whole = load_spec(config("benchmarks/models/qwen3-410m"))
    names = [name for row in whole.table if row.can_be_blocks for name in row.names]
    whole = replace(whole, stored_formats=tuple((name, "Q4_K") for name in names))
    check_quantized_cut(with_quantization(asked, part_of(whole, ranks)), part_of)


def part_of(whole: ModelSpec, ranks: int) -> ModelSpec:
    return with_weight_table(shard(whole, ranks))


def test_a_cut_within_a_super_block_is_refused_with_numbers_that_work() -> None:
    whole = load_spec(config("benchmarks/models/qwen3-410m"))
    cut = {row.in_size for row in whole.table if row.names[0].endswith(("o_proj.weight", "down_proj.weight"))}
    working = [
        ranks
        for ranks in range(1, 65)
        if not sharding_problems(whole, ranks) and all(size // ranks % 256 == 0 for size in cut)
    ]
    refused = next(ranks for ranks in range(2, 65) if not sharding_problems(whole, ranks) and ranks not in working)
    for ranks in working[1:]:
        in_super_blocks(ranks)
    expected = rf"Q4_K of 256 elements; what works is {', '.join(map(str, working))}$"
    with pytest.raises(ConfigError, match=expected) as caught:
        in_super_blocks(refused)
    assert Remedy("tensor_parallel_size", max(each for each in working if each < refused)) in caught.value.remedies
