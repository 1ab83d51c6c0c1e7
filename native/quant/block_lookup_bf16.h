// Weights in blocks as bfloat16, 32 at a time, by tables: the bits of an integer select one of its format's numbers.
// For AVX-512.
//
// The instruction that looks up 32 words uses 5 bits of each and ignores the others. With 4 bits, both halves of a
// table are the same, so higher bits need not be cleared.
#pragma once

#include <array>

#include "quant/block_layouts.h"

#if defined(OSTINATO_HAS_AVX512_BF16)
namespace ostinato {

constexpr std::uint16_t bf16_bits(int value) {
    const int size = value < 0 ? -value : value;
    int exponent = 0;
    while (size >> (exponent + 1)) ++exponent;
    const int bits = size == 0 ? 0 : (127 + exponent) << 7 | (size << 7 >> exponent & 0x7F);
    return static_cast<std::uint16_t>(bits | (value < 0 ? 0x8000 : 0));
}

// Numbers of a format by their integers' bits.
template <typename F>
struct Numbers {
    alignas(64) std::array<float, 1 << F::BITS> floats{};
    alignas(64) std::array<std::uint16_t, 64> words{};

    constexpr Numbers() {
        for (int i = 0; i < 1 << F::BITS; ++i) floats[i] = static_cast<float>(F::value(i));
        for (int i = 0; i < 64; ++i) {
            words[i] = bf16_bits(F::value(i % (1 << F::BITS)));
        }
    }
};
template <typename F>
inline constexpr Numbers<F> NUMBERS;

// Integers minus a zero point of up to 255: a table of 16 begins `MOST - zero` behind the first.
struct NumbersBelow {
    static constexpr int MOST = 255;
    alignas(64) std::array<std::uint16_t, MOST + 16> words{};

    constexpr NumbersBelow() {
        for (int i = 0; i < MOST + 16; ++i) words[i] = bf16_bits(i - MOST);
    }
};
inline constexpr NumbersBelow NUMBERS_BELOW;

// Lookup table in registers. With 6 bits, `low` and `high` are one table.
struct Table {
    __m512i low, high;
};

// Return the table of a block's integers.
template <typename F>
inline Table table_of(const std::uint8_t* block) {
    if constexpr (F::HAS_ZERO) {
        const auto* at = &NUMBERS_BELOW.words[NumbersBelow::MOST - block[0]];
        return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), __m512i{}};
    } else {
        return {_mm512_load_si512(NUMBERS<F>.words.data()), _mm512_load_si512(NUMBERS<F>.words.data() + 32)};
    }
}

// Return the table of a block's weights, rounded to bfloat16. `minimum` is the zero point of formats that have one.
template <typename F>
inline Table table_of(float scale, [[maybe_unused]] float minimum) {
    static_assert(F::BITS < 6);
    const auto scaled = [&](const float* integers) {
        const Float numbers = load(integers);
        if constexpr (F::HAS_MINIMUM) {
            return (__m512)fma(numbers, splat(scale), splat(minimum));
        } else if constexpr (F::HAS_ZERO) {
            return (__m512)((numbers - minimum) * scale);
        } else {
            return (__m512)(numbers * scale);
        }
    };
    const float* floats = NUMBERS<F>.floats.data();
    const __m512 low = scaled(floats), high = F::BITS == 4 ? low : scaled(floats + (1 << F::BITS) - LANES);
    return {(__m512i)_mm512_cvtne2ps_pbh(high, low), __m512i{}};
}

// Return words that hold the lower halves of 16 bytes in their lowest 4 bits, then the upper halves.
inline __m512i halves_of_16(const std::uint8_t* from) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm512_cvtepu8_epi16(_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4)));
}

