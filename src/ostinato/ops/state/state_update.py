"""state_update: the Mamba-2 recurrence for decode rows, token by token, from read slot to write slots.

h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,  y_t = h_t C_t + D x_t,  dt_t = softplus(dt_raw + dt_bias)
(Dao and Gu 2024, arXiv 2405.21060, sections 2 and 6: A is one scalar per head.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ostinato.ops.state.rounding import rounded


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
) -> torch.Tensor:
    """Compute the Mamba-2 recurrence of decode rows.

    Row r's tokens are `r * n` to `r * n + n - 1`, n being `write_slots.shape[1]`. `x` [rows * n, heads, head_dim]; `dt`
    [rows * n, heads] before bias and softplus; `A_log`, `D`, `dt_bias` [heads] float32, A being -exp(A_log); `B`, `C`
    [rows * n, groups, state]; `ssm_states` [slots, heads, head_dim, state]; `read_slots` [rows], 0 being the zero
    state; `write_slots` [rows, n], for the state after token i. -> [rows * n, heads, head_dim] in the dtype of `x`. All
    arithmetic is in float32. Padding rows read and write slot 0, which no request reads, and cost nothing on a CPU.

    After each token a state is rounded to the dtype of `ssm_states`, and the next token begins with the rounded state.
    With `noise`, the number of the layer, 16-bit states are rounded stochastically (`ops/state/rounding.py`): a row's
    first token is at `start_positions` [rows].
    """
    step = time_steps(dt, dt_bias, dt_limit)
    decay = torch.exp(step * -A_log.exp())
    scaled = step.unsqueeze(-1) * x.float()
    update = _gathered if x.is_cuda else _row_by_row
    inputs = (decay, scaled, B.float(), C.float())
    y = update(*inputs, ssm_states, read_slots, write_slots, start_positions, noise)
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
) -> torch.Tensor:
    """Update each state in place: it is read once and written once, while it stays in the core's cache."""
    heads, head_dim, state_size = ssm_states.shape[1:]
    tokens, groups = B.shape[:2]
    in_place = ssm_states.dtype == torch.float32
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
                target.copy_(rounded(state[None], target.dtype, position, noise)[0])
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
) -> torch.Tensor:
    """Update all rows at once, without reading a value on the host.

    It is for devices on which a call costs more than a copy.
    """
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
        kept = rounded(state, ssm_states.dtype, position, noise)
        ssm_states[write_slots[:, i]] = kept
        state = kept.float()
    return torch.stack(outputs, dim=1).flatten(0, 1)
