// int8 numbers: groups of values quantised with one scale, as ops/quant/quantize.py defines them, and conversion to bfloat16,
// which is exact.
#pragma once

#include <algorithm>
#include <array>

#include "core/simd.h"

namespace ostinato {

// Return the largest magnitude, or NaN if there is one: its bits are above those of infinity.
template <typename T>
inline float largest_magnitude(const T* values, std::int64_t count) {
    Int most{};
    for (std::int64_t i = 0; i < count; i += LANES) {
        const Int bits = bits_as<Int>(load_partial(values + i, count - i)) & 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    std::int32_t best = 0;
    for (int i = 0; i < LANES; ++i) best = std::max(best, static_cast<std::int32_t>(most[i]));
    return bits_as<float>(best);
}

// Write the integers of `count` values. -> their scale
template <typename T>
inline float quantize_group(const T* values, std::int64_t count, std::int8_t* to) {
    const float scale = largest_magnitude(values, count) / MAX_INT8;
    const Float divisor = splat(scale > 0.0f ? scale : 1.0f), most = splat(MAX_INT8);
    for (std::int64_t i = 0; i < count; i += LANES) {
        Float whole = load_partial(values + i, count - i) / divisor;
        whole = max(whole < most ? whole : most, -most) + ROUND;
        // The lowest bits hold the integer.
        const LaneBytes bytes = __builtin_convertvector(bits_as<Int>(whole), LaneBytes);
        if (count - i >= LANES) {
            std::memcpy(to + i, &bytes, LANES);
        } else {
            std::memcpy(to + i, &bytes, count - i);
        }
    }
    return scale;
}

constexpr int INT8_STEP = 64;  // integers converted at a time

#if defined(OSTINATO_HAS_AVX512_VBMI)
// The two bytes of |i| as bfloat16, for i below 128.
struct BytesOfIntegers {
    alignas(64) std::array<std::uint8_t, 128> low{}, high{};

    constexpr BytesOfIntegers() {
        for (int exponent = 0; exponent < 7; ++exponent) {
            for (int i = 1 << exponent; i < 2 << exponent; ++i) {
                const int bits = (127 + exponent) << 7 | (i << (7 - exponent) & 0x7F);
                low[i] = static_cast<std::uint8_t>(bits & 0xFF);
                high[i] = static_cast<std::uint8_t>(bits >> 8);
            }
        }
    }
};
inline constexpr BytesOfIntegers BYTES_OF_INTEGERS;

// Compute first[32], second[32] = from[64]: eight instructions besides loads and stores, where arithmetic takes twice
// as many.
inline void int8_to_bf16(__m512i from, bf16* first, bf16* second) {
    const auto table = [](const std::array<std::uint8_t, 128>& of, __m512i index) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(of.data()), index, _mm512_load_si512(of.data() + 64));
    };
    // The permutation makes interleaving within 128 bits give the elements in order.
    const __m512i values = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), from);
    const __m512i sizes = _mm512_abs_epi8(values);
    // Only the magnitude of -128 has its upper bit set: it is looked up as 0, and needs the exponent bits 0x43.
    const __m512i exponent = _mm512_gf2p8affine_epi64_epi8(sizes, _mm512_set1_epi64(0x8080000000008000), 0);
    const __m512i sign = _mm512_ternarylogic_epi64(values, _mm512_set1_epi8(-128), exponent, 0xEA);  // (a & b) | c
    const __m512i low = table(BYTES_OF_INTEGERS.low, sizes);
    const __m512i high = _mm512_or_si512(table(BYTES_OF_INTEGERS.high, sizes), sign);
    _mm512_storeu_si512(first, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(second, _mm512_unpackhi_epi8(low, high));
}

inline void int8_to_bf16(const std::int8_t* from, bf16* first, bf16* second) {
    int8_to_bf16(_mm512_loadu_si512(from), first, second);
}

// Convert fewer than 64 integers, with zeros behind them.
inline void int8_to_bf16_partial(const std::int8_t* from, std::int64_t count, bf16* first, bf16* second) {
    int8_to_bf16(_mm512_maskz_loadu_epi8((std::uint64_t{1} << count) - 1, from), first, second);
}
#else
inline void int8_to_bf16(const std::int8_t* from, bf16* first, bf16* second) {
    for (int i = 0; i < INT8_STEP; i += LANES) {
        bf16* to = i < INT8_STEP / 2 ? first + i : second + (i - INT8_STEP / 2);
        store(to, load(from + i));
    }
}

inline void int8_to_bf16_partial(const std::int8_t* from, std::int64_t count, bf16* first, bf16* second) {
    std::int8_t some[INT8_STEP] = {};
    std::memcpy(some, from, count);
    int8_to_bf16(some, first, second);
}
#endif

}  // namespace ostinato
