"""Facts of the operations, one row each, for the plan, the choice of kernels and graphs; without torch.

An operation's row names the file that defines it: its `reference` is in `ops/reference/`. Native kernels have the names
of their operations and are in native/. Triton kernels are in `ops/triton/`. The rules for the shapes and dtypes of
results are here too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, overload

from ostinato.ops import kernel_cost, scratch
from ostinato.ops.kernel_cost import KernelCost
from ostinato.ops.launch_tables import attention as attention_launches
from ostinato.ops.launch_tables import matmul, pointwise, state
from ostinato.ops.launch_tables import pointwise as rotary_launches
from ostinato.ops.launch_tables import pointwise as sample_launches
from ostinato.ops.launch_tables.launch import Launch
from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks, formats_of
from ostinato.ops.scratch import Scratch

HAS_GATES = {
    "relu2": False,
    "silu": False,
    "swiglu": True,
    "geglu": True,
    "gelu": False,
    "gelu_pytorch_tanh": False,
}
"""Activations, and whether the inputs of each are gates followed by an equal number of values to gate.

`ops/reference/matmul.py` defines them. The build gives C++ the table (`cmake/write_constants.py`).
"""

GATED = tuple(name for name, has_gates in HAS_GATES.items() if has_gates)


class ArrayLike(Protocol):
    """A tensor, or what stands for one in a sketch of a model."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...


ShapeAndDtype = tuple[tuple[int, ...], object]
"""Shape and dtype of a result. The dtype is that of an argument, or a name."""


def like_first(x: ArrayLike, /, *_: object, **__: object) -> ShapeAndDtype:
    return x.shape, x.dtype


def axial_angles_shape(positions: ArrayLike, axes: ArrayLike, frequencies: ArrayLike, scaling: float) -> ShapeAndDtype:
    return (2, positions.shape[0], frequencies.shape[0]), "float32"


def concat_shape(first: ArrayLike, second: ArrayLike) -> ShapeAndDtype:
    return (*first.shape[:-1], first.shape[-1] + second.shape[-1]), first.dtype


def delta_rule_shape(q: ArrayLike, k: ArrayLike, v: ArrayLike, *_: object, **__: object) -> ShapeAndDtype:
    return v.shape, v.dtype


