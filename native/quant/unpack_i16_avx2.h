// Unpacking of a block's integers to 16 bits, 32 at a time, for products with i16 tokens, with AVX2.
//
// Integers are read unsigned, as the block has them. Their offset `LEAST` is added with the sums of a token's elements,
// once per 32. Shifts and masks are constants of each subblock, so that one shift moves bits of separate bytes to their
// place.
#pragma once

#include "quant/block_scales.h"
#include "quant/quantize_tokens_i16.h"

#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)

namespace ostinato {

inline __m256i load_32_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// Return each byte shifted up by BY bits, or down if BY is negative, and masked by `mask`.
template <int BY>
inline __m256i moved(__m256i bytes, int mask) {
    const __m256i shifted = BY > 0 ? _mm256_slli_epi16(bytes, BY > 0 ? BY : 0) : _mm256_srli_epi16(bytes, BY < 0 ? -BY : 0);
    return _mm256_and_si256(BY == 0 ? bytes : shifted, _mm256_set1_epi8(static_cast<char>(mask)));
}

// Zero-extend bytes to 16 bits: in each half of the register the first eight, then the second eight.
inline void spread(__m256i bytes, __m256i* to) {
    to[0] = _mm256_unpacklo_epi8(bytes, _mm256_setzero_si256());
    to[1] = _mm256_unpackhi_epi8(bytes, _mm256_setzero_si256());
}

// Integers of a block as i16 vectors. For formats whose integers are bytes in a register first, tokens have the order
// of `spread`.
template <typename F>
struct UnpackI16Avx2 {
    static constexpr bool IS_INTERLEAVED = true;
    static constexpr int TOGETHER = 1;  // subblocks that are read from the same bytes
    static constexpr int LEAST = 0;     // offset that is to be added to each integer
    static constexpr float UNIT = 1;    // value that an integer of 1 is read as

    template <int INDEX>
    static void read(const std::uint8_t* block, __m256i* to) {
        spread((__m256i)F::integers(block, INDEX), to);
    }
};

// Formats with half bytes: the lower halves of 16 bytes, then the upper halves.
template <typename F, int LEAST_OF>
struct UnpackNibblesAvx2 {
    static constexpr bool IS_INTERLEAVED = false;
    static constexpr int TOGETHER = 1, LEAST = LEAST_OF;
    static constexpr float UNIT = 1;

    template <int INDEX>
    static void read(const std::uint8_t* block, __m256i* to) {
        const __m256i bytes = _mm256_cvtepu8_epi16(load_16_bytes(F::halves(block, INDEX)));
        to[0] = _mm256_and_si256(bytes, _mm256_set1_epi16(15));
        to[1] = _mm256_srli_epi16(bytes, 4);
    }
};

template <> struct UnpackI16Avx2<Q4_0> : UnpackNibblesAvx2<Q4_0, -8> {};
template <> struct UnpackI16Avx2<Q4_1> : UnpackNibblesAvx2<Q4_1, 0> {};
template <int SIZE> struct UnpackI16Avx2<Int4<SIZE>> : UnpackNibblesAvx2<Int4<SIZE>, 0> {};

template <> struct UnpackI16Avx2<Q8_0> {
    static constexpr bool IS_INTERLEAVED = false;
    static constexpr int TOGETHER = 1, LEAST = 0;
    static constexpr float UNIT = 1;

    template <int>
    static void read(const std::uint8_t* block, __m256i* to) {
        to[0] = _mm256_cvtepi8_epi16(load_16_bytes(block + 2));
        to[1] = _mm256_cvtepi8_epi16(load_16_bytes(block + 18));
    }
};

template <> struct UnpackI16Avx2<Q4_K> {
    static constexpr bool IS_INTERLEAVED = false;
    static constexpr int TOGETHER = 2, LEAST = 0;
    static constexpr float UNIT = 1;

    template <int INDEX>
    static void read(const std::uint8_t* block, __m256i* to) {
        for (int half = 0; half < 2; ++half) {
            const __m256i bytes = _mm256_cvtepu8_epi16(load_16_bytes(block + 16 + INDEX / 2 * SUBBLOCK + half * 16));
            to[half] = _mm256_and_si256(bytes, _mm256_set1_epi16(15));
            to[2 + half] = _mm256_srli_epi16(bytes, 4);
        }
    }
};

template <> struct UnpackI16Avx2<Q5_0> : UnpackI16Avx2<Q5_1> {
    static constexpr int LEAST = -16;

    template <int>
    static void read(const std::uint8_t* block, __m256i* to) {
        spread((__m256i)(halves_at(block + 6) | fifth_bits_at(block + 2)), to);
    }
};

template <> struct UnpackI16Avx2<Q5_K> : UnpackI16Avx2<Q5_1> {
    template <int P>
    static void read(const std::uint8_t* block, __m256i* to) {
        const __m256i four = moved<P % 2 * -4>(load_32_bytes(block + 48 + P / 2 * SUBBLOCK), 0x0F);
        spread(_mm256_or_si256(four, moved<4 - P>(load_32_bytes(block + 16), 0x10)), to);
    }
};

// The 16 elements of a scale have no sums of their own, so integers are read with their sign: 256 times as large, above
// a byte of zeros.
template <> struct UnpackI16Avx2<Q6_K> : UnpackI16Avx2<Q5_1> {
    static constexpr float UNIT = 256;

    template <int P>
    static void read(const std::uint8_t* block, __m256i* to) {
        constexpr int SECOND = P / 4, QUARTER = P % 4;
        const __m256i four = moved<QUARTER / 2 * -4>(load_32_bytes(block + SECOND * 64 + QUARTER % 2 * SUBBLOCK), 0x0F);
        const __m256i two = moved<4 - 2 * QUARTER>(load_32_bytes(block + 128 + SECOND * SUBBLOCK), 0x30);
        const __m256i integers = _mm256_sub_epi8(_mm256_or_si256(four, two), _mm256_set1_epi8(32));
        to[0] = _mm256_unpacklo_epi8(_mm256_setzero_si256(), integers);
        to[1] = _mm256_unpackhi_epi8(_mm256_setzero_si256(), integers);
    }
};

// Look up the numbers of IQ4_NL and IQ4_XS plus 128.
inline void spread_iq4(Bytes32 index, __m256i* to) {
    const __m128i values = _mm_add_epi8(load_16_bytes(IQ4_VALUES), _mm_set1_epi8(-128));
    spread(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)index), to);
}

template <> struct UnpackI16Avx2<IQ4_NL> : UnpackI16Avx2<Q5_1> {
    static constexpr int LEAST = -128;

    template <int>
    static void read(const std::uint8_t* block, __m256i* to) { spread_iq4(halves_at(block + 2), to); }
};

template <> struct UnpackI16Avx2<IQ4_XS> : UnpackI16Avx2<Q5_1> {
    static constexpr int LEAST = -128;

    template <int P>
    static void read(const std::uint8_t* block, __m256i* to) { spread_iq4(halves_at(block + 8 + 16 * P), to); }
};

}  // namespace ostinato

#endif
