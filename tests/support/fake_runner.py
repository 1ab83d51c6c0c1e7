"""A runner without tensors, whose cache remembers what was written: a wrong block or slot gives wrong tokens.

Its model is a checksum: the next token depends on all earlier ones and their order, as they are found again
in the blocks and the slot of the request. What a block holds depends on all tokens before it too, as in a model.

Its drafts are the model's own tokens up to where it guesses wrong. What a wrong draft leaves behind, a key and a state
in the memory of its row, is as wrong as the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.kv_cache.prefix_index import IndexEntry, PrefixIndex
from ostinato.scheduler.batch import Batch, BatchRow, RowResult, StepResult, TokenLogprobs

VOCABULARY = 50

IMAGE = VOCABULARY
"""The token that stands for any part of any image."""
FIRST_PART = 1000
"""What the model takes for part i of image n is this * (1 + n) + i."""

Guess = Callable[[BatchRow], tuple[int, int]]
"""A row -> (drafts that are proposed for it, of which so many from the first on are right)."""


def checksum(token_ids: Sequence[int], seed: int = 0) -> int:
    for token_id in token_ids:
        seed = (seed * 1_000_003 + token_id + 1) % (2**61 - 1)
    return seed


def next_token(token_ids: Sequence[int]) -> int:
    """The token that the model gives after `token_ids`."""
    return checksum(token_ids) % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens after `prompt`, computed without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def any_guess(row: BatchRow) -> tuple[int, int]:
    """Seldom fewer drafts than the row may have, and any number of them right; the same for the same text."""
    chance = checksum([row.start, *map(ord, row.request_id), *row.token_ids])
    most = row.num_drafts
    num_drafts = most if chance % 4 else chance // 4 % (most + 1)
    return num_drafts, chance // 64 % (num_drafts + 1)


@dataclass
class FakeRunner:
    """Runs batches whose rows have the prompt as payload, if prompt log-probabilities are wanted."""

    block_size: int
    has_attention: bool = True
    has_state: bool = True
    guess: Guess = any_guess
    window: int | None = None
    """Positions that a token sees in layers whose keys are in window blocks; None: the model has none."""
    keys: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """(block, offset) -> (position, token, checksum of the tokens up to it)."""
    window_block_keys: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """The same for (window block, offset)."""
    cells: dict[int, int] = field(default_factory=dict)
    """Cell of the encoder cache -> part of an image."""
    states: dict[int, int] = field(default_factory=dict)
    """Slot -> checksum of the tokens so far."""
    copies: list[Any] = field(default_factory=list)
    """Contents of blocks and slots that were copied out of this memory."""
    packed_contents: Callable[[int], memoryview] | None = None
    """Place of a packed checkpoint -> its bytes."""

    def run(self, batch: Batch, broken: Collection[str] = ()) -> StepResult:
        """The results; rows of the requests in `broken` leave rubbish and an error."""
        self._check_writers(batch)
        self._encode(batch)
        return StepResult(
            tuple(self._break_row(row) if row.request_id in broken else self._run_row(row) for row in batch.rows)
        )

    def fail(self, batch: Batch) -> None:
        """Leave behind what a step that breaks down may leave: anything, wherever it may write."""
        self._check_writers(batch)
        for item in batch.images_to_encode:
            self.cells |= dict.fromkeys(item.cells, -1)
        for row in batch.rows:
            self._break_row(row)

    def _encode(self, batch: Batch) -> None:
        """What the encoder gives for the images of a batch. Nobody's cells but their own are written."""
        read = {cell: use for row in batch.rows for use in row.media for cell in use.cells}
        for item in batch.images_to_encode:
            for index, cell in enumerate(item.cells):
                assert cell > 0, "an image has the null cell"
                assert read[cell].cells == item.cells, "an image is encoded over another one that the step needs"
                self.cells[cell] = FIRST_PART * (1 + int(item.digest)) + index

    def tokens(self, row: BatchRow) -> list[int]:
        """What the model takes for a row's tokens: those that stand for images, as the encoder gave them."""
        found = list(row.token_ids)
        for use in row.media:
            assert use.start < row.end, "a row has an image of which it computes nothing"
            assert use.end > row.start, "a row has an image of which it computes nothing"
            assert len(use.cells) == use.end - use.start, "an image has not one cell for each of its tokens"
            for position in range(max(use.start, row.start), min(use.end, row.end)):
                assert row.token_ids[position - row.start] == IMAGE, "a token of text takes an image"
                found[position - row.start] = self.cells[use.cells[position - use.start]]
        assert IMAGE not in found, "a token that stands for an image has none"
        return found

    def written_blocks(self, row: BatchRow) -> tuple[int, ...]:
        """The blocks that a row writes to; all others of its table it only reads."""
        if not self.has_attention:
            return ()
        last = row.end + row.num_drafts - 1
        return row.block_table[row.start // self.block_size : last // self.block_size + 1]

    def written_window_blocks(self, row: BatchRow) -> tuple[int, ...]:
        if self.window is None:
            return ()
        last = row.end + row.num_drafts - 1
        return row.window_block_table[row.start // self.block_size : last // self.block_size + 1]

    def seen_before(self, row: BatchRow) -> range:
        """Positions before a row whose keys in window blocks its tokens see."""
        return range(row.start if self.window is None else max(0, row.start - self.window + 1), row.start)

    def written_slots(self, row: BatchRow) -> tuple[int, ...]:
        return (*row.write_slots, *(slot for _, slot in row.checkpoints)) if self.has_state else ()

    def check_writes(self, batch: Batch, index: PrefixIndex) -> None:
        """Raise AssertionError if a step writes to what the index has."""
        blocks = {entry.block for entry in index}
        slots = {checkpoint.slot for checkpoint in index.checkpoints}
        window_blocks = {window_block.id for window_block in index.window_blocks}
        for row in batch.rows:
            assert not window_blocks & set(self.written_window_blocks(row)), (
                "a row writes to a window block that is in the index"
            )
            assert not blocks & set(self.written_blocks(row)), "a row writes to a block that is in the index"
            assert not slots & set(self.written_slots(row)), "a row writes to a checkpoint"

    def check_reads(self, row: BatchRow, token_ids: Sequence[int]) -> None:
        """Raise AssertionError unless a row finds exactly the first `row.start` of its request's tokens."""
        seed = 0
        for position, token_id in enumerate(token_ids[: row.start]):
            seed = checksum([token_id], seed)
            if self.has_attention:
                found = self.keys.get(self._place(row, position))
                assert found == (position, token_id, seed), "a row reads a block of another text"
            if position in self.seen_before(row):
                found = self.window_block_keys.get(self._window_block_place(row, position))
                assert found == (position, token_id, seed), "a row reads a window block of another text"
        if self.has_state:
            assert (row.read_slot == 0) == (row.start == 0), "only a row that begins reads the zero state"
            assert row.start == 0 or self.states.get(row.read_slot) == seed, "a row reads the state of another text"
        else:
            assert row.read_slot == 0, "a row reads a slot, and the model has no state layers"

    def check_index(self, index: PrefixIndex) -> None:
        """Raise AssertionError unless blocks and checkpoints hold the texts for which the index has them."""
        sums: dict[IndexEntry | None, int] = {None: 0}
        # Whatever order the index has them in, parents come first.
        for entry in sorted(index, key=lambda each: each.end):
            if entry.parent not in sums or entry.digests:
                continue  # its tokens do not tell what stands there
            seed = sums[entry.parent]
            start = entry.end - len(entry.token_ids)
            for offset, token_id in enumerate(entry.token_ids):
                seed = checksum([token_id], seed)
                if self.has_attention:
                    found = self.keys.get((entry.block, offset))
                    assert found == (start + offset, token_id, seed), "a block of the index holds another text"
                if entry.window_block is not None:
                    found = self.window_block_keys.get((entry.window_block.id, offset))
                    assert found == (start + offset, token_id, seed), "a window block of the index holds another text"
            sums[entry] = seed
            if entry.checkpoint is not None:
                slot = entry.checkpoint.slot
                if slot < 0:
                    assert self.packed_contents is not None, "a checkpoint is packed without memory"
                    state = self.copies[int.from_bytes(self.packed_contents(-slot), "little")]
                else:
                    state = self.states.get(slot)
                assert state == seed, "a checkpoint holds the state of another text"

    def _place(self, row: BatchRow, position: int) -> tuple[int, int]:
        return row.block_table[position // self.block_size], position % self.block_size

    def _window_block_place(self, row: BatchRow, position: int) -> tuple[int, int]:
        window_block = row.window_block_table[position // self.block_size]
        assert window_block > 0, "a row lacks a window block that it sees"
        return window_block, position % self.block_size

    def _check_writers(self, batch: Batch) -> None:
        """Rows have memory for all that they may write, and nobody else reads or writes it in this step."""
        for index, row in enumerate(batch.rows):
            others = [other for other in batch.rows if other is not row]
            most = batch.num_drafts if index < batch.num_decode_rows else 0
            assert 0 <= row.num_drafts <= most, "a row may have more drafts than the batch gives it"
            if self.has_attention:
                end = row.end + row.num_drafts
                assert len(row.block_table) * self.block_size >= end, "a row has too few blocks"
                assert 0 not in row.block_table, "a row has the null block"
                assert len(set(row.block_table)) == len(row.block_table), "a row has a block twice"
                used = {block for other in others for block in other.block_table}
                assert not used & set(self.written_blocks(row)), "a row writes to a block that another row has"
            else:
                assert not row.block_table, "a row has blocks, and the model has no attention"
            if self.window is not None:
                first, end = (row.start - self.window + 1) // self.block_size, row.end + row.num_drafts
                held = row.window_block_table[max(0, first) :]
                assert len(row.window_block_table) * self.block_size >= end, "a row has too few window blocks"
                assert 0 not in held, "a row has the null window block"
                assert len(set(held)) == len(held), "a row has a window block twice"
                used = {window_block for other in others for window_block in other.window_block_table}
                assert not used & set(self.written_window_blocks(row)), (
                    "a row writes to a window block that another row has"
                )
            else:
                assert not row.window_block_table, "a row has window blocks, and the model has no windows"
            if self.has_state:
                assert len(row.write_slots) == 1 + row.num_drafts, "a row has not one slot for each of its tokens"
                written = self.written_slots(row)
                used = {slot for other in others for slot in (other.read_slot, *self.written_slots(other))}
                assert 0 not in written, "a row writes to the null slot"
                assert len(set(written)) == len(written), "a row writes twice to one slot"
                assert not used & set(written), "a row writes to a slot that another row reads or writes"
                reserved = [slot for _, slot in row.checkpoints]
                assert row.read_slot not in reserved, "a row writes a checkpoint over what it reads"
                positions = [position for position, _ in row.checkpoints]
                assert positions == sorted(set(positions)), "the checkpoints of a row are not in order"
                assert all(row.start < each < row.end for each in positions), "a checkpoint outside of its row"
            else:
                assert row.write_slots == (0,), "a row has a slot, and the model has no state layers"
                assert not row.checkpoints, "a row takes a checkpoint, and the model has no state layers"

    def _run_row(self, row: BatchRow) -> RowResult:
        num_drafts, num_right = self.guess(row)
        assert 0 <= num_right <= num_drafts <= row.num_drafts, "more drafts than the row may have"
        assert row.num_logits >= row.samples * (1 + row.num_drafts), "a row samples without logits"
        token_ids, seed = self.tokens(row), self._read(row)
        sums = []
        for index in range(len(row.token_ids) + num_drafts):
            if index >= len(row.token_ids):
                is_wrong = index - len(row.token_ids) == num_right
                token_ids.append((seed + is_wrong) % VOCABULARY)
            seed = checksum([token_ids[index]], seed)
            sums.append(seed)
        self._write(row, token_ids, sums)
        # What the model gives behind the last known token and behind each draft, up to the first wrong one.
        targets = tuple(seed % VOCABULARY for seed in sums[len(row.token_ids) - 1 :])
        accepted = targets[: num_right + 1] if row.samples else ()
        return RowResult(row.request_id, accepted, None, self._prompt_logprobs(row), num_drafts=num_drafts)

    def _read(self, row: BatchRow) -> int:
        """The checksum of the text before a row, as its blocks and its slot have it."""
        sums = []
        if self.has_attention:
            found = [self.keys[self._place(row, position)] for position in range(row.start)]
            assert [position for position, _, _ in found] == list(range(row.start)), "a block holds another position"
            sums.append(checksum([token_id for _, token_id, _ in found]))
            assert not found or found[-1][2] == sums[0], "the blocks of a row are not those of one text"
        if self.window is not None:
            found = [
                self.window_block_keys[self._window_block_place(row, position)] for position in self.seen_before(row)
            ]
            assert [position for position, _, _ in found] == list(self.seen_before(row)), (
                "a window block holds another position"
            )
            # With a window of 1, window blocks tell a row nothing of the text before it.
            sums += [found[-1][2]] if found else [0] if row.start == 0 else []
        if self.has_state:
            sums.append(0 if row.read_slot == 0 else self.states[row.read_slot])
        assert len(set(sums)) == 1, "blocks, window blocks and slot tell of different tokens"
        return sums[0]

    def _write(self, row: BatchRow, token_ids: Sequence[int], sums: Sequence[int]) -> None:
        """Keep what a row's tokens and its drafts give; `sums` are of the text up to each of them."""
        if self.has_attention:
            for position, (token_id, seed) in enumerate(zip(token_ids, sums, strict=True), start=row.start):
                self.keys[self._place(row, position)] = (position, token_id, seed)
        if self.window is not None:
            for position, (token_id, seed) in enumerate(zip(token_ids, sums, strict=True), start=row.start):
                self.window_block_keys[self._window_block_place(row, position)] = (position, token_id, seed)
        if self.has_state:
            for position, slot in row.checkpoints:
                self.states[slot] = sums[position - row.start - 1]
            # A row that got fewer drafts than it might leaves its last slots as they are.
            for slot, seed in zip(row.write_slots, sums[len(row.token_ids) - 1 :], strict=False):
                self.states[slot] = seed

    def _break_row(self, row: BatchRow) -> RowResult:
        if self.has_attention:
            for position in range(row.start, row.end + row.num_drafts):
                self.keys[self._place(row, position)] = (-1, -1, -1)
        if self.window is not None:
            for position in range(row.start, row.end + row.num_drafts):
                self.window_block_keys[self._window_block_place(row, position)] = (-1, -1, -1)
        for slot in self.written_slots(row):
            self.states[slot] = -1
        return RowResult(row.request_id, error=ValueError("the row broke down"))

    def _prompt_logprobs(self, row: BatchRow) -> tuple[TokenLogprobs, ...]:
        prompt = row.sampling_state
        if prompt is None:
            return ()
        positions = range(row.end + row.num_drafts - row.num_logits, row.end)
        return tuple(TokenLogprobs(prompt[p + 1], -1.0, 1) for p in positions if p + 1 < len(prompt))
