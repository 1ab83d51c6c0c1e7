// Transposes of a few vectors.
#pragma once

#include "simd.h"

namespace ostinato {

// The low or the high halves of two vectors, element by element in turns.
inline Float interleave_low(Float a, Float b) {
#if defined(__AVX512F__)
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return (Float)_mm512_permutex2var_ps((__m512)a, order, (__m512)b);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

inline Float interleave_high(Float a, Float b) {
#if defined(__AVX512F__)
    const __m512i order = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return (Float)_mm512_permutex2var_ps((__m512)a, order, (__m512)b);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Vectors that hold [LANES][COUNT] become [COUNT][LANES]: log2(LANES) times, the first half of them is interleaved with
// the second. With COUNT = LANES, element i of vector j becomes element j of vector i.
template <int COUNT>
inline void transpose(Float (&rows)[COUNT]) {
    Float other[COUNT];
    for (int width = 1; width < LANES; width *= 2) {
        for (int i = 0; i < COUNT / 2; ++i) {
            other[2 * i] = interleave_low(rows[i], rows[i + COUNT / 2]);
            other[2 * i + 1] = interleave_high(rows[i], rows[i + COUNT / 2]);
        }
        for (int i = 0; i < COUNT; ++i) rows[i] = other[i];
    }
}

}  // namespace ostinato
