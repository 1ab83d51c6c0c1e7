// Scales and minima of weights in blocks, prepared for a superblock at a time.
#pragma once

#include <algorithm>
#include <type_traits>

#include "quant/block_layouts.h"

namespace ostinato {

#if defined(OSTINATO_HAS_AVX2)
// Return the first 16 bytes of a block.
inline __m128i beginning(const std::uint8_t* block) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block)); }

// Return the first float16 of each of eight blocks.
template <typename F>
inline __m128i first_halves(const std::uint8_t* block) {
    const auto two = [&](int i) {
        return _mm_unpacklo_epi16(beginning(block + i * F::BYTES), beginning(block + (i + 1) * F::BYTES));
    };
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(two(0), two(2)), _mm_unpacklo_epi32(two(4), two(6)));
}

// Return the first words of four blocks; behind the last block, its word again.
template <typename F>
inline __m128i first_words(const std::uint8_t* block, int last = 3) {
    const auto at = [&](int i) { return beginning(block + std::min(i, last) * F::BYTES); };
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(at(0), at(1)), _mm_unpacklo_epi32(at(2), at(3)));
}

// Return the first words of two blocks.
template <typename F>
inline __m128i first_two_words(const std::uint8_t* block, int last) {
    return _mm_setr_epi32(static_cast<int>(word_at(block)), static_cast<int>(word_at(block + last * F::BYTES)), 0, 0);
}

// Split eight words with a scale and a zero point into scales, and zero points in 32 bits.
inline __m256 scales_of(__m256i words) {
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_set1_epi32(INT4_ZERO_BITS), words));
}

inline __m256i zeros_of(__m256i words) { return _mm256_and_si256(_mm256_set1_epi32(INT4_ZERO_BITS), words); }

// Return the minima that replace zero points where integers are read unsigned.
inline __m256 minima_of(__m256 scales, __m256i zeros) {
    return _mm256_mul_ps(scales, _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_setzero_si256(), zeros)));
}

// Return the eight scales of IQ4_XS.
inline __m256 split_scales(const std::uint8_t* block) {
    const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(block[2] | block[3] << 8),
                                           _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word_at(block + 4))),
                                          _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i both = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                                         _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4));
    const __m256 numbers = _mm256_cvtepi32_ps(_mm256_sub_epi32(both, _mm256_set1_epi32(32)));
    return _mm256_mul_ps(numbers, _mm256_set1_ps(half_at(block)));
}

#endif

#if defined(OSTINATO_HAS_AVX512)
// Return the sixteen scales of Q6_K.
inline __m512 byte_scales(const std::uint8_t* block) {
    const __m128i integers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 192));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(integers)), _mm512_set1_ps(half_at(block + 208)));
}

// Return the eight scales and the eight minima of Q4_K or Q5_K.
inline __m512 six_bit_scales(const std::uint8_t* block) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(six_bit_integers(block)));
    const __m512 of_scales = _mm512_broadcastss_ps(_mm_cvtph_ps(packed));
    const __m512 of_minima = _mm512_set1_ps(-half_at(block + 2));
    return _mm512_mul_ps(numbers, _mm512_mask_blend_ps(0xFF00, of_scales, of_minima));
}
#endif

// True for formats whose integers a float32 product reads without their sign: their offset becomes a minimum.
template <typename F>
inline constexpr bool READS_UNSIGNED = false;
#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)
template <> inline constexpr bool READS_UNSIGNED<Q4_0> = true;
template <> inline constexpr bool READS_UNSIGNED<Q4_1> = true;
template <> inline constexpr bool READS_UNSIGNED<Q4_K> = true;
template <int GROUP_SIZE> inline constexpr bool READS_UNSIGNED<Int4<GROUP_SIZE>> = true;
#endif

