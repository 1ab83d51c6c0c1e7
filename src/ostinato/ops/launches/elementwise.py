"""Launches of the operations that pass over activations: norms, embeddings, joins.

A program takes whole rows of up to 8192 elements in registers: 16 to 32 elements per thread.
"""

from __future__ import annotations

from ostinato.ops.launches.table import Launch, power_of_two

ELEMENTS_PER_PROGRAM = 2048
"""Elements of the short rows that a program takes together: enough to keep a block of four warps busy."""

COLUMNS = 1024
"""Elements of a row that a copying program takes: 4 to 8 per thread, each loaded at once."""


def _rows_launch(kernel: str, size: int) -> Launch:
    """Return the launch of a kernel whose programs take whole rows of `size` elements, several if they are short.

    It does not depend on the number of rows, so that a row's sum has one order.
    """
    columns = power_of_two(size, least=16)
    at_once = max(1, ELEMENTS_PER_PROGRAM // columns)
    warps = power_of_two(columns * at_once // 512, most=16)
    return Launch(kernel, {"ROWS": at_once, "COLUMNS": columns}, warps)


def rms_norm_launches(*, size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for rows of `size` elements."""
    return (_rows_launch("rms_norm_kernel", size),)


def gated_rms_norm_launches(*, size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for groups of `size` channels."""
    return (_rows_launch("gated_rms_norm_kernel", size),)


def layer_norm_launches(*, size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for rows of `size` elements."""
    return (_rows_launch("layer_norm_kernel", size),)


def _copy_launch(kernel: str, size: int) -> Launch:
    """Return the launch of a kernel whose programs take a part of one row."""
    columns = power_of_two(size, least=16, most=COLUMNS)
    return Launch(kernel, {"COLUMNS": columns}, power_of_two(columns // 256, most=4))


def embedding_launches(*, size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for vectors of `size` elements."""
    return (_copy_launch("embedding_kernel", size),)


def concat_launches(*, size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for results of `size` elements per token."""
    return (_copy_launch("concat_kernel", size),)


def gated_activation_launches(*, size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for results of `size` elements per token."""
    return (_copy_launch("gated_activation_kernel", size),)


def inject_media_launches(*, size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for hidden states of `size` elements."""
    return (_copy_launch("inject_media_kernel", size),)


def multiply_launches(*, size: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for vectors of `size` elements."""
    return (_copy_launch("multiply_kernel", size),)
