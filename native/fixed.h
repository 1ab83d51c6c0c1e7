// Products of tokens in bfloat16 or float16 with weights of 4 to 8 bits, in integers: one instruction multiplies pairs and adds
// them in twos, and no weight has to become a float first.
//
// Here: what tokens become; and products of a few of them with 8-bit weights, with AVX2 alone. Weights in blocks are multiplied
// in fixed_blocks.h, with AVX-512 in fixed_groups.h; more tokens, with AVX2 alone, in fixed_panel.h.
//
// A token is made 16-bit integers, 32 or 64 together with one power of two: x = scale * q. What is within 7 binades of the
// largest of them (4 in float16) loses nothing, and elsewhere x loses at most 2^-15 of that largest: 63 of them together no
// more than it may have lost itself when it was rounded to bfloat16. Where the largest is below 2^-86, it counts as that.
// Numbers that are not finite have no such form: a product with one of them is computed without it.
//
// Integers cannot overflow. The largest is (2 - 2^-10) 2^14 = 32752, since numbers have 11 bits at the most, and the scale
// is that of their exponent. A weight is at most 255 as it is read, or 32 times 256 (Q6_K). What a lane sums before it is a
// float is less than 2^26, in panels, which add up all 32, 2^29, and with Q6_K, which adds up 4, 2^30. The sum of 32 integers
// is below 2^20: a float has it.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "transpose.h"

#if defined(__AVX2__)
#define OSTINATO_I16

namespace ostinato {

// Tokens [tokens][token_size]: of each, integers, padded with zeros to groups; then, of each 32 of them, scales; then sums.
struct I16TokenLayout {
    std::int64_t size, parts;

    explicit I16TokenLayout(std::int64_t in) : size((in + I16_TOKEN_PADDING - 1) / I16_TOKEN_PADDING * I16_TOKEN_PADDING), parts(size / SUBBLOCK) {}

    std::int64_t token_size() const { return size + 2 * parts * (sizeof(float) / sizeof(i16)); }
    template <typename X>
    auto* scales(X* token) const {
        return reinterpret_cast<std::conditional_t<std::is_const_v<X>, const float, float>*>(token + size);
    }
    template <typename X>
    auto* sums(X* token) const {
        return scales(token) + parts;
    }
};

// What numbers become integers with, by the bits of the largest of them, without its sign.
struct PowerOfTwoScale {
    static constexpr int LEAST = 41;  // the exponent of 2^-86
    bool finite;
    float scale, inverse;

    explicit PowerOfTwoScale(int largest) {
        const int exponent = std::max(largest >> 23, LEAST);
        finite = exponent != 255;
        scale = bits_as<float>((exponent - 14) << 23);
        inverse = bits_as<float>((127 + 14 + 127 - exponent) << 23);
    }
};

// The elements from `at` on, with zeros behind all `count` of them.
template <typename T>
inline Float load_padded(const T* x, std::int64_t at, std::int64_t count) {
    return at < count ? load_partial(x + at, count - at) : Float{};
}

// Tokens that are multiplied with rows in blocks at once.
constexpr int MAX_I16_TOKENS = LANES == 8 ? std::min(I16_NR, MAX_I16_BLOCK_TOKENS_AVX2) : I16_NR;

// Calls `body` with the number of tokens, up to TOKENS, as a constant.
template <int TOKENS = I16_NR, typename Body>
inline void with_i16_tokens(int tokens, Body&& body) {
    if constexpr (TOKENS > 0) {
        if (tokens == TOKENS) {
            body(std::integral_constant<int, TOKENS>{});
        } else {
            with_i16_tokens<TOKENS - 1>(tokens, body);
        }
    }
}

#if !defined(__AVX512F__)
// Eight of a token's numbers as integers that multiply 1 / `inverse`.
inline __m256i to_i16(Float x, float inverse) { return _mm256_cvtps_epi32((__m256)(x * inverse)); }

// SPAN elements of a token, of which there are `count`. False: one of them is not finite.
template <int SPAN, I16Order ORDER, typename T>
inline bool quantize_span_i16(const T* x, std::int64_t count, i16* to, float* scales, float* sums) {
    constexpr int VECTORS_OF = SPAN / LANES, PART_VECTORS = SUBBLOCK / LANES;
    Float values[VECTORS_OF];
    __m256i most = _mm256_setzero_si256();
    for (int v = 0; v < VECTORS_OF; ++v) {
        values[v] = load_padded(x, v * LANES, count);
        most = _mm256_max_epi32(most, _mm256_and_si256((__m256i)values[v], _mm256_set1_epi32(0x7FFFFFFF)));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    const PowerOfTwoScale scaling(_mm_cvtsi128_si32(four));
    if (!scaling.finite) return false;
    for (int part = 0; part < SPAN / SUBBLOCK; ++part) {
        __m256i sum = _mm256_setzero_si256();
        __m256i eights[PART_VECTORS];
        for (int v = 0; v < PART_VECTORS; ++v) {
            eights[v] = to_i16(values[part * PART_VECTORS + v], scaling.inverse);
            sum = _mm256_add_epi32(sum, eights[v]);
        }
        if constexpr (ORDER == I16Order::INTERLEAVED_8) std::swap(eights[1], eights[2]);
        for (int v = 0; v < PART_VECTORS; v += 2) {
            __m256i in_order = _mm256_permute4x64_epi64(_mm256_packs_epi32(eights[v], eights[v + 1]), 0xD8);
            if constexpr (ORDER == I16Order::PAIRS_02_13) {
                constexpr int PAIRS = _MM_SHUFFLE(3, 1, 2, 0);
                in_order = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(in_order, PAIRS), PAIRS);
            }
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + part * SUBBLOCK + v * LANES), in_order);
        }
        scales[part] = scaling.scale;
        sums[part] = ostinato::sum((Float)_mm256_cvtepi32_ps(sum)) * scaling.scale;
    }
    return true;
}

