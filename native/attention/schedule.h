// Division of attention's work among threads: units of one row, one key head and some queries. Threads claim shares of
// them; if a unit is too large for that, units are cut at tiles instead, into one share for each thread.
#pragma once

#include "attention/operands.h"
#include "core/program.h"

namespace ostinato {
namespace attention {

// The step's inputs, read when the kernel runs.
struct Step {
    std::int64_t tokens;  // without padding at the end of the batch
    std::int64_t rows;
    const std::int32_t *row_starts, *start_positions, *kv_lens, *block_tables;
    std::int64_t max_blocks, block_size;
    std::int64_t heads, kv_heads;
    std::int64_t first_key, window;  // `window`: positions that a token sees, including its own
    std::int64_t least, most;  // query rows per key head; other rows are left out
    const std::int32_t* last_seen;  // [tokens] last position that each token sees, which never falls in a row; or null

    // Return the end of the keys that a token, at `position` of its row, sees.
    std::int64_t end_of(std::int64_t token, std::int64_t position) const {
        return 1 + (last_seen == nullptr ? position : std::max<std::int64_t>(position, last_seen[token]));
    }

    std::int64_t group() const { return heads / kv_heads; }

    // Return the first key that the token at `position` sees.
    std::int64_t first_of(std::int64_t position) const { return std::max(first_key, position - window + 1); }

    // Return the tokens of a row that attend to at least one key.
    Range attending(std::int64_t row) const {
        const std::int64_t begin = row_starts[row], position = start_positions[row];
        const std::int64_t end = std::min<std::int64_t>({row_starts[row + 1], tokens, begin + kv_lens[row] - position});
        const std::int64_t first = std::min(end, begin + std::max<std::int64_t>(0, first_key - position));
        return {std::max(begin, first), std::max(begin, end)};
    }
};

// Write zeros for the tokens that attend to no key.
template <typename T>
void clear_others(const ThreadGroup& threads, const Step& step, T* out, std::int64_t size) {
    const Range mine = threads.split(step.tokens);
    std::int64_t token = mine.begin;
    const auto clear_until = [&](std::int64_t end) {
        if (end > token) std::memset(out + token * size, 0, sizeof(T) * (end - token) * size);
    };
    for (std::int64_t row = 0; row < step.rows && token < mine.end; ++row) {
        const Range queries = step.attending(row);
        if (queries.begin >= queries.end) continue;
        clear_until(std::min(queries.begin, mine.end));
        token = std::max(token, queries.end);
    }
    clear_until(mine.end);
}

// Queries [begin, end) of the batch for one key head; the first is at `position`. A query row is one head of one token.
struct WorkUnit {
    std::int64_t row, kv_head, begin, end, position, group;
    std::int64_t keys;  // end of the keys that the last query sees
    std::int64_t first_tile, end_tile;  // absolute: tile t holds keys [t * TILE, (t + 1) * TILE)

    std::int64_t query_rows() const { return (end - begin) * group; }
    bool may_be_cut() const { return query_rows() <= MAX_SPLIT_ROWS; }

    // Keys are counted in units of 16; reading and packing a tile costs about as much as ROWS query rows.
    static constexpr std::int64_t PART = 16, ROWS = 8;
    std::int64_t cost_before(std::int64_t tile) const {
        const std::int64_t end = std::min(tile * TILE, keys);
        return (end - first_tile * TILE + PART - 1) / PART * (ROWS + query_rows());
    }
    std::int64_t cost() const { return cost_before(end_tile); }
};

template <typename Body>
void each_unit(const Step& step, Body&& body) {
    const std::int64_t most = std::max<std::int64_t>(1, ATTENTION_UNIT_ROWS / step.group());
    for (std::int64_t row = 0; row < step.rows; ++row) {
        const Range queries = step.attending(row);
        const std::int64_t query_rows = (queries.end - queries.begin) * step.group();
        if (query_rows < step.least || query_rows > step.most) continue;
        const std::int64_t to_position = step.start_positions[row] - step.row_starts[row];
        for (std::int64_t kv_head = 0; kv_head < step.kv_heads; ++kv_head) {
            for (std::int64_t begin = queries.begin; begin < queries.end; begin += most) {
                const std::int64_t end = std::min(begin + most, queries.end);
                const std::int64_t keys = step.end_of(end - 1, end - 1 + to_position), tiles = (keys + TILE - 1) / TILE;
                const std::int64_t position = begin + to_position, group = step.group();
                body(WorkUnit{row, kv_head, begin, end, position, group, keys, step.first_of(position) / TILE, tiles});
            }
        }
    }
}

// Division of tiles into shares. All threads compute the same division, and no result depends on it.
struct Shares {
    std::int64_t total;
    int count;
    bool cuts;  // units, at tiles

    // Return the share of the cost in which the middle of the tile lies, or that of the unit if units are whole. `before`
    // is the cost of the units before this one.
    int share_of(std::int64_t before, const WorkUnit& unit, std::int64_t tile) const {
        const bool cut = cuts && unit.may_be_cut();
        const std::int64_t begin = cut ? unit.cost_before(tile) : 0;
        const std::int64_t end = cut ? unit.cost_before(tile + 1) : unit.cost();
        const std::int64_t share = (2 * before + begin + end) * count / (2 * total);
        return static_cast<int>(std::min<std::int64_t>(count - 1, share));
    }

    // Return the end of the tiles, from `tile` on, that are in the same share.
    std::int64_t end_of_part(std::int64_t before, const WorkUnit& unit, std::int64_t tile) const {
        if (!cuts || !unit.may_be_cut()) return unit.end_tile;
        const int share = share_of(before, unit, tile);
        while (++tile < unit.end_tile && share_of(before, unit, tile) == share) {
        }
        return tile;
    }
};

}  // namespace attention
}  // namespace ostinato
