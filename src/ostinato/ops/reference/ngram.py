"""References of n-gram embeddings (Qwen4): hashed n-grams of each row, their rows of a table, and the gate of streams.

`ngram_ids` keeps the last tokens of each row in slots, like the inputs of a convolution (`conv`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ostinato.ops.sizes import TOKEN_DIGITS


def ngram_ids(
    token_ids: torch.Tensor,
    multipliers: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    end_id: int,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """Return the table row of each n-gram that ends with a token, for n from 2 to `len(multipliers)`.

    The hash of an n-gram is the exclusive or of its tokens, each times the multiplier of its distance from the last
    one. Its heads have tables of `sizes` rows, which begin at `starts`, both [heads of all n] int64 with those of n = 2
    first: the row is the hash modulo the size. An n-gram has no token from before an `end_id` or the row's beginning:
    it has `end_id` in their place. `token_ids` [tokens] int64, `multipliers` [n] int64; `states` [slots, n - 1, 3], the
    last tokens before a position in base 256; rows, slots and `checkpoints` as for `causal_conv1d`. Read slot 0 stands
    for `end_id` alone. -> [tokens, heads] int64.
    """
    kept, per_row = states.shape[1], write_slots.shape[1]
    decode_tokens = num_decode_rows * per_row
    out = token_ids.new_zeros((len(token_ids), len(sizes)))  # padding has a row of the table too
    if num_decode_rows:
        tokens = token_ids[:decode_tokens].view(num_decode_rows, per_row)
        window = torch.cat((_last_tokens(states, read_slots[:num_decode_rows], end_id), tokens), dim=1)
        out[:decode_tokens] = _rows_of(window, multipliers, sizes, starts, end_id).flatten(0, 1)
        # The state after token i is the window's tokens i + 1 to i + kept.
        states[write_slots[:num_decode_rows]] = _digits(window.unfold(1, kept, 1)[:, 1:]).to(states.dtype)
    first, slots = row_starts.tolist(), write_slots[:, 0].tolist()
    for row in range(num_decode_rows, len(first) - 1):
        begin, end = first[row], first[row + 1]
        if begin == end:
            continue
        before = _last_tokens(states, read_slots[row : row + 1], end_id)
        window = torch.cat((before, token_ids[None, begin:end]), dim=1)
        out[begin:end] = _rows_of(window, multipliers, sizes, starts, end_id)[0]
        ends = [(offset, slot) for of_row, offset, slot in checkpoints if of_row == row]
        for offset, slot in (*ends, (end - begin, slots[row])):
            states[slot] = _digits(window[0, offset : offset + kept]).to(states.dtype)
    return out


def _digits(token_ids: torch.Tensor) -> torch.Tensor:
    """Return ids in base 256, [...] -> [..., TOKEN_DIGITS]."""
    return torch.stack([token_ids >> 8 * place & 255 for place in range(TOKEN_DIGITS)], dim=-1)


def _last_tokens(states: torch.Tensor, slots: torch.Tensor, end_id: int) -> torch.Tensor:
    """Return the tokens that the read slots keep, [rows, n - 1] int64."""
    # Slot 0 and its digits, which may be anything, are selected away.
    digits = torch.where((slots == 0).view(-1, 1, 1), 0, states[slots]).long()
    ids = sum(digits[..., place] << 8 * place for place in range(TOKEN_DIGITS))
    return torch.where((slots == 0)[:, None], end_id, ids)


def _rows_of(
    window: torch.Tensor, multipliers: torch.Tensor, sizes: torch.Tensor, starts: torch.Tensor, end_id: int
) -> torch.Tensor:
    """Return the table rows of the tokens after the first n - 1 of `window` [rows, n - 1 + tokens]."""
    kept = len(multipliers) - 1
    heads = len(sizes) // kept
    tokens = window.shape[1] - kept
    mixed, earlier, blocks = window[:, kept:] * multipliers[0], None, []
    for distance in range(1, kept + 1):
        token = window[:, kept - distance : kept - distance + tokens]
        earlier = token if earlier is None else torch.where(earlier == end_id, end_id, token)
        mixed = mixed ^ earlier * multipliers[distance]
        here = slice((distance - 1) * heads, distance * heads)
        blocks.append(mixed[..., None] % sizes[here] + starts[here])
    return torch.cat(blocks, dim=-1)


def ngram_embedding(ids: torch.Tensor, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the rows `ids` [tokens, heads] int64 of a table, side by side.

    The table is its `parts` [rows, size] below each other, on the host, where only the rows that are read need be in
    memory; all but the last have equally many rows. -> [tokens, heads * size] in `dtype`, where `ids` are.
    """
    part_rows = len(parts[0])
    rows = ids.to(parts[0].device).flatten()
    out = torch.empty((len(rows), parts[0].shape[1]), dtype=dtype)
    part_of_row = rows // part_rows
    for number in part_of_row.unique().tolist():
        in_part = part_of_row == number
        out[in_part] = parts[number][rows[in_part] - number * part_rows].to(dtype)
    return out.view(len(ids), -1).to(ids.device)


def ngram_gate(keys: torch.Tensor, queries: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiply `values` by a gate of each stream: sigmoid(sign(s) sqrt(|s|)) for s = key . query / sqrt(size).

    `keys` and `queries` [tokens, streams * size], `values` [tokens, size] -> [tokens, streams * size] in the dtype of
    `values`, computed in float32. A score below 1e-6 has the gate of 1e-6, with its sign; that of 0 is 1 / 2.
    """
    size = values.shape[1]
    scores = (keys.float() * queries.float()).unflatten(1, (-1, size)).sum(dim=-1, keepdim=True) / math.sqrt(size)
    gates = (scores.abs().clamp_min(1e-6).sqrt() * scores.sign()).sigmoid()
    gated: torch.Tensor = gates * values.float()[:, None]
    return gated.flatten(1).to(values.dtype)