// A token of `in` elements, SPAN of which have one scale.
template <int SPAN, I16Order ORDER, typename T>
bool quantize_token_i16(const T* x, std::int64_t in, i16* token) {
    const I16TokenLayout layout(in);
    for (std::int64_t at = 0; at < layout.size; at += SPAN) {
        float *scales = layout.scales(token) + at / SUBBLOCK, *sums = layout.sums(token) + at / SUBBLOCK;
        if (!quantize_span_i16<SPAN, ORDER>(x + at, in - at, token + at, scales, sums)) return false;
    }
    return true;
}

template <typename T>
inline bool quantize_token_i16(int span, I16Order order, const T* x, std::int64_t in, i16* token) {
    if (span == I16_SCALE_SPAN) return quantize_token_i16<I16_SCALE_SPAN, I16Order::LINEAR>(x, in, token);
    return order == I16Order::INTERLEAVED_8 ? quantize_token_i16<SUBBLOCK, I16Order::INTERLEAVED_8>(x, in, token)
                                       : quantize_token_i16<SUBBLOCK, I16Order::LINEAR>(x, in, token);
}

inline __m256i load_i16(const i16* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

inline __m128i load_16_bytes(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

// Compilers put additions off until all that is to be added is there, and run out of registers for it: here it is needed.
inline void keep_in_register(__m256i& value) { asm("" : "+x"(value)); }

// Rows that a number of tokens is multiplied with at once: their sums stay in registers.
template <int TOKENS>
constexpr int I16_MR = TOKENS == 1 ? MR : 2;

// sums[t * stride + r] = tokens[t] . rows[r] for 8-bit weights without their scales.
template <int TOKENS>
void dot_i16_i8(const Tokens<i16>& tokens, const std::int8_t* const* rows, std::int64_t in, float* sums, int stride) {
    constexpr int ROWS = I16_MR<TOKENS>;
    const I16TokenLayout layout(in);
    Float total[MR][TOKENS];
    for (int r = 0; r < MR; ++r) {
        for (int t = 0; t < TOKENS; ++t) total[r][t] = Float{};
    }
    // Of elements `begin` to `begin + FIXED_SPAN`, which stand at `from` in each of `some`.
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

inline void dot_i16_i8_up_to(int tokens, const Tokens<i16>& x, const std::int8_t* const* rows, std::int64_t in, float* sums,
                           int stride) {
    with_i16_tokens(tokens, [&](auto some) { dot_i16_i8<some.value>(x, rows, in, sums, stride); });
}
#endif

}  // namespace ostinato

#endif