def embedding_shape(
    token_ids: ArrayLike,
    weight: ArrayLike,
    multiplier: float,
    weight_scale: object = None,
    group_size: int | None = None,
    out_dtype: object = None,
    blocks: Blocks | None = None,
) -> ShapeAndDtype:
    if blocks is not None:
        kind = BLOCK_FORMATS[blocks[0][0]]
        return (token_ids.shape[0], weight.shape[1] // kind.num_bytes * kind.elements), out_dtype
    return (token_ids.shape[0], weight.shape[1]), out_dtype or weight.dtype


def sharded_embedding_shape(
    token_ids: ArrayLike, weight: ArrayLike, multiplier: float, first: int, own: object, *how: Any
) -> ShapeAndDtype:
    return embedding_shape(token_ids, weight, multiplier, *how)


def gather_columns_shape(x: ArrayLike, starts: object, num_columns: int) -> ShapeAndDtype:
    return (x.shape[0], num_columns), x.dtype


def gated_activation_shape(x: ArrayLike, activation: str, clamp: object = None) -> ShapeAndDtype:
    return (x.shape[0], x.shape[1] // 2), x.dtype


def gated_rms_norm_shape(x: ArrayLike, gate: ArrayLike, *_: object, **__: object) -> ShapeAndDtype:
    return x.shape, gate.dtype


def linear_shape(
    x: ArrayLike,
    weight: ArrayLike,
    bias: object = None,
    residual: object = None,
    activation: str | None = None,
    scale: object = None,
    out_dtype: object = None,
    weight_scale: object = None,
    group_size: int | None = None,
    blocks: Blocks | None = None,
    order: object = None,
    int8_activations: bool = False,
) -> ShapeAndDtype:
    if len(x.shape) == 3:
        return (*x.shape[:2], weight.shape[0] // x.shape[1]), x.dtype
    outputs = weight.shape[0] if blocks is None else sum(rows for _, rows in blocks)
    return (x.shape[0], outputs // 2 if activation in GATED else outputs), out_dtype or x.dtype


def ngram_embedding_shape(ids: ArrayLike, parts: Sequence[ArrayLike], dtype: object) -> ShapeAndDtype:
    return (ids.shape[0], ids.shape[1] * parts[0].shape[1]), dtype


def ngram_gate_shape(keys: ArrayLike, queries: object, values: ArrayLike) -> ShapeAndDtype:
    return keys.shape, values.dtype


def ngram_ids_shape(token_ids: ArrayLike, multipliers: object, sizes: ArrayLike, *_: object) -> ShapeAndDtype:
    return (token_ids.shape[0], sizes.shape[0]), "int64"


def rms_norm_shape(x: ArrayLike, weight: ArrayLike, *_: object, **__: object) -> ShapeAndDtype:
    return x.shape, weight.dtype


def sharded_rms_norm_shape(
    x: ArrayLike, weight: ArrayLike, eps: float, num_ranks: int, gate: ArrayLike | None = None, *_: object, **__: object
) -> ShapeAndDtype:
    return x.shape, (weight if gate is None else gate).dtype


def rotary_shape(
    q: ArrayLike, k: object, v: object, angles: object, *_: object, **__: object
) -> ShapeAndDtype | ArrayLike:
    return q if angles is None else (q.shape, q.dtype)


def rotary_angles_shape(positions: ArrayLike, frequencies: ArrayLike, scaling: float) -> ShapeAndDtype:
    return (2, positions.shape[0], frequencies.shape[0]), "float32"


def route_shape(
    x: ArrayLike, weight: ArrayLike, correction_bias: object, top_k: int, *_: object, **__: object
) -> ShapeAndDtype:
    return (x.shape[0], 2, top_k), "float32"


def mhc_weights_shape(x: ArrayLike, fn: ArrayLike, *_: object) -> ShapeAndDtype:
    return (x.shape[0], fn.shape[0]), "float32"


def mix_streams_shape(x: ArrayLike, y: object, weights: ArrayLike, streams: int) -> ShapeAndDtype:
    results = weights.shape[1] // (streams + (y is not None))
    return (x.shape[0], results * (x.shape[1] // streams)), x.dtype


def select_blocks_shape(index_q: ArrayLike, *arguments: Any) -> ShapeAndDtype:
    *_, budget, ratio = arguments
    return (index_q.shape[0], budget // ratio), "int32"


def sample_shape(logits: ArrayLike, *_: object, **__: object) -> ShapeAndDtype:
    return (logits.shape[0],), "int32"


def weighted_embedding_shape(ids: ArrayLike, weights: ArrayLike, table: ArrayLike) -> ShapeAndDtype:
    return (ids.shape[0], table.shape[1]), table.dtype


GraphBackend = Literal["tape", "cuda"]
"""Kind of graph capture: a tape on a CPU, or a CUDA graph on a GPU."""

Part = Literal["attention", "state", "moe"]
"""A part of a model that a piecewise graph may leave out."""

Caller = Literal["every step", "prefill", "encoder"]
"""Caller of an operation: any step, a step with a prompt in it, or a vision encoder."""

Limited = Literal["elements of a head", "taps of a convolution"]
"""Sizes of models that kernels may limit."""

Result = Callable[..., ShapeAndDtype | ArrayLike]
"""Rule for an operation's result, called like the operation, with anything array-like in place of tensors.

For an operation that works in place, the rule returns the argument itself.
"""


@dataclass(frozen=True)
class Implementation:
    """Facts of one implementation of an operation: its reference, the native one or the one in Triton."""

    reads_on_host: bool = False
    """True if it reads tensor values on the host while it runs."""

    deterministic: tuple[str, ...] = ()
    """Options that are on with `deterministic=True`, so that a token's bits depend only on its own row.

    An implementation without such options has that property always.
    """

    block_formats: frozenset[str] = frozenset()
    """Block formats of weights that it reads."""

    most: Mapping[Limited, int] = field(default_factory=dict)
    """Largest supported sizes; a size without an entry has no limit."""

    scratch: Callable[..., Scratch] | None = None
    """Rule for its scratch memory; None if that is negligible."""

    launches: Callable[..., tuple[Launch, ...]] | None = None
    """Rule for the launches of a Triton kernel's call, by plain sizes and the GPU's compute capability."""

    def is_capturable(self, backend: GraphBackend) -> bool:
        """Return whether a graph of this kind can hold the implementation.

        A tape can always: it calls implementations that read on the host anew in each replay. A CUDA graph cannot hold
        those.
        """
        return backend == "tape" or not self.reads_on_host


@dataclass(frozen=True)
class Operation:
    """One operation: its implementations by name, and the facts that all of them share."""

    result: Result

    file: str
    """Family of the operation: the file of `ops/reference/` that defines it, and of `ops/triton/` with its kernel."""

    reference: Implementation = Implementation()
    native: Implementation | None = Implementation()
    triton: Implementation | None = None
    """Triton implementation. It never reads on the host, so every graph can hold it."""
    triton_file: str | None = None
    """File of the Triton kernel, if it is not `file`."""

    part: Part | None = None
    callers: tuple[Caller, ...] = ("every step",)
    in_prompts: str | None = None
    """Operation that computes prompt rows in place of this one, or None."""
    decode_launches: int | None = None
    """Triton's launches of one call in a decode step, if that is not the number of launches that its table lists.

    Other launches of the table are for prompts, for sampled tokens, or follow some matmuls.
    """
    work: Callable[..., KernelCost] | None = None
    """Rule for its work in a step, by a `StepShape` and plain numbers. None if it only passes over activations."""

    def implementation(self, name: str) -> Implementation | None:
        """Return the implementation `name` (`reference`, `native` or `triton`), or None if there is none."""
        return {"reference": self.reference, "native": self.native, "triton": self.triton}.get(name)

    @overload
    def __get__(self, ops: None, owner: type) -> Operation: ...
    @overload
    def __get__(self, ops: object, owner: type) -> Callable[..., Any]: ...
    def __get__(self, ops: object | None, owner: type) -> Any:
        """Return the row when read from the class; an instance (`ops.dispatch.Ops`) has the kernel in its place."""
        assert ops is None, f"{type(ops).__name__} was made without all kernels"
        return self


ALL_BLOCKS = frozenset(BLOCK_FORMATS)
NATIVE_BLOCKS = frozenset(BLOCK_FORMATS)
TRITON_BLOCKS = frozenset((*formats_of("int4"), "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"))

EVERYWHERE: tuple[Caller, ...] = ("every step", "encoder")

PIECES = {"Q4_0": 16, "MXFP4": 16, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16}
"""Inputs that Triton's products read at once, by the formats that they read in pieces."""


class Operations:
    """Rows of all operations. The files of the operations say what each computes."""

    add = Operation(like_first, "pointwise", triton=Implementation(launches=pointwise.add_launches), callers=EVERYWHERE)
    # Operations between ranks have no kernel; the process group computes them (`ops/reference/collectives.py`).
    all_reduce = Operation(lambda x: x, "collectives", Implementation(reads_on_host=True), native=None)
    attention = Operation(
        like_first,
        "attention",
        Implementation(reads_on_host=True, scratch=scratch.reference_attention),
        Implementation(scratch=scratch.native_attention, deterministic=("fixed_order",)),
        Implementation(
            launches=attention_launches.attention_launches,
            most={"elements of a head": attention_launches.MAX_HEAD_DIM},
            scratch=scratch.triton_attention,
        ),
        part="attention",
        work=kernel_cost.attention_cost,
    )
    axial_angles = Operation(
        axial_angles_shape,
        "rotary",
        triton=Implementation(launches=rotary_launches.rotary_angles_launches),
        callers=EVERYWHERE,
    )
    causal_conv1d = Operation(
        like_first,
        "conv",
        Implementation(reads_on_host=True),
        triton=Implementation(launches=state.causal_conv1d_launches, most={"taps of a convolution": state.MAX_TAPS}),
        part="state",
        decode_launches=1,
        work=kernel_cost.causal_conv1d_cost,
    )
    clip = Operation(
        like_first, "pointwise", triton=Implementation(launches=pointwise.clip_launches), callers=("encoder",)
    )
    concat = Operation(
        concat_shape, "pointwise", triton=Implementation(launches=pointwise.concat_launches), callers=EVERYWHERE
    )
    delta_scan = Operation(
        delta_rule_shape,
        "delta",
        Implementation(reads_on_host=True, scratch=scratch.reference_delta_scan),
        # It works token by token, with the bits of delta_update, so it needs no deterministic option.
        Implementation(scratch=scratch.native_delta_scan),
        Implementation(launches=state.delta_scan_launches, scratch=scratch.triton_delta_scan),
        part="state",
        callers=("prefill",),
        work=kernel_cost.delta_rule_cost,
    )
    delta_update = Operation(
        delta_rule_shape,
        "delta",
        triton=Implementation(launches=state.delta_update_launches),
        part="state",
        in_prompts="delta_scan",
        work=kernel_cost.delta_rule_cost,
    )
    dilated_conv1d = Operation(
        like_first,
        "conv",
        Implementation(reads_on_host=True),
        part="state",
        work=kernel_cost.dilated_conv1d_cost,
    )
    embedding = Operation(
        embedding_shape,
        "pointwise",
        Implementation(block_formats=ALL_BLOCKS),
        Implementation(block_formats=NATIVE_BLOCKS),
        triton=Implementation(block_formats=TRITON_BLOCKS, launches=pointwise.embedding_launches),
        callers=EVERYWHERE,
        triton_file="embedding",
    )
    sharded_embedding = Operation(
        sharded_embedding_shape,
        "collectives",
        Implementation(reads_on_host=True, block_formats=ALL_BLOCKS),
        native=None,
    )
    encoder_attention = Operation(
        like_first,
        "attention",
        native=Implementation(scratch=scratch.native_encoder_attention),
        triton=Implementation(launches=attention_launches.encoder_attention_launches),
        callers=("encoder",),
    )
    gather_columns = Operation(gather_columns_shape, "collectives", Implementation(reads_on_host=True), native=None)
    gather_act_order = Operation(
        like_first,
        "collectives",
        Implementation(reads_on_host=True, scratch=scratch.reference_gather_act_order),
        native=None,
    )
    gated_activation = Operation(
        gated_activation_shape,
        "matmul",
        triton=Implementation(launches=pointwise.gated_activation_launches),
        callers=EVERYWHERE,
        triton_file="pointwise",
    )
    gated_rms_norm = Operation(
        gated_rms_norm_shape, "pointwise", triton=Implementation(launches=pointwise.gated_rms_norm_launches)
    )
    indexed_attention = Operation(
        like_first,
        "indexed_attention",
        Implementation(reads_on_host=True, scratch=scratch.reference_indexed_attention),
        Implementation(scratch=scratch.native_indexed_attention),
        part="attention",
        work=kernel_cost.indexed_attention_cost,
    )
    inject_media = Operation(
        lambda x, *_, **__: x,
        "pointwise",
        triton=Implementation(launches=pointwise.inject_media_launches),
        triton_file="embedding",
    )
    layer_norm = Operation(
        like_first, "pointwise", triton=Implementation(launches=pointwise.layer_norm_launches), callers=EVERYWHERE
    )
    linear = Operation(
        linear_shape,
        "matmul",
        Implementation(block_formats=ALL_BLOCKS, scratch=scratch.reference_quantized),
        Implementation(block_formats=NATIVE_BLOCKS, scratch=scratch.native_linear, deterministic=("fixed_order",)),
        triton=Implementation(
            block_formats=TRITON_BLOCKS, launches=matmul.linear_launches, scratch=scratch.triton_linear
        ),
        callers=EVERYWHERE,
        # A matmul of unquantised weights is cuBLAS's, which no table lists.
        decode_launches=1,
        work=kernel_cost.matmul_cost,
    )
    mhc_weights = Operation(mhc_weights_shape, "mhc", native=None)
    mix_streams = Operation(mix_streams_shape, "mhc", native=None)
    moe = Operation(
        like_first,
        "matmul",
        Implementation(reads_on_host=True, block_formats=ALL_BLOCKS),
        Implementation(block_formats=NATIVE_BLOCKS, scratch=scratch.native_moe, deterministic=("fixed_order",)),
        triton=Implementation(block_formats=TRITON_BLOCKS, launches=matmul.moe_launches, scratch=scratch.triton_moe),
        part="moe",
        work=kernel_cost.matmul_cost,
        triton_file="moe",
    )
    multiply = Operation(
        like_first, "pointwise", triton=Implementation(launches=pointwise.multiply_launches), callers=EVERYWHERE
    )
    ngram_embedding = Operation(ngram_embedding_shape, "ngram", Implementation(reads_on_host=True), part="state")
    ngram_gate = Operation(ngram_gate_shape, "ngram")
    ngram_ids = Operation(
        ngram_ids_shape, "ngram", Implementation(reads_on_host=True), part="state", work=kernel_cost.ngram_ids_cost
    )
    rms_norm = Operation(
        rms_norm_shape, "pointwise", triton=Implementation(launches=pointwise.rms_norm_launches), callers=EVERYWHERE
    )
    sharded_rms_norm = Operation(sharded_rms_norm_shape, "collectives", Implementation(reads_on_host=True), native=None)
    rotary = Operation(rotary_shape, "rotary", triton=Implementation(launches=rotary_launches.rotary_launches))
    rotary_angles = Operation(
        rotary_angles_shape, "rotary", triton=Implementation(launches=rotary_launches.rotary_angles_launches)
    )
    rotate = Operation(
        like_first, "rotary", triton=Implementation(launches=rotary_launches.rotate_launches), callers=EVERYWHERE
    )
    route = Operation(route_shape, "matmul", triton=Implementation(launches=matmul.route_launches), triton_file="moe")
    sample = Operation(
        sample_shape,
        "sample",
        native=Implementation(scratch=scratch.native_sample),
        triton=Implementation(launches=sample_launches.sample_launches, scratch=scratch.triton_sample),
        decode_launches=2,
    )
    select_blocks = Operation(
        select_blocks_shape,
        "indexed_attention",
        Implementation(reads_on_host=True, scratch=scratch.reference_select_blocks),
        native=None,
        part="attention",
        work=kernel_cost.select_blocks_cost,
    )
    selected_attention = Operation(
        like_first,
        "indexed_attention",
        Implementation(reads_on_host=True, scratch=scratch.reference_selected_attention),
        native=None,
        part="attention",
        work=kernel_cost.selected_attention_cost,
    )
    selective_scan = Operation(
        like_first,
        "selective",
        Implementation(reads_on_host=True, scratch=scratch.reference_selective_scan),
        triton=Implementation(launches=state.selective_scan_launches),
        part="state",
        callers=("prefill",),
        work=kernel_cost.selective_recurrence_cost,
    )
    selective_update = Operation(
        like_first,
        "selective",
        triton=Implementation(launches=state.selective_update_launches),
        part="state",
        in_prompts="selective_scan",
        work=kernel_cost.selective_recurrence_cost,
    )
    ssd_scan = Operation(
        like_first,
        "ssd",
        Implementation(reads_on_host=True, scratch=scratch.reference_ssd_scan),
        Implementation(scratch=scratch.native_ssd_scan, deterministic=("recurrent",)),
        Implementation(launches=state.ssd_scan_launches),
        part="state",
        callers=("prefill",),
        work=kernel_cost.recurrence_cost,
    )
    state_update = Operation(
        like_first,
        "ssd",
        triton=Implementation(launches=state.state_update_launches),
        part="state",
        in_prompts="ssd_scan",
        work=kernel_cost.recurrence_cost,
    )
    token_shift = Operation(
        like_first,
        "conv",
        Implementation(reads_on_host=True),
        triton=Implementation(launches=state.causal_conv1d_launches),
        part="state",
        decode_launches=1,
    )
    weighted_embedding = Operation(
        weighted_embedding_shape,
        "pointwise",
        triton=Implementation(launches=rotary_launches.weighted_embedding_launches),
        callers=("encoder",),
        triton_file="embedding",
    )


OPERATIONS: dict[str, Operation] = {name: row for name, row in vars(Operations).items() if isinstance(row, Operation)}
"""All operations by name."""


ENCODER_OPS = frozenset(name for name, row in OPERATIONS.items() if "encoder" in row.callers)
"""Operations that a vision encoder calls."""

COLLECTIVE_OPS = ("all_reduce", "sharded_embedding", "gather_columns", "gather_act_order", "sharded_rms_norm")
"""Operations in which ranks wait for each other."""


def prefill_op(operation: str) -> str:
    """Return the operation that computes prompt rows in place of `operation`, or `operation` itself."""
    return OPERATIONS[operation].in_prompts or operation


def call_with_known(rule: Callable[..., object], sizes: Mapping[str, object]) -> Any:
    """Call a row's `rule` (work, scratch memory, launches) with those of `sizes` that its parameters name."""
    return rule(**{name: sizes[name] for name in _asked_by(rule) if name in sizes})


@lru_cache(maxsize=256)
def _asked_by(rule: Callable[..., object]) -> tuple[str, ...]:
    return tuple(inspect.signature(rule).parameters)


@lru_cache(maxsize=64)
def ops_called_by(*callers: Caller) -> frozenset[str]:
    """Return the names of the operations that only these callers call."""
    return frozenset(name for name, row in OPERATIONS.items() if {*row.callers} <= {*callers})


@lru_cache(maxsize=1)
def parts() -> Mapping[Part, Sequence[str]]:
    """Return the parts of a model that piecewise graphs may leave out, with the operations in each."""
    found: dict[Part, list[str]] = {}
    for name, row in OPERATIONS.items():
        if row.part is not None:
            found.setdefault(row.part, []).append(name)
    return found
