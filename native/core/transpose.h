// Transposes of a few vectors in registers.
#pragma once

#include <type_traits>
#include <utility>

#include "core/simd.h"

namespace ostinato {

// Interleave the low or the high halves of two vectors.
inline Float interleave_low(Float a, Float b) {
#if defined(OSTINATO_HAS_AVX512)
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return (Float)_mm512_permutex2var_ps((__m512)a, order, (__m512)b);
#elif defined(OSTINATO_HAS_AVX2)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

inline Float interleave_high(Float a, Float b) {
#if defined(OSTINATO_HAS_AVX512)
    const __m512i order = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return (Float)_mm512_permutex2var_ps((__m512)a, order, (__m512)b);
#elif defined(OSTINATO_HAS_AVX2)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

template <typename Body, int... I>
[[gnu::always_inline]] inline void call_with(Body&& body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>{}), ...);
}

// Call `body` with each integer below COUNT as a constant, so that arrays that it indexes can be registers.
//
// Each nested call costs the compiler as much as a function. A loop with `#pragma GCC unroll` costs little and gives the
// same instructions where a body only indexes arrays.
template <int COUNT, typename Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
    call_with(body, std::make_integer_sequence<int, COUNT>{});
}

// Transpose vectors that hold [LANES][COUNT] to [COUNT][LANES]: log2(LANES) times, interleave the first half of them
// with the second. With COUNT = LANES, element i of vector j becomes element j of vector i.
template <int COUNT>
[[gnu::always_inline]] inline void transpose(Float (&rows)[COUNT]) {
    for (int width = 1; width < LANES; width *= 2) {
        Float other[COUNT];
        unrolled<COUNT / 2>([&](auto i) __attribute__((always_inline)) {
            other[2 * i] = interleave_low(rows[i], rows[i + COUNT / 2]);
            other[2 * i + 1] = interleave_high(rows[i], rows[i + COUNT / 2]);
        });
        unrolled<COUNT>([&](auto i) __attribute__((always_inline)) { rows[i] = other[i]; });
    }
}

#if defined(OSTINATO_HAS_AVX512)
// Transpose a square: single elements, then pairs, change places within 128 bits, where that costs least, then the 128
// bits do.
[[gnu::always_inline]] inline void transpose(Float (&rows)[LANES]) {
    __m512d pairs[LANES], fours[LANES];
    __m512 halves[LANES];
    unrolled<LANES / 2>([&](auto i) __attribute__((always_inline)) {
        pairs[2 * i] = (__m512d)_mm512_unpacklo_ps((__m512)rows[2 * i], (__m512)rows[2 * i + 1]);
        pairs[2 * i + 1] = (__m512d)_mm512_unpackhi_ps((__m512)rows[2 * i], (__m512)rows[2 * i + 1]);
    });
    unrolled<LANES / 2>([&](auto i) __attribute__((always_inline)) {
        constexpr int from = i / 2 * 4 + i % 2, to = i / 2 * 4 + i % 2 * 2;
        fours[to] = _mm512_unpacklo_pd(pairs[from], pairs[from + 2]);
        fours[to + 1] = _mm512_unpackhi_pd(pairs[from], pairs[from + 2]);
    });
    unrolled<LANES / 2>([&](auto i) __attribute__((always_inline)) {
        constexpr int from = i / 4 * 8 + i % 4;
        halves[from] = _mm512_shuffle_f32x4((__m512)fours[from], (__m512)fours[from + 4], 0x88);
        halves[from + 4] = _mm512_shuffle_f32x4((__m512)fours[from], (__m512)fours[from + 4], 0xDD);
    });
    unrolled<LANES / 2>([&](auto i) __attribute__((always_inline)) {
        rows[i] = (Float)_mm512_shuffle_f32x4(halves[i], halves[i + 8], 0x88);
        rows[i + 8] = (Float)_mm512_shuffle_f32x4(halves[i], halves[i + 8], 0xDD);
    });
}

