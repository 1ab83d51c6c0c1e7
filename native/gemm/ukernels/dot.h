// Dot products of a few rows of weights with a few tokens: the inner loop of the small-m drivers.
//
// Weights are used as the checkpoint has them, [n, k]. Each dot product runs along k in ascending order, in one
// accumulator, so a result depends only on its own token and row, however many of either are computed together.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "core/simd.h"

namespace ostinato {

// Reading and multiplying of one vector of X (type of tokens: float or bf16) with one of W (storage type of weights).
template <typename X, typename W>
struct Dot {
    static constexpr int STEP = LANES;
    using Vector = Float;
    static Vector read(const float* from) { return load(from); }
    static Vector read_first(const float* from, int count) { return load_masked(from, count); }
    template <typename T>
    static Vector read(const T* from) {
        return load(from);
    }
    template <typename T>
    static Vector read_first(const T* from, int count) {
        return load_masked(from, count);
    }
    static Float multiply_add(Float to, Vector x, Vector w) { return to + x * w; }
};

#if defined(OSTINATO_HAS_AVX512_BF16) || defined(OSTINATO_HAS_NEON_BF16)
#define OSTINATO_BF16_PRODUCTS
// Pairs of bfloat16 are multiplied exactly and added in float32.
template <typename W>
struct Dot<bf16, W> {
    static constexpr int STEP = 2 * LANES;
#if defined(OSTINATO_HAS_NEON_BF16)
    using Vector = bfloat16x8_t;
#else
    using Vector = __m512bh;
#endif

    static Vector read(const bf16* from) {
        Vector value;
        std::memcpy(&value, from, sizeof(value));
        return value;
    }
    // Read int8 values as bfloat16: the upper halves of their float32 bits.
    static Vector read(const std::int8_t* from) {
#if defined(OSTINATO_HAS_NEON_BF16)
        const int16x8_t wide = vmovl_s8(vld1_s8(from));
        const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), high = vcvtq_f32_s32(vmovl_high_s16(wide));
        return vreinterpretq_bf16_u16(vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)));
#else
        alignas(64) static constexpr std::uint16_t UPPER[STEP] = {
            1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
            33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
        const auto wide = [](const std::int8_t* part) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(part));
            return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
        };
        return (Vector)_mm512_permutex2var_epi16(wide(from), _mm512_load_si512(UPPER), wide(from + LANES));
#endif
    }
    template <typename T>
    static Vector read_first(const T* from, int count) {
        T elements[STEP] = {};
        std::memcpy(elements, from, sizeof(T) * count);
        return read(elements);
    }
    static Float multiply_add(Float to, Vector x, Vector w) {
#if defined(OSTINATO_HAS_NEON_BF16)
        return (Float)vbfdotq_f32((float32x4_t)to, x, w);
#else
        return (Float)_mm512_dpbf16_ps((__m512)to, x, w);
#endif
    }
};
#endif

#if defined(OSTINATO_HAS_AVX512)
// Return the sums of four vectors, as four parts of 128 bits that are still to be added.
inline __m512 sum_parts(const Float* vectors) {
    const auto add_pairs = [](Float a, Float b) {
        return _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    };
    const __m512 ab = add_pairs(vectors[0], vectors[1]), cd = add_pairs(vectors[2], vectors[3]);
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
}
#endif

// Write the sums of four vectors.
inline void sum4(const Float* vectors, float* sums) {
#if defined(OSTINATO_HAS_AVX512)
    const __m512 abcd = sum_parts(vectors);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(OSTINATO_HAS_AVX2)
    const auto add_halves = [](Float a, Float b) {
        return _mm256_add_ps(_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x20),
                             _mm256_permute2f128_ps((__m256)a, (__m256)b, 0x31));
    };
    const __m256 ab = add_halves(vectors[0], vectors[1]), cd = add_halves(vectors[2], vectors[3]);
    const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
    const __m256 single = _mm256_add_ps(_mm256_shuffle_ps(pairs, pairs, 0x88), _mm256_shuffle_ps(pairs, pairs, 0xDD));
    _mm_storeu_ps(sums, _mm_unpacklo_ps(_mm256_castps256_ps128(single), _mm256_extractf128_ps(single, 1)));
#else
    for (int i = 0; i < 4; ++i) sums[i] = sum(vectors[i]);
#endif
}

