"""The recurrence of Mamba-2 (state_update, ssd_scan) against its definition, as loops in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.reference import ssd
from tests.support.examples import examples

few = examples(25)
seeds = st.integers(0, 2**31)

NAN = float("nan")
FLOAT32 = {"atol": 1e-4, "rtol": 1e-4}
NO_LIMIT = (0.0, math.inf)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def row_starts(lengths: list[int]) -> torch.Tensor:
    return int32(0, *torch.tensor(lengths).cumsum(0).tolist())


def same(given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, NaN being equal to NaN."""
    return torch.equal(given.nan_to_num(1e30), expected.nan_to_num(1e30))


# The recurrence


@dataclass
class Recurrence:
    """Inputs of the Mamba-2 recurrence for some tokens, as the kernels take them."""

    x: torch.Tensor
    dt: torch.Tensor
    A_log: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    dt_limit: tuple[float, float]

    def tokens(self, begin: int, end: int) -> tuple[Any, ...]:
        """The kernels' first eight arguments for a part of the tokens."""
        part = slice(begin, end)
        per_head = (self.D, self.dt_bias, self.dt_limit)
        return (self.x[part], self.dt[part], self.A_log, self.B[part], self.C[part], *per_head)

    def follow(
        self,
        begin: int,
        end: int,
        state: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Outputs of tokens `begin` to `end - 1` after `state`, and the state after each, kept in `dtype`."""
        heads, head_dim = self.x.shape[1:]
        groups, size = self.B.shape[1:]
        h = torch.zeros(heads, head_dim, size, dtype=torch.float64) if state is None else state.double()
        out, states = [], []
        for t in range(begin, end):
            y = torch.zeros(heads, head_dim, dtype=torch.float64)
            new = torch.zeros_like(h)
            for head in range(heads):
                group = head // (heads // groups)
                raw = float(self.dt[t, head]) + float(self.dt_bias[head])
                step = min(max(math.log1p(math.exp(raw)), self.dt_limit[0]), self.dt_limit[1])
                for p in range(head_dim):
                    added = step * float(self.x[t, head, p]) * self.B[t, group].double()
                    new[head, p] = math.exp(-step * math.exp(float(self.A_log[head]))) * h[head, p] + added
                    y[head, p] = new[head, p] @ self.C[t, group].double()
                    y[head, p] += float(self.D[head]) * float(self.x[t, head, p])
            h = new.to(dtype).double()
            out.append(y)
            states.append(h)
        return torch.stack(out), states


def recurrence(
    tokens: int,
    groups: int,
    heads_per_group: int,
    seed: int,
    dt_limit: tuple[float, float] = NO_LIMIT,
    head_dim: int = 3,
    size: int = 4,
) -> Recurrence:
    generator = torch.Generator().manual_seed(seed)
    heads = groups * heads_per_group
    return Recurrence(
        normal(generator, tokens, heads, head_dim),
        normal(generator, tokens, heads),
        normal(generator, heads),
        normal(generator, tokens, groups, size),
        normal(generator, tokens, groups, size),
        normal(generator, heads),
        normal(generator, heads) - 1,
        dt_limit,
    )


def slots_of(case: Recurrence, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`count` slots, all NaN."""
    return torch.full((count, *case.x.shape[1:], case.B.shape[-1]), NAN, dtype=dtype)


# state_update


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["_row_by_row", "_gathered"])
@few
@given(
    pasts=st.lists(st.booleans(), min_size=1, max_size=4),
    per_row=st.integers(1, 3),
    groups=st.integers(1, 3),
    heads_per_group=st.integers(1, 2),
    in_place=st.booleans(),
    dt_limit=st.sampled_from([NO_LIMIT, (0.2, 0.7)]),
    seed=seeds,
)
def test_state_update_follows_the_recurrence_from_read_slot_to_write_slots(
    dtype: torch.dtype,
    form: str,
    pasts: list[bool],
    per_row: int,
    groups: int,
    heads_per_group: int,
    in_place: bool,
    dt_limit: tuple[float, float],
    seed: int,
) -> None:
    """A row without a past reads slot 0, which is NaN. A read slot that is not written keeps its bits."""
    case = recurrence(len(pasts) * per_row, groups, heads_per_group, seed, dt_limit)
    generator = torch.Generator().manual_seed(seed)
    slots = iter((torch.randperm(4 * len(pasts), generator=generator) + 1).tolist())
    states = slots_of(case, 4 * len(pasts) + 1, dtype)
    reads, writes = [], []
    for past in pasts:
        own = [next(slots) for _ in range(per_row)]
        writes.append(own)
        reads.append((own[0] if in_place else next(slots)) if past else 0)
        if past:
            states[reads[-1]] = normal(generator, *states.shape[1:]).to(dtype)
    before = states.clone()
    out = run_form(form, case, states, int32(*reads), int32(*writes))
    written = {slot for own in writes for slot in own}
    # A state in bfloat16 may round to the other side of a tie, and what follows it.
    tolerance = FLOAT32 if dtype is torch.float32 else {"atol": 3e-2, "rtol": 2e-2}
    for row, (read, own) in enumerate(zip(reads, writes, strict=True)):
        begin, end = row * per_row, (row + 1) * per_row
        expected, after = case.follow(begin, end, before[read] if read else None, dtype)
        torch.testing.assert_close(out[begin:end].double(), expected, **tolerance)
        for slot, state in zip(own, after, strict=True):
            torch.testing.assert_close(states[slot].double(), state, **tolerance)
    untouched = [slot for slot in range(len(states)) if slot not in written]
    assert same(states[untouched].float(), before[untouched].float())


