// Quantisation of tokens in bfloat16 or float16 to block floating point with 16-bit integers, for products with weights
// of 4 to 8 bits: one instruction multiplies pairs and adds them in twos, and no weight has to become a float first.
//
// The products are gemm/ukernels/dot_i16_i8.h, dot_i16_block_avx2.h, dot_i16_block_avx512.h, dot_i16_planes.h for ARM,
// and, for more tokens, gemm/large_m_i16.h.
//
// Each 32, 64 or 128 elements of a token become 16-bit integers with one power of two: x = scale * q. Elements within 7
// binades of their maximum (4 in float16) lose nothing. Elsewhere x loses at most 2^-15 of the maximum: 63 of them
// together lose no more than the maximum may have lost itself when it was rounded to bfloat16, and 127 no more than twice
// that. A maximum below 2^-86 counts as 2^-86. Numbers that are not finite have no such form: a product with one of them
// is computed in floats.
//
// Integers cannot overflow. The largest is (2 - 2^-10) 2^14 = 32752, since numbers have at most 11 bits, and the scale
// is that of their exponent. A weight is at most 255 as it is read, or 32 times 256 (Q6_K). The sum of a lane before it
// becomes a float is less than 2^26; with Q6_K, which adds 4, less than 2^30; and in panels, where a lane adds up to 128
// products of int8, less than 2^29. The sum of 32 integers is below 2^20, which a float represents.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "core/simd.h"
#include "core/transpose.h"
#include "quant/block_format.h"

#if defined(OSTINATO_HAS_AVX2) || defined(OSTINATO_HAS_DOTPROD)
#define OSTINATO_I16

namespace ostinato {

// Layout of tokens [tokens][token_size]: the integers of a token, padded with zeros; then a scale per subblock; then a
// sum per subblock.
struct I16TokenLayout {
    std::int64_t size, subblocks;

    explicit I16TokenLayout(std::int64_t in) : size((in + I16_TOKEN_PADDING - 1) / I16_TOKEN_PADDING * I16_TOKEN_PADDING), subblocks(size / SUBBLOCK) {}

    std::int64_t token_size() const { return size + 2 * subblocks * (sizeof(float) / sizeof(i16)); }
    template <typename X>
    auto* scales(X* token) const {
        return reinterpret_cast<std::conditional_t<std::is_const_v<X>, const float, float>*>(token + size);
    }
    template <typename X>
    auto* sums(X* token) const {
        return scales(token) + subblocks;
    }
};

// Power of two that scales numbers to integers, from the bits of their largest magnitude.
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

// Load elements from `at` on, with zeros behind all `count` of them.
template <typename T>
inline Float load_padded(const T* x, std::int64_t at, std::int64_t count) {
    return at < count ? load_partial(x + at, count - at) : Float{};
}

#if defined(OSTINATO_HAS_DOTPROD)
// ARM multiplies bytes: an integer is 256 times its upper byte plus its lower byte, both with a sign, in two planes.
// SMMLA reads 8 bytes of one plane and 8 of the other; SDOT reads 32 of each.
#if defined(OSTINATO_HAS_I8MM)
constexpr int PLANE_BYTES = 8;
#else
constexpr int PLANE_BYTES = SUBBLOCK;
#endif

// Quantize a token of `in` elements, SUBBLOCK of which share a scale. -> false if one of them is not finite
template <typename T>
bool quantize_token_i16(int, I16Order, const T* x, std::int64_t in, i16* token) {
    constexpr int INFINITE = 0x7F800000, LAST_OF_BF16 = 1 << 16;
    const I16TokenLayout layout(in);
    for (std::int64_t number = 0; number < layout.subblocks; ++number) {
        Float values[SUBBLOCK / LANES];
        Int most{}, sum{};
        for (int v = 0; v < SUBBLOCK / LANES; ++v) {
            values[v] = load_padded(x, number * SUBBLOCK + v * LANES, in);
            const Int bits = bits_as<Int>(values[v]) & 0x7FFFFFFF;
            most = bits > most ? bits : most;
        }
        int largest = 0;
        for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]);
        // Above 255/256 of a binade the scale is that of the next, since 32640 has no two bytes with a sign.
        const PowerOfTwoScale scaling(std::min(largest, INFINITE) + LAST_OF_BF16);
        if (!scaling.finite) return false;
        auto* planes = reinterpret_cast<std::int8_t*>(token + number * SUBBLOCK);
        for (int i = 0; i < SUBBLOCK; i += LANES) {
            const Int integers = bits_as<Int>(values[i / LANES] * scaling.inverse + ROUND) - bits_as<std::int32_t>(ROUND);
            const LaneBytes low = __builtin_convertvector(integers, LaneBytes);
            const LaneBytes high = __builtin_convertvector((integers - __builtin_convertvector(low, Int)) >> 8, LaneBytes);
            std::int8_t* to = planes + i / PLANE_BYTES * 2 * PLANE_BYTES + i % PLANE_BYTES;
            std::memcpy(to, &high, LANES);
            std::memcpy(to + PLANE_BYTES, &low, LANES);
            sum += integers;
        }
        layout.scales(token)[number] = scaling.scale;
        layout.sums(token)[number] = static_cast<float>(sum[0] + sum[1] + sum[2] + sum[3]) * scaling.scale;
    }
    return true;
}
#else
constexpr int PAIRS_02_13 = _MM_SHUFFLE(3, 1, 2, 0);  // exchanges the middle ones of four
constexpr int STEP_SUBBLOCKS = 4, STEP_ELEMENTS = STEP_SUBBLOCKS * SUBBLOCK;  // read at a time with AVX-512
static_assert(std::max(I16_SCALE_SPAN, I16_SCALE_SPAN_AVX512) <= STEP_ELEMENTS);

