"""The operations' facts, one row each: all that the plan, the choice of kernels and graphs know of them, without torch.

The file of an operation's name holds its `reference`, which is the definition. Operations that only a vision encoder
calls lie in `ops/encoder/`, those of the part "state" in `ops/state/`, those in which ranks wait for each other in
`ops/ranks/`. Native kernels have the names of their operations, and lie in the folders of native/;
Triton's lie in `ops/triton/`, in files of their operations' names, those of the part "state" in `ops/triton/state/`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, overload

from ostinato.ops import results, scratch, work
from ostinato.ops.blocks.formats import BLOCK_FORMATS
from ostinato.ops.launches import attention as attention_launches
from ostinato.ops.launches import elementwise, products, state
from ostinato.ops.launches import rotary as rotary_launches
from ostinato.ops.launches import sample as sample_launches
from ostinato.ops.launches.table import Launch
from ostinato.ops.scratch import Scratch
from ostinato.ops.sizes import (
    MIN_AMX_EXPERT_TOKENS,
    MIN_AMX_QUERIES,
    MIN_AMX_TOKENS,
)
from ostinato.ops.work import KernelWork

Backend = Literal["tape", "cuda"]
"""How a graph is captured: on a CPU, or on a GPU."""

Part = Literal["attention", "state", "moe"]
"""A part of a model that a piecewise graph may leave out."""

Caller = Literal["every step", "prefill", "encoder"]
"""Who calls an operation: only a step with a prompt in it, only a vision encoder, or any step."""

Limited = Literal["elements of a head", "taps of a convolution"]
"""Sizes of models that kernels may have a limit for."""

Result = Callable[..., Any]
"""Called like the operation, with anything that has a `shape` and a `dtype` in place of tensors.

-> (shape, dtype) of the result. The dtype is that of an argument, or a name. An operation that works in place gives the
argument itself."""


@dataclass(frozen=True)
class Implementation:
    """What is known of an operation's implementation in one backend."""

    reads_on_host: bool = False
    """It looks at values on the host while it runs."""

    deterministic: tuple[str, ...] = ()
    """Options that are on with `deterministic=True`, so that a token's bits depend on nothing but its own row. Without
    such options they never depend on more."""

    matrix_units: str | None = None
    """What of it runs on matrix units, where the processor has them and no option of `deterministic` is on."""

    in_integers: str | None = None
    """What of it is multiplied in 16-bit integers, where the processor has AVX2 and no more and no option of
    `deterministic` is on."""

    few_in_integers: str | None = None
    """The same where the processor has AVX-512."""

    block_formats: frozenset[str] = frozenset()
    """Those of weights in blocks that it reads."""

    most: Mapping[Limited, int] = field(default_factory=dict)
    """Sizes that it takes no more of; any of others."""

    scratch: Callable[..., Scratch] | None = None
    """Its memory, where that counts."""

    launches: Callable[..., tuple[Launch, ...]] | None = None
    """Of a Triton kernel: what a call launches, by plain sizes and the GPU's compute capability."""

    def is_capturable(self, backend: Backend) -> bool:
        """A tape calls what reads on the host anew in each replay; a CUDA graph cannot hold it."""
        return backend == "tape" or not self.reads_on_host


@dataclass(frozen=True)
class Operation:
    """One operation: its implementations by name, and what is the same for all of them."""

    result: Result
    reference: Implementation = Implementation()
    native: Implementation | None = Implementation()
    triton: Implementation | None = None
    """It never reads on the host, so every graph can hold it."""
    part: Part | None = None
    caller: Caller = "every step"
    in_prompts: str | None = None
    """What takes its place for the rows of prompts, where another operation does."""
    work: Callable[..., KernelWork] | None = None
    """What it does in a step, by a `StepShape` and plain numbers. None: it passes over activations and no more."""

    def implementation(self, name: str) -> Implementation | None:
        """`name` is `reference`, `native` or `triton`; None: there is none."""
        return {"reference": self.reference, "native": self.native, "triton": self.triton}.get(name)

    @overload
    def __get__(self, ops: None, owner: type) -> Operation: ...
    @overload
    def __get__(self, ops: object, owner: type) -> Callable[..., Any]: ...
    def __get__(self, ops: object | None, owner: type) -> Any:
        """Of the class `Operations` the row; an object of it (`ops.kernels.Ops`) has the chosen kernel in its place."""
        assert ops is None, f"{type(ops).__name__} was made without all kernels"
        return self


