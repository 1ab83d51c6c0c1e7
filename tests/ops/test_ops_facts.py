"""The operations' facts: every name has a row, every row a file, and what a row says of results is so."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays, dtype_name
from ostinato.ops.dispatch import Ops, load_extension, reference_kernel, select_ops
from ostinato.ops.operations import OPERATIONS, Operations
from ostinato.ops.step_inputs import LayerCache
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.models.test_models import BLOCK_SIZE, CPU, poisoned_memory
from tests.support.checkpoints import RECIPES, checkpoint
from tests.support.native_sets import SETS
from tests.support.vl_models import VL_RECIPES, encoder_inputs, random_items, vl_model, vl_spec


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_a_file_of_its_name(name: str) -> None:
    assert callable(reference_kernel(name))


def test_rules_for_results_take_the_arguments_of_the_references_under_their_names() -> None:
    for name, row in OPERATIONS.items():
        reference = [*inspect.signature(reference_kernel(name)).parameters.values()]
        rule = inspect.signature(row.result).parameters.values()
        # Rules that name no argument take any first one.
        named = [parameter for parameter in rule if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        if name != "all_reduce":
            assert [(own.name, own.default is own.empty) for own in named] == [
                (own.name, own.default is own.empty) for own in reference[: len(named)]
            ], name


@pytest.mark.parametrize("isa", SETS)
def test_a_row_says_whether_there_is_a_native_kernel(isa: str) -> None:
    extension = load_extension(isa)
    assert {name for name in OPERATIONS if hasattr(extension, name)} == {
        name for name, row in OPERATIONS.items() if row.native is not None
    }


def test_facts_are_read_without_torch() -> None:
    code = "import sys, ostinato.ops.operations, ostinato.plan.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_operation_is_its_row_in_the_table_and_its_kernel_in_an_object_of_chosen_ones() -> None:
    ops = select_ops({})
    assert Operations.rms_norm is OPERATIONS["rms_norm"]
    x = torch.randn(3, 8)
    assert torch.equal(ops.rms_norm(x, torch.ones(8), 1e-6), reference_kernel("rms_norm")(x, torch.ones(8), 1e-6))
    with pytest.raises(AssertionError, match="without all kernels"):
        _ = Ops({}, ops.hook).rms_norm


@pytest.mark.parametrize("name", RECIPES)
def test_every_operation_that_a_spec_names_has_a_row(name: str) -> None:
    assert set(model_spec(read_config(checkpoint(name))).ops) <= OPERATIONS.keys()


@pytest.mark.parametrize("name", VL_RECIPES)
def test_every_operation_that_a_spec_with_images_names_has_a_row(name: str) -> None:
    assert set(vl_spec(name).ops) <= OPERATIONS.keys()


def checked_ops() -> Ops:
    """References whose results must be what the operations' rows say."""

    def checked(name: str, reference: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            expected = OPERATIONS[name].result(*args, **kwargs)
            result = reference(*args, **kwargs)
            if isinstance(expected, torch.Tensor):
                assert result is expected, f"{name} gives another tensor than the row says"
                return result
            shape, dtype = expected
            dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
            assert (result.shape, result.dtype) == (torch.Size(shape), dtype), name
            return result

        return call

    return Ops({name: checked(name, reference_kernel(name)) for name in OPERATIONS}, select_ops({}).hook)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_results_of_a_step_are_what_the_rows_say(name: str, dtype: torch.dtype) -> None:
    spec = model_spec(read_config(checkpoint(name)))
    model = build_model(WeightAllocator(checked_ops(), TorchArrays("cpu"), dtype_name(dtype)), spec)
    load_weights(model, checkpoint(name))
    memory = [
        LayerCache(
            k_cache=None if layer.k_cache is None else layer.k_cache.to(dtype),
            v_cache=None if layer.v_cache is None else layer.v_cache.to(dtype),
            index_cache=None if layer.index_cache is None else layer.index_cache.to(dtype),
            states={
                name: states.to(torch.float32 if name == "delta" else dtype) for name, states in layer.states.items()
            },
        )
        for layer in poisoned_memory(spec)
    ]
    for row, decode_rows in ((BatchRow("r", (5, 6), 0, (1,), 0, (2,)), 0), (BatchRow("r", (7,), 2, (1,), 2, (2,)), 1)):
        model.compute_logits(model(make_step_inputs(Batch((row,), decode_rows), BLOCK_SIZE, CPU), memory))


@pytest.mark.parametrize("name", VL_RECIPES)
def test_results_of_an_encoder_are_what_the_rows_say(name: str) -> None:
    vision = vl_spec(name).vision
    assert vision is not None
    model = vl_model(name, checked_ops())
    model.encode(encoder_inputs(random_items(name, [(4, 6), (8, 4)], seed=0), vision))
