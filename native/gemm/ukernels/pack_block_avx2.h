// Packing of rows in blocks into panels of floats, for gemm/large_m_avx2.h, and of integers, for
// gemm/large_m_i16.h: a subblock of eight rows at a time.
//
// Integers are transposed while four of a row, or eight half bytes, are 32 bits. Afterwards a vector holds the same
// element of eight rows, and another their eight scales.
#pragma once

#include "core/transpose.h"
#include "quant/block_scales.h"

#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)

namespace ostinato {

// Scales and minima of eight rows, for the elements of a block.
template <typename F>
struct PanelScales {
    static constexpr int EACH = F::ELEMENTS / F::SCALED;
    static constexpr bool IN_WORD = F::HALF_SCALED || F::HAS_ZERO;  // true if scales are at the beginning of a block
    static constexpr bool HAS_MINIMUM = BlockScales<F>::HAS_MINIMUM;
    Float scale[EACH], minimum[HAS_MINIMUM ? EACH : 1];
    __m256i zeros;  // zero points in 32 bits, of formats that have them

    [[gnu::always_inline]] explicit PanelScales(const std::uint8_t* const (&block)[LANES]) {
        if constexpr (IN_WORD) {
            of_words(block);
        } else if constexpr (EACH == 1) {
            alignas(32) float each[LANES], unused;
            for (int r = 0; r < LANES; ++r) F::scales(block[r], each + r, &unused);
            scale[0] = load(each);
        } else {
            static_assert(BlockScales<F>::BLOCKS == 1);
            Float of_rows[LANES][EACH / LANES], minima[LANES];
            for (int r = 0; r < LANES; ++r) {
                const BlockScales<F> factors(block[r], 1);
                for (int i = 0; i < EACH; i += LANES) of_rows[r][i / LANES] = load(factors.scale + i);
                if constexpr (HAS_MINIMUM) minima[r] = load(factors.minimum);
            }
            for (int i = 0; i < EACH; i += LANES) {
                Float square[LANES];
                for (int r = 0; r < LANES; ++r) square[r] = of_rows[r][i / LANES];
                transpose(square);
                for (int at = 0; at < LANES; ++at) scale[i + at] = square[at];
            }
            if constexpr (HAS_MINIMUM) {
                transpose(minima);
                for (int at = 0; at < LANES; ++at) minimum[at] = minima[at];
            }
        }
    }

    [[gnu::always_inline]] Float weights(__m256i integers, int at) const {
        const auto numbers = (Float)_mm256_cvtepi32_ps(integers);
        if constexpr (HAS_MINIMUM) return fma(numbers, scale[at], minimum[at]);
        return numbers * scale[at];
    }

