// Attention of a tile of keys and values with few query rows: keys and values are read once, in place.
//
// The sums are those of attention/packed.h, in the same order, so a query gets the same bits either way. The keys of a
// panel are transposed in registers, and all sums over keys are in registers too.
#pragma once

#include "attention/operands.h"
#include "core/transpose.h"

namespace ostinato {
namespace attention {

constexpr int PREFETCHES = 2;  // per square of a panel
// Panels computed at a time, as measured with AVX2: independent sums hide the latency of additions.
template <int ROWS>
constexpr int PANELS_AT_ONCE = LANES != 8 ? 1 : ROWS == 1 ? 4 : 2;
static_assert(LANES != 8 || PANELS % 4 == 0);
#if defined(OSTINATO_FEW_VARIANTS)
constexpr int SMALL_Q_ROWS = 3;
#else
constexpr int SMALL_Q_ROWS = LANES == 16 ? SMALL_Q_ROWS_AVX512 : SMALL_Q_ROWS_OTHERS;  // limited by the registers beside a panel's square
#endif

// Load LANES words of a head from `word` on. Words beyond `head_dim`, which only occur if not WHOLE, are 0.
template <bool WHOLE, typename T, typename S>
[[gnu::always_inline]] inline Float words_of(Head<T> head, const S* from, std::int64_t word) {
    if constexpr (WHOLE) return LaneOperand<T>::load(from + word * LaneOperand<T>::ELEMENTS);
    return head.load_words(from, word);
}

// LANES words of each of LANES heads from `word` on, transposed: vector i holds word i of each head.
template <bool WHOLE, typename T, typename S>
struct Square {
    Float words[LANES];

    [[gnu::always_inline]] Square(Head<T> head, const S* cache, const std::int64_t* offsets, std::int64_t word) {
        unrolled<LANES>([&](auto i) __attribute__((always_inline)) {
            words[i] = words_of<WHOLE>(head, cache + offsets[i], word);
        });
        transpose(words);
    }

    template <typename I>
    [[gnu::always_inline]] Float operator[](I i) const {
        return words[i];
    }
};

#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512_BF16)
#if defined(OSTINATO_HAS_AVX512)
using Units = __m512i;
#else
using Units = __m256i;
#endif

// The same for bfloat16: pairs are transposed, then converted to floats.
template <>
struct Square<true, bf16, bf16> {
    Units pairs[LANES / 2];

    [[gnu::always_inline]] Square(Head<bf16>, const bf16* cache, const std::int64_t* offsets, std::int64_t word) {
        read_units([&](int i) __attribute__((always_inline)) { return cache + offsets[i] + word; }, pairs);
    }

    template <typename I>
    [[gnu::always_inline]] Float operator[](I i) const {
        return i % 2 == 0 ? first_of_pairs(pairs[i / 2]) : second_of_pairs(pairs[i / 2]);
    }
};
#endif

// Compute scores [ROWS, TILE] of PANELS_AT_ONCE panels of keys over the words [begin, end), and add them to those of
// the words before. All these words are read before the next keys: the lines of more keys would evict each other.
template <bool WHOLE, typename T, int ROWS, typename S>
[[gnu::noinline]] void score_panels(Head<T> head, const S* cache, const std::int64_t* offsets, std::int64_t begin,
                                    std::int64_t end, const float* queries, float* scores, HeadPrefetch& fetch) {
    Float sums[PANELS_AT_ONCE<ROWS>][ROWS];
    const auto each = [&](auto&& body) __attribute__((always_inline)) {
        unrolled<PANELS_AT_ONCE<ROWS>>([&](auto p) __attribute__((always_inline)) {
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { body(sums[p][r], scores + r * TILE + p * LANES); });
        });
    };
    each([&](Float& sum, const float* at) __attribute__((always_inline)) { sum = begin == 0 ? Float{} : load(at); });
    HeadPrefetch fetching = fetch;
    const std::int64_t words = head.padded_words();
    for (std::int64_t word = begin; word < end; word += LANES) {
        unrolled<PANELS_AT_ONCE<ROWS>>([&](auto p) __attribute__((always_inline)) {
            const Square<WHOLE, T, S> square(head, cache, offsets + p * LANES, word);
            unrolled<LANES>([&](auto i) __attribute__((always_inline)) {
                if constexpr (i % (LANES / PREFETCHES) == 0) fetching.step();
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
                    LaneOperand<T>::multiply_add(sums[p][r], square[i], queries + r * words + word + i);
                }
            });
        });
    }
    fetch = fetching;
    each([&](Float sum, float* at) __attribute__((always_inline)) { store(at, sum); });
}

// BLOCKS times LANES words of ELEMENTS keys' values, in an order that suits the vectors; `in_order` puts sums over them
// into the order of the dimensions.
template <bool WHOLE, typename T, int BLOCKS, typename S>
struct Values {
    static constexpr int ELEMENTS = LaneOperand<T>::ELEMENTS;
    Float words[BLOCKS][ELEMENTS];

    [[gnu::always_inline]] Values(Head<T> head, const S* cache, const std::int64_t* of, std::int64_t word) {
        unrolled<BLOCKS>([&](auto b) __attribute__((always_inline)) {
            unrolled<ELEMENTS>([&](auto e) __attribute__((always_inline)) {
                words[b][e] = words_of<WHOLE>(head, cache + of[e], word + b * LANES);
            });
            LaneOperand<T>::across_keys(words[b]);
        });
    }

    static void in_order(Float (&)[BLOCKS][ELEMENTS]) {}
};

#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512_BF16)
// The same for bfloat16: the first element of each pair, then the second.
template <int BLOCKS>
struct Values<true, bf16, BLOCKS, bf16> {
    Float words[BLOCKS][1];

