// Packing of rows in blocks into panels of integers, for gemm/large_m_i16.h with AVX-512: two subblocks of sixteen rows
// are transposed at a time, while four integers of a row are 32 bits.
#pragma once

#include "core/transpose.h"
#include "quant/block_scales.h"

#if defined(OSTINATO_I16_PANELS) && defined(OSTINATO_HAS_AVX512)

namespace ostinato {

// Elements added in integers: those of one scale.
template <typename F>
constexpr int I16_SUM = std::min(F::SCALED, SUBBLOCK);

// Return the scales of a superblock, or of its first blocks; eight of them are followed by the minima.
template <typename F>
[[gnu::always_inline]] inline Float panel_scales(const std::uint8_t* block, int blocks) {
    if constexpr (F::ELEMENTS < SUPERBLOCK) {
        const BlockScales<F> of_blocks(block, blocks);
        alignas(64) float both[LANES] = {};
        std::memcpy(both, of_blocks.scale, SUBBLOCKS * sizeof(float));
        if constexpr (F::HAS_MINIMUM) std::memcpy(both + SUBBLOCKS, of_blocks.minimum, SUBBLOCKS * sizeof(float));
        return load(both);
    } else if constexpr (F::HAS_MINIMUM) {
        return (Float)six_bit_scales(block);
    } else if constexpr (F::SCALED < SUBBLOCK) {
        return (Float)byte_scales(block);
    } else {
        return (Float)_mm512_zextps256_ps512(split_scales(block));
    }
}

// Compute pairs[0] = the first and the third byte of each 32 bits, with their sign, and pairs[stride] = the others.
inline void put_pairs(Float fours, int stride, Int* pairs) {
    pairs[0] = (Int)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)fours, 8), 8);
    pairs[stride] = (Int)_mm512_srai_epi16((__m512i)fours, 8);
}

// Pack elements `begin` to `end` of sixteen rows as pairs, with their scales and minima.
template <typename F>
void pack_blocks_i16(const BlockByte* const* rows, std::int64_t begin, std::int64_t end, int stride, Int* pairs, Float* scales,
                     Float* minima) {
    constexpr int SUBBLOCKS_PER_BLOCK = F::ELEMENTS / SUBBLOCK;
    const int subblocks = static_cast<int>(end - begin) / SUBBLOCK;
    const std::uint8_t* block[LANES];
    Float square[LANES];
    for (int r = 0; r < LANES; ++r) {
        block[r] = &rows[r][begin / F::ELEMENTS * F::BYTES].byte;
        square[r] = panel_scales<F>(block[r], subblocks / SUBBLOCKS_PER_BLOCK);
    }
    transpose(square);
    for (int i = 0; i < subblocks * SUBBLOCK / I16_SUM<F>; ++i) scales[i * stride] = square[i * I16_SUM<F> / std::min(F::SCALED, SUPERBLOCK)];
    for (int i = 0; F::HAS_MINIMUM && i < subblocks; ++i) minima[i * stride] = square[SUBBLOCKS + i];
    for (int subblock = 0; subblock < subblocks; subblock += 2, pairs += SUBBLOCK * stride) {
        for (int r = 0; r < LANES; ++r) {
            const auto integers = [&](int at) __attribute__((always_inline)) {
                return (__m256i)F::integers(block[r] + at / SUBBLOCKS_PER_BLOCK * F::BYTES, at % SUBBLOCKS_PER_BLOCK);
            };
            const __m256i second = subblock + 1 < subblocks ? integers(subblock + 1) : _mm256_setzero_si256();
            square[r] = (Float)_mm512_inserti64x4(_mm512_castsi256_si512(integers(subblock)), second, 1);
        }
        transpose(square);
        for (int u = 0; u < LANES; ++u) put_pairs(square[u], stride, pairs + 2 * u * stride);
    }
}

}  // namespace ostinato

#endif