def run_form(
    form: str, case: Recurrence, states: torch.Tensor, reads: torch.Tensor, writes: torch.Tensor
) -> torch.Tensor:
    """`_row_by_row` is what the kernel does on a CPU; `_gathered`, for other devices, must do the same here."""
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        if form == "_gathered":
            context.setattr(ssd, "_row_by_row", ssd._gathered)
        return ssd.state_update(*case.tokens(0, len(case.x)), states, reads, writes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_of_the_update_agree(dtype: torch.dtype) -> None:
    """Also in what they round to the state's dtype between the tokens of a row."""
    case = recurrence(12, 2, 2, seed=4)
    by_row, gathered = slots_of(case, 14, dtype), slots_of(case, 14, dtype)
    by_row[13] = gathered[13] = 0.7
    reads, writes = int32(13, 0, 7), int32([1, 2, 3, 4], [5, 6, 8, 9], [7, 10, 11, 12])
    by_row[7] = gathered[7] = -0.3
    outputs = [
        run_form("_row_by_row", case, by_row, reads, writes),
        run_form("_gathered", case, gathered, reads, writes),
    ]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_row, gathered, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_padding_rows_of_a_decode_step_disturb_nobody() -> None:
    """Rows of padding read and write slot 0, which is NaN, between rows that count."""
    case = recurrence(4, 2, 2, seed=3)
    states = slots_of(case, 3)
    states[1] = 1.0
    out = ssd.state_update(*case.tokens(0, 4), states, int32(0, 1, 0, 0), int32([0], [1], [0], [2]))
    expected, [state] = case.follow(1, 2, torch.ones_like(states[1]))
    torch.testing.assert_close(out[1:2].double(), expected, **FLOAT32)
    torch.testing.assert_close(states[1].double(), state, **FLOAT32)
    assert out.isfinite().all()
    assert states[2].isfinite().all()


# ssd_scan


def scan(
    case: Recurrence,
    states: torch.Tensor,
    spans: list[tuple[int, int]],
    positions: list[int],
    reads: list[int],
    writes: list[int],
    chunk_size: int,
    checkpoints: list[tuple[int, int, int]] | None = None,
) -> torch.Tensor:
    """Rows on adjacent spans of the tokens of `case`."""
    return ssd.ssd_scan(
        *case.tokens(spans[0][0], spans[-1][1]),
        chunk_size,
        states,
        row_starts([end - begin for begin, end in spans]),
        int32(*positions),
        int32(*reads),
        int32(*writes),
        checkpoints or [],
    )


@few
@given(
    rows=st.lists(st.tuples(st.integers(0, 21), st.integers(0, 20)), min_size=1, max_size=3),
    chunk_size=st.sampled_from([1, 4, 12, 16]),
    longest=st.sampled_from([4, 64]),
    groups=st.integers(1, 3),
    heads_per_group=st.integers(1, 2),
    dt_limit=st.sampled_from([NO_LIMIT, (0.2, 0.7)]),
    seed=seeds,
)
def test_the_scan_equals_the_recurrence_from_any_position(
    rows: list[tuple[int, int]],
    chunk_size: int,
    longest: int,
    groups: int,
    heads_per_group: int,
    dt_limit: tuple[float, float],
    seed: int,
) -> None:
    """`rows` are (position of the first token, tokens). A row leaves checkpoints at a third and two thirds, off and
    on the multiples of the chunk size, and at its end; one without tokens writes nothing; slot 0 and all unwritten
    slots are NaN. Chunks longer than `longest` are computed as several."""
    spans, total = [], 0
    for _, length in rows:
        spans.append((total, total + length))
        total += length
    if total == 0:
        return
    case = recurrence(total, groups, heads_per_group, seed, dt_limit)
    states = slots_of(case, 5 * len(rows) + 1)
    reads, writes, checkpoints = [], [], []
    for row, (position, length) in enumerate(rows):
        reads.append(5 * row + 1 if position else 0)
        writes.append(5 * row + 2)
        if position:
            states[reads[-1]] = normal(torch.Generator().manual_seed(seed + row), *states.shape[1:])
        at = sorted({length // 3, 2 * length // 3, length} - {0})
        checkpoints += [(row, offset, 5 * row + 3 + i) for i, offset in enumerate(at)]
    before = states.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssd, "MAX_CHUNK", longest)
        out = scan(case, states, spans, [position for position, _ in rows], reads, writes, chunk_size, checkpoints)
    written = {slot for *_, slot in checkpoints}
    for row, (begin, end) in enumerate(spans):
        if begin == end:
            continue
        expected, after = case.follow(begin, end, before[reads[row]] if reads[row] else None)
        torch.testing.assert_close(out[begin:end].double(), expected, **FLOAT32)
        torch.testing.assert_close(states[writes[row]].double(), after[-1], **FLOAT32)
        written.add(writes[row])
        for of_row, offset, slot in checkpoints:
            if of_row == row:
                torch.testing.assert_close(states[slot].double(), after[offset - 1], **FLOAT32)
    untouched = [slot for slot in range(len(states)) if slot not in written]
    assert same(states[untouched], before[untouched])


@few
@given(st.integers(0, 20), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 2), seeds)
def test_the_scan_of_a_cut_prompt_is_bit_equal_if_the_cuts_are_multiples_of_the_chunk_size(
    first: int, chunks_per_part: list[int], groups: int, seed: int
) -> None:
    """Also if the first token, at position `first`, is none: it is the positions that count."""
    chunk_size, cuts = 8, [first // 8 * 8]
    for chunks in chunks_per_part:
        cuts.append(cuts[-1] + chunks * chunk_size)
    total = cuts[-1] + 5 - first
    case = recurrence(total, groups, 2, seed)
    whole_states, states = slots_of(case, 2), slots_of(case, 2)
    if first:
        whole_states[1] = states[1] = normal(torch.Generator().manual_seed(seed), *states.shape[1:])
    whole = scan(case, whole_states, [(0, total)], [first], [1 if first else 0], [1], chunk_size)
    parts, begin = [], 0
    for end in [*(cut - first for cut in cuts[1:]), total]:
        position = first + begin
        parts.append(scan(case, states, [(begin, end)], [position], [1 if position else 0], [1], chunk_size))
        begin = end
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(states[1], whole_states[1])


@few
@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), seeds)
def test_the_scan_and_the_update_continue_each_other_wherever_a_prompt_is_cut(lengths: list[int], seed: int) -> None:
    """Parts of one token are decode rows."""
    case = recurrence(sum(lengths), 2, 2, seed)
    states, parts, begin = slots_of(case, 2), [], 0
    for length in lengths:
        read, end = (1 if begin else 0), begin + length
        if length == 1:
            part = ssd.state_update(*case.tokens(begin, end), states, int32(read), int32([1]))
        else:
            part = scan(case, states, [(begin, end)], [begin], [read], [1], 8)
        parts.append(part)
        begin = end
    expected, after = case.follow(0, begin)
    torch.testing.assert_close(torch.cat(parts).double(), expected, **FLOAT32)
    torch.testing.assert_close(states[1].double(), after[-1], **FLOAT32)


