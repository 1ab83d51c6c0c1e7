// Attention of a tile of keys and values with many query rows: both are packed, then multiplied as matrices.
//
// A query row's result from a tile does not depend on the other rows: every score is one sum over head_dim in order,
// and every weighted value one sum over the tile's keys in order, whatever the block of registers. Keys that a row does
// not see have a weight of 0, and adding 0 times a finite value changes no sum.
#pragma once

#include "attention/softmax.h"
#include "core/thread_group.h"
#include "core/transpose.h"

namespace ostinato {
namespace attention {

// Running weighted sums of some query rows.
struct Sums {
    Softmax* softmax;
    float* values;  // [rows, padded_dim]
};

// Scratch of a thread for `rows` query rows and a tile of keys and values. ops/scratch.py counts it.
template <typename T>
struct TileScratch {
    float *keys, *values;     // packed
    float *queries, *scores;  // [rows, padded words], [rows, TILE]
    Sums running, tile_sums;

    TileScratch(const ThreadGroup& threads, const Head<T>& head, std::int64_t rows) {
        const std::int64_t words = head.padded_words(), dim = head.padded_dim();
        const std::int64_t value_words = TILE / LaneOperand<T>::ELEMENTS * dim;
        float* next = threads.thread_scratch<float>(rows * (words + TILE + 2 * dim + 4) + TILE * words + value_words);
        const auto take = [&](std::int64_t count) {
            float* taken = next;
            next += count;
            return taken;
        };
        keys = take(TILE * words);
        values = take(value_words);
        queries = take(rows * words);
        scores = take(rows * TILE);
        running.values = take(rows * dim);
        tile_sums.values = take(rows * dim);
        running.softmax = reinterpret_cast<Softmax*>(take(rows * 2));
        tile_sums.softmax = reinterpret_cast<Softmax*>(take(rows * 2));
    }
};

// Pack LANES keys from `offsets` on into `panel` [padded words, LANES]: word by word, with the keys beside each other.
template <typename T, typename S>
void pack_keys(Head<T> head, const S* cache, const std::int64_t* offsets, float* panel, HeadPrefetch& fetch) {
    for (std::int64_t word = 0; word < head.words(); word += LANES) {
        Float rows[LANES];
        for (int i = 0; i < LANES; ++i) rows[i] = head.load_words(cache + offsets[i], word);
        fetch.step();
        transpose(rows);
        for (int i = 0; i < LANES; ++i) store(panel + (word + i) * LANES, rows[i]);
    }
}

// Pack the values of the keys that share a word into `packed` [padded_dim] words.
template <typename T, typename S>
void pack_values(Head<T> head, const S* cache, const std::int64_t* offsets, float* packed) {
    constexpr int ELEMENTS = LaneOperand<T>::ELEMENTS;
    for (std::int64_t word = 0; word < head.words(); word += LANES) {
        Float values[ELEMENTS];
        for (int e = 0; e < ELEMENTS; ++e) values[e] = head.load_words(cache + offsets[e], word);
        LaneOperand<T>::across_keys(values);
        for (int e = 0; e < ELEMENTS; ++e) store(packed + word * ELEMENTS + e * LANES, values[e]);
    }
}

// Compute a block of registers: `out` [ROWS, COLUMNS * LANES] = left [ROWS, depth] x right. Element k of a column of
// vectors is at `right + k * step`, the next column `column` words further.
template <typename T, int ROWS, int COLUMNS>
void product_block(const float* left, std::int64_t left_stride, const float* right, std::int64_t step,
                   std::int64_t column, std::int64_t depth, float* out, std::int64_t out_stride) {
    Float sums[ROWS][COLUMNS] = {};
    for (std::int64_t k = 0; k < depth; ++k) {
        Float vectors[COLUMNS];
        for (int j = 0; j < COLUMNS; ++j) vectors[j] = load(right + k * step + j * column);
        for (int i = 0; i < ROWS; ++i) {
            for (int j = 0; j < COLUMNS; ++j) {
                LaneOperand<T>::multiply_add(sums[i][j], vectors[j], left + i * left_stride + k);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < COLUMNS; ++j) store(out + i * out_stride + j * LANES, sums[i][j]);
    }
}

constexpr int BLOCK_ROWS = 6;
constexpr int BLOCK_COLUMNS = LANES == 8 ? 2 : 4;  // limited by the registers

// Compute `product_block` for `rows` up to BLOCK_ROWS and the columns of vectors from `begin` to `end`.
template <typename T>
void product(std::int64_t rows, std::int64_t begin, std::int64_t end, const float* left, std::int64_t left_stride,
             const float* right, std::int64_t step, std::int64_t column, std::int64_t depth, float* out,
             std::int64_t out_stride) {
    std::int64_t j = begin;
    const auto block = [&](auto columns) {
        constexpr int COLUMNS = decltype(columns)::value;
        for (; j + COLUMNS <= end; j += COLUMNS) {
            with_constant<BLOCK_ROWS>(rows, [&](auto some) {
                product_block<T, some.value, COLUMNS>(left, left_stride, right + j * column, step, column, depth, out + j * LANES, out_stride);
            });
        }
    };
    block(std::integral_constant<int, BLOCK_COLUMNS>{});
    block(std::integral_constant<int, 2>{});
    block(std::integral_constant<int, 1>{});
}

}  // namespace attention
}  // namespace ostinato
