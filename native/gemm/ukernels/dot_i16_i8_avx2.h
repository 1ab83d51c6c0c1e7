// Dot products of a few i16 tokens with int8 rows that have one scale, for AVX2.
#pragma once

#include "gemm/ukernels/dot.h"
#include "quant/quantize_tokens_i16.h"

#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)

namespace ostinato {

// Keep `value` in a register. Otherwise compilers delay additions until all addends are there, and run out of
// registers.
inline void keep_in_register(__m256i& value) { asm("" : "+x"(value)); }

// Rows multiplied with TOKENS tokens at once: their sums stay in registers.
template <int TOKENS>
constexpr int I16_MR = TOKENS == 1 ? MR : 2;

// Compute sums[t * stride + r] = tokens[t] . rows[r] for int8 weights without their scales.
template <int TOKENS>
void dot_i16_i8(const Tokens<i16>& tokens, const std::int8_t* const* rows, std::int64_t in, float* sums, int stride) {
    constexpr int ROWS = I16_MR<TOKENS>;
    const I16TokenLayout layout(in);
    Float total[MR][TOKENS];
    for (int r = 0; r < MR; ++r) {
        for (int t = 0; t < TOKENS; ++t) total[r][t] = Float{};
    }
    // Multiplies elements `begin` to `begin + I16_SCALE_SPAN`, which are at `from` in each of `some`.
    const auto multiply = [&](const std::int8_t* const* some, std::int64_t from, std::int64_t begin)
        __attribute__((always_inline)) {
        const i16* x = tokens.x + begin;
#pragma GCC unroll 4
        for (int first = 0; first < MR; first += ROWS) {
            __m256i part[ROWS][TOKENS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
                for (int t = 0; t < TOKENS; ++t) part[r][t] = _mm256_setzero_si256();
            }
            unrolled<I16_SCALE_SPAN / 16>([&](auto i) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    const __m256i weights = _mm256_cvtepi8_epi16(load_16_bytes(some[first + r] + from + i * 16));
#pragma GCC unroll 8
                    for (int t = 0; t < TOKENS; ++t) {
                        const __m256i products = _mm256_madd_epi16(weights, load_i16(x + t * tokens.stride + i * 16));
                        part[r][t] = _mm256_add_epi32(part[r][t], products);
                        keep_in_register(part[r][t]);
                    }
                }
            });
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) {
                const Float scale = splat(layout.scales(tokens.x + t * tokens.stride)[begin / SUBBLOCK]);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    total[first + r][t] = fma((Float)_mm256_cvtepi32_ps(part[r][t]), scale, total[first + r][t]);
                }
            }
        }
    };
    std::int64_t begin = 0;
    for (; begin + I16_SCALE_SPAN <= in; begin += I16_SCALE_SPAN) multiply(rows, begin, begin);
    if (begin < in) {
        std::int8_t rest[MR][I16_SCALE_SPAN] = {};
        const std::int8_t* some[MR];
        for (int r = 0; r < MR; ++r) {
            std::memcpy(rest[r], rows[r] + begin, in - begin);
            some[r] = rest[r];
        }
        multiply(some, 0, begin);
    }
    for (int t = 0; t < TOKENS; ++t) {
        const Float of_rows[MR] = {total[0][t], total[1][t], total[2][t], total[3][t]};
        sum4(of_rows, sums + t * stride);
    }
}

inline void dot_i16_i8_up_to(int tokens, const Tokens<i16>& x, const std::int8_t* const* rows, const std::int8_t* const*, int,
                             std::int64_t in, float* sums, int stride) {
    with_i16_tokens(tokens, [&](auto some) { dot_i16_i8<some.value>(x, rows, in, sums, stride); });
}

}  // namespace ostinato

#endif