// Transpose 16 rows of 8 times 32 bits from `at(row)` on: vector u holds word u of each row. Packed elements take a part
// of the moves of elements that are converted first.
template <typename At>
[[gnu::always_inline]] inline void read_units(At&& at, __m512i (&units)[8]) {
    __m512i words[2][4];  // in 128 bits each: word u of four rows, word u + 4 of these, then both of the next four
    unrolled<2>([&](auto half) __attribute__((always_inline)) {
        const auto both = [&](int r) __attribute__((always_inline)) {
            const auto part = [&](int row) __attribute__((always_inline)) {
                return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(8 * half + row)));
            };
            return _mm512_inserti64x4(_mm512_castsi256_si512(part(r)), part(r + 4), 1);
        };
        const __m512i a = both(0), b = both(1), c = both(2), d = both(3);
        const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
        const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
        words[half][0] = _mm512_unpacklo_epi64(ab_low, cd_low);
        words[half][1] = _mm512_unpackhi_epi64(ab_low, cd_low);
        words[half][2] = _mm512_unpacklo_epi64(ab_high, cd_high);
        words[half][3] = _mm512_unpackhi_epi64(ab_high, cd_high);
    });
    unrolled<4>([&](auto u) __attribute__((always_inline)) {
        units[u] = _mm512_shuffle_i32x4(words[0][u], words[1][u], 0x88);
        units[u + 4] = _mm512_shuffle_i32x4(words[0][u], words[1][u], 0xDD);
    });
}

// Convert the first or the second element of bfloat16 pairs to floats.
inline Float first_of_pairs(__m512i pairs) { return (Float)_mm512_slli_epi32(pairs, 16); }

inline Float second_of_pairs(__m512i pairs) {
    return (Float)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000)));
}
#elif defined(OSTINATO_HAS_AVX2)
// Transpose a square: single elements, then pairs, change places within 128 bits, where that costs least, then the 128
// bits do.
[[gnu::always_inline]] inline void transpose(Float (&rows)[LANES]) {
    __m256d pairs[LANES];
    __m256 fours[LANES];
    unrolled<LANES / 2>([&](auto i) __attribute__((always_inline)) {
        pairs[2 * i] = (__m256d)_mm256_unpacklo_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
        pairs[2 * i + 1] = (__m256d)_mm256_unpackhi_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
    });
    unrolled<LANES / 2>([&](auto i) __attribute__((always_inline)) {
        constexpr int from = i / 2 * 4 + i % 2, to = i / 2 * 4 + i % 2 * 2;
        fours[to] = (__m256)_mm256_unpacklo_pd(pairs[from], pairs[from + 2]);
        fours[to + 1] = (__m256)_mm256_unpackhi_pd(pairs[from], pairs[from + 2]);
    });
    unrolled<LANES / 2>([&](auto i) __attribute__((always_inline)) {
        rows[i] = (Float)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        rows[i + 4] = (Float)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    });
}

// Transpose 8 rows of 4 times 32 bits from `at(row)` on: vector u holds word u of each row. Packed elements take half
// as many moves as elements that are converted first.
template <typename At>
[[gnu::always_inline]] inline void read_units(At&& at, __m256i (&units)[4]) {
    const auto both = [&](int r) __attribute__((always_inline)) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(r)));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(r + 4))), 1);
    };
    const __m256i a = both(0), b = both(1), c = both(2), d = both(3);
    const __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
    const __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
    units[0] = _mm256_unpacklo_epi64(ab_low, cd_low);
    units[1] = _mm256_unpackhi_epi64(ab_low, cd_low);
    units[2] = _mm256_unpacklo_epi64(ab_high, cd_high);
    units[3] = _mm256_unpackhi_epi64(ab_high, cd_high);
}

// Sign-extend the first or the second byte of each 16 bits.
inline __m256i even_bytes(__m256i bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); }

inline __m256i odd_bytes(__m256i bytes) { return _mm256_srai_epi16(bytes, 8); }

// Convert the first or the second element of bfloat16 pairs to floats.
inline Float first_of_pairs(__m256i pairs) { return (Float)_mm256_slli_epi32(pairs, 16); }

inline Float second_of_pairs(__m256i pairs) {
    return (Float)_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000)));
}
#endif

}  // namespace ostinato
