"""Arguments of native kernels go by name. What is missing, unknown or of another kind is a TypeError; nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato.ops.dispatch import load_extension, reference_kernel
from ostinato.ops.operations import OPERATIONS
from tests.support.native_sets import SETS

X, WEIGHT = torch.randn(3, 8), torch.ones(8)
Call = Callable[[str, int, dict[str, Any]], None]

pytestmark = pytest.mark.parametrize("isa", SETS)


def arguments() -> tuple[int, dict[str, Any]]:
    return len(X), {"x": X, "weight": WEIGHT, "eps": 1e-6, "offset": 0.0, "residual": None, "out": torch.zeros(3, 8)}


@pytest.fixture(params=["at once", "in a program"])
def call(request: pytest.FixtureRequest, isa: str) -> Call:
    """Calls a kernel of that name, or has a program note the call."""
    extension = load_extension(isa)
    callee = extension if request.param == "at once" else extension.Program()
    return lambda name, tokens, named: getattr(callee, name)(tokens, named)


def test_all_arguments_by_name_are_a_call(isa: str) -> None:
    tokens, named = arguments()
    load_extension(isa).rms_norm(tokens, dict(reversed(named.items())))
    torch.testing.assert_close(named["out"], reference_kernel("rms_norm")(X, WEIGHT, 1e-6))


def test_a_missing_argument_is_named(call: Call) -> None:
    tokens, named = arguments()
    del named["weight"]
    with pytest.raises(TypeError, match="rms_norm: the argument weight is missing"):
        call("rms_norm", tokens, named)


def test_an_unknown_argument_is_named(call: Call) -> None:
    tokens, named = arguments()
    with pytest.raises(TypeError, match="rms_norm takes no argument wieght"):
        call("rms_norm", tokens, named | {"wieght": WEIGHT})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("eps", "small", "str"), ("x", None, "NoneType"), ("weight", 140737, "int"), ("x", [1.0], "list")],
)
def test_an_argument_of_another_kind_is_named(call: Call, name: str, value: Any, kind: str) -> None:
    tokens, named = arguments()
    with pytest.raises(TypeError, match=f"rms_norm: the argument {name} is a {kind}"):
        call("rms_norm", tokens, named | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("x", X.double(), "x is float64 where a float is read"),
        ("out", X.half(), "out is float16 where float32 is read"),
        ("x", X.t(), "x is a strided tensor where a contiguous one is read"),
        ("out", torch.zeros(3, 9)[:, :8], "out is a strided tensor where a contiguous one is read"),
    ],
)
def test_a_tensor_that_holds_or_lies_otherwise_is_a_mistake_of_the_caller(
    call: Call, name: str, value: torch.Tensor, why: str
) -> None:
    tokens, named = arguments()
    with pytest.raises(AssertionError, match=f"rms_norm: {why}"):
        call("rms_norm", tokens, named | {name: value})


def test_a_tensor_of_a_dtype_that_no_kernel_reads_is_refused(call: Call) -> None:
    tokens, named = arguments()
    with pytest.raises(TypeError, match=r"kernels know no tensors of torch\.complex64"):
        call("rms_norm", tokens, named | {"weight": WEIGHT.to(torch.complex64)})


@pytest.mark.parametrize("name", [name for name, row in OPERATIONS.items() if row.native is not None])
def test_every_kernel_names_what_it_lacks_and_what_it_does_not_know(call: Call, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: the argument .* is missing"):
        call(name, 1, {"nonsense": 1})
