// float8_e4m3 numbers: a sign, four bits of exponent less 7, three of mantissa; no infinity. Tensors in blocks keep no NaN
// among them (ops/quant/dequantize.py).
//
// Shifted up, their bits are those of a float16 that is 2^8 times smaller, denormals included, since its exponent has
// bias 15. That conversion is exact however denormals are treated, and the factor is part of a scale.
#pragma once

#include "core/simd.h"

namespace ostinato {

struct float8 {
    std::uint8_t bits;
};

constexpr float FLOAT8_FACTOR = 256.0f;  // values are read divided by this

#if defined(OSTINATO_HAS_AVX2)
// Return the float16 bits of sixteen numbers.
inline __m256i halves_of_float8(const float8* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<short>(0xBFFF)));
}
#endif

// Load COUNT numbers, 16 or more, each divided by FLOAT8_FACTOR.
template <int COUNT>
inline void load(const float8* from, Float* to) {
#if defined(OSTINATO_HAS_AVX512)
    for (int i = 0; i < COUNT / 16; ++i) to[i] = (Float)_mm512_cvtph_ps(halves_of_float8(from + i * 16));
#elif defined(OSTINATO_HAS_AVX2)
    for (int i = 0; i < COUNT / 16; ++i) {
        const __m256i halves = halves_of_float8(from + i * 16);
        to[2 * i] = (Float)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        to[2 * i + 1] = (Float)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
#else
    for (int i = 0; i < COUNT; i += LANES) {
        half halves[LANES];
        for (int k = 0; k < LANES; ++k) {
            const int bits = bits_as<std::int8_t>(from[i + k].bits);
            halves[k].bits = static_cast<std::uint16_t>(bits * 128 & 0xBFFF);
        }
        to[i / LANES] = load(halves);
    }
#endif
}

#if defined(OSTINATO_HAS_AVX512_BF16)
// The eight numbers with exponent 0, divided by FLOAT8_FACTOR, as bfloat16: their mantissa times 2^-17.
alignas(64) inline constexpr std::uint16_t SMALL_FLOAT8[32] = {0x0000, 0x3700, 0x3780, 0x37C0, 0x3800, 0x3820, 0x3840, 0x3860};

// Load 32 numbers, each divided by FLOAT8_FACTOR, as bfloat16. Exponents other than 0 grow by 112; numbers with
// exponent 0 are looked up by their lowest five bits, the mantissa.
inline __m512i words_of_float8(const float8* from) {
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i sizes = _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x7F0));
    const __m512i normal = _mm512_add_epi16(sizes, _mm512_set1_epi16(112 << 7));
    const __mmask32 is_small = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78));
    const __m512i all = _mm512_mask_permutexvar_epi16(normal, is_small, words, _mm512_load_si512(SMALL_FLOAT8));
    return _mm512_ternarylogic_epi64(words, _mm512_set1_epi16(-32768), all, 0xEA);  // (a & b) | c
}
#endif

}  // namespace ostinato