// Write the sums of two times four vectors, with the bits of `sum4`.
inline void sum8(const Float* first, const Float* second, float* first_sums, float* second_sums) {
#if defined(OSTINATO_HAS_AVX512)
    const __m512 a = sum_parts(first), b = sum_parts(second);
    const __m512 half = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    const __m512 both = _mm512_add_ps(half, _mm512_shuffle_f32x4(half, half, 0xB1));
    _mm_storeu_ps(first_sums, _mm512_castps512_ps128(both));
    _mm_storeu_ps(second_sums, _mm512_extractf32x4_ps(both, 2));
#else
    sum4(first, first_sums);
    sum4(second, second_sums);
#endif
}

constexpr int MR = 4;
#if defined(OSTINATO_HAS_AVX512)
constexpr int NR = 6;  // 24 accumulators, 4 rows and a token: 29 of 32 registers
#elif defined(OSTINATO_HAS_AVX2)
constexpr int NR = 4;  // 12 accumulators, 3 tokens and a row: 16 of 16 registers; 4 tokens take 2 rows at a time
#else
constexpr int NR = 2;  // 8 accumulators, 4 rows and a token: 13 of 16 registers
#endif

// Rows whose sums with TOKENS tokens are in registers together.
template <int TOKENS>
constexpr int ROWS_IN_REGISTERS = LANES == 8 && TOKENS > 3 ? 2 : MR;

// A few tokens as the inner loop reads them: packed as [steps][TOKENS][STEP], or in place, `stride` elements apart.
template <typename X>
struct Tokens {
    const X* x;
    std::int64_t stride;  // 0: packed
};

// Compute total[t][r] += x[t][i] * w[r][i] for elements `begin` to `end`, TOKENS tokens and ROWS rows. `begin` is a
// multiple of STEP; packed tokens are padded with zeros to a multiple of it.
//
// Meanwhile PREFETCH of the next rows are prefetched, whose storage type is N.
template <int PREFETCH, bool PACKED, typename X, typename W, typename N, int TOKENS, int ROWS>
__attribute__((always_inline)) inline void dot_span(const Tokens<X>& tokens, const W* const* w, const N* const* next,
                                                    std::int64_t begin, std::int64_t end, Float (&total)[TOKENS][ROWS]) {
    using D = Dot<X, W>;
    const std::int64_t token_stride = PACKED ? D::STEP : tokens.stride;
    const X* x = tokens.x + (PACKED ? begin * TOKENS : begin);
    // The fewer of rows and tokens are held in registers, and the others are loaded one by one.
    const auto multiply = [&](auto&& token, auto&& row) __attribute__((always_inline)) {
        if constexpr (LANES == 8 && TOKENS < ROWS) {
            typename D::Vector held[TOKENS];
#pragma GCC unroll 6
            for (int t = 0; t < TOKENS; ++t) held[t] = token(t);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const typename D::Vector one = row(r);
#pragma GCC unroll 6
                for (int t = 0; t < TOKENS; ++t) total[t][r] = D::multiply_add(total[t][r], held[t], one);
            }
        } else {
            typename D::Vector held[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) held[r] = row(r);
#pragma GCC unroll 6
            for (int t = 0; t < TOKENS; ++t) {
                const typename D::Vector one = token(t);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) total[t][r] = D::multiply_add(total[t][r], one, held[r]);
            }
        }
    };
    std::int64_t i = begin;
    for (; i + D::STEP <= end; i += D::STEP, x += PACKED ? D::STEP * TOKENS : D::STEP) {
        if constexpr (PREFETCH > 0) {
#pragma GCC unroll 4
            for (int p = 0; p < PREFETCH; ++p) __builtin_prefetch(next[p] + i, 0, 2);
        }
        multiply([&](int t) __attribute__((always_inline)) { return D::read(x + t * token_stride); },
                 [&](int r) __attribute__((always_inline)) { return D::read(w[r] + i); });
    }
    if (i < end) {
        const int rest = static_cast<int>(end - i);
        multiply([&](int t) __attribute__((always_inline)) { return D::read_first(x + t * token_stride, rest); },
                 [&](int r) __attribute__((always_inline)) { return D::read_first(w[r] + i, rest); });
    }
}

// Set sums to zero in registers: an initialiser would write them to memory first.
template <int TOKENS, int ROWS>
__attribute__((always_inline)) inline void clear(Float (&total)[TOKENS][ROWS]) {
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) total[t][r] = Float{};
    }
}

