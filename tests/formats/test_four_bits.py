"""4-bit weights, packed by the public rules of each format, unpacked again."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.formats.quantization_config import stored_weights
from ostinato.formats.unpack import unpack
from ostinato.ops.arrays import host_values
from tests.support.examples import examples
from tests.support.quantized_checkpoints import quantization_config
from tests.support.stored_formats import FORMS, GROUP, awq, compressed_tensors, gptq, packed

few = examples(40)


def stored(form: str) -> Any:
    return stored_weights({"quantization_config": FORMS[form][0]})


def of_numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {part: host_values(tensor) for part, tensor in tensors.items()}


def random(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Values with groups that are positive throughout, whose zero point is 0, and others."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    values[0] = values[0].abs() + 1
    return values


@few
@given(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 2**31))
def test_gptq_and_awq_are_unpacked_by_any_multiple_of_8_rows(
    eights: int, groups: int, has_zeros: bool, seed: int
) -> None:
    weight = random(8 * eights, GROUP * groups, seed)
    for form, (tensors, meaning) in {
        "gptq": gptq(weight, GROUP, has_zeros, False, less=1),
        "gptq-v2": gptq(weight, GROUP, has_zeros, False, less=0),
        "awq": awq(weight, GROUP),
    }.items():
        for begin, end in ((0, len(weight)), (8, len(weight)), (8 * (eights - 1), 8 * eights)):
            some = unpack(stored(form), of_numpy(tensors), begin, end, weight.shape[1])
            assert np.array_equal(some.dequantized(GROUP), meaning[begin:end]), (form, begin, end)


@few
@given(st.integers(1, 40), st.integers(1, 100), st.booleans(), st.integers(0, 2**31))
def test_rows_and_columns_of_compressed_tensors_need_not_fill_an_int32(
    rows: int, columns: int, has_zeros: bool, seed: int
) -> None:
    weight = random(rows, columns, seed)
    for group_size, form in ((None, "ct-channel"), (GROUP, "ct")):
        tensors, meaning = compressed_tensors(weight, group_size, has_zeros, False)
        of_form = stored(f"{form}-zeros" if has_zeros else form)
        for begin in range(0, rows, 16):
            end = min(begin + 16, rows)
            some = unpack(of_form, of_numpy(tensors), begin, end, columns)
            assert np.array_equal(some.dequantized(group_size), meaning[begin:end])


def test_the_order_of_awq_is_even_elements_first() -> None:
    """As its kernels read them: the low halves of the four bytes, and then the high ones."""
    [[together]] = packed(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]]), (0, 2, 4, 6, 1, 3, 5, 7)).tolist()
    assert hex(together) == "0x75316420"


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
)
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group_size"), [("group", 32), ("group", 128), ("channel", None)])
def test_what_compressed_tensors_itself_writes_means_the_same_here(
    strategy: str, group_size: int | None, is_symmetric: bool
) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    facts = {"num_bits": 4, "type": "int", "symmetric": is_symmetric, "strategy": strategy, "group_size": group_size}
    arguments = QuantizationArgs(**facts)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    weight = random(20, 256, seed=3)
    groups = weight.unflatten(1, (-1, group_size or 256))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    written = PackedQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme
    )
    expected = PackedQuantizationCompressor.decompress(dict(written), scheme)["weight"]
    described = quantization_config(weights=facts)
    ours = stored_weights({"quantization_config": described})
    assert ours is not None
    assert np.array_equal(unpack(ours, of_numpy(written), 0, 20, 256).dequantized(group_size), expected)