inline __m256i load_32(const std::uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

// Return words that hold the lower halves of 32 bytes, or the upper halves, in their lowest 4 bits.
inline __m512i halves_of_32(const std::uint8_t* from, bool upper) {
    const __m512i words = _mm512_cvtepu8_epi16(load_32(from));
    return upper ? _mm512_srli_epi16(words, 4) : words;
}

// Position of a format's bits: `low` returns all bits of 32 words but the fifth, or all six; TOGETHER subblocks share
// their bytes.
template <typename F>
struct NibblePlaces {
    static constexpr int TOGETHER = 1;
};

template <typename F, int AT>
struct NibblesOf16 {
    static constexpr int TOGETHER = 1;
    static __m512i low(const std::uint8_t* block, int subblock) { return halves_of_16(block + AT + 16 * subblock); }
};

template <> struct NibblePlaces<Q4_0> : NibblesOf16<Q4_0, 2> {};
template <> struct NibblePlaces<Q4_1> : NibblesOf16<Q4_1, 4> {};
template <> struct NibblePlaces<IQ4_NL> : NibblesOf16<IQ4_NL, 2> {};
template <> struct NibblePlaces<MXFP4> : NibblesOf16<MXFP4, 1> {};
template <> struct NibblePlaces<IQ4_XS> : NibblesOf16<IQ4_XS, 8> {};
template <int SIZE> struct NibblePlaces<Int4<SIZE>> : NibblesOf16<Int4<SIZE>, 4> {};

template <> struct NibblePlaces<Q5_0> : NibblesOf16<Q5_0, 6> {
    static __mmask32 fifth(const std::uint8_t* block, int) { return word_at(block + 2); }
};

template <> struct NibblePlaces<Q5_1> : NibblesOf16<Q5_1, 8> {
    static __mmask32 fifth(const std::uint8_t* block, int) { return word_at(block + 4); }
};

template <> struct NibblePlaces<Q4_K> {
    static constexpr int TOGETHER = 2;
    static __m512i low(const std::uint8_t* block, int subblock) {
        return halves_of_32(block + 16 + subblock / 2 * SUBBLOCK, subblock % 2);
    }
};

template <> struct NibblePlaces<Q5_K> {
    static constexpr int TOGETHER = 2;
    static __m512i low(const std::uint8_t* block, int subblock) {
        return halves_of_32(block + 48 + subblock / 2 * SUBBLOCK, subblock % 2);
    }
    static __mmask32 fifth(const std::uint8_t* block, int subblock) {
        return _mm256_test_epi8_mask(load_32(block + 16), _mm256_set1_epi8(static_cast<char>(1 << subblock)));
    }
};

template <> struct NibblePlaces<Q6_K> {
    static constexpr int TOGETHER = 4;
    // Return all six bits.
    static __m512i low(const std::uint8_t* block, int subblock) {
        const int second = subblock / 4, quarter = subblock % 4;
        const __m512i four = halves_of_32(block + second * 64 + quarter % 2 * SUBBLOCK, quarter / 2);
        const __m512i two = _mm512_cvtepu8_epi16(load_32(block + 128 + second * SUBBLOCK));
        const __m512i above = quarter == 0   ? _mm512_slli_epi16(two, 4)
                              : quarter == 1 ? _mm512_slli_epi16(two, 2)
                              : quarter == 2 ? two
                                             : _mm512_srli_epi16(two, 2);
        return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), four, above, 0xCA);  // a ? b : c
    }
};

// Return the numbers in `table` for the integers of a subblock.
template <typename F>
inline __m512bh look_up(const std::uint8_t* block, int subblock, const Table& table) {
    __m512i index = NibblePlaces<F>::low(block, subblock);
    if constexpr (F::BITS == 6) return (__m512bh)_mm512_permutex2var_epi16(table.low, index, table.high);
    if constexpr (F::BITS == 5) {
        index = _mm512_and_si512(index, _mm512_set1_epi16(15));
        index = _mm512_mask_add_epi16(index, NibblePlaces<F>::fifth(block, subblock), index, _mm512_set1_epi16(16));
    }
    return (__m512bh)_mm512_permutexvar_epi16(index, table.low);
}

}  // namespace ostinato
#endif