def test_a_checkpoint_on_a_multiple_of_the_chunk_size_is_the_state_that_a_cut_there_leaves() -> None:
    """Bit for bit, so that a request that starts at the checkpoint goes on as the first one did."""
    case = recurrence(40, 2, 2, seed=5)
    states, cut = slots_of(case, 3), slots_of(case, 2)
    scan(case, states, [(0, 40)], [0], [0], [1], 8, [(0, 24, 2)])
    scan(case, cut, [(0, 24)], [0], [0], [1], 8)
    assert torch.equal(states[2], cut[1])


def inputs_of_a_real_model(tokens: int, seed: int) -> Recurrence:
    """Sizes at which products are blocked and made by several threads; inputs in bfloat16, decays mild and strong."""
    case = recurrence(tokens, 4, 4, seed, head_dim=64, size=128)
    case.A_log = torch.linspace(1, 16, 16).log()
    case.x, case.dt, case.B, case.C = (t.bfloat16() for t in (case.x, case.dt, case.B, case.C))
    return case


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_of_the_scan_has_the_same_bits_in_any_batch_and_with_any_checkpoints(threads: int) -> None:
    lengths, positions = [300, 128, 37, 200, 16], [0, 256, 0, 112, 480]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    case = inputs_of_a_real_model(ends[-1], seed=8)
    rows = range(len(lengths))
    together = slots_of(case, 16)
    together[1:6] = normal(torch.Generator().manual_seed(9), *together[1:6].shape)
    before = together.clone()
    reads = [row + 1 if positions[row] else 0 for row in rows]
    checkpoints = [(0, 128, 11), (0, 288, 12), (1, 128, 13), (3, 16, 14), (3, 100, 15)]
    with given_threads(threads):
        out = scan(case, together, spans, positions, reads, [row + 6 for row in rows], 128, checkpoints)
        for row in rows:
            alone = before.clone()
            given = scan(case, alone, [spans[row]], [positions[row]], [reads[row]], [row + 1], 128)
            assert torch.equal(given, out[slice(*spans[row])])
            assert torch.equal(alone[row + 1], together[row + 6])
    assert torch.equal(together[13], together[7])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_prompt_that_goes_on_from_a_checkpoint_on_a_multiple_of_the_chunk_size_has_the_same_bits(
    threads: int,
) -> None:
    """Also where the model's chunks are computed as several."""
    case = inputs_of_a_real_model(500, seed=10)
    states = slots_of(case, 6)
    with given_threads(threads):
        whole = scan(case, states, [(0, 500)], [0], [0], [1], 128, [(0, 128, 2), (0, 384, 3)])
        for position, slot in ((128, 2), (384, 3)):
            taken = states[slot].clone()
            rest = scan(case, states, [(position, 500)], [position], [slot], [4], 128)
            assert torch.equal(rest, whole[position:])
            assert torch.equal(states[4], states[1])
            assert torch.equal(states[slot], taken)
            begin = scan(case, states, [(0, position)], [0], [0], [5], 128)
            assert torch.equal(begin, whole[:position])
            assert torch.equal(states[5], taken)


