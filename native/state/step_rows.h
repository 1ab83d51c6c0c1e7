// Rows of a step, for kernels that keep a row's last inputs in slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include "bind/arguments.h"
#include "core/thread_group.h"

namespace ostinato {

// First token of each row, and the end of the last one, [rows + 1]. Other rows of the step may come before these: tokens
// are counted from the first of these rows.
struct RowStarts : Array<INT32> {
    std::int64_t operator[](std::int64_t row) const { return at<const std::int32_t>()[row] - *at<const std::int32_t>(); }
};

// Request to store the state after `offset` tokens of a prefill row in `slot` too.
struct Checkpoint {
    std::int64_t row, offset, slot;
};
using Checkpoints = std::vector<Checkpoint>;

inline bool from_python(PyObject* value, Checkpoints& to) {
    std::vector<std::array<std::int64_t, 3>> triples;
    if (!nb::try_cast(nb::handle(value), triples)) return false;
    for (const auto& [row, offset, slot] : triples) to.push_back({row, offset, slot});
    return true;
}

// Call body(row, part) for the parts of the work along rows that this thread claims; each row is split into `parts`. A
// part costs as much as its row has tokens, `length_of(row)`, and belongs to that of the shares that are claimed in which
// its middle lies.
template <typename Length, typename Body>
void each_claimed_part(const ThreadGroup& threads, std::int64_t rows, const Length& length_of, std::int64_t parts, Body&& body) {
    std::int64_t work = 0;
    for (std::int64_t row = 0; row < rows; ++row) work += std::max<std::int64_t>(0, length_of(row)) * parts;
    const std::int64_t shares = threads.size == 1 ? 1 : threads.size * PARTS_PER_THREAD;
    for (const std::int64_t share : threads.claims(shares)) {
        std::int64_t before = 0;
        for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t length = length_of(row);
            if (length <= 0) continue;
            for (std::int64_t part = 0; part < parts; ++part, before += length) {
                if ((2 * before + length) * shares / (2 * work) == share) body(row, part);
            }
        }
    }
}

struct StepRow {
    std::int64_t index, begin, end;  // tokens
    std::int32_t read_slot;          // 0: there is no earlier state
};

// Rows as arguments. The first `num_decode_rows` have write_slots.shape[1] tokens each. Tensors are read when the
// kernel runs; checkpoints were copied.
struct StepRows : Arguments {
    FIELD(Array<INT32>, row_starts);  // [rows + 1]
    FIELD(Array<INT32>, read_slots);  // [rows]
    FIELD(Strided<INT32>, write_slots);  // [rows, tokens of a decode row]
    FIELD(std::int64_t, num_decode_rows);
    FIELD(Checkpoints, checkpoints);

    // Call body(StepRow) for all rows that have one of the first `tokens` tokens.
    template <typename Body>
    void each_row(std::int64_t tokens, Body&& body) const {
        const auto* starts = row_starts.at<const std::int32_t>();
        const auto* reads = read_slots.at<const std::int32_t>();
        const std::int64_t per_row = write_slots.shape[1];
        for (std::int64_t row = 0; row < write_slots.shape[0]; ++row) {
            const bool decodes = row < num_decode_rows;
            const std::int64_t begin = decodes ? row * per_row : starts[row];
            const std::int64_t end = std::min(tokens, decodes ? begin + per_row : std::int64_t{starts[row + 1]});
            if (begin < end) body(StepRow{row, begin, end, reads[row]});
        }
    }

    // Return whether the row is padding: nothing reads its result.
    bool is_padding(const StepRow& row) const {
        const auto* writes = write_slots.row<const std::int32_t>(row.index);
        return row.read_slot == 0 &&
               std::all_of(writes, writes + write_slots.shape[1], [](auto slot) { return slot == 0; });
    }

    // Call body(count, slot) for each slot to which the row's state after `count` of its tokens goes; never for slot 0.
    template <typename Body>
    void each_written(const StepRow& row, Body&& body) const {
        const auto* writes = write_slots.row<const std::int32_t>(row.index);
        const std::int64_t count = row.end - row.begin;
        if (row.index < num_decode_rows) {
            for (std::int64_t i = 0; i < count; ++i) {
                if (writes[i]) body(i + 1, writes[i]);
            }
            return;
        }
        for (const Checkpoint& taken : checkpoints) {
            if (taken.row == row.index) body(taken.offset, taken.slot);
        }
        if (writes[0]) body(count, writes[0]);
    }
};

}  // namespace ostinato