#if defined(OSTINATO_HAS_AVX2)
// Return the words with a scale and a zero point of the `blocks` blocks of a superblock.
template <typename F>
inline __m256i words_of(const std::uint8_t* block, int blocks) {
    constexpr int BLOCKS = SUPERBLOCK / F::ELEMENTS;
    const auto words_from = [&](int b) {
        if constexpr (BLOCKS == 2) return first_two_words<F>(block, blocks - 1);
        return first_words<F>(block + b * F::BYTES, std::min(blocks - b, 4) - 1);
    };
    const __m256i words = _mm256_castsi128_si256(words_from(0));
    if (BLOCKS <= 4) return words;
    return _mm256_inserti128_si256(words, blocks > 4 ? words_from(4) : _mm_setzero_si128(), 1);
}

// Return the float16 values at the beginning of four blocks: scales, then minima.
template <typename F>
inline __m128i halves_of_four(const std::uint8_t* block) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm_shuffle_epi8(first_words<F>(block), order);
}
#endif

// Scales and minima of a superblock, or of some of its blocks: one of each per SCALED elements.
template <typename F>
struct BlockScales {
    static constexpr bool HAS_MINIMUM = F::HAS_MINIMUM || READS_UNSIGNED<F>;
    static constexpr int BLOCKS = SUPERBLOCK / F::ELEMENTS, EACH = F::ELEMENTS / F::SCALED, COUNT = BLOCKS * EACH;
    static constexpr int ROOM = std::max(COUNT, 8);  // whole vectors are read
    alignas(64) float scale[ROOM], minimum[HAS_MINIMUM ? ROOM : 1];

    [[gnu::always_inline]] BlockScales(const std::uint8_t* block, int blocks) {
#if defined(OSTINATO_HAS_AVX2)
        if constexpr (std::is_same_v<F, IQ4_XS>) {
            _mm256_storeu_ps(scale, split_scales(block));
            return;
        } else if constexpr (F::HAS_ZERO) {
            of_words(block, blocks);
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
            if constexpr (!F::HAS_MINIMUM && READS_UNSIGNED<F>) *minima = static_cast<float>(F::least(block)) * scale[b];
        }
    }

#if defined(OSTINATO_HAS_AVX2)
    // A function of its own, never inline: a call within the loops would move all sums through memory.
    [[gnu::noinline, gnu::cold]] void of_rest(const std::uint8_t* block, int blocks) { of_each(block, blocks); }

    // Read scales and zero points that share a word. Eight are stored at once: a load that spans several recent stores
    // has to wait.
    void of_words(const std::uint8_t* block, int blocks) {
        const __m256i words = words_of<F>(block, blocks);
        const __m256 scales = scales_of(words);
        _mm256_store_ps(scale, scales);
        if constexpr (HAS_MINIMUM) _mm256_store_ps(minimum, minima_of(scales, zeros_of(words)));
    }

    // Read the scales of eight blocks.
    void of_halves(const std::uint8_t* block) {
        if constexpr (F::HAS_MINIMUM) {
            const __m128i first = halves_of_four<F>(block), second = halves_of_four<F>(block + 4 * F::BYTES);
            _mm256_storeu_ps(scale, _mm256_cvtph_ps(_mm_unpacklo_epi64(first, second)));
            _mm256_storeu_ps(minimum, _mm256_cvtph_ps(_mm_unpackhi_epi64(first, second)));
        } else {
            const __m256 scales = _mm256_cvtph_ps(first_halves<F>(block));
            _mm256_storeu_ps(scale, scales);
            if constexpr (READS_UNSIGNED<F>) {
                const __m256 least = _mm256_set1_ps(static_cast<float>(F::least(block)));
                _mm256_storeu_ps(minimum, _mm256_mul_ps(scales, least));
            }
        }
    }
#endif
};

