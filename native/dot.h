// Dot products of a few rows of weights with a few tokens: the inner loop of every matrix product here.
//
// Weights stay as the checkpoint has them, [out, in]: each dot product runs along `in`, in one accumulator, in ascending
// order. So a result depends on its own token and row alone, however many of either are computed together.
#pragma once

#include "simd.h"

namespace ostinato {

// What is multiplied: X is the storage type of tokens, float or bf16; W that of weights.
template <typename X, typename W>
struct Dot {
    static constexpr int STEP = LANES;
    using Vector = Float;
    static Vector read(const float* from) { return load(from); }
    static Vector read_first(const float* from, int count) { return load_first(from, count); }
    template <typename T>
    static Vector read(const T* from) {
        return load(from);
    }
    template <typename T>
    static Vector read_first(const T* from, int count) {
        return load_first(from, count);
    }
    static Float multiply_add(Float to, Vector x, Vector w) { return to + x * w; }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16 are multiplied exactly and added in float32.
template <typename W>
struct Dot<bf16, W> {
    static constexpr int STEP = 2 * LANES;
    using Vector = __m512bh;

    static Vector read(const bf16* from) {
        Vector value;
        std::memcpy(&value, from, sizeof(value));
        return value;
    }
    // Integers of 8 bits are bfloat16 numbers.
    static Vector read(const std::int8_t* from) {
        const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(wide)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(wide, 1)));
        return _mm512_cvtne2ps_pbh(high, low);
    }
    template <typename T>
    static Vector read_first(const T* from, int count) {
        T elements[STEP] = {};
        std::memcpy(elements, from, sizeof(T) * count);
        return read(elements);
    }
    static Float multiply_add(Float to, Vector x, Vector w) { return (Float)_mm512_dpbf16_ps((__m512)to, x, w); }
};
#endif

// Sums of four vectors.
inline void sum4(const Float* vectors, float* sums) {
#if defined(__AVX512F__)
    const __m512 a = (__m512)vectors[0], b = (__m512)vectors[1], c = (__m512)vectors[2], d = (__m512)vectors[3];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    for (int i = 0; i < 4; ++i) sums[i] = sum(vectors[i]);
#endif
}

constexpr int DOT_ROWS = 4;
#if defined(__AVX512F__)
constexpr int DOT_TOKENS = 6;  // 24 accumulators, 4 rows and a token: 29 of 32 registers
#else
constexpr int DOT_TOKENS = 2;  // 8 accumulators, 4 rows and a token: 13 of 16 registers
#endif

// A few tokens as the inner loop reads them: `x` [steps][TOKENS][STEP], packed, or in place, `stride` elements apart.
template <typename X>
struct Tokens {
    const X* x;
    std::int64_t stride;  // 0: packed
};

// to[t][r] += x[t][i] * w[r][i] for elements `begin` to `end`, TOKENS tokens and DOT_ROWS rows. `begin` is a multiple of
// STEP; packed tokens are padded with zeros to one.
//
// PREFETCH rows of what comes next are fetched into the cache meanwhile.
template <int TOKENS, int PREFETCH, bool PACKED, typename X, typename W>
__attribute__((always_inline)) inline void dot_span(const Tokens<X>& tokens, const W* const* w, const W* const* next, std::int64_t begin,
                     std::int64_t end, Float (&total)[TOKENS][DOT_ROWS]) {
    using D = Dot<X, W>;
    const std::int64_t token_stride = PACKED ? D::STEP : tokens.stride;
    const X* x = tokens.x + (PACKED ? begin * TOKENS : begin);
    std::int64_t i = begin;
    for (; i + D::STEP <= end; i += D::STEP, x += PACKED ? D::STEP * TOKENS : D::STEP) {
        typename D::Vector rows[DOT_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < DOT_ROWS; ++r) rows[r] = D::read(w[r] + i);
        if constexpr (PREFETCH > 0) {
#pragma GCC unroll 4
            for (int p = 0; p < PREFETCH; ++p) __builtin_prefetch(next[p] + i, 0, 2);
        }
#pragma GCC unroll 6
        for (int t = 0; t < TOKENS; ++t) {
            const typename D::Vector token = D::read(x + t * token_stride);
#pragma GCC unroll 4
            for (int r = 0; r < DOT_ROWS; ++r) total[t][r] = D::multiply_add(total[t][r], token, rows[r]);
        }
    }
    if (i < end) {
        const int rest = static_cast<int>(end - i);
        typename D::Vector rows[DOT_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < DOT_ROWS; ++r) rows[r] = D::read_first(w[r] + i, rest);
#pragma GCC unroll 6
        for (int t = 0; t < TOKENS; ++t) {
            const typename D::Vector token = D::read_first(x + t * token_stride, rest);
#pragma GCC unroll 4
            for (int r = 0; r < DOT_ROWS; ++r) total[t][r] = D::multiply_add(total[t][r], token, rows[r]);
        }
    }
}

// Zeros, in registers: an initialiser would write them to memory first.
template <int TOKENS>
__attribute__((always_inline)) inline void clear(Float (&total)[TOKENS][DOT_ROWS]) {
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
        for (int r = 0; r < DOT_ROWS; ++r) total[t][r] = Float{};
    }
}

// sums[t * sums_stride + r] = sum_i x[t][i] * w[r][i] for TOKENS tokens and DOT_ROWS rows of `size` elements.
//
// With `scales`, weights have one factor per `group` elements of a row, a multiple of STEP: row r's begin at scales[r].
template <int TOKENS, int PREFETCH, bool PACKED, typename X, typename W>
inline void dot_block(const Tokens<X>& tokens, const W* const* w, const W* const* next, std::int64_t size,
                      const float* const* scales, std::int64_t group, float* sums, int sums_stride) {
    Float total[TOKENS][DOT_ROWS];
    clear(total);
    if (scales == nullptr) {
        dot_span<TOKENS, PREFETCH, PACKED>(tokens, w, next, 0, size, total);
    } else {
        for (std::int64_t begin = 0; begin < size; begin += group) {
            Float part[TOKENS][DOT_ROWS];
            clear(part);
            const std::int64_t end = begin + group < size ? begin + group : size;
            dot_span<TOKENS, PREFETCH, PACKED>(tokens, w, next, begin, end, part);
#pragma GCC unroll 6
            for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
                for (int r = 0; r < DOT_ROWS; ++r) total[t][r] += part[t][r] * scales[r][begin / group];
            }
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * sums_stride);
}

}  // namespace ostinato