ALL_BLOCKS = frozenset(BLOCK_FORMATS)
NATIVE_BLOCKS = frozenset(BLOCK_FORMATS)
TRITON_BLOCKS = frozenset(("int4_g32", "int4_g64", "int4_g128", "Q8_0"))


class Operations:
    """All rows. The files of the operations say what each computes."""

    # Between ranks: no kernel of this machine, but what the process group does (`ops/ranks/between.py`).
    all_reduce = Operation(lambda x: x, Implementation(reads_on_host=True), native=None)
    attention = Operation(
        results.like_first,
        Implementation(reads_on_host=True, scratch=scratch.reference_attention),
        Implementation(
            scratch=scratch.native_attention,
            deterministic=("fixed_order",),
            matrix_units=f"bfloat16 rows of {MIN_AMX_QUERIES} queries or more for each key head",
        ),
        Implementation(
            launches=attention_launches.attention, most={"elements of a head": attention_launches.MOST_HEAD_DIM}
        ),
        part="attention",
        work=work.attention,
    )
    axial_angles = Operation(results.axial_angles, triton=Implementation(launches=rotary_launches.angles))
    causal_conv1d = Operation(
        results.like_first,
        Implementation(reads_on_host=True),
        triton=Implementation(launches=state.causal_conv1d, most={"taps of a convolution": state.MOST_TAPS}),
        part="state",
        work=work.causal_conv1d,
    )
    concat = Operation(results.concat, triton=Implementation(launches=elementwise.concat))
    delta_scan = Operation(
        results.delta_rule,
        Implementation(reads_on_host=True, scratch=scratch.reference_delta_scan),
        # Token by token, with the bits of delta_update: no option makes it deterministic.
        Implementation(scratch=scratch.native_delta_scan),
        Implementation(launches=state.delta_scan),
        part="state",
        caller="prefill",
        work=work.delta_rule,
    )
    delta_update = Operation(
        results.delta_rule,
        triton=Implementation(launches=state.delta_update),
        part="state",
        in_prompts="delta_scan",
        work=work.delta_rule,
    )
    embedding = Operation(
        results.embedding,
        Implementation(block_formats=ALL_BLOCKS),
        Implementation(block_formats=NATIVE_BLOCKS),
        triton=Implementation(block_formats=TRITON_BLOCKS, launches=elementwise.embedding),
    )
    embedding_of_ranks = Operation(
        results.embedding_of_ranks, Implementation(reads_on_host=True, block_formats=ALL_BLOCKS), native=None
    )
    encoder_attention = Operation(
        results.like_first,
        native=Implementation(scratch=scratch.native_encoder_attention),
        triton=Implementation(launches=attention_launches.encoder_attention),
        caller="encoder",
    )
    gather_columns = Operation(results.gather_columns, Implementation(reads_on_host=True), native=None)
    gather_inputs = Operation(
        results.like_first, Implementation(reads_on_host=True, scratch=scratch.reference_gather_inputs), native=None
    )
    gated_activation = Operation(results.gated_activation, triton=Implementation(launches=elementwise.gated_activation))
    gated_rms_norm = Operation(results.gated_rms_norm, triton=Implementation(launches=elementwise.gated_rms_norm))
    inject_media = Operation(lambda x, *_, **__: x, triton=Implementation(launches=elementwise.inject_media))
    layer_norm = Operation(results.like_first, triton=Implementation(launches=elementwise.layer_norm), caller="encoder")
    linear = Operation(
        results.linear,
        Implementation(block_formats=ALL_BLOCKS, scratch=scratch.reference_quantized),
        Implementation(
            block_formats=NATIVE_BLOCKS,
            scratch=scratch.native_linear,
            deterministic=("fixed_order",),
            matrix_units=f"bfloat16 products of {MIN_AMX_TOKENS} tokens or more",
            in_integers="bfloat16 or float16 with int8 of a scale per row, or with blocks that are not float8",
            few_in_integers="a few tokens of bfloat16 or float16 with blocks that are not float8",
        ),
        triton=Implementation(block_formats=TRITON_BLOCKS, launches=products.linear),
        work=work.products,
    )
    moe = Operation(
        results.like_first,
        Implementation(reads_on_host=True, block_formats=ALL_BLOCKS),
        Implementation(
            block_formats=NATIVE_BLOCKS,
            scratch=scratch.native_moe,
            deterministic=("fixed_order",),
            matrix_units=f"bfloat16 tokens, {MIN_AMX_EXPERT_TOKENS} or more for each expert",
            in_integers="bfloat16 or float16 with blocks that are not float8",
            few_in_integers="a few tokens for each expert, of bfloat16 or float16, with blocks that are not float8",
        ),
        triton=Implementation(block_formats=TRITON_BLOCKS, launches=products.moe),
        part="moe",
        work=work.products,
    )
    multiply = Operation(results.like_first, triton=Implementation(launches=elementwise.multiply))
    rms_norm = Operation(results.rms_norm, triton=Implementation(launches=elementwise.rms_norm))
    rms_norm_of_ranks = Operation(results.rms_norm_of_ranks, Implementation(reads_on_host=True), native=None)
    rotary = Operation(results.rotary, triton=Implementation(launches=rotary_launches.rotary))
    rotary_angles = Operation(results.rotary_angles, triton=Implementation(launches=rotary_launches.angles))
    rotate = Operation(results.like_first, triton=Implementation(launches=rotary_launches.rotate), caller="encoder")
    route = Operation(results.route, triton=Implementation(launches=products.route))
    sample = Operation(
        results.sample,
        native=Implementation(scratch=scratch.native_sample),
        triton=Implementation(launches=sample_launches.sample),
    )
    selective_scan = Operation(
        results.like_first,
        Implementation(reads_on_host=True, scratch=scratch.reference_selective_scan),
        triton=Implementation(launches=state.selective_scan),
        part="state",
        caller="prefill",
        work=work.selective_recurrence,
    )
    selective_update = Operation(
        results.like_first,
        triton=Implementation(launches=state.selective_update),
        part="state",
        in_prompts="selective_scan",
        work=work.selective_recurrence,
    )
    ssd_scan = Operation(
        results.like_first,
        Implementation(reads_on_host=True, scratch=scratch.reference_ssd_scan),
        Implementation(
            scratch=scratch.native_ssd_scan, deterministic=("recurrent",), matrix_units="products of bfloat16 inputs"
        ),
        Implementation(launches=state.ssd_scan),
        part="state",
        caller="prefill",
        work=work.recurrence,
    )
    state_update = Operation(
        results.like_first,
        triton=Implementation(launches=state.state_update),
        part="state",
        in_prompts="ssd_scan",
        work=work.recurrence,
    )
    token_shift = Operation(
        results.like_first,
        Implementation(reads_on_host=True),
        triton=Implementation(launches=state.causal_conv1d),
        part="state",
    )
    weighted_embedding = Operation(
        results.weighted_embedding, triton=Implementation(launches=rotary_launches.weighted_embedding), caller="encoder"
    )