#if defined(OSTINATO_HAS_AVX512)
// Return the place of eight 16-bit integers of a token among those of four subblocks: the even or the odd ones of a
// subblock's first or second half.
constexpr int place_of(I16Order order, int subblock, bool odd, bool second) {
    switch (order) {
        case I16Order::BLOCKS: return 4 * (2 * second + odd) + subblock;
        case I16Order::HALVES: return 4 * (2 * (subblock % 2) + odd) + 2 * (subblock / 2) + second;
        default: return 4 * (2 * (subblock / 2) + odd) + 2 * (subblock % 2) + second;
    }
}

// Write a subblock of a token as integers, with its sum, which rows that have one scale do not need.
template <I16Order ORDER>
inline void put_subblock_i16(const Float* values, const PowerOfTwoScale& scaling, int subblock, i16* to, float* sum) {
    static constexpr std::array<std::uint16_t, SUBBLOCK> APART = [] {
        std::array<std::uint16_t, SUBBLOCK> places{};
        for (int i = 0; i < SUBBLOCK; ++i) places[i] = static_cast<std::uint16_t>(i % 8 * 2 + i / 8 % 2 * 16 + i / 16);
        return places;
    }();
    const __m512i first = _mm512_cvtps_epi32((__m512)(values[0] * scaling.inverse));
    const __m512i second = _mm512_cvtps_epi32((__m512)(values[1] * scaling.inverse));
    const __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)),
                                             _mm512_cvtepi32_epi16(second), 1);
    if constexpr (ORDER == I16Order::LINEAR) {
        _mm512_storeu_si512(to + subblock * SUBBLOCK, words);
        return;
    }
    *sum = static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(first, second))) * scaling.scale;
    if constexpr (ORDER == I16Order::PAIRS_02_13) {
        const __m512i pairs = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(words, PAIRS_02_13), PAIRS_02_13);
        _mm512_storeu_si512(to + subblock * SUBBLOCK, pairs);
        return;
    }
    const __m512i apart = _mm512_permutexvar_epi16(_mm512_loadu_si512(APART.data()), words);
    unrolled<4>([&](auto i) __attribute__((always_inline)) {
        constexpr bool odd = i >= 2, second_half = i % 2;
        auto* place = reinterpret_cast<__m128i*>(to) + place_of(ORDER, subblock, odd, second_half);
        _mm_storeu_si128(place, _mm512_extracti32x4_epi32(apart, i));
    });
}

