"""References of `ssd_scan` and `state_update`: the Mamba-2 recurrence for prefill and decode rows.

`ssd_scan` works in chunks (state-space duality). Dao and Gu 2024, arXiv 2405.21060, section 6 and listing 1: inside a
chunk the recurrence is a masked matmul; one state is passed from chunk to chunk. Any length of chunk gives the same
sums in another order. In this file a chunk of the model is computed as equal chunks of at most `MAX_CHUNK` tokens. They
begin at absolute multiples of their length, and so at those of `chunk_size` too: the same sums are made in the same
order if a prompt is split at such a multiple. 16-bit states are rounded there too, at the same positions as by the
native scan. A row is computed alone and chunk by chunk, with the same calls on the same shapes in any batch.

`state_update` works token by token, from read slot to write slots:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,  y_t = h_t C_t + D x_t,  dt_t = softplus(dt_raw + dt_bias)

(Dao and Gu 2024, arXiv 2405.21060, sections 2 and 6: A is one scalar per head.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ostinato.ops.reference.stochastic_rounding import rounded
from ostinato.ops.sizes import INT8_STATE_TOKENS, SCAN_CHUNK, chunk_length


def state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    ssm_states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    start_positions: torch.Tensor | None = None,
    noise: int | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute the Mamba-2 recurrence of decode rows.

    Row r's tokens are `r * n` to `r * n + n - 1`, n being `write_slots.shape[1]`. `x` [rows * n, heads, head_dim]; `dt`
    [rows * n, heads] before bias and softplus; `A_log`, `D`, `dt_bias` [heads] float32, A being -exp(A_log); `B`, `C`
    [rows * n, groups, state]; `ssm_states` [slots, heads, head_dim, state]; `read_slots` [rows], 0 being the zero
    state; `write_slots` [rows, n], for the state after token i. -> [rows * n, heads, head_dim] in the dtype of `x`. All
    arithmetic is in float32. Padding rows read and write slot 0, which no request reads, and cost nothing on a CPU.

    After each token a state is rounded to the dtype of `ssm_states`, and the next token begins with the rounded state.
    With `noise`, the number of the layer, 16-bit states are rounded stochastically
    (`ops/reference/stochastic_rounding.py`): a row's first token is at `start_positions` [rows]. With `packable`,
    float32 states are rounded to 8 bits after the last of `INT8_STATE_TOKENS` tokens.
    """
    step = time_steps(dt, dt_bias, dt_limit)
    decay = torch.exp(step * -A_log.exp())
    scaled = step.unsqueeze(-1) * x.float()
    update = _gathered if x.is_cuda else _row_by_row
    inputs = (decay, scaled, B.float(), C.float())
    y = update(*inputs, ssm_states, read_slots, write_slots, start_positions, noise, packable)
    return y.addcmul_(x.float(), D.unsqueeze(-1)).to(x.dtype)


def time_steps(dt: torch.Tensor, dt_bias: torch.Tensor, dt_limit: tuple[float, float]) -> torch.Tensor:
    """Return softplus(dt + bias) in float32, clamped to `dt_limit` if the checkpoint narrows it."""
    step = F.softplus(dt.float() + dt_bias)
    return step if dt_limit == (0.0, float("inf")) else step.clamp(*dt_limit)


