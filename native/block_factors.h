// The scales and minima of weights in blocks, made ready for 256 elements at a time, for products in float32.
#pragma once

#include "block_numbers.h"

namespace ostinato {

constexpr int GROUP = 256;  // elements whose scales are made ready together: all of a block, or those of several

#if defined(__AVX2__)
// The halves at the beginnings of eight blocks.
template <typename F>
inline __m128i first_halves(const std::uint8_t* block) {
    const auto at = [&](int i) { return static_cast<short>(block[i * F::BYTES] | block[i * F::BYTES + 1] << 8); };
    return _mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}

// The first words of four blocks; behind the last, its own.
template <typename F>
inline __m128i first_words(const std::uint8_t* block, int last = 3) {
    const auto at = [&](int i) { return static_cast<int>(word_at(block + std::min(i, last) * F::BYTES)); };
    return _mm_setr_epi32(at(0), at(1), at(2), at(3));
}

// Those of IQ4_XS: eight scales.
inline void split_scales(const std::uint8_t* block, float* to) {
    const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(block[2] | block[3] << 8),
                                           _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word_at(block + 4))),
                                          _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i both = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                                         _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4));
    const __m256 numbers = _mm256_cvtepi32_ps(_mm256_sub_epi32(both, _mm256_set1_epi32(32)));
    _mm256_storeu_ps(to, _mm256_mul_ps(numbers, _mm256_set1_ps(half_at(block))));
}

#endif

// Formats of which a product in float32 takes the integers as they stand in the block: what these are less than zero is
// a minimum then.
template <typename F>
inline constexpr bool IS_RAW = false;
#if defined(__AVX2__) && !defined(__AVX512F__)
template <> inline constexpr bool IS_RAW<Q4_0> = true;
template <> inline constexpr bool IS_RAW<Q4_1> = true;
template <> inline constexpr bool IS_RAW<Q4_K> = true;
template <int GROUP_SIZE> inline constexpr bool IS_RAW<Int4<GROUP_SIZE>> = true;
#endif

// Of each `SCALED` elements of a group a scale, and a minimum where there are any; or of so many blocks of it.
template <typename F>
struct Factors {
    static constexpr bool HAS_MINIMUM = F::HAS_MINIMUM || IS_RAW<F>;
    static constexpr int BLOCKS = GROUP / F::ELEMENTS, EACH = F::ELEMENTS / F::SCALED, COUNT = BLOCKS * EACH;
    alignas(64) float scale[COUNT], minimum[HAS_MINIMUM ? COUNT : 1];

    [[gnu::always_inline]] Factors(const std::uint8_t* block, int blocks) {
#if defined(__AVX2__)
        if constexpr (std::is_same_v<F, IQ4_XS>) {
            split_scales(block, scale);
            return;
        } else if constexpr (F::HALF_SCALED) {
            blocks == BLOCKS ? of_halves(block) : of_rest(block, blocks);
            return;
        }
#endif
        of_each(block, blocks);
    }

  private:
    void of_each(const std::uint8_t* block, int blocks) {
        for (int b = 0; b < blocks; ++b, block += F::BYTES) {
            float* minima = minimum + (HAS_MINIMUM ? b * EACH : 0);
            F::scales(block, scale + b * EACH, minima);
            if constexpr (!F::HAS_MINIMUM && IS_RAW<F>) *minima = static_cast<float>(F::least(block)) * scale[b];
        }
    }

#if defined(__AVX2__)
    // Apart, and never inline: a call within the loops would have all sums go through memory.
    [[gnu::noinline, gnu::cold]] void of_rest(const std::uint8_t* block, int blocks) { of_each(block, blocks); }

    // Of eight blocks.
    void of_halves(const std::uint8_t* block) {
        if constexpr (F::HAS_MINIMUM) {
            for (int b = 0; b < BLOCKS; b += 4) {
                const __m256 in_turns = _mm256_cvtph_ps(first_words<F>(block + b * F::BYTES));
                const __m256 apart = _mm256_permutevar8x32_ps(in_turns, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
                _mm_storeu_ps(scale + b, _mm256_castps256_ps128(apart));
                _mm_storeu_ps(minimum + b, _mm256_extractf128_ps(apart, 1));
            }
        } else {
            const __m256 scales = _mm256_cvtph_ps(first_halves<F>(block));
            _mm256_storeu_ps(scale, scales);
            if constexpr (IS_RAW<F>) {
                const __m256 least = _mm256_set1_ps(static_cast<float>(F::least(block)));
                _mm256_storeu_ps(minimum, _mm256_mul_ps(scales, least));
            }
        }
    }
#endif
};

}  // namespace ostinato
