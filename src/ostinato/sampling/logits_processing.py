"""Logits processing: from the model's logits to those that a token is sampled from.

The order: logit bias, `min_tokens` (end tokens are ruled out), repetition penalty, frequency and presence penalty, the
guide (what its grammar does not allow is ruled out); then, unless greedy, temperature, top-k, top-p, min-p. The first
five are `process_logits`, the others the operation `sample`. The guide is the last of the five, so that nothing lifts
what it rules out, and before the others, so that these select among what it allows. If tokens tie at the threshold of
top-k or top-p, all of them are kept, so that the result does not depend on any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ostinato.errors import Remedy, RequestError
from ostinato.ops.arrays import host_values, is_on_host, like
from ostinato.ops.step_inputs import Array
from ostinato.sampling.state import PendingToken

_OFFSETS_OF_BYTES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)
"""[256, 8]: for each byte's bits, lowest first, 0 if the bit is set and -inf otherwise."""


def process_logits(logits: Array | np.ndarray, pending_tokens: Sequence[PendingToken]) -> None:
    """Apply bias, `min_tokens`, penalties and guide of each pending token, in place on `logits` [tokens, vocab]."""
    vocab_size = logits.shape[-1]
    # On a CPU numpy changes few logits in less time than torch, and with the same bits.
    values: Values = host_values(logits) if is_on_host(logits) else logits
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):  # a model's infinite logits are found later
        _add_bias(flat, vocab_size, pending_tokens)
        _suppress_stop_tokens(flat, vocab_size, pending_tokens)
        _apply_penalties(flat, vocab_size, pending_tokens)
    _apply_grammar_masks(values, pending_tokens)


def guide_error(pending: PendingToken) -> RequestError | None:
    """Return the reason why a pending token's guide leaves no token to sample; None if it is not the guide."""
    state, guidance = pending.state, pending.state.guidance
    if guidance is None:
        return None
    mask = guidance.allowed_mask(pending.drafts)
    if guidance.error is not None:
        return RequestError(f"the guide cannot be followed any further: {guidance.error}")
    allowed = np.unpackbits(np.frombuffer(mask or b"", dtype=np.uint8), bitorder="little")
    if pending.suppresses_stops:
        allowed[[token for token in state.suppressed_token_ids if token < len(allowed)]] = 0
        if not allowed.any():
            length, least = len(state.output_token_ids) + len(pending.drafts), state.params.min_tokens
            message = f"the guide ends the output after {length} tokens, and min_tokens is {least}"
            return RequestError(message, [Remedy("min_tokens", length)])
    if not allowed.any():
        return RequestError("the guide allows no token that the model has, and no end here")
    return None


Values = Any
"""Logits of all pending tokens in one row, [tokens * vocab] float32, and what is computed with them."""


def _places(row: int, vocab_size: int, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return row * vocab_size + np.asarray(token_ids, dtype=np.int64)


def _add_bias(flat: Values, vocab_size: int, pending_tokens: Sequence[PendingToken]) -> None:
    biased = [(row, bias) for row, pending in enumerate(pending_tokens) if (bias := pending.state.params.logit_bias)]
    if not biased:
        return
    places = np.concatenate([_places(row, vocab_size, list(bias)) for row, bias in biased])
    values = np.array([value for _, bias in biased for value in bias.values()], dtype=np.float32)
    flat[like(flat, places)] += like(flat, values)


def _suppress_stop_tokens(flat: Values, vocab_size: int, pending_tokens: Sequence[PendingToken]) -> None:
    held = [
        _places(row, vocab_size, pending.state.suppressed_token_ids)
        for row, pending in enumerate(pending_tokens)
        if pending.suppresses_stops
    ]
    if held:
        flat[like(flat, np.concatenate(held))] = -math.inf


def _apply_penalties(flat: Values, vocab_size: int, pending_tokens: Sequence[PendingToken]) -> None:
    """Apply the repetition penalty of CTRL (arXiv 1909.05858), and frequency and presence penalties as OpenAI's.

    The repetition penalty multiplies negative logits.
    """
    rows = [row for row, pending in enumerate(pending_tokens) if pending.state.params.has_penalties]
    if not rows:
        return
    seen = [pending_tokens[row].state.counts().seen(pending_tokens[row].drafts) for row in rows]
    lengths = [len(token_ids) for token_ids, _ in seen]
    places = np.concatenate([_places(row, vocab_size, ids) for row, (ids, _) in zip(rows, seen, strict=True)])
    params = [pending_tokens[row].state.params for row in rows]
    repetition, frequency, presence = (
        like(flat, np.repeat(np.asarray([getattr(p, name) for p in params], dtype=np.float32), lengths))
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    counts = like(flat, np.concatenate([output_counts for _, output_counts in seen]))
    index = like(flat, places)
    values = flat[index]
    divided, multiplied, is_positive = values / repetition, values * repetition, values > 0
    if isinstance(flat, np.ndarray):
        values = np.where(is_positive, divided, multiplied)
    else:
        values = divided.where(is_positive, multiplied)
    flat[index] = values - frequency * counts - presence * (counts > 0)


def _apply_grammar_masks(logits: Values, pending_tokens: Sequence[PendingToken]) -> None:
    guided = [
        (row, guidance.allowed_mask(pending.drafts))
        for row, pending in enumerate(pending_tokens)
        if (guidance := pending.state.guidance)
    ]
    if not guided:
        return
    vocab_size = logits.shape[-1]
    # Tokens of the model's vocabulary beyond a mask's end are ruled out, and all tokens if there is no mask.
    allowed = np.zeros((len(guided), (vocab_size + 7) // 8), dtype=np.uint8)
    for place, (_, mask) in enumerate(guided):
        if mask is not None:
            bits = np.frombuffer(mask, dtype=np.uint8)[: allowed.shape[1]]
            allowed[place, : len(bits)] = bits
    # Adding takes the same time for any mask, unlike filling, and values that are not finite do not vanish.
    looked_up: Values = (
        _OFFSETS_OF_BYTES.take(allowed, axis=0)
        if isinstance(logits, np.ndarray)
        else like(logits, _OFFSETS_OF_BYTES)[like(logits, allowed).long()]
    )
    offsets = looked_up.reshape(len(guided), -1)[:, :vocab_size]
    if len(guided) == len(pending_tokens):
        logits += offsets
        return
    for place, (row, _) in enumerate(guided):
        logits[row] += offsets[place]