OPERATIONS: dict[str, Operation] = {name: row for name, row in vars(Operations).items() if isinstance(row, Operation)}
"""By name."""


BETWEEN_RANKS = ("all_reduce", "embedding_of_ranks", "gather_columns", "gather_inputs", "rms_norm_of_ranks")
"""Those in which ranks wait for each other."""


def in_prompts(operation: str) -> str:
    """What computes the rows of prompts where `operation` computes those that decode: another one, or itself."""
    return OPERATIONS[operation].in_prompts or operation


def with_asked(rule: Callable[..., Any], sizes: Mapping[str, Any]) -> Any:
    """The result of a row's rule (work, scratch memory, launches), with those of `sizes` that it asks for."""
    return rule(**{name: sizes[name] for name in _asked_by(rule) if name in sizes})


@lru_cache(maxsize=256)
def _asked_by(rule: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(rule).parameters)


def called_by(*callers: Caller) -> frozenset[str]:
    """The names of the operations that none but these call."""
    return frozenset(name for name, row in OPERATIONS.items() if row.caller in callers)


def parts() -> dict[Part, tuple[str, ...]]:
    """The parts of a model that piecewise graphs may leave out and the operations in each."""
    found: dict[Part, tuple[str, ...]] = {}
    for name, row in OPERATIONS.items():
        if row.part is not None:
            found[row.part] = (*found.get(row.part, ()), name)
    return found