    [[gnu::always_inline]] Values(Head<bf16>, const bf16* cache, const std::int64_t* of, std::int64_t word) {
        static_assert(BLOCKS % 2 == 0);
        unrolled<BLOCKS / 2>([&](auto b) __attribute__((always_inline)) {
            const bf16* from = cache + of[0] + word + b * 2 * LANES;
            Units pairs;
            std::memcpy(&pairs, from, sizeof(pairs));
            words[2 * b][0] = first_of_pairs(pairs);
            words[2 * b + 1][0] = second_of_pairs(pairs);
        });
    }

    static void in_order(Float (&sums)[BLOCKS][1]) {
        unrolled<BLOCKS / 2>([&](auto b) __attribute__((always_inline)) {
            const Float first = sums[2 * b][0], second = sums[2 * b + 1][0];
            sums[2 * b][0] = interleave_low(first, second);
            sums[2 * b + 1][0] = interleave_high(first, second);
        });
    }
};

template <>
struct Values<true, bf16, 1, bf16> : Values<false, bf16, 1, bf16> {
    using Values<false, bf16, 1, bf16>::Values;
};
#endif

// Compute sums [ROWS, padded_dim] = weights [ROWS, TILE words] x values, for BLOCKS times LANES words from `word` on
// and `depth` words of weights.
template <bool WHOLE, typename T, int ROWS, int BLOCKS, typename S>
[[gnu::noinline]] void weighted_value_words(Head<T> head, const S* cache, const std::int64_t* offsets, std::int64_t word,
                                   std::int64_t depth, const float* weights, float* out, HeadPrefetch& fetch) {
    constexpr int ELEMENTS = LaneOperand<T>::ELEMENTS;
    using Some = Values<WHOLE, T, BLOCKS, S>;
    Float sums[ROWS][BLOCKS][ELEMENTS] = {};
    HeadPrefetch fetching = fetch;
    for (std::int64_t k = 0; k < depth; ++k) {
        fetching.step();
        const Some values(head, cache, offsets + k * ELEMENTS, word);
        unrolled<BLOCKS>([&](auto b) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
                for (int e = 0; e < ELEMENTS; ++e) {
                    LaneOperand<T>::multiply_add(sums[r][b][e], values.words[b][e], weights + r * TILE + k);
                }
            }
        });
    }
    fetch = fetching;
    const std::int64_t dim = head.padded_dim();
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        Some::in_order(sums[r]);
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; ++b) {
#pragma GCC unroll 2
            for (int e = 0; e < ELEMENTS; ++e) {
                store(out + r * dim + (word + b * LANES) * ELEMENTS + e * LANES, sums[r][b][e]);
            }
        }
    }
}

// Compute the scores Q x K [rows, TILE] of up to SMALL_Q_ROWS rows.
template <typename T, typename S>
void qk_scores(std::int64_t rows, Head<T> head, const S* cache, const KeyOffsets& places, const float* queries,
                  float* scores, HeadPrefetch& fetch) {
    with_constant<SMALL_Q_ROWS>(rows, [&](auto constant) {
        constexpr int ROWS = constant.value;
        const std::int64_t whole = head.dim / (LANES * LaneOperand<T>::ELEMENTS) * LANES, words = head.padded_words();
        for (std::int64_t i = 0; i < places.end; i += PANELS_AT_ONCE<ROWS> * LANES) {
            const std::int64_t* of = places.offsets + i;
            if (whole > 0) score_panels<true, T, ROWS>(head, cache, of, 0, whole, queries, scores + i, fetch);
            if (whole < words) score_panels<false, T, ROWS>(head, cache, of, whole, words, queries, scores + i, fetch);
        }
    });
}

template <typename T>
constexpr int blocks_of_words(int rows) {
    const int sums = LANES == 16 ? 24 : 10;
    const int most = sums / (rows * LaneOperand<T>::ELEMENTS);
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// Return the number of passes of the weights over the values.
template <typename T>
std::int64_t value_passes(std::int64_t rows, std::int64_t dim) {
    const std::int64_t blocks = blocks_of_words<T>(static_cast<int>(rows)) * LANES * LaneOperand<T>::ELEMENTS;
    return (dim + blocks - 1) / blocks;
}

// Compute P x V: sums [rows, padded_dim] from weights [rows, TILE], of which `depth` words are not 0.
template <typename T, typename S>
void weighted_values(std::int64_t rows, Head<T> head, const S* cache, const KeyOffsets& places, std::int64_t depth,
                  const float* weights, float* sums, HeadPrefetch& fetch) {
    with_constant<SMALL_Q_ROWS>(rows, [&](auto constant) {
        constexpr int ROWS = constant.value, MOST = blocks_of_words<T>(ROWS);
        std::int64_t word = 0;
        const auto blocks = [&](auto count) {
            constexpr int COUNT = count.value;
            for (; (word + COUNT * LANES) * LaneOperand<T>::ELEMENTS <= head.dim; word += COUNT * LANES) {
                weighted_value_words<true, T, ROWS, COUNT>(head, cache, places.offsets, word, depth, weights, sums, fetch);
            }
        };
        if constexpr (MOST >= 4) blocks(std::integral_constant<int, 4>{});
        if constexpr (MOST >= 2) blocks(std::integral_constant<int, 2>{});
        blocks(std::integral_constant<int, 1>{});
        if (word < head.padded_words()) {
            weighted_value_words<false, T, ROWS, 1>(head, cache, places.offsets, word, depth, weights, sums, fetch);
        }
    });
}

}  // namespace attention
}  // namespace ostinato
