// Dot products of a few i16 tokens with int8 rows that have one scale, for AVX-512.
#pragma once

#include "gemm/ukernels/dot_i16_block_avx512.h"

#if defined(OSTINATO_I16) && defined(OSTINATO_HAS_AVX512)

namespace ostinato {

// Compute sums[t * stride + r] = tokens[t] . rows[r] for int8 weights without their scales, while `next` is prefetched.
template <int TOKENS>
void dot_i16_i8(const Tokens<i16>& tokens, const std::int8_t* const* rows, const std::int8_t* const* next, int prefetch,
                std::int64_t in, float* sums, int stride) {
    constexpr int WORDS = 2 * LANES, ROWS = TOKENS > 2 ? 2 : MR;  // rows whose integers are in registers together
    const I16TokenLayout layout(in);
    __m512 total[TOKENS][MR];
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
        for (int r = 0; r < MR; ++r) total[t][r] = _mm512_setzero_ps();
    }
    // Multiplies elements `begin` to `begin + I16_SCALE_SPAN_AVX512`, which are at `from` in each of `some`.
    const auto multiply = [&](const std::int8_t* const* some, std::int64_t from, std::int64_t begin)
        __attribute__((always_inline)) {
        unrolled<MR / ROWS>([&](auto half) __attribute__((always_inline)) {
            __m512i part[TOKENS][ROWS];
            unrolled<I16_SCALE_SPAN_AVX512 / WORDS>([&](auto i) __attribute__((always_inline)) {
                __m512i weights[ROWS];
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    const std::int8_t* at = some[half * ROWS + r] + from + i * WORDS;
                    weights[r] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
                }
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t) {
                    const __m512i x = _mm512_loadu_si512(tokens.x + t * tokens.stride + begin + i * WORDS);
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) {
                        part[t][r] = add_products(i == 0 ? _mm512_setzero_si512() : part[t][r], weights[r], x);
                    }
                }
            });
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) {
                const __m512 scale = _mm512_set1_ps(layout.scales(tokens.x + t * tokens.stride)[begin / SUBBLOCK]);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    __m512& of_row = total[t][half * ROWS + r];
                    of_row = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[t][r]), scale, of_row);
                }
            }
        });
    };
    std::int64_t begin = 0;
    for (; begin + I16_SCALE_SPAN_AVX512 <= in; begin += I16_SCALE_SPAN_AVX512) {
        for (int p = 0; p < prefetch; ++p) __builtin_prefetch(next[p] + begin, 0, 2);
        multiply(rows, begin, begin);
    }
    if (begin < in) {
        std::int8_t rest[MR][I16_SCALE_SPAN_AVX512] = {};
        const std::int8_t* some[MR];
        for (int r = 0; r < MR; ++r) {
            std::memcpy(rest[r], rows[r] + begin, in - begin);
            some[r] = rest[r];
        }
        multiply(some, 0, begin);
    }
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) {
        Float of_rows[MR];
        for (int r = 0; r < MR; ++r) of_rows[r] = (Float)total[t][r];
        sum4(of_rows, sums + t * stride);
    }
}

inline void dot_i16_i8_up_to(int tokens, const Tokens<i16>& x, const std::int8_t* const* rows, const std::int8_t* const* next,
                             int prefetch, std::int64_t in, float* sums, int stride) {
    with_i16_tokens(tokens, [&](auto some) { dot_i16_i8<some.value>(x, rows, next, prefetch, in, sums, stride); });
}

}  // namespace ostinato

#endif
