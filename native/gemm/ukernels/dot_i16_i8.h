// Dot products of a few i16 tokens with int8 rows that have one scale, for AVX2 and AVX-512.
#pragma once

#include "gemm/ukernels/dot.h"
#include "gemm/ukernels/dot_i16_block_avx512.h"
#include "quant/quantize_tokens_i16.h"

#if defined(OSTINATO_HAS_AVX2)

namespace ostinato {

// Inputs of int8 rows, and of tokens, that are added in integers.
constexpr int I16_I8_SUM = LANES == 8 ? I16_SCALE_SPAN : I16_SCALE_SPAN_AVX512;

// Return `to` plus the products of pairs, of which each lane has one. The order of these instructions is kept: otherwise
// compilers delay additions until all addends are there, and run out of registers.
[[gnu::always_inline]] inline Int add_pairs(Int to, Int a, Int b) {
#if defined(OSTINATO_HAS_AVX512)
    to = (Int)add_products((__m512i)to, (__m512i)a, (__m512i)b);
#else
    to = (Int)_mm256_add_epi32((__m256i)to, _mm256_madd_epi16((__m256i)a, (__m256i)b));
#endif
    asm("" : "+v"(to));
    return to;
}

// Read as many integers as a vector has words.
[[gnu::always_inline]] inline Int read_words(const std::int8_t* from) {
#if defined(OSTINATO_HAS_AVX512)
    return (Int)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    return (Int)_mm256_cvtepi8_epi16(load_16_bytes(from));
#endif
}

// Compute sums[t * stride + r] = tokens[t] . rows[r] for int8 weights without their scales, while `next` is prefetched.
template <int TOKENS>
void dot_i16_i8(const Tokens<i16>& tokens, const std::int8_t* const* rows, const std::int8_t* const* next, int prefetch,
                std::int64_t in, float* sums, int stride) {
    constexpr int WORDS = 2 * LANES, ROWS = TOKENS > (LANES == 8 ? 1 : 2) ? 2 : MR;  // rows in registers together
    const I16TokenLayout layout(in);
    Float total[TOKENS][MR] = {};
    // Multiplies elements `begin` to `begin + I16_I8_SUM`, which are at `from` in each of `some`.
    const auto multiply = [&](const std::int8_t* const* some, std::int64_t from, std::int64_t begin)
        __attribute__((always_inline)) {
        unrolled<MR / ROWS>([&](auto half) __attribute__((always_inline)) {
            Int part[TOKENS][ROWS] = {};
            unrolled<I16_I8_SUM / WORDS>([&](auto i) __attribute__((always_inline)) {
                Int weights[ROWS];
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) weights[r] = read_words(some[half * ROWS + r] + from + i * WORDS);
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t) {
                    Int x;
                    std::memcpy(&x, tokens.x + t * tokens.stride + begin + i * WORDS, sizeof(x));
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) part[t][r] = add_pairs(part[t][r], weights[r], x);
                }
            });
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) {
                const Float scale = splat(layout.scales(tokens.x + t * tokens.stride)[begin / SUBBLOCK]);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    Float& of_row = total[t][half * ROWS + r];
                    of_row = fma(__builtin_convertvector(part[t][r], Float), scale, of_row);
                }
            }
        });
    };
    std::int64_t begin = 0;
    for (; begin + I16_I8_SUM <= in; begin += I16_I8_SUM) {
        for (int p = 0; LANES == 16 && p < prefetch; ++p) __builtin_prefetch(next[p] + begin, 0, 2);
        multiply(rows, begin, begin);
    }
    if (begin < in) {
        std::int8_t rest[MR][I16_I8_SUM] = {};
        const std::int8_t* some[MR];
        for (int r = 0; r < MR; ++r) {
            std::memcpy(rest[r], rows[r] + begin, in - begin);
            some[r] = rest[r];
        }
        multiply(some, 0, begin);
    }
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * stride);
}

inline void dot_i16_i8_up_to(int tokens, const Tokens<i16>& x, const std::int8_t* const* rows, const std::int8_t* const* next,
                             int prefetch, std::int64_t in, float* sums, int stride) {
    with_constant<I16_NR>(tokens, [&](auto some) { dot_i16_i8<some.value>(x, rows, next, prefetch, in, sums, stride); });
}

}  // namespace ostinato

#endif
