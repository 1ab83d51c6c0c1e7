// A tile of keys and values against few query rows: both are read once, from where they lie.
//
// The sums are those of attention_tile.h, in the same order, so that a query gets the same bits either way: the keys of
// a panel are transposed in registers, and all sums over keys are in registers too.
#pragma once

#include "attention_words.h"
#include "transpose.h"

namespace ostinato {
namespace attention {

constexpr int FETCHES = 2;  // in a square of a panel
#if defined(OSTINATO_FEW_VARIANTS)
constexpr int DIRECT_ROWS = 3;
#else
constexpr int DIRECT_ROWS = LANES == 16 ? 12 : 4;  // what the registers hold beside a panel's square
#endif

// LANES words of a head from `word` on; beyond `head_dim`, which is a case of its own, they are 0.
template <bool WHOLE, typename T, typename S>
[[gnu::always_inline]] inline Float words_of(Head<T> head, const S* from, std::int64_t word) {
    if constexpr (WHOLE) return Words<T>::load(from + word * Words<T>::ELEMENTS);
    return head.load_words(from, word);
}

// scores [ROWS, TILE] of a panel of keys, from words [begin, end), added to those of the words before. All of a key is
// read before the keys behind the panel are: the lines of more keys than that hinder each other.
template <bool WHOLE, typename T, int ROWS, typename S>
[[gnu::noinline]] void score_panel(Head<T> head, const S* cache, const std::int64_t* offsets, std::int64_t begin,
                                   std::int64_t end, const float* queries, float* scores, Fetch& fetch) {
    Float sums[ROWS];
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
        sums[r] = begin == 0 ? Float{} : load(scores + r * TILE);
    });
    Fetch fetching = fetch;
    const std::int64_t words = head.padded_words();
    for (std::int64_t word = begin; word < end; word += LANES) {
        Float square[LANES];
        unrolled<LANES>([&](auto i) __attribute__((always_inline)) {
            square[i] = words_of<WHOLE>(head, cache + offsets[i], word);
        });
        transpose(square);
        unrolled<LANES>([&](auto i) __attribute__((always_inline)) {
            if constexpr (i % (LANES / FETCHES) == 0) fetching.step();
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
                Words<T>::multiply_add(sums[r], square[i], queries + r * words + word + i);
            });
        });
    }
    fetch = fetching;
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { store(scores + r * TILE, sums[r]); });
}

// sums [ROWS, padded_dim] = weights [ROWS, TILE words] x values, in words of BLOCKS times LANES from `word` on; `depth`
// words of weights.
template <bool WHOLE, typename T, int ROWS, int BLOCKS, typename S>
[[gnu::noinline]] void weigh_words(Head<T> head, const S* cache, const std::int64_t* offsets, std::int64_t word, std::int64_t depth,
                 const float* weights, float* out, Fetch& fetch) {
    constexpr int ELEMENTS = Words<T>::ELEMENTS;
    Float sums[BLOCKS][ROWS][ELEMENTS] = {};
    Fetch fetching = fetch;
    for (std::int64_t k = 0; k < depth; ++k) {
        const std::int64_t* of = offsets + k * ELEMENTS;
        fetching.step();
        unrolled<BLOCKS>([&](auto b) __attribute__((always_inline)) {
            Float values[ELEMENTS];
            unrolled<ELEMENTS>([&](auto e) __attribute__((always_inline)) {
                values[e] = words_of<WHOLE>(head, cache + of[e], word + b * LANES);
            });
            Words<T>::across_keys(values);
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
                unrolled<ELEMENTS>([&](auto e) __attribute__((always_inline)) {
                    Words<T>::multiply_add(sums[b][r][e], values[e], weights + r * TILE + k);
                });
            });
        });
    }
    fetch = fetching;
    const std::int64_t dim = head.padded_dim();
    unrolled<BLOCKS>([&](auto b) __attribute__((always_inline)) {
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
            unrolled<ELEMENTS>([&](auto e) __attribute__((always_inline)) {
                store(out + r * dim + (word + b * LANES) * ELEMENTS + e * LANES, sums[b][r][e]);
            });
        });
    });
}

// Calls `body` with the number of rows as a constant.
template <int ROWS = DIRECT_ROWS, typename Body>
void with_rows(std::int64_t rows, Body&& body) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return with_rows<ROWS - 1>(rows, body);
    }
    body(std::integral_constant<int, ROWS>{});
}

// scores [rows, TILE] of `rows` up to DIRECT_ROWS.
template <typename T, typename S>
void score_direct(std::int64_t rows, Head<T> head, const S* cache, const Places& places, const float* queries,
                  float* scores, Fetch& fetch) {
    with_rows(rows, [&](auto constant) {
        constexpr int ROWS = constant.value;
        const std::int64_t whole = head.dim / (LANES * Words<T>::ELEMENTS) * LANES, words = head.padded_words();
        for (std::int64_t i = 0; i < places.end; i += LANES) {
            const std::int64_t* of = places.offsets + i;
            if (whole > 0) score_panel<true, T, ROWS>(head, cache, of, 0, whole, queries, scores + i, fetch);
            if (whole < words) score_panel<false, T, ROWS>(head, cache, of, whole, words, queries, scores + i, fetch);
        }
    });
}

template <typename T>
constexpr int blocks_of_words(int rows) {
    const int sums = LANES == 16 ? 24 : 10;
    const int most = sums / (rows * Words<T>::ELEMENTS);
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// sums [rows, padded_dim] from weights [rows, TILE], of which `depth` words are not 0.
template <typename T, typename S>
void weigh_direct(std::int64_t rows, Head<T> head, const S* cache, const Places& places, std::int64_t depth,
                  const float* weights, float* sums, Fetch& fetch) {
    with_rows(rows, [&](auto constant) {
        constexpr int ROWS = constant.value, MOST = blocks_of_words<T>(ROWS);
        std::int64_t word = 0;
        const auto blocks = [&](auto count) {
            constexpr int COUNT = count.value;
            for (; (word + COUNT * LANES) * Words<T>::ELEMENTS <= head.dim; word += COUNT * LANES) {
                weigh_words<true, T, ROWS, COUNT>(head, cache, places.offsets, word, depth, weights, sums, fetch);
            }
        };
        if constexpr (MOST >= 4) blocks(std::integral_constant<int, 4>{});
        if constexpr (MOST >= 2) blocks(std::integral_constant<int, 2>{});
        blocks(std::integral_constant<int, 1>{});
        if (word < head.padded_words()) {
            weigh_words<false, T, ROWS, 1>(head, cache, places.offsets, word, depth, weights, sums, fetch);
        }
    });
}

}  // namespace attention
}  // namespace ostinato