def _row_by_row(
    decay: torch.Tensor,
    scaled: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    ssm_states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    start_positions: torch.Tensor | None,
    noise: int | None,
    packable: bool,
) -> torch.Tensor:
    """Update each state in place: it is read once and written once, while it stays in the core's cache."""
    heads, head_dim, state_size = ssm_states.shape[1:]
    tokens, groups = B.shape[:2]
    in_place = ssm_states.dtype == torch.float32 and not packable
    y = torch.empty_like(scaled)
    product = scaled.new_empty(groups, heads * head_dim // groups, state_size)
    # Heads of one group share B and C, so the group's heads and channels form one matrix [channels, state].
    by_token = zip(
        decay.view(tokens, heads, 1, 1).unbind(),
        scaled.view(tokens, groups, -1, 1).unbind(),
        B.unsqueeze(2).unbind(),
        C.unsqueeze(2).unbind(),
        y.view(tokens, groups, -1).unbind(),
        strict=True,
    )
    for row, (read, writes) in enumerate(zip(read_slots.tolist(), write_slots.tolist(), strict=True)):
        previous = ssm_states[read] if read else None
        is_padding = read == 0 and not any(writes)
        for i, write in enumerate(writes):
            decay_t, scaled_t, B_t, C_t, y_t = next(by_token)
            if is_padding:
                y_t.zero_()
                continue
            target = ssm_states[write]
            state = target if in_place else torch.empty_like(target, dtype=torch.float32)
            if previous is None:
                state.zero_()
            else:
                torch.mul(previous, decay_t, out=state)
            by_group = state.view(groups, -1, state_size)
            by_group.addcmul_(scaled_t, B_t)
            # Elementwise operations are used: a batched matrix-vector product is five times slower on a cached state.
            torch.mul(by_group, C_t, out=product)
            torch.sum(product, dim=-1, out=y_t)
            if not in_place:
                position = None if start_positions is None else start_positions[row : row + 1] + i
                target.copy_(rounded(state[None], target.dtype, position, noise, packable)[0])
            previous = target  # The next step would read the same.
    return y


def _gathered(
    decay: torch.Tensor,
    scaled: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    ssm_states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    start_positions: torch.Tensor | None,
    noise: int | None,
    packable: bool,
) -> torch.Tensor:
    """Update all rows at once without reading values on the host, where a call costs more than a copy."""
    rows, tokens_per_row = write_slots.shape
    heads_per_group = scaled.shape[1] // B.shape[1]
    by_row = (rows, tokens_per_row)
    decay, scaled = decay.unflatten(0, by_row), scaled.unflatten(0, by_row)
    B = B.repeat_interleave(heads_per_group, dim=1).unflatten(0, by_row)
    C = C.repeat_interleave(heads_per_group, dim=1).unflatten(0, by_row)
    state = torch.where((read_slots == 0).view(-1, 1, 1, 1), 0, ssm_states[read_slots].float())
    outputs = []
    for i in range(tokens_per_row):
        state = state * decay[:, i, :, None, None] + scaled[:, i, :, :, None] * B[:, i, :, None, :]
        outputs.append((state @ C[:, i, :, :, None]).squeeze(-1))
        position = None if start_positions is None else start_positions + i
        kept = rounded(state, ssm_states.dtype, position, noise, packable)
        ssm_states[write_slots[:, i]] = kept
        state = kept.float()
    return torch.stack(outputs, dim=1).flatten(0, 1)


MAX_CHUNK = 64
"""Tokens of a chunk. The work inside a chunk grows with its square; the work per chunk is one pass over the state."""

MIN_LOG_DECAY = -60.0
"""Smallest log decay: one below e^-60 is taken as e^-60, which no sum in float32 notices.

Smaller ones would make denormal products, and a CPU multiplies denormal numbers tens of times slower.
"""


@dataclass(frozen=True)
class SsdChunk:
    """Some adjacent tokens of one row, all in float32 but `log_decay`."""

    x: torch.Tensor
    """Inputs, [n, heads, head_dim]."""
    B: torch.Tensor
    """Input matrix B, [groups, n, state]."""
    C: torch.Tensor
    """Output matrix C, [groups, n, state]."""
    step: torch.Tensor
    """Step sizes, [n, heads]."""
    log_decay: torch.Tensor
    """Log of the decay from the chunk's begin to after each token, [n, heads] in float64.

    The differences that are made of it are small where the sums are large.
    """

    def first(self, n: int) -> SsdChunk:
        """Return the first `n` tokens."""
        return SsdChunk(self.x[:n], self.B[:, :n], self.C[:, :n], self.step[:n], self.log_decay[:n])


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    chunk_size: int,
    ssm_states: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    checkpoints: Sequence[tuple[int, int, int]] = (),
    recurrent: bool = False,
    noise: int | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute the Mamba-2 recurrence of prefill rows.

    Row r owns tokens `row_starts[r]:row_starts[r + 1]` of `x`, the first at `start_positions[r]` of its request. Shapes
    as in state_update, with `tokens` in place of `rows * n`; `read_slots` [rows] (0: the zero state); `write_slots`
    [rows], for the state after the row's last token. `checkpoints` are (row, offset, slot): the state after `offset`
    tokens of the row also goes to `slot`. No row may write a slot that another one reads. `recurrent` takes token by
    token as `state_update` does, so that a request has the same bits however its tokens are divided between the two. ->
    [tokens, heads, head_dim] in the dtype of `x`; the arithmetic is in float32.

    A state is rounded as in state_update, but only where it is written and after each whole chunk of at most
    `SCAN_CHUNK` tokens; the next chunk begins with the rounded state. So a request's states do not depend on a split at
    that position, or on a prefix hit there. With `packable`, a chunk has `INT8_STATE_TOKENS` tokens.
    """
    row_starts = row_starts - row_starts[:1]  # Other rows may come first.
    out = torch.empty_like(x)
    keeps_float32 = ssm_states.dtype == torch.float32
    length, A = chunk_length(chunk_size, MAX_CHUNK if keeps_float32 else SCAN_CHUNK), -A_log.exp()
    if packable:
        length = INT8_STATE_TOKENS
    starts, positions = row_starts.tolist(), start_positions.tolist()
    reads, writes = read_slots.tolist(), write_slots.tolist()
    for row in range(len(starts) - 1):
        token, end = starts[row], starts[row + 1]
        if token == end:
            continue
        wanted = {starts[row] + offset: slot for of_row, offset, slot in checkpoints if of_row == row}
        if recurrent:
            read, write = read_slots[row : row + 1], write_slots[row : row + 1]
            while token < end:
                part = slice(token, token + 1)
                token += 1
                to = write.new_tensor([wanted[token]]) if token in wanted else write
                inputs = (x[part], dt[part], A_log, B[part], C[part], D, dt_bias, dt_limit)
                position = start_positions[row : row + 1] + (part.start - starts[row])
                out[part] = state_update(*inputs, ssm_states, read, to.unsqueeze(1), position, noise, packable)
                read = to
            if end in wanted:
                ssm_states[writes[row]] = ssm_states[wanted[end]]
            continue
        state = ssm_states[reads[row]].float() if reads[row] else None
        while token < end:
            position = positions[row] + token - starts[row]
            stop = min(end, token + length - position % length)
            span = slice(token, stop)
            # This runs per chunk, not for all tokens at once: a vectorised softplus rounds the last elements of a
            # tensor differently, and the same chunk must give the same bits wherever its row began.
            step = time_steps(dt[span], dt_bias, dt_limit)
            log_decay = (step * A).double().cumsum(0)
            by_group = (B[span].float().transpose(0, 1), C[span].float().transpose(0, 1))
            chunk = SsdChunk(x[span].float(), *by_group, step, log_decay)
            _put_outputs(chunk, state, D, out[span])
            before_first = start_positions[row : row + 1] - starts[row] - 1
            for at in [at for at in wanted if token < at < stop]:
                _advance(chunk.first(at - token), state, ssm_states[wanted[at]], before_first + at, noise, packable)
            # A checkpoint's slot keeps the state, and the next chunk reads it there, so no state is copied.
            slot = ssm_states[wanted.get(stop, writes[row])]
            state = _advance(chunk, state, slot, before_first + stop, noise, packable)
            token = stop
        if end in wanted:
            ssm_states[writes[row]] = ssm_states[wanted[end]]
    return out


def _put_outputs(chunk: SsdChunk, state: torch.Tensor | None, D: torch.Tensor, out: torch.Tensor) -> None:
    """Write the outputs of a chunk that begins with `state` [heads, head_dim, state] to `out` [n, heads, head_dim].

    Without a state, the chunk begins with the zero state.
    """
    groups, n, state_size = chunk.B.shape
    head_dim = chunk.x.shape[2]
    by_head = chunk.log_decay.t().contiguous()  # [heads, n]
    # [heads, t, s]: the factor of token s's x in the output at t >= s: its decay until t, its step and C_t B_s.
    weights = _decay(by_head.unsqueeze(2) - by_head.unsqueeze(1))
    scores = torch.bmm(chunk.C, chunk.B.transpose(1, 2))  # [groups, t, s]
    weights.view(groups, -1, n, n).mul_(scores.unsqueeze(1))
    weights.mul_(chunk.step.t().unsqueeze(1)).tril_()
    weights.diagonal(dim1=1, dim2=2).add_(D.unsqueeze(1))
    y = torch.bmm(weights, chunk.x.transpose(0, 1))  # [heads, n, head_dim]
    if state is None:
        out.copy_(y.transpose(0, 1))
        return
    carried = torch.bmm(chunk.C, state.reshape(groups, -1, state_size).transpose(1, 2))
    torch.addcmul(
        y.view(groups, -1, n, head_dim).permute(2, 0, 1, 3),
        carried.view(groups, n, -1, head_dim).transpose(0, 1),
        _decay(chunk.log_decay).view(n, groups, -1, 1),
        out=out.view(n, groups, -1, head_dim),
    )


def _advance(
    chunk: SsdChunk,
    state: torch.Tensor | None,
    slot: torch.Tensor,
    position: torch.Tensor,
    noise: int | None,
    packable: bool,
) -> torch.Tensor:
    """Write the state after the chunk's tokens to `slot` [heads, head_dim, state] and return it, rounded, in float32.

    The last token is at `position` [1]. `state` is the one before the chunk, which may be `slot` itself.
    """
    groups, n, state_size = chunk.B.shape
    new = slot if slot.dtype == torch.float32 and not packable else torch.empty_like(slot, dtype=torch.float32)
    by_group = new.view(groups, -1, state_size)
    remaining = _decay(chunk.log_decay[-1] - chunk.log_decay).mul_(chunk.step)  # From after token t to the end.
    weighted = (chunk.x * remaining.unsqueeze(-1)).view(n, groups, -1).permute(1, 2, 0)  # [groups, heads * dim, n]
    if state is None:
        torch.bmm(weighted, chunk.B, out=by_group)
    else:
        torch.mul(state, _decay(chunk.log_decay[-1]).view(-1, 1, 1), out=new)
        by_group.baddbmm_(weighted, chunk.B)
    if new is slot:
        return slot
    slot.copy_(rounded(new[None], slot.dtype, position, noise, packable)[0])
    return slot.float()


def _decay(log: torch.Tensor) -> torch.Tensor:
    """Return exp of `log` (float64) in float32, clamped since values above 0, which do not count, may overflow."""
    return log.float().clamp_(MIN_LOG_DECAY, 0.0).exp_()
