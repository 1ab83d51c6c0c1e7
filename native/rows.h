// The rows of a step, for kernels that keep a row's last inputs in slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "program.h"

namespace ostinato {

// (row, offset, slot), one after the other: the state after `offset` tokens of a prefill row also goes to `slot`.
using Checkpoints = std::vector<std::int64_t>;

struct StepRow {
    std::int64_t index, begin, end;  // tokens
    std::int32_t read_slot;          // 0: nothing came before
};

// `row_starts` [rows + 1], `read_slots` [rows], `write_slots` [rows, per_row] with a stride, all int32. The first
// `decode_rows` have `per_row` tokens each.
struct StepRows {
    const std::int32_t *row_starts, *read_slots, *write_slots;
    std::int64_t write_stride, rows, per_row, decode_rows;
    const Checkpoints& checkpoints;

    // Calls body(StepRow) for all rows that have one of the first `tokens` tokens.
    template <typename Body>
    void each(std::int64_t tokens, Body&& body) const {
        for (std::int64_t row = 0; row < rows; ++row) {
            const bool decodes = row < decode_rows;
            const std::int64_t begin = decodes ? row * per_row : row_starts[row];
            const std::int64_t end = std::min(tokens, decodes ? begin + per_row : std::int64_t{row_starts[row + 1]});
            if (begin < end) body(StepRow{row, begin, end, read_slots[row]});
        }
    }

    // Whether nobody reads what becomes of a row.
    bool is_padding(const StepRow& row) const {
        const std::int32_t* writes = write_slots + row.index * write_stride;
        return row.read_slot == 0 && std::all_of(writes, writes + per_row, [](auto slot) { return slot == 0; });
    }

    // Calls body(count, slot) for each slot to which a row's state after `count` of its tokens goes; never for slot 0.
    template <typename Body>
    void each_written(const StepRow& row, Body&& body) const {
        const std::int32_t* writes = write_slots + row.index * write_stride;
        const std::int64_t count = row.end - row.begin;
        if (row.index < decode_rows) {
            for (std::int64_t i = 0; i < count; ++i) {
                if (writes[i]) body(i + 1, writes[i]);
            }
            return;
        }
        for (std::size_t i = 0; i < checkpoints.size(); i += 3) {
            if (checkpoints[i] == row.index) body(checkpoints[i + 1], checkpoints[i + 2]);
        }
        if (writes[0]) body(count, writes[0]);
    }
};

}  // namespace ostinato