inline int largest_of(Int values) { return _mm512_reduce_max_epi32((__m512i)values); }
#else
// Write a subblock of a token as integers, with its sum.
template <I16Order ORDER>
inline void put_subblock_i16(const Float* values, const PowerOfTwoScale& scaling, int subblock, i16* to, float* sum) {
    __m256i eights[SUBBLOCK / LANES], total = _mm256_setzero_si256();
    for (int v = 0; v < SUBBLOCK / LANES; ++v) {
        eights[v] = _mm256_cvtps_epi32((__m256)(values[v] * scaling.inverse));
        total = _mm256_add_epi32(total, eights[v]);
    }
    if constexpr (ORDER == I16Order::INTERLEAVED_8) std::swap(eights[1], eights[2]);
    for (int v = 0; v < SUBBLOCK / LANES; v += 2) {
        __m256i in_order = _mm256_permute4x64_epi64(_mm256_packs_epi32(eights[v], eights[v + 1]), 0xD8);
        if constexpr (ORDER == I16Order::PAIRS_02_13) {
            in_order = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(in_order, PAIRS_02_13), PAIRS_02_13);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + subblock * SUBBLOCK + v * LANES), in_order);
    }
    *sum = ostinato::sum((Float)_mm256_cvtepi32_ps(total)) * scaling.scale;
}

inline int largest_of(Int values) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)values), _mm256_extracti128_si256((__m256i)values, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

inline __m256i load_i16(const i16* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

inline __m128i load_16_bytes(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
#endif

// Quantize SPAN elements of a token, of which `count` exist, into subblocks `first` and following of `to`. -> false if one
// of them is not finite
template <int SPAN, I16Order ORDER, typename T>
inline bool quantize_span_i16(const T* x, std::int64_t count, i16* to, float* scales, float* sums, int first = 0) {
    constexpr int SUBBLOCK_VECTORS = SUBBLOCK / LANES;
    Float values[SPAN / LANES];
    Int most{};
    for (int v = 0; v < SPAN / LANES; ++v) {
        values[v] = load_padded(x, v * LANES, count);
        const Int size = bits_as<Int>(values[v]) & 0x7FFFFFFF;
        most = size > most ? size : most;
    }
    const PowerOfTwoScale scaling(largest_of(most));
    if (!scaling.finite) return false;
    for (int i = 0; i < SPAN / SUBBLOCK; ++i) {
        scales[i] = scaling.scale;
        put_subblock_i16<ORDER>(values + i * SUBBLOCK_VECTORS, scaling, first + i, to, sums + i);
    }
    return true;
}

// Quantize a token of `in` elements, SPAN of which share a scale. -> false if one of them is not finite
template <int SPAN, I16Order ORDER, typename T>
bool quantize_token_i16(const T* x, std::int64_t in, i16* token) {
    const I16TokenLayout layout(in);
    for (std::int64_t at = 0; at < layout.size; at += SPAN) {
        const int number = static_cast<int>(at / SUBBLOCK);
        if (!quantize_span_i16<SPAN, ORDER>(x + at, in - at, token + at / STEP_ELEMENTS * STEP_ELEMENTS, layout.scales(token) + number,
                                            layout.sums(token) + number, number % STEP_SUBBLOCKS)) {
            return false;
        }
    }
    return true;
}

#if defined(OSTINATO_HAS_AVX512)
template <typename T>
inline bool quantize_token_i16(int, I16Order order, const T* x, std::int64_t in, i16* token) {
    switch (order) {
        case I16Order::BLOCKS: return quantize_token_i16<SUBBLOCK, I16Order::BLOCKS>(x, in, token);
        case I16Order::HALVES: return quantize_token_i16<SUBBLOCK, I16Order::HALVES>(x, in, token);
        case I16Order::BYTES: return quantize_token_i16<SUBBLOCK, I16Order::BYTES>(x, in, token);
        default: return quantize_token_i16<I16_SCALE_SPAN_AVX512, I16Order::LINEAR>(x, in, token);
    }
}
#else
template <typename T>
inline bool quantize_token_i16(int span, I16Order order, const T* x, std::int64_t in, i16* token) {
    if (span == I16_SCALE_SPAN) return quantize_token_i16<I16_SCALE_SPAN, I16Order::LINEAR>(x, in, token);
    return order == I16Order::INTERLEAVED_8 ? quantize_token_i16<SUBBLOCK, I16Order::INTERLEAVED_8>(x, in, token)
                                       : quantize_token_i16<SUBBLOCK, I16Order::LINEAR>(x, in, token);
}
#endif
#endif

}  // namespace ostinato

#endif