// Compute sums[t * sums_stride + r] = sum_i x[t][i] * w[r][i] for TOKENS tokens and ROWS rows of `size` elements.
//
// `scales` are optional: one factor per `group` elements of a row, a multiple of STEP; row r's begin at scales[r].
template <int TOKENS, int ROWS, int PREFETCH, bool PACKED, typename X, typename W, typename N>
__attribute__((always_inline)) inline void dot_few_rows(const Tokens<X>& tokens, const W* const* w, const N* const* next,
                                                        std::int64_t size, const float* const* scales, std::int64_t group,
                                                        float* sums, int sums_stride) {
    Float total[TOKENS][ROWS];
    clear(total);
    if (scales == nullptr) {
        dot_span<PREFETCH, PACKED>(tokens, w, next, 0, size, total);
    } else {
        for (std::int64_t begin = 0; begin < size; begin += group) {
            Float part[TOKENS][ROWS];
            clear(part);
            const std::int64_t end = begin + group < size ? begin + group : size;
            dot_span<PREFETCH, PACKED>(tokens, w, next, begin, end, part);
#pragma GCC unroll 6
            for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) total[t][r] += part[t][r] * scales[r][begin / group];
            }
        }
    }
    if constexpr (ROWS == MR) {
#pragma GCC unroll 3
        for (int t = 0; t + 1 < TOKENS; t += 2) {
            sum8(total[t], total[t + 1], sums + t * sums_stride, sums + (t + 1) * sums_stride);
        }
        if constexpr (TOKENS % 2 == 1) sum4(total[TOKENS - 1], sums + (TOKENS - 1) * sums_stride);
    } else {
        static_assert(ROWS == 2);
#pragma GCC unroll 3
        for (int t = 0; t < TOKENS; t += 2) {
            const int other = t + 1 < TOKENS ? t + 1 : t;
            const Float both[4] = {total[t][0], total[t][1], total[other][0], total[other][1]};
            float of_both[4];
            sum4(both, of_both);
            std::memcpy(sums + t * sums_stride, of_both, 2 * sizeof(float));
            std::memcpy(sums + other * sums_stride, of_both + 2, 2 * sizeof(float));
        }
    }
}

// Compute `dot_few_rows` for MR rows.
template <int TOKENS, int PREFETCH, bool PACKED, typename X, typename W, typename N>
inline void dot_block(const Tokens<X>& tokens, const W* const* w, const N* const* next, std::int64_t size,
                      const float* const* scales, std::int64_t group, float* sums, int sums_stride) {
    constexpr int ROWS = ROWS_IN_REGISTERS<TOKENS>;
    if constexpr (ROWS == MR) {
        dot_few_rows<TOKENS, ROWS, PREFETCH, PACKED>(tokens, w, next, size, scales, group, sums, sums_stride);
    } else {
        constexpr int FIRST = (PREFETCH + 1) / 2;
        dot_few_rows<TOKENS, ROWS, FIRST, PACKED>(tokens, w, next, size, scales, group, sums, sums_stride);
        dot_few_rows<TOKENS, ROWS, PREFETCH - FIRST, PACKED>(tokens, w + ROWS, next + FIRST, size,
                                                             scales ? scales + ROWS : nullptr, group, sums + ROWS,
                                                             sums_stride);
    }
}

struct BlockByte;  // weights in blocks, which have their own dot products (gemm/block_ops.h)

// Most tokens multiplied with rows of W at a time. With blocks and 16 registers they are fewer, as integers take
// registers too.
template <typename W>
constexpr int MAX_DOT_TOKENS = std::is_same_v<W, BlockByte> && LANES < 16 ? 2 : NR;

// Most i16 tokens multiplied with rows in blocks at a time.
constexpr int MAX_I16_TOKENS = LANES == 8 ? I16_BLOCK_NR_AVX2 : I16_NR;

// Blocks of tokens from which on rows are first converted to the type that is multiplied, as measured: two with vectors
// of 4, where blocks are small; three where a conversion takes several instructions; elsewhere never.
template <typename X, typename W>
constexpr int MIN_BLOCKS_TO_WIDEN = std::is_same_v<X, W> || std::is_same_v<W, BlockByte> ? std::numeric_limits<int>::max()
                            : LANES < 8                  ? 2
                            : Dot<X, W>::STEP > LANES    ? 3
                                                         : std::numeric_limits<int>::max();

// Compute to[i] = from[i], converted to X, for `size` elements, with zeros up to a whole step.
template <typename X, typename W>
inline void widen_row(const W* from, std::int64_t size, X* to) {
    using D = Dot<X, W>;
    for (std::int64_t i = 0; i < size; i += D::STEP) {
        const int rest = static_cast<int>(std::min<std::int64_t>(D::STEP, size - i));
        const typename D::Vector wide = rest == D::STEP ? D::read(from + i) : D::read_first(from + i, rest);
        std::memcpy(to + i, &wide, sizeof(wide));
    }
}

}  // namespace ostinato