@contextmanager
def given_threads(count: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize(
    ("chunk_size", "length"), [(1, 1), (16, 16), (64, 64), (96, 48), (100, 50), (128, 64), (256, 64)]
)
def test_a_chunk_of_the_model_is_computed_as_equal_chunks(chunk_size: int, length: int) -> None:
    assert ssd.chunk_length(chunk_size, 64) == length


def test_a_state_in_bfloat16_is_rounded_after_each_whole_chunk_and_where_it_is_written() -> None:
    """After a checkpoint inside a chunk the scan goes on with what was not rounded."""
    case = recurrence(20, 1, 2, seed=6)
    states = slots_of(case, 6, torch.bfloat16)
    out = scan(case, states, [(0, 20)], [0], [0], [1], 8, [(0, 8, 2), (0, 11, 3), (0, 16, 4), (0, 20, 5)])
    before = None
    for begin, end, slot in ((0, 8, 2), (8, 16, 4), (16, 20, 5)):
        expected, after = case.follow(begin, end, before)
        torch.testing.assert_close(out[begin:end].double(), expected, **FLOAT32)
        torch.testing.assert_close(states[slot].double(), after[-1], atol=1e-5, rtol=2**-8)
        if slot == 4:
            torch.testing.assert_close(states[3].double(), after[2], atol=1e-5, rtol=2**-8)
        before = states[slot]
    assert torch.equal(states[1], states[5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_in_16_bits_is_the_same_wherever_a_prompt_is_cut_at_chunks(dtype: torch.dtype) -> None:
    """With the noise of positions, in the bits of a prompt that is not cut."""
    case = recurrence(40, 1, 2, seed=9)
    slots = (int32(0), int32(1))
    whole, states = slots_of(case, 2, dtype), slots_of(case, 2, dtype)
    of_whole = (int32(0, 40), int32(0))
    out = ssd.ssd_scan(*case.tokens(0, 40), 48, whole, *of_whole, *slots, noise=5)
    first = ssd.ssd_scan(*case.tokens(0, 16), 48, states, int32(0, 16), int32(0), *slots, noise=5)
    rest = ssd.ssd_scan(*case.tokens(16, 40), 48, states, int32(0, 24), int32(16), int32(1), int32(1), noise=5)
    assert torch.equal(torch.cat((first, rest)), out)
    assert torch.equal(states[1], whole[1])


@few
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 2), seeds)
def test_a_recurrent_scan_has_the_bits_of_the_update_wherever_a_prompt_is_cut(
    lengths: list[int], groups: int, seed: int
) -> None:
    """Each part leaves checkpoints inside and at its end."""
    total = sum(lengths)
    case = recurrence(total, groups, 2, seed)
    states, decoded, at = slots_of(case, 4), slots_of(case, total + 2), 0
    for length in lengths:
        part = ssd.ssd_scan(
            *(
                *case.tokens(at, at + length),
                8,
                states,
                row_starts([length]),
                int32(at),
                int32(1 if at else 0),
                int32(1),
            ),
            *([(0, length // 2, 2), (0, length, 3)], True),
        )
        for token in range(at, at + length):
            slots = (int32(token + 1 if token else 0), int32([token + 2]))
            expected = ssd.state_update(*case.tokens(token, token + 1), decoded, *slots)
            assert torch.equal(part[token - at : token - at + 1], expected)
        at += length
        if length > 1:
            assert torch.equal(states[2], decoded[at + 1 - length + length // 2])
        if length:
            assert torch.equal(states[1], decoded[at + 1])
            assert torch.equal(states[3], decoded[at + 1])


def test_large_decays_neither_overflow_nor_forget_the_newest_token() -> None:
    """A sum of logarithms far below the range of exp, as A of -16 and large time steps give."""
    case = recurrence(64, 1, 1, seed=7)
    case.A_log = torch.tensor([16.0]).log()
    case.dt = case.dt + 3
    states = slots_of(case, 2)
    out = scan(case, states, [(0, 64)], [0], [0], [1], 32)
    expected, after = case.follow(0, 64)
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(states[1].double(), after[-1], atol=1e-3, rtol=1e-3)


def test_decays_too_small_to_count_stay_clear_of_denormal_numbers() -> None:
    """Products with denormal numbers are slow; in a sum in float32 they are as good as none."""
    logs = torch.tensor([0.0, -1.0, -30.0, -90.0, -1e4, -math.inf], dtype=torch.float64)
    decays = ssd._decay(logs)
    torch.testing.assert_close(decays.double(), logs.exp(), atol=1e-25, rtol=1e-6)
    assert (decays > 1e10 * torch.finfo(torch.float32).tiny).all()


def test_no_state_of_a_scan_with_strong_decays_is_denormal() -> None:
    """Only the first token adds to the state, which after six is e^-95 of that."""
    case = recurrence(64, 1, 1, seed=11, dt_limit=(1.1875, 1.1875))
    case.A_log = torch.tensor([16.0]).log()
    case.x[1:] = 0
    states = slots_of(case, 3)
    scan(case, states, [(0, 64)], [0], [0], [1], 64, [(0, 6, 2)])
    tiny = torch.finfo(torch.float32).tiny
    assert ((states[1:] == 0) | (states[1:].abs() >= tiny)).all()
