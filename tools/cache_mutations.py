"""Ways to break the prefix cache, and what `ostinato verify` compares, for mutate_cache.py.

A text that is edited stands exactly once in its file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`edits` are (text that stands once in `path`, what takes its place).

    With `verify`, arguments of `ostinato verify --quick`, that command must find it, in place of the tests.
    """

    what: str
    path: str
    edits: tuple[tuple[str, str], ...]
    verify: tuple[str, ...] = ()


def mutation(what: str, path: str, *edits: tuple[str, str], verify: tuple[str, ...] = ()) -> Mutation:
    return Mutation(what, path, edits, verify)


MUTATIONS = (
    # Prefix LMs.
    mutation(
        "a prefix LM's prompt finds the blocks of another one that begins alike",
        "scheduler/prefill.py",
        ("if policy.whole_prompts else request.media", "if False else request.media"),
    ),
    mutation(
        "a chunk cuts a prefix LM's prompt",
        "scheduler/prefill.py",
        (" or budget < whole_prompt_end(request, limits) - start", ""),
        ("        if end < whole_prompt_end(request, self._limits):\n            return None\n", ""),
    ),
    # Packed checkpoints.
    mutation(
        "a packed checkpoint is not kept while a request that hits it takes its slots",
        "kv_cache/store.py",
        ("        self.packed.retain((id,))\n", "        pass\n"),
        ("        self.counters.unpacked_checkpoints += 1\n        self.packed.release((id,))\n", ""),
    ),
    mutation(
        "a request whose checkpoint is packed continues without its state",
        "kv_cache/state_slots.py",
        (
            "            self._store.unpack(-request_cache.read_slot, request_cache.write_slots[0])\n",
            "            self._store.packed.release((-request_cache.read_slot,))\n",
        ),
    ),
    mutation(
        "a request that finds no memory keeps its reference to a packed checkpoint",
        "kv_cache/state_slots.py",
        ("            self._store.packed.release((-request_cache.read_slot,))\n", ""),
    ),
    mutation(
        "a slot is given away before its checkpoint is packed",
        "kv_cache/store.py",
        (
            "        self.packed_states.pack(self.memory, checkpoint.slot, id)\n",
            "        self.packed_states.pack(self.memory, 1, id)\n",
        ),
    ),
    mutation(
        "a packed checkpoint that is evicted keeps its place",
        "kv_cache/store.py",
        ("            self.packed.unmark_cached(-checkpoint.slot)\n", "            pass\n"),
    ),
    mutation(
        "a checkpoint that no request has hit inside a prompt displaces a packed one",
        "kv_cache/store.py",
        ("            if utility_tier(checkpoint) < utility_tier(other):\n", "            if False:\n"),
    ),
    mutation(
        "a packed checkpoint goes to a file as what lies in another slot",
        "kv_cache/store.py",
        ("        packed = self._contents(checkpoint) if checkpoint.slot < 0 else None\n", "        packed = None\n"),
    ),
    # Marks: checkpoints where the application wants them, pinned.
    mutation(
        "no checkpoint is written out at a mark inside a chunk",
        "kv_cache/checkpoints.py",
        (
            "(self.last, self.branch, *self.marks) if start < position < end}",
            "(self.last, self.branch) if start < position < end}",
        ),
    ),
    mutation(
        "a chunk is not cut at a mark",
        "kv_cache/checkpoints.py",
        ("for cut in (self.last, self.branch, *self.marks):", "for cut in (self.last, self.branch):"),
    ),
    mutation(
        "a mark is pinned though its checkpoint was not taken",
        "kv_cache/checkpoints.py",
        ("if entry is not None and store.can_hit(entry) and store.pins", "if entry is not None and store.pins"),
    ),
    mutation(
        "a pinned checkpoint at a prompt's end is given up when decoding goes on",
        "kv_cache/checkpoints.py",
        ("checkpoint.hits == 0 and checkpoint.entry.pin is None:", "checkpoint.hits == 0:"),
    ),
    mutation(
        "a pinned checkpoint is evicted like any other",
        "kv_cache/eviction.py",
        ("else item.entry.pin is not None:", "else False:"),
    ),
    mutation(
        "a pinned window block is evicted like any other",
        "kv_cache/eviction.py",
        ("if item.entry.num_windows_pinned if isinstance", "if False if isinstance"),
    ),
    mutation(
        "the last block before a mark is evicted like any other in a model without state",
        "kv_cache/eviction.py",
        ("tier = 1 if entry.pin is None else PINNED_TIER", "tier = 1"),
    ),
    mutation(
        "what was ranked before it was pinned keeps its old rank",
        "kv_cache/eviction.py",
        ("worth.last_use == last_use and worth.tier == score[0]", "worth.last_use == last_use"),
    ),
    mutation(
        "what is pinned is evicted though something unpinned waits for the next look",
        "kv_cache/eviction.py",
        ("while self._heap and (has_ranked or self._heap[0][0][0] < PINNED_TIER):", "while self._heap:"),
    ),
    mutation(
        "pinned slots count as slots for new checkpoints",
        "kv_cache/store.py",
        ("        if not self.pins.pinned or self.packed.count:\n", "        if True:\n"),
    ),
    mutation(
        "a pin outlives its checkpoint",
        "kv_cache/store.py",
        ("            self.pins.lose(checkpoint.entry)\n", "            pass\n"),
    ),
    mutation(
        "a pin outlives its block",
        "kv_cache/store.py",
        ("            self.pins.lose(entry)\n", "            pass\n"),
    ),
    mutation(
        "a pin never ends",
        "kv_cache/marks.py",
        ("if pin.end <= self.time]:", "if pin.end < 0]:"),
    ),
    mutation(
        "a hit does not let a pin's time begin anew",
        "kv_cache/manager.py",
        ("            self.store.pins.refresh(request_cache.last_entry)\n", "            pass\n"),
    ),
    mutation(
        "a client may take the pins of clients with no more",
        "kv_cache/marks.py",
        ("key=lambda each: (counts[each], each == client)", "key=lambda each: (counts[each], each != client)"),
    ),
    mutation(
        "blocks of pinned prefixes are not bounded",
        "kv_cache/marks.py",
        (" or num_blocks > self.max_blocks:", ":"),
    ),
    mutation(
        "a refused pin takes those of others all the same",
        "kv_cache/marks.py",
        ("            if not ends:\n", "            if not ends:\n                list(map(self.lose, displaced))\n"),
    ),
    mutation(
        "another client lengthens the time of a pin",
        "kv_cache/marks.py",
        ("            if pin.client == client:\n", "            if True:\n"),
    ),
    mutation(
        "the pins that a reset ends are not counted",
        "kv_cache/marks.py",
        ("list(self.pinned):\n            self.lose(entry)", "list(self.pinned):\n            self._remove(entry)"),
    ),
    # Donation: a state becomes a checkpoint without a copy.
    mutation(
        "the slot that became a checkpoint is written on",
        "kv_cache/checkpoints.py",
        (
            "tuple(write_slot for write_slot in request_cache.write_slots if write_slot != slot)",
            "tuple(request_cache.write_slots)",
        ),
    ),
    mutation(
        "a checkpoint is taken over in place and stays in the index",
        "kv_cache/state_slots.py",
        (
            "            self._store.evict_checkpoint(checkpoint)\n            self._store.counters",
            "            self._store.counters",
        ),
    ),
    mutation(
        "a checkpoint that two requests read is taken over in place",
        "kv_cache/state_slots.py",
        (" is not None and self._slots.references(slot) == 1\n", " is not None\n"),
    ),
    mutation(
        "a checkpoint is taken where no block ends",
        "kv_cache/checkpoints.py",
        (
            "elif request_cache.num_indexed * block_hashes.block_size == num_computed:",
            "elif request_cache.last_entry is not None:",
        ),
    ),
    mutation(
        "a checkpoint that was read stays referenced",
        "kv_cache/state_slots.py",
        ("            self._slots.release((request_cache.read_slot,))\n", "            pass\n"),
    ),
    mutation(
        "slots of checkpoints that were not taken are not handed back",
        "kv_cache/checkpoints.py",
        ("    store.slots.release(tuple(slot for _, slot in request_cache.reserved_checkpoints))\n", ""),
    ),
    mutation(
        "a trailing checkpoint that was hit is given up",
        "kv_cache/checkpoints.py",
        (
            "if checkpoint.entry.checkpoint is checkpoint and checkpoint.hits == 0 and",
            "if checkpoint.entry.checkpoint is checkpoint and",
        ),
    ),
    mutation(
        "the trailing checkpoint does not move on",
        "kv_cache/checkpoints.py",
        ("                _drop_unless_hit(store, previous)\n", "                pass\n"),
    ),
    mutation(
        "spare slots are not left",
        "kv_cache/state_slots.py",
        ("else missing + spare_slots > self._store", "else missing > self._store"),
    ),
    # Sharing: computed blocks are given up for those of the index, and hits take what is there.
    mutation(
        "a block that the index has is not swapped",
        "kv_cache/checkpoints.py",
        ("swapped[index] = entry.block", "swapped[index] = block"),
    ),
    mutation(
        "a block that was given up is not released",
        "kv_cache/checkpoints.py",
        ("            store.blocks.release((block,))\n", ""),
    ),
    mutation(
        "a block of the index that takes another's place is not referenced",
        "kv_cache/checkpoints.py",
        ("            store.blocks.retain((entry.block,))\n", ""),
    ),
    mutation(
        "blocks that are hit are not referenced",
        "kv_cache/manager.py",
        ("            self.blocks.retain(request_cache.block_table)\n", ""),
    ),
    mutation(
        "the checkpoint that is hit is not referenced",
        "kv_cache/state_slots.py",
        ("            self._slots.retain((request_cache.read_slot,))\n", "            pass\n"),
    ),
    mutation(
        "the index gains from a failed step",
        "scheduler/scheduler.py",
        (
            "        for request in failed.requests:\n            if request.status is not RequestStatus.FINISHED:\n",
            "        for request, row in zip(failed.requests, batch.rows, strict=True):\n"
            "            if request.status is not RequestStatus.FINISHED:\n"
            "                request.num_computed_tokens = row.end\n"
            "                self._commit_row(request, row)\n",
        ),
    ),
    mutation(
        "the index gains from a broken row",
        "scheduler/scheduler.py",
        (
            "            if row_result.error is not None:\n",
            "            if row_result.error is not None:\n"
            "                request.num_computed_tokens = row.end\n"
            "                self._commit_row(request, row)\n",
        ),
    ),
    mutation(
        "a hit goes beyond the last checkpoint",
        "kv_cache/store.py",
        (
            "            while self.slots.count and depth and matched[depth - 1].checkpoint is None:\n",
            "            while False:\n",
        ),
    ),
    mutation(
        "a hit covers the last token",
        "scheduler/prefill.py",
        (" else request.num_tokens - 1\n", " else request.num_tokens\n"),
    ),
    mutation(
        "a request that computes all of its tokens takes hits",
        "scheduler/prefill.py",
        ("    limit = 0 if request.skips_prefix_cache else request", "    limit = request"),
    ),
    mutation(
        "a request that is owed log-probabilities of its prompt skips them",
        "scheduler/prefill.py",
        ("        limit = min(limit, request.num_prompt_logprobs)\n", "        pass\n"),
    ),
    mutation(
        "a block is found after another parent",
        "kv_cache/prefix_index.py",
        ("            and entry.parent is parent\n", ""),
    ),
    mutation(
        "a block is found by its hash alone",
        "kv_cache/prefix_index.py",
        ("            and entry.token_ids == block_hashes.token_ids[index]\n", ""),
    ),
    mutation(
        "a block of another salt is found",
        "kv_cache/prefix_index.py",
        ("            and entry.salt == block_hashes.salt\n", ""),
    ),
    mutation(
        "a salt does not change hashes",
        "kv_cache/prefix_index.py",
        ("if index == 0 and self.salt is not None:", "if False:"),
    ),
    mutation(
        "images do not change hashes",
        "kv_cache/prefix_index.py",
        ('                content += _length_prefixed(b"media", digest)\n', "                pass\n"),
    ),
    # Eviction: what is referenced stays, and the rest goes in order.
    mutation(
        "a slot that is referenced is evicted",
        "kv_cache/store.py",
        ("if packed else self.slots.is_idle(checkpoint.slot)", "if packed else True"),
    ),
    mutation(
        "an evicted block leaves its checkpoint",
        "kv_cache/store.py",
        (
            "            self.evict_checkpoint(entry.checkpoint)\n        if self.files",
            "            pass\n        if self.files",
        ),
    ),
    mutation(
        "an evicted block is not handed back",
        "kv_cache/store.py",
        ("            self.blocks.unmark_cached(entry.block)\n", "            pass\n"),
    ),
    mutation(
        "checkpoints inside texts do not go first",
        "kv_cache/eviction.py",
        ("return 0 if item.is_interior and item.hits == 0 else 1", "return 1"),
    ),
    mutation(
        "leaves without a checkpoint do not go first",
        "kv_cache/eviction.py",
        ("        return Utility(0, entry.last_use, 0.0)\n", "        return Utility(1, entry.last_use, 0.0)\n"),
    ),
    mutation(
        "what was used since it was ranked is evicted",
        "kv_cache/eviction.py",
        ("if worth.last_use == last_use and worth.tier", "if worth.tier"),
    ),
    mutation(
        "marconi looks at recency alone",
        "kv_cache/eviction.py",
        ("EFFICIENCY_WEIGHT = 1.0", "EFFICIENCY_WEIGHT = 0.0"),
    ),
    mutation(
        "a checkpoint's base is remembered when one is placed before it",
        "kv_cache/prefix_index.py",
        (
            "            if entry.previous_checkpoint_version == self._num_changes:\n",
            "            if entry.previous_checkpoint_version >= 0:\n",
        ),
    ),
    mutation(
        "the text that is released is not the one used last",
        "kv_cache/manager.py",
        (
            "        if request_cache.last_entry is not None:\n"
            "            self.store.touch(request_cache.last_entry)\n",
            "        if request_cache.last_entry is not None:\n",
        ),
    ),
    mutation(
        "a request takes more than its share of the slots",
        "kv_cache/checkpoints.py",
        ("SLOT_FRACTION = 4\n", "SLOT_FRACTION = 1\n"),
    ),
    mutation(
        "a long output gives up the checkpoint at its prompt's end",
        "kv_cache/checkpoints.py",
        (" or not self.is_interior(position):", ":"),
    ),
    mutation(
        "a report keeps the spacing of the start",
        "scheduler/scheduler.py",
        ("            request.update_cache_report()\n", ""),
    ),
    mutation(
        "a request that waits does not see what it could share",
        "scheduler/scheduler.py",
        ("        if batch.num_decode_rows < len(batch.rows):\n", "        if False:\n"),
    ),
    mutation(
        "a request that found too little memory is not asked again",
        "scheduler/prefill.py",
        ("return self.request is request and is_no_more", "return self.request is request"),
    ),
    mutation(
        "what is forgotten is told as evicted",
        "kv_cache/store.py",
        (
            "            entry.lost_checkpoint = False\n        self.evicted_keys = RecentKeys(MAX_EVICTED_KEYS)\n",
            "            entry.lost_checkpoint = False\n",
        ),
    ),
    # Holders: where running requests stand.
    mutation(
        "a leaf where a request stands is evicted",
        "kv_cache/store.py",
        ("for entry in index.leaves if entry.num_holders == 0)", "for entry in index.leaves)"),
        (
            "lambda entry: entry.is_evictable and entry in index",
            "lambda entry: not entry.num_children and entry in index",
        ),
    ),
    mutation(
        "the holder stays behind when a request moves on",
        "kv_cache/checkpoints.py",
        (
            "            request_cache.last_entry.num_holders -= 1\n        request_cache.last_entry = entered",
            "            pass\n        request_cache.last_entry = entered",
        ),
    ),
    mutation(
        "a hit counts no holder",
        "kv_cache/manager.py",
        (
            "        request_cache.last_entry.num_holders += 1\n        request_cache.capacity",
            "        request_cache.capacity",
        ),
    ),
    mutation(
        "a request that ends stays a holder",
        "kv_cache/manager.py",
        (
            "            request_cache.last_entry.num_holders -= 1\n        self.blocks.release",
            "            pass\n        self.blocks.free",
        ),
    ),
    # Placement and what is told.
    mutation(
        "the last checkpoint stands at the prompt's end",
        "kv_cache/checkpoints.py",
        (
            "    last = (num_tokens - 1) // block_size * block_size\n",
            "    last = num_tokens // block_size * block_size\n",
        ),
    ),
    mutation(
        "no checkpoint is taken where a prompt leaves a text",
        "kv_cache/checkpoints.py",
        ("branch = num_matched if policy.branches and num_matched > hit else 0", "branch = 0"),
    ),
    mutation(
        "evicted blocks are forgotten",
        "kv_cache/store.py",
        ("        self.evicted_keys.add(entry.key)\n", ""),
    ),
    # Speculation: a step writes a window of states, of which the number of accepted drafts says where the text goes on.
    mutation(
        "speculation: the next step reads the first state of the window",
        "kv_cache/state_slots.py",
        (
            "request_cache.read_slot = request_cache.write_slots[num_accepted]",
            "request_cache.read_slot = request_cache.write_slots[0]",
        ),
    ),
    mutation(
        "speculation: the number of accepted drafts is not told when checkpoints are placed",
        "scheduler/scheduler.py",
        ("                num_accepted=num_accepted,\n", ""),
    ),
    mutation(
        "speculation: drafts behind a stop token count as accepted",
        "scheduler/scheduler.py",
        (
            "self._commit_row(request, row, num_accepted=num_kept - 1)",
            "self._commit_row(request, row, len(row_result.token_ids) - 1)",
        ),
    ),
    mutation(
        "speculation: another state of the window is kept for a boundary",
        "kv_cache/checkpoints.py",
        ("slot = written[position - start]", "slot = request_cache.read_slot"),
    ),
    mutation(
        "speculation: a slot is looked up in the window after one was left behind",
        "kv_cache/checkpoints.py",
        ("slot = written[position - start]", "slot = request_cache.write_slots[position - start]"),
    ),
    mutation(
        "speculation: boundaries inside a window are passed over",
        "kv_cache/checkpoints.py",
        ("for position in range(start, num_computed + 1):", "for position in range(num_computed, num_computed + 1):"),
    ),
    mutation(
        "speculation: the checkpoint before a window is given up at once",
        "kv_cache/checkpoints.py",
        ("            elif position > start:\n", "            elif False:\n"),
    ),
    mutation(
        "speculation: checkpoints before a window stay for ever",
        "kv_cache/checkpoints.py",
        (
            "    for checkpoint in request_cache.replaced_checkpoints:\n        _drop_unless_hit(store, checkpoint)\n",
            "",
        ),
    ),
    mutation(
        "speculation: the checkpoint before a window's first state is not given up",
        "kv_cache/checkpoints.py",
        ("            elif position > start:\n", "            elif position >= start and num_accepted:\n"),
    ),
    mutation(
        "speculation: a slot of the window that was left behind stays referenced",
        "kv_cache/checkpoints.py",
        ("    if slot != request_cache.read_slot:\n        store.slots.release((slot,))\n", ""),
    ),
    mutation(
        "speculation: a trailing checkpoint goes though none takes its place",
        "kv_cache/checkpoints.py",
        (
            "        if position not in entered:\n",
            "        if request_cache.last_entry is None or position % len(request_cache.last_entry.token_ids):\n",
        ),
        (
            "        slot = written",
            "        if position not in entered:\n            continue\n        slot = written",
        ),
    ),
    mutation(
        "speculation: a request is admitted with fewer slots than its window has",
        "kv_cache/manager.py",
        ("        if not self.state_slots.can_allocate(request_cache) or not self.grow(", "        if not self.grow("),
    ),
    mutation(
        "speculation: a row waits for the slots of its drafts",
        "kv_cache/state_slots.py",
        (
            "return bool(request_cache.write_slots) or self.slots_per_request == 0",
            "return len(request_cache.write_slots) == self.slots_per_request",
        ),
    ),
    mutation(
        "speculation: a row has drafts for which it has no slots",
        "scheduler/decode.py",
        ("count = min(count, len(request_cache.write_slots) - 1)", "pass"),
    ),
    mutation(
        "speculation: no blocks are asked for drafts",
        "scheduler/decode.py",
        ("has_grown = cache.grow(request.request_id, request.num_tokens + count)", "has_grown = True"),
    ),
    mutation(
        "speculation: a row has a draft for the last token that its request may have",
        "scheduler/decode.py",
        ("request.max_num_tokens - request.num_tokens - 1)", "request.max_num_tokens - request.num_tokens)"),
    ),
    mutation(
        "speculation: drafts do not count for the budget of a step",
        "scheduler/scheduler.py",
        (
            "budget = self.limits.max_num_batched_tokens - len(decoding) * (1 + num_drafts)",
            "budget = self.limits.max_num_batched_tokens - len(decoding)",
        ),
    ),
    mutation(
        "speculation: a cached prompt decodes at once though the step has no room for its drafts",
        "scheduler/prefill.py",
        ("if 0 < start == request.num_tokens - 1 and budget <= num_drafts:", "if False:"),
    ),
    mutation(
        "speculation: drafts of a cached prompt do not count for the budget of a step",
        "scheduler/scheduler.py",
        ("                budget -= 1 + num_drafts\n", "                budget -= 1\n"),
    ),
    mutation(
        "speculation: somebody is preempted for blocks that hold only drafts",
        "scheduler/decode.py",
        (
            "if any(cache.shrink(other.request_id, other.num_tokens) for other in reversed(running)):",
            "if False:",
        ),
    ),
    mutation(
        "speculation: a block of a known token is given back with those of drafts",
        "kv_cache/manager.py",
        (
            "needed = -(-num_tokens // self.block_size)\n        if request_cache",
            "needed = -(-(num_tokens - 1) // self.block_size)\n        if request_cache",
        ),
    ),
    mutation(
        "images: those behind a request that waits for cells take some",
        "scheduler/encoder_scheduler.py",
        ("        self._is_short = True\n", ""),
    ),
    mutation(
        "images: a request holds on to what it has computed",
        "scheduler/encoder_scheduler.py",
        ("            self.cache.unpin_except(request.request_id, image_in_progress(request))\n", "            pass\n"),
    ),
    mutation(
        "images: what a failed step was to encode stays",
        "scheduler/scheduler.py",
        ("self.encoder_cache.finish_step(succeeded=False)", "self.encoder_cache.finish_step(succeeded=True)"),
    ),
    mutation(
        "images: a request is admitted though its row has no room for the first",
        "scheduler/prefill.py",
        ("if self._media.max_chunk_end(request, start, end) < end:", "if False:"),
    ),
    mutation(
        "images: without chunked prefill a prompt begins though not all of its images fit",
        "scheduler/prefill.py",
        ("end = start + 1 if limits.enable_chunked_prefill or is_cut else", "end = start + 1 if True else"),
    ),
    mutation(
        "images: a request lets go of the one in whose midst it stands",
        "scheduler/encoder_scheduler.py",
        ("if span.start < position}", "if False}"),
    ),
    mutation(
        "images: the hash of a block does not tell them apart",
        "kv_cache/prefix_index.py",
        ('                content += _length_prefixed(b"media", digest)\n', "                pass\n"),
    ),
    mutation(
        "files: what was matched is evicted for what goes on from it",
        "kv_cache/offload/save_restore.py",
        ("num_blocks > store.blocks.num_available - matched", "num_blocks > store.blocks.num_available"),
    ),
    mutation(
        "files: a text is not held while it is read",
        "kv_cache/offload/save_restore.py",
        ("                held.move(entry)\n", ""),
    ),
    mutation(
        "files: damage is not told",
        "kv_cache/offload/save_restore.py",
        (
            "            if state is None:\n                store.damaged_keys.add(block_hashes.keys[target - 1])",
            "            if state is None:\n                pass",
        ),
    ),
    mutation(
        "files: a block is lost",
        "kv_cache/store.py",
        ("if self.files is not None and entry.block:", "if False:"),
    ),
    mutation(
        "files: what stays in memory at the end is lost",
        "kv_cache/offload/save_restore.py",
        ("            files.save_block(entry)\n", "            pass\n"),
    ),
    mutation(
        "files: those that were forgotten are found",
        "kv_cache/store.py",
        ("self.files.directory.clear()", "pass"),
    ),
    mutation(
        "files: a name does not tell what stands before a block",
        "kv_cache/prefix_index.py",
        ("hashlib.blake2b(previous_key + content", "hashlib.blake2b(content"),
    ),
    mutation(
        "files: a checksum is not compared",
        "kv_cache/offload/file_format.py",
        (" or checksum != file_checksum(\n        packed[CHECKSUM_START:]\n    )", ""),
    ),
    mutation(
        "files: the limit is not kept",
        "kv_cache/offload/directory.py",
        ("if self._file_bytes > limit else None", "if False else None"),
    ),
    mutation(
        "files: a failed write stays under its name",
        "kv_cache/offload/directory.py",
        ("unfinished.unlink(missing_ok=True)\n", "unfinished.rename(path)\n"),
    ),
    mutation(
        "files: what the writer cannot foresee ends it",
        "kv_cache/offload/directory.py",
        ("except Exception as error:", "except OSError as error:"),
    ),
    mutation(
        "files: a use that writes nothing is forgotten with the engine",
        "kv_cache/offload/directory.py",
        ("            os.utime(self._path(key))\n", "            pass\n"),
    ),
    mutation(
        "files: engines write under one name",
        "kv_cache/offload/directory.py",
        ("{secrets.token_hex(4)}{PARTIAL_SUFFIX}", "{PARTIAL_SUFFIX}"),
    ),
    mutation(
        "files: a salt may end in what looks like an image",
        "kv_cache/prefix_index.py",
        ('kind + len(encoded).to_bytes(8, "little") + encoded', "kind + encoded"),
    ),
    mutation(
        "files: at the end more is written than files may hold",
        "kv_cache/offload/save_restore.py",
        ("ordered = _within_limit(entries, windows, files)", "ordered = list(entries)"),
    ),
    mutation(
        "files: a folder that was cleared away stays away",
        "kv_cache/offload/directory.py",
        ("        except FileNotFoundError:\n", "        except NotImplementedError:\n"),
    ),
    mutation(
        "files: a thread that cannot be started ends the engine",
        "kv_cache/offload/directory.py",
        ("except (MemoryError, OSError, RuntimeError) as error:", "except (MemoryError, OSError) as error:"),
    ),
    mutation(
        "files: what was read while it waited changes when its memory is used again",
        "kv_cache/offload/directory.py",
        ("contents = memoryview(bytes(draft.contents))", "contents = draft.contents"),
    ),
    mutation(
        "files: what stands behind a file's end is kept",
        "kv_cache/offload/file_format.py",
        ("            os.ftruncate(file, size)\n", "            pass\n"),
    ),
    mutation(
        "files: a window block of a leaf is lost",
        "kv_cache/store.py",
        ("            self._save_window_block(entry.window_block)\n", "            pass\n"),
    ),
    mutation(
        "files: a window block that makes room is lost",
        "kv_cache/store.py",
        ("            self._save_window_block(window_block)\n", ""),
    ),
    mutation(
        "files: window blocks inside a text are written",
        "kv_cache/store.py",
        ("self.files is not None and utility_tier(window_block) > 0:", "self.files is not None:"),
    ),
    mutation(
        "files: a state is written without its window",
        "kv_cache/offload/file_tier.py",
        (
            "                self.save_window_block(window_entry, window_entry.window_block.id)\n",
            "                pass\n",
        ),
    ),
    mutation(
        "files: a state whose window is gone is written",
        "kv_cache/offload/file_tier.py",
        (
            "            return False\n        for window_entry in window:",
            "            pass\n        for window_entry in window:",
        ),
    ),
    mutation(
        "files: window blocks at the end are lost",
        "kv_cache/offload/save_restore.py",
        ("            files.save_window_block(entry, entry.window_block.id)\n", "            pass\n"),
    ),
    mutation(
        "files: window blocks of a hit are not looked for",
        "kv_cache/offload/save_restore.py",
        ("(lacking := self._last_lacking(target)) is not None", "(lacking := None) is not None"),
    ),
    mutation(
        "files: window blocks in memory are not held while others are read",
        "kv_cache/offload/save_restore.py",
        ("        store.window_blocks.retain(window_blocks)\n", "        window_blocks = []\n"),
    ),
    mutation(
        "files: a damaged window block is not told",
        "kv_cache/offload/save_restore.py",
        (
            "is None:\n                        store.damaged_keys.add(block_hashes.keys[target - 1])",
            "is None:\n                        pass",
        ),
    ),
    mutation(
        "files: a window block that was read is not written to its memory",
        "kv_cache/offload/save_restore.py",
        ('        files.memory.write("window_block", window_block, contents)\n', ""),
    ),
    # Requests that move.
    mutation(
        "move: what came is not written",
        "kv_cache/manager.py",
        (
            '            memory.write("block", request_cache.block_table[index], snapshot.blocks[index])\n',
            "            pass\n",
        ),
    ),
    mutation(
        "move: what the index has is written over",
        "kv_cache/manager.py",
        (
            "for index in range(request_cache.num_indexed, len(snapshot.blocks)):",
            "for index in range(len(snapshot.blocks)):",
        ),
    ),
    mutation(
        "move: a state that came is not written",
        "kv_cache/manager.py",
        ('            memory.write("slot", request_cache.read_slot, snapshot.state)\n', ""),
    ),
    mutation(
        "move: a state that came is not read",
        "kv_cache/manager.py",
        (
            "            request_cache.read_slot = request_cache.write_slots[0]\n"
            '            memory.write("slot", request_cache.read_slot',
            '            memory.write("slot", request_cache.write_slots[0]',
        ),
    ),
    mutation(
        "move: a request reads a checkpoint beside the state that came",
        "kv_cache/manager.py",
        (
            "request_cache.last_entry.checkpoint is not None and uses_checkpoint:",
            "request_cache.last_entry.checkpoint is not None:",
        ),
    ),
    mutation(
        "move: a block that is not full is indexed",
        "kv_cache/manager.py",
        (
            "index_blocks(self.store, request_cache, block_hashes, snapshot.num_tokens)",
            "index_blocks(self.store, request_cache, block_hashes, len(snapshot.blocks) * self.block_size)",
        ),
    ),
    mutation(
        "move: full blocks that came are not indexed",
        "kv_cache/manager.py",
        ("            index_blocks(self.store, request_cache, block_hashes, snapshot.num_tokens)\n", ""),
    ),
    mutation(
        "move: the state is that of another slot",
        "engine/migration/export_import.py",
        ('memory.read("slot", request_cache.read_slot)', 'memory.read("slot", request_cache.slots[-1])'),
    ),
    mutation(
        "move: a block is copied with what stands behind its tokens",
        "engine/migration/export_import.py",
        ("None if count == size else count", "None"),
    ),
    mutation(
        "move: who waits loses what came with it when it moves on",
        "engine/migration/export_import.py",
        ("        return request.kv_snapshot\n", "        return None\n"),
    ),
    mutation(
        "move: a request begins where the index has it, and not where it was",
        "scheduler/prefill.py",
        ("start = match.hit if snapshot is None else snapshot.num_tokens", "start = match.hit"),
    ),
    mutation(
        "move: what came is taken though the index has more",
        "scheduler/prefill.py",
        ("snapshot is not None and snapshot.num_tokens > match.hit else None", "snapshot is not None else None"),
    ),
    mutation(
        "move: more blocks of the index are attached than were carried",
        "scheduler/prefill.py",
        ("match.matched[: snapshot.num_tokens // block_size]", "match.matched"),
    ),
    mutation(
        "move: what came is kept after it was admitted",
        "scheduler/prefill.py",
        (
            "        request.kv_snapshot, request.num_imported_tokens = None, 0\n",
            "        request.num_imported_tokens = 0\n",
        ),
    ),
    mutation(
        "move: tokens that are lost are not counted",
        "scheduler/prefill.py",
        (
            "            self.moves.recomputed_tokens += max(0, request.num_imported_tokens - start)\n",
            "            pass\n",
        ),
    ),
    mutation(
        "move: who has begun elsewhere waits behind all",
        "scheduler/request_queues.py",
        ("self._fair_share.current if request.was_imported else self._fair_share", "self._fair_share"),
    ),
    # Shares of the rows.
    mutation(
        "share: a client without a row waits where each may have one",
        "scheduler/request_queues.py",
        ("self._num_running[client] + 1 <= _share", "self._num_running[client] + 1 < _share"),
    ),
    mutation(
        "share: who yields falls below its share, and takes the row back",
        "scheduler/request_queues.py",
        ("if count - 1 >= _share", "if count >= _share"),
    ),
    mutation(
        "share: who has yielded yields again at once",
        "scheduler/scheduler.py",
        ("request.min_tokens_to_yield = 2 * request.num_tokens", "request.min_tokens_to_yield = 0"),
    ),
    mutation(
        "move: window blocks that came are not written",
        "kv_cache/manager.py",
        (
            "                memory.write(\n",
            "                (lambda *_: None)(\n",
        ),
    ),
    mutation(
        "move: window blocks that the index has are evicted for those that came",
        "kv_cache/sliding_window.py",
        ("        self._store.window_blocks.retain(shared_ids.values())\n", ""),
        (
            "        ids = shared_ids | allocated_ids\n",
            "        self._store.window_blocks.retain(shared_ids.values())\n        ids = shared_ids | allocated_ids\n",
        ),
    ),
    mutation(
        "move: the index does not keep the window blocks of its blocks",
        "kv_cache/sliding_window.py",
        ("                self._store.add_window_block(indexed[index], id)\n", "                pass\n"),
    ),
    mutation(
        "move: window blocks of other blocks are carried",
        "engine/migration/export_import.py",
        (
            'copied("window_block", request_cache.window_block_table, request_cache.first_window_block)',
            'copied("window_block", request_cache.window_block_table, 0)',
        ),
    ),
    # Window blocks: what requests keep of layers with a window, and what of it is cached.
    mutation(
        "window blocks: a request lets go of one that it still sees",
        "kv_cache/sliding_window.py",
        (
            "return max(0, position // self.block_size - self.blocks_per_window)",
            "return max(0, position // self.block_size)",
        ),
    ),
    mutation(
        "window blocks: the window before the last boundary is let go of",
        "kv_cache/sliding_window.py",
        (
            "return max(0, position // self.block_size - self.blocks_per_window)",
            "return max(0, (position - self.window + 1) // self.block_size)",
        ),
    ),
    mutation(
        "window blocks: a request keeps all of them",
        "kv_cache/sliding_window.py",
        (
            "        first = min(self.rules.first_block(position), len(request_cache.window_block_table))\n",
            "        first = 0\n",
        ),
    ),
    mutation(
        "window blocks: those of drafts that were not kept are kept",
        "kv_cache/sliding_window.py",
        (
            "        end = position // self.rules.block_size + 1\n",
            "        end = len(request_cache.window_block_table)\n",
        ),
    ),
    mutation(
        "window blocks: too few are reserved for a request",
        "kv_cache/sliding_window.py",
        ("        return self.blocks_per_window + 2\n", "        return self.blocks_per_window + 1\n"),
    ),
    mutation(
        "window blocks: none are set aside for the rows of a step",
        "kv_cache/sliding_window.py",
        ("        return (self.step_tokens - 1) // self.block_size\n", "        return 0\n"),
    ),
    mutation(
        "window blocks: more are reserved than there are",
        "kv_cache/sliding_window.py",
        ("if self.num_unreserved < previous and self.num_unreserved < spare:", "if False:"),
    ),
    mutation(
        "window blocks: what was reserved for a request that ends stays reserved",
        "kv_cache/sliding_window.py",
        ("        self.reserve(request_cache, 0)\n", ""),
    ),
    mutation(
        "window blocks: those of a request that ends leak",
        "kv_cache/sliding_window.py",
        (
            "        self._store.release_window_blocks("
            "request_cache.window_block_table[request_cache.first_window_block :])\n"
            "        request_cache.window_block_table,",
            "        request_cache.window_block_table,",
        ),
    ),
    mutation(
        "window blocks: those that are hit are not referenced",
        "kv_cache/sliding_window.py",
        ("        self._store.window_blocks.retain(ids)\n", ""),
    ),
    mutation(
        "window blocks: a hit is taken where one of its window is gone",
        "kv_cache/store.py",
        ("depth = index if num_window_blocks >= min(self.blocks_per_window, index) else depth", "depth = index"),
    ),
    mutation(
        "window blocks: a hit is taken though a window block in the middle of its window is gone",
        "kv_cache/store.py",
        (
            "num_window_blocks = 0 if entry.window_block is None else num_window_blocks + 1",
            "num_window_blocks += entry.window_block is not None",
        ),
    ),
    mutation(
        "window blocks: a hit needs one more than its window has",
        "kv_cache/store.py",
        (
            "if num_window_blocks >= min(self.blocks_per_window, index)",
            "if num_window_blocks >= min(self.blocks_per_window + 1, index)",
        ),
    ),
    mutation(
        "window blocks: a hit is taken where no checkpoint stands",
        "kv_cache/store.py",
        ("            if entry.checkpoint is not None or not self.slots.count:\n", "            if True:\n"),
    ),
    mutation(
        "window blocks: one that was computed is not entered",
        "kv_cache/checkpoints.py",
        ("            _index_window_block(store, request_cache, entry, index)\n", "            pass\n"),
    ),
    mutation(
        "window blocks: one that was given up for an equal one leaks",
        "kv_cache/checkpoints.py",
        ("    store.window_blocks.release((window_block,))\n", ""),
    ),
    mutation(
        "window blocks: an equal one is not taken in place of one's own",
        "kv_cache/checkpoints.py",
        ("(*table[:index], entry.window_block.id, *table[index + 1 :])", "table"),
    ),
    mutation(
        "window blocks: that of a block that leaves the index stays behind",
        "kv_cache/store.py",
        (
            "        if entry.window_block is not None:\n            self._drop_window_block(entry.window_block)\n",
            "        entry.window_block = None\n",
        ),
    ),
    mutation(
        "window blocks: those in use are evicted",
        "kv_cache/store.py",
        (
            "window_block for window_block in index.window_blocks if self.window_blocks.is_idle(window_block.id)\n",
            "window_block for window_block in index.window_blocks\n",
        ),
        (
            "index.window_block_of(window_block.id) is window_block and self.window_blocks.is_idle(window_block.id)",
            "index.window_block_of(window_block.id) is window_block",
        ),
    ),
    mutation(
        "window blocks: one that became idle waits until all have gone",
        "kv_cache/store.py",
        ("                self._window_blocks.push(window_block)\n", "                pass\n"),
    ),
    mutation(
        "window blocks: those at the end of a text go first",
        "kv_cache/manager.py",
        ("            self.store.touch_window(request_cache.last_entry)\n", ""),
    ),
    mutation(
        "window blocks: a hit does not make them stay",
        "kv_cache/manager.py",
        ("        self.store.touch_window(request_cache.last_entry, is_hit=True)\n", ""),
    ),
    mutation(
        "window blocks: those where a text parts from another go first",
        "kv_cache/checkpoints.py",
        (
            "        for position in (positions.last, positions.branch, *positions.marks):\n",
            "        for position in positions.marks:\n",
        ),
    ),
    mutation(
        "window blocks: a block at a text's end that lacks one does not go first",
        "kv_cache/eviction.py",
        ("        return Utility(tier=0, last_use=entry.last_use, efficiency=0.0)\n", "        pass\n"),
    ),
    mutation(
        "window blocks: those of idle blocks stay when all is forgotten",
        "kv_cache/store.py",
        (
            "for window_block in [each for each in self.index.window_blocks if self.window_blocks.is_idle(each.id)]:",
            "for window_block in ():",
        ),
    ),
    mutation(
        "window blocks: what lacks a window is told as without a checkpoint",
        "kv_cache/prefix_index.py",
        ("        elif end <= reach:\n", "        elif False:\n"),
    ),
    mutation(
        "window blocks: a draft is written beyond those that are reserved",
        "kv_cache/manager.py",
        ("            max_blocks.append(more)\n", "            pass\n"),
    ),
    mutation(
        "window blocks: a request waits no more where there are none for it",
        "scheduler/prefill.py",
        ("match, spare_blocks, spare_window_blocks, uses_checkpoint", "match, spare_blocks, 0, uses_checkpoint"),
    ),
    mutation(
        "window blocks: one that lacks them is admitted only when it finds more blocks",
        "scheduler/prefill.py",
        (" and num_window_blocks <= self.num_window_blocks\n", "\n"),
    ),
    mutation(
        "window blocks: those that no token sees are not let go of",
        "scheduler/scheduler.py",
        ("        if cache.window_blocks is not None:\n", "        if False:\n"),
    ),
    mutation(
        "rows: a request that leaves its row to make room hides the next one",
        "scheduler/decode.py",
        (
            "                    continue  # it has left",
            "                    index += 1\n                    continue  #",
        ),
    ),
    mutation(
        "rows: streams wait for all scores of others' prompts",
        "scheduler/prefill.py",
        ("= self._limits.scored_tokens if is_decoding else None", "= None"),
    ),
    # What whole runs show.
    mutation(
        "verify: padding of a replay writes a live slot",
        "graphs/buffers.py",
        ("= end if field.ends else 0\n", "= end if field.ends else 1\n"),
        verify=("demo",),
    ),
    mutation(
        "verify: padding of a replay keeps what stood there",
        "graphs/buffers.py",
        ("            if field.per == per and field.is_padded:\n", "            if field.per == per and field.ends:\n"),
        verify=("demo",),
    ),
    mutation(
        "verify: a salt does not change hashes, though what is found is compared",
        "kv_cache/prefix_index.py",
        ("if index == 0 and self.salt is not None:", "if False:"),
        verify=("demo",),
    ),
    mutation(
        "verify: a salt is left out",
        "kv_cache/prefix_index.py",
        ("if index == 0 and self.salt is not None:", "if False:"),
        ("            and entry.salt == block_hashes.salt\n", ""),
        verify=("demo",),
    ),
    mutation(
        "verify: states of 16 bits are truncated",
        "ops/reference/stochastic_rounding.py",
        (
            "        return states.to(dtype)\n",
            "        bits = DROPPED_BITS.get(dtype, 0)\n"
            "        return (states.float().view(torch.int32) >> bits << bits).view(torch.float32).to(dtype)\n",
        ),
        # The native kernels round in C++. With references alone each way takes long, so these are few.
        verify=("demo", "--kernels", "reference", "--state-cache-mode", "none", "--graph-mode", "none"),
    ),
    mutation(
        "verify: a request with images loses their positions when it is preempted",
        "scheduler/request.py",
        ("        request.rope,\n", "        None if request.num_preemptions else request.rope,\n"),
        verify=("demo-vl",),
    ),
    mutation(
        "verify: images have no place in the positions of tokens that are computed again",
        "media/media_item.py",
        ("dtype=np.int64) + self.delta\n", "dtype=np.int64)\n"),
        verify=("demo-vl",),
    ),
    mutation(
        "verify: images do not change hashes",
        "kv_cache/prefix_index.py",
        ('                content += _length_prefixed(b"media", digest)\n', "                pass\n"),
        ("            and entry.digests == block_hashes.digests(index)\n", ""),
        verify=("demo-vl",),
    ),
    mutation(
        "verify: a round that ends inside publishes the state behind all of its drafts",
        "scheduler/scheduler.py",
        ("num_accepted=num_kept - 1)", "num_accepted=len(row_result.token_ids) - 1)"),
        verify=("demo",),
    ),
    mutation(
        "verify: a boundary inside a round gets the state behind the round",
        "kv_cache/checkpoints.py",
        ("        slot = written[position - start]\n", "        slot = written[-1]\n"),
        verify=("demo",),
    ),
    mutation(
        "verify: drafts are kept without a look at them",
        "sampling/sampler.py",
        ("if draft != drawn[i]), len(ahead))", "if False), len(ahead))"),
        verify=("demo",),
    ),
    mutation(
        "verify: one wrong draft is let pass",
        "sampling/sampler.py",
        ("if draft != drawn[i]), len(ahead))", "if draft != drawn[i] and i), len(ahead))"),
        verify=("demo",),
    ),
)