  private:
    void of_words(const std::uint8_t* const (&block)[LANES]) {
        const auto word = [&](int r) { return static_cast<int>(word_at(block[r])); };
        const __m256i words = _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
        if constexpr (F::HAS_ZERO) {
            scale[0] = (Float)scales_of(words);
            zeros = zeros_of(words);
            if constexpr (HAS_MINIMUM) minimum[0] = (Float)minima_of((__m256)scale[0], zeros);
        } else {
            const __m256i first = _mm256_and_si256(words, _mm256_set1_epi32(0xFFFF)), second = _mm256_srli_epi32(words, 16);
            const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
            scale[0] = (Float)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
            if constexpr (F::HAS_MINIMUM) {
                minimum[0] = (Float)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
            } else if constexpr (HAS_MINIMUM) {
                minimum[0] = scale[0] * static_cast<float>(F::least(block[0]));
            }
        }
    }
};

// Return the integers in byte BYTE of each 32 bits: sign-extended, or its low (LOW) or upper half.
template <int BYTE>
inline __m256i whole_byte(__m256i fours) {
    return _mm256_srai_epi32(_mm256_slli_epi32(fours, 24 - 8 * BYTE), 24);
}

template <int BYTE, bool LOW>
inline __m256i half_byte(__m256i fours) {
    constexpr int SHIFT = 8 * BYTE + (LOW ? 0 : 4);
    return _mm256_and_si256(_mm256_srli_epi32(fours, SHIFT), _mm256_set1_epi32(15));
}

// Compute to[i * stride] = element i of subblock `subblock` of eight rows' blocks, for i < SUBBLOCK.
template <typename F>
[[gnu::always_inline]] inline void pack_subblock(const std::uint8_t* const (&block)[LANES], int subblock,
                                             const PanelScales<F>& factors, int stride, Float* to) {
    const int at = subblock * SUBBLOCK / F::SCALED;
    if constexpr (IS_FLOAT8<F>) {
        Float numbers[LANES][SUBBLOCK / LANES];
        for (int r = 0; r < LANES; ++r) load<SUBBLOCK>(F::numbers(block[r], subblock), numbers[r]);
        for (int v = 0; v < SUBBLOCK / LANES; ++v) {
            Float square[LANES];
            for (int r = 0; r < LANES; ++r) square[r] = numbers[r][v];
            transpose(square);
            for (int i = 0; i < LANES; ++i) to[(v * LANES + i) * stride] = square[i] * factors.scale[at];
        }
    } else if constexpr (std::is_same_v<F, Q4_K>) {
        const auto put = [&](auto low) __attribute__((always_inline)) {
            for (int half = 0; half < SUBBLOCK; half += 16) {
                __m256i fours[4];
                read_units([&](int r) { return block[r] + 16 + subblock / 2 * SUBBLOCK + half; }, fours);
                unrolled<4>([&](auto u) __attribute__((always_inline)) {
                    unrolled<4>([&](auto i) __attribute__((always_inline)) {
                        to[(half + 4 * u + i) * stride] = factors.weights(half_byte<i, low>(fours[u]), at);
                    });
                });
            }
        };
        subblock % 2 ? put(std::false_type{}) : put(std::true_type{});
    } else if constexpr (READS_UNSIGNED<F>) {
        __m256i fours[4];
        read_units([&](int r) { return F::halves(block[r], subblock); }, fours);
        unrolled<4>([&](auto u) __attribute__((always_inline)) {
            unrolled<4>([&](auto i) __attribute__((always_inline)) {
                to[(4 * u + i) * stride] = factors.weights(half_byte<i, true>(fours[u]), at);
                to[(SUBBLOCK / 2 + 4 * u + i) * stride] = factors.weights(half_byte<i, false>(fours[u]), at);
            });
        });
    } else {
        Float fours[LANES];
        for (int r = 0; r < LANES; ++r) fours[r] = (Float)F::integers(block[r], subblock);
        transpose(fours);
        unrolled<LANES>([&](auto u) __attribute__((always_inline)) {
            unrolled<4>([&](auto i) __attribute__((always_inline)) {
                const __m256i integers = whole_byte<i>((__m256i)fours[u]);
                to[(4 * u + i) * stride] = factors.weights(integers, at + 4 * u / std::min(F::SCALED, SUBBLOCK));
            });
        });
    }
}

// Compute panel[(i - begin) * stride] = elements `begin` to `end` of eight rows; both are multiples of SUBBLOCK.
template <typename F>
void pack_blocks(const BlockByte* const* rows, std::int64_t begin, std::int64_t end, int stride, Float* panel) {
    for (std::int64_t i = begin; i < end;) {
        const std::uint8_t* block[LANES];
        for (int r = 0; r < LANES; ++r) block[r] = &rows[r][i / F::ELEMENTS * F::BYTES].byte;
        const PanelScales<F> factors(block);
        const int first = static_cast<int>(i % F::ELEMENTS) / SUBBLOCK;
        for (int subblock = first; subblock < F::ELEMENTS / SUBBLOCK && i < end; ++subblock, i += SUBBLOCK, panel += SUBBLOCK * stride) {
            pack_subblock<F>(block, subblock, factors, stride, panel);
        }
    }
}

// Elements added in integers: those of one scale, but no more than share a scale of a token.
template <typename F>
constexpr int I16_SUM = std::clamp(F::SCALED, 16, I16_SCALE_SPAN);

// Return the lower or the upper halves of the first and the third byte, or of the second and the fourth.
template <int SHIFT>
inline __m256i half_pairs(__m256i fours) {
    return _mm256_and_si256(_mm256_srli_epi32(fours, SHIFT), _mm256_set1_epi32(0x000F000F));
}

// Compute to[pair * stride] = the pairs of subblock `subblock` of eight rows' blocks. `least` is subtracted from the
// unsigned integers.
template <typename F>
[[gnu::always_inline]] inline void pack_subblock_i16(const std::uint8_t* const (&block)[LANES], int subblock, __m256i least,
                                                     int stride, __m256i* to) {
    // `at` is the index of a unit in the subblock.
    const auto put = [&](int at, __m256i first, __m256i second) __attribute__((always_inline)) {
        constexpr bool LESS = READS_UNSIGNED<F> && !F::HAS_MINIMUM;
        to[2 * at * stride] = LESS ? _mm256_sub_epi16(first, least) : first;
        to[(2 * at + 1) * stride] = LESS ? _mm256_sub_epi16(second, least) : second;
    };
    if constexpr (std::is_same_v<F, Q4_K>) {
        for (int half = 0; half < 2; ++half) {
            __m256i fours[4];
            read_units([&](int r) { return block[r] + 16 + subblock / 2 * SUBBLOCK + half * 16; }, fours);
            for (int u = 0; u < 4; ++u) {
                const __m256i halves = subblock % 2 ? _mm256_srli_epi32(fours[u], 4) : fours[u];
                put(4 * half + u, half_pairs<0>(halves), half_pairs<8>(halves));
            }
        }
    } else if constexpr (READS_UNSIGNED<F>) {
        __m256i fours[4];
        read_units([&](int r) { return F::halves(block[r], subblock); }, fours);
        unrolled<4>([&](auto u) __attribute__((always_inline)) {
            put(u, half_pairs<0>(fours[u]), half_pairs<8>(fours[u]));
            put(4 + u, half_pairs<4>(fours[u]), half_pairs<12>(fours[u]));
        });
    } else {
        Float fours[LANES];
        for (int r = 0; r < LANES; ++r) fours[r] = (Float)F::integers(block[r], subblock);
        transpose(fours);
        unrolled<LANES>([&](auto u) __attribute__((always_inline)) {
            put(u, even_bytes((__m256i)fours[u]), odd_bytes((__m256i)fours[u]));
        });
    }
}

// Pack elements `begin` to `end` of eight rows as pairs, with their scales and minima. Both are multiples of SUBBLOCK
// and of I16_SUM.
template <typename F>
void pack_blocks_i16(const BlockByte* const* rows, std::int64_t begin, std::int64_t end, int stride, Int* pairs,
                     Float* scales, Float* minima) {
    auto* to = reinterpret_cast<__m256i*>(pairs);
    constexpr int SUM = I16_SUM<F>;
    for (std::int64_t i = begin; i < end;) {
        const std::uint8_t* block[LANES];
        for (int r = 0; r < LANES; ++r) block[r] = &rows[r][i / F::ELEMENTS * F::BYTES].byte;
        const PanelScales<F> factors(block);
        __m256i least = _mm256_setzero_si256();
        if constexpr (F::HAS_ZERO) {
            least = _mm256_or_si256(factors.zeros, _mm256_slli_epi32(factors.zeros, 16));
        } else if constexpr (READS_UNSIGNED<F> && !F::HAS_MINIMUM) {
            least = _mm256_set1_epi16(static_cast<short>(-F::least(block[0])));
        }
        const int first = static_cast<int>(i % F::ELEMENTS) / SUBBLOCK;
        for (int subblock = first; subblock < F::ELEMENTS / SUBBLOCK && i < end; ++subblock, i += SUBBLOCK, to += SUBBLOCK / 2 * stride) {
            pack_subblock_i16<F>(block, subblock, least, stride, to);
            const std::int64_t from = i - begin;
            if constexpr (F::HAS_MINIMUM) minima[from / SUBBLOCK * stride] = factors.minimum[subblock * SUBBLOCK / F::SCALED];
            for (int at = 0; at < SUBBLOCK && (from + at) % SUM == 0; at += SUM) {
                scales[(from + at) / SUM * stride] = factors.scale[(subblock * SUBBLOCK + at) / F::SCALED];
            }
        }
    }
}

}  // namespace ostinato

#endif
