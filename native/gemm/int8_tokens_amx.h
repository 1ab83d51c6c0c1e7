// Products of tokens in int8 (gemm/int8_tokens.h) on matrix units: as gemm/large_m_amx.h, with tiles of 64 inputs.
#pragma once

#include "gemm/int8_tokens.h"
#include "gemm/large_m_amx.h"

#if defined(OSTINATO_TILES)
namespace ostinato {
namespace tiles {

constexpr std::int64_t INT8_DEPTH = TILE_DEPTH<std::int8_t>, INT8_TILE = SIDE * INT8_DEPTH;

// Copy inputs `begin` to `end` of rows as tiles [steps][2][16 rows, 64 inputs], with zeros behind rows and inputs.
inline void copy_rows_int8(const TileRows<std::int8_t>& rows, std::int64_t begin, std::int64_t end, std::int8_t* panel) {
    for (int r = 0; r < ROWS; ++r) {
        std::int8_t* to = panel + r * INT8_DEPTH;
        for (std::int64_t i = begin; i < end; i += INT8_DEPTH, to += ROWS * INT8_DEPTH) {
            const std::int64_t count = rows.row[r] ? std::min(end - i, INT8_DEPTH) : 0;
            if (count == INT8_DEPTH) {
                std::memcpy(to, rows.row[r] + i, INT8_DEPTH);
            } else {
                std::memset(to, 0, INT8_DEPTH);
                if (count) std::memcpy(to, rows.row[r] + i, count);
            }
        }
    }
}

// Compute sums [blocks][32 rows][16 tokens] = rows x tokens. Meanwhile the next rows are prefetched.
inline void multiply_rows_int8(const TileRows<std::int8_t>& rows, const TileRows<std::int8_t>& next,
                               const PackedTiles<std::int8_t>& tokens, std::int8_t* panel, std::int32_t* sums) {
    const std::int64_t pairs = (tokens.blocks + 1) / 2;
    StreamPrefetch fetch(next, tokens.steps * pairs);
    const auto then = [&](std::int64_t) { fetch(); };
    // Tiles that are loaded more often are copied: rows in place may evict each other from the L1 cache.
    const bool in_place = pairs == 1 && rows.in % INT8_DEPTH == 0 && rows.row[SIDE - 1] && rows.row[ROWS - 1];
    const std::int64_t span = in_place ? rows.in : INT8_PANEL_K;
    const WeightTiles<std::int8_t> tiles = in_place
        ? WeightTiles<std::int8_t>{rows.row[0], rows.row[SIDE], rows.in, INT8_DEPTH}
        : WeightTiles<std::int8_t>{panel, panel + INT8_TILE, ROW_BYTES, 2 * INT8_TILE};
    for (std::int64_t begin = 0; begin < rows.in; begin += span) {
        const std::int64_t end = std::min(rows.in, begin + span), count = (end - begin + INT8_DEPTH - 1) / INT8_DEPTH;
        if (!in_place) copy_rows_int8(rows, begin, end, panel);
        for (std::int64_t block = 0; block < tokens.blocks; block += 2) {
            with_blocks(tokens, block, [&](auto blocks) {
                multiply_blocks<blocks.value>(tiles, tokens, block, begin / INT8_DEPTH, count, begin > 0,
                                              sums + block * ROWS * SIDE, then);
            });
        }
    }
}

// Write the outputs of a block of tokens from `first` on.
template <typename T, typename Y>
void put_int8_block(const std::int32_t* sums, const Int8Tokens& tokens, std::int64_t first, const Epilogue& o,
                    std::int64_t row, int count, Y* y) {
    Float halves[2][SIDE];
    for (int r = 0; r < ROWS; ++r) std::memcpy(&halves[r / SIDE][r % SIDE], sums + r * SIDE, sizeof(Float));
    transpose(halves[0]);
    transpose(halves[1]);
    for (std::int64_t t = first; t < std::min<std::int64_t>(tokens.count, first + SIDE); ++t) {
        std::int32_t of_token[ROWS];
        for (int half = 0; half < 2; ++half) std::memcpy(of_token + half * SIDE, &halves[half][t - first], sizeof(Float));
        put_int8_outputs<T>(of_token, ROWS, tokens, t, 0, o, row, count, y);
    }
}

// Compute all outputs of any number of tokens, in groups that stay in an L2 cache.
template <typename T, typename Y>
void gemm_int8(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride,
               const WeightView<std::int8_t>& w, const Epilogue& all, Y* y_of_all) {
    const std::int64_t steps = (w.k + INT8_DEPTH - 1) / INT8_DEPTH, blocks = blocks_of(tokens);
    const std::int64_t most = std::max<std::int64_t>(2, TILE_GROUP_BYTES / (steps * INT8_TILE));
    const EvenBlocks groups(blocks, static_cast<int>(most));
    for (int group = 0; group < groups.count; ++group) {
        const std::int64_t first = groups.begin(group) * SIDE, here = groups.size(group);
        const std::int64_t count = std::min(tokens - first, here * SIDE);
        const auto [made, behind] = quantize_tokens_int8(threads, count, x + first * x_stride, x_stride, w.k, here * steps * INT8_TILE);
        const PackedTiles<std::int8_t> packed{reinterpret_cast<std::int8_t*>(behind), here, steps};
        const Range mine = threads.split_shared(here * steps);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t block = i / steps, step = i % steps;
            const std::int8_t* from[SIDE];
            for (std::int64_t t = 0; t < SIDE; ++t) from[t] = block * SIDE + t < count ? made.at(block * SIDE + t) : nullptr;
            pack_tile(from, step * INT8_DEPTH, INT8_DEPTH, packed.tile(block, step));
        }
        threads.barrier();
        const Epilogue o = from_token<Y>(all, first);
        Y* y = y_of_all + first * o.y_stride;
        const std::int64_t width = has_gates(o.activation) ? SIDE : ROWS, panel_floats = ROWS * INT8_PANEL_K / sizeof(float);
        float* work = threads.thread_scratch<float>(panel_floats + here * ROWS * SIDE);
        auto* panel = reinterpret_cast<std::int8_t*>(work);
        auto* sums = reinterpret_cast<std::int32_t*>(work + panel_floats);
        const Scope scope;
        for (const std::int64_t number : threads.claims((o.size + width - 1) / width)) {
            const OutputRows<std::int8_t> rows(w, o, number), next(w, o, number + 1);
            multiply_rows_int8(rows, next, packed, panel, sums);
            for (std::int64_t block = 0; block < here; ++block) {
                put_int8_block<T>(sums + block * ROWS * SIDE, made, block * SIDE, o, rows.first, static_cast<int>(rows.count), y);
            }
        }
    }
}

}  // namespace tiles
}  // namespace ostinato
#endif
