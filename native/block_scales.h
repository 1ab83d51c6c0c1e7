// The scales of weights in blocks, made ready for 256 elements at a time, for products of bfloat16. For AVX-512.
#pragma once

#include "block_factors.h"

#if defined(__AVX512BF16__)
namespace ostinato {

// The scales of a group, or of so many blocks of it: sixteen, or eight and behind them as many minima or zero points. With
// blocks of 32, scales and minima take turns.
template <typename F>
struct BlockScalesBf16 {
    static constexpr int BLOCKS = SUPERBLOCK / F::ELEMENTS;
    static constexpr bool IN_TURNS = F::HAS_MINIMUM && F::ELEMENTS == SUBBLOCK;
    alignas(64) float numbers[16];

    BlockScalesBf16() = default;
    [[gnu::always_inline]] BlockScalesBf16(const std::uint8_t* block, int blocks) { make(block, blocks); }

    [[gnu::always_inline]] void make(const std::uint8_t* block, int blocks) {
        if (blocks == BLOCKS) {
            of_group(block);
        } else {
            of_rest(block, blocks);
        }
    }

    // Where a format has them, the zero point of a part instead.
    float minimum(int part) const {
        return numbers[IN_TURNS ? 2 * part + 1 : 8 + (F::HAS_ZERO ? part * SUBBLOCK / F::SCALED : part)];
    }
    float scale(int part) const { return numbers[IN_TURNS ? 2 * part : part * SUBBLOCK / F::SCALED]; }

    // What the sums of pairs of a part's elements are multiplied with.
    Float of_pairs(int part) const {
        if constexpr (F::SCALED == SUBBLOCK / 2) {
            const __m512 first = _mm512_set1_ps(numbers[2 * part]), second = _mm512_set1_ps(numbers[2 * part + 1]);
            return (Float)_mm512_mask_blend_ps(0xFF00, first, second);
        } else {
            return splat(scale(part));
        }
    }

  private:
    [[gnu::always_inline]] void of_group(const std::uint8_t* block) {
        if constexpr (F::ELEMENTS == SUPERBLOCK && F::HAS_MINIMUM) {
            _mm512_store_ps(numbers, six_bit_scales(block));
        } else if constexpr (F::ELEMENTS == SUPERBLOCK && F::SCALED == SUBBLOCK) {
            _mm256_store_ps(numbers, split_scales(block));
        } else if constexpr (F::ELEMENTS == SUPERBLOCK) {
            _mm512_store_ps(numbers, byte_scales(block));
        } else if constexpr (F::HAS_ZERO) {
            for (int b = 0; b < BLOCKS; b += 4) put_with_zeros(first_words<F>(block + b * F::BYTES, BLOCKS - 1), b);
        } else if constexpr (IS_FLOAT8<F>) {
            for (int b = 0; b < BLOCKS; ++b) F::scales(block + b * F::BYTES, numbers + b, nullptr);
        } else if constexpr (IN_TURNS) {
            const __m256i halves = _mm256_setr_m128i(first_words<F>(block), first_words<F>(block + 4 * F::BYTES));
            _mm512_store_ps(numbers, _mm512_cvtph_ps(halves));
        } else {
            _mm256_store_ps(numbers, _mm256_cvtph_ps(first_halves<F>(block)));
        }
    }

    // Apart, and never inline: a call within the loops would have all sums go through memory.
    [[gnu::noinline, gnu::cold]] void of_rest(const std::uint8_t* block, int blocks) {
        for (int b = 0; b < blocks; ++b, block += F::BYTES) {
            if constexpr (F::HAS_ZERO) {
                numbers[b] = bits_as<float>(word_at(block) & ~std::uint32_t{0xFF});
                numbers[8 + b] = block[0];
            } else {
                float* of_block = numbers + b * (IN_TURNS ? 2 : 1);
                F::scales(block, of_block, of_block + 1);
            }
        }
    }

    void put_with_zeros(__m128i words, int at) {
        const __m128i zero = _mm_set1_epi32(0xFF);
        _mm_store_si128(reinterpret_cast<__m128i*>(numbers + at), _mm_andnot_si128(zero, words));
        _mm_store_ps(numbers + 8 + at, _mm_cvtepi32_ps(_mm_and_si128(zero, words)));
    }
};

}  // namespace ostinato
#endif