#if defined(OSTINATO_HAS_AVX512_BF16)
// Scales of a superblock, or of some of its blocks, for bfloat16 products with AVX-512: sixteen, or eight followed by
// as many minima or zero points. In blocks of 32, scales and minima alternate.
template <typename F>
struct BlockScalesBf16 {
    static constexpr int BLOCKS = SUPERBLOCK / F::ELEMENTS;
    static constexpr bool IN_TURNS = F::HAS_MINIMUM && F::ELEMENTS == SUBBLOCK;
    alignas(64) float numbers[16];

    BlockScalesBf16() = default;
    [[gnu::always_inline]] BlockScalesBf16(const std::uint8_t* block, int blocks) { make(block, blocks); }

    [[gnu::always_inline]] void make(const std::uint8_t* block, int blocks) {
        if (blocks == BLOCKS) {
            of_superblock(block);
        } else {
            of_rest(block, blocks);
        }
    }

    // Return the minimum of a subblock, or its zero point in formats that have one.
    float minimum(int subblock) const {
        return numbers[IN_TURNS ? 2 * subblock + 1 : 8 + (F::HAS_ZERO ? subblock * SUBBLOCK / F::SCALED : subblock)];
    }
    float scale(int subblock) const { return numbers[IN_TURNS ? 2 * subblock : subblock * SUBBLOCK / F::SCALED]; }

    // Return the factors of the pairwise sums of a subblock.
    Float of_pairs(int subblock) const {
        if constexpr (F::SCALED == SUBBLOCK / 2) {
            const __m512 first = _mm512_set1_ps(numbers[2 * subblock]), second = _mm512_set1_ps(numbers[2 * subblock + 1]);
            return (Float)_mm512_mask_blend_ps(0xFF00, first, second);
        } else {
            return splat(scale(subblock));
        }
    }

  private:
    [[gnu::always_inline]] void of_superblock(const std::uint8_t* block) {
        if constexpr (F::ELEMENTS == SUPERBLOCK && F::HAS_MINIMUM) {
            _mm512_store_ps(numbers, six_bit_scales(block));
        } else if constexpr (F::ELEMENTS == SUPERBLOCK && F::SCALED == SUBBLOCK) {
            _mm256_store_ps(numbers, split_scales(block));
        } else if constexpr (F::ELEMENTS == SUPERBLOCK) {
            _mm512_store_ps(numbers, byte_scales(block));
        } else if constexpr (F::HAS_ZERO) {
            for (int b = 0; b < BLOCKS; b += 4) put_with_zeros(first_words<F>(block + b * F::BYTES, BLOCKS - 1), b);
        } else if constexpr (!F::HALF_SCALED) {
            for (int b = 0; b < BLOCKS; ++b) F::scales(block + b * F::BYTES, numbers + b, nullptr);
        } else if constexpr (IN_TURNS) {
            const __m256i halves = _mm256_setr_m128i(first_words<F>(block), first_words<F>(block + 4 * F::BYTES));
            _mm512_store_ps(numbers, _mm512_cvtph_ps(halves));
        } else {
            _mm256_store_ps(numbers, _mm256_cvtph_ps(first_halves<F>(block)));
        }
    }

    // A function of its own, never inline: a call within the loops would move all sums through memory.
    [[gnu::noinline, gnu::cold]] void of_rest(const std::uint8_t* block, int blocks) {
        for (int b = 0; b < blocks; ++b, block += F::BYTES) {
            if constexpr (F::HAS_ZERO) {
                numbers[b] = int4_scale(word_at(block));
                numbers[8 + b] = block[0];
            } else {
                float* of_block = numbers + b * (IN_TURNS ? 2 : 1);
                F::scales(block, of_block, of_block + 1);
            }
        }
    }

    void put_with_zeros(__m128i words, int at) {
        const __m128i zero = _mm_set1_epi32(INT4_ZERO_BITS);
        _mm_store_si128(reinterpret_cast<__m128i*>(numbers + at), _mm_andnot_si128(zero, words));
        _mm_store_ps(numbers + 8 + at, _mm_cvtepi32_ps(_mm_and_si128(zero, words)));
    }
};
#endif

}  // namespace ostinato
