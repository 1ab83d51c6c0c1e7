// Dot products in bfloat16 pairs with weights in blocks.
//
// The exact product multiplies tokens with a block's integers, which bfloat16 represents exactly. The sum of 32
// products is multiplied by their scale in float32; with minima, the sum of 32 elements of a token is multiplied by the
// minimum. That doubles the work for each token. So more tokens are multiplied with weights that were rounded to
// bfloat16.
//
// In both, sums run in ascending order in one accumulator: a result depends only on its own token and row.
#pragma once

#include "gemm/ukernels/dequant_dot_bf16.h"
#include "quant/block_lookup_bf16.h"
#include "quant/block_scales.h"

namespace ostinato {

#if defined(OSTINATO_HAS_AVX512_BF16)
// Return the integers of a subblock.
template <typename F>
inline __m512bh integers_of(const std::uint8_t* block, int subblock, [[maybe_unused]] const Table& table) {
    if constexpr (IS_FLOAT8<F>) {
        return (__m512bh)words_of_float8(F::numbers(block, subblock));
    } else if constexpr (F::BITS == 8) {
        return Dot<bf16, std::int8_t>::read(reinterpret_cast<const std::int8_t*>(block + 2));
    } else {
        return look_up<F>(block, subblock, table);
    }
}

// Return the weights of a subblock, each rounded once.
template <typename F>
inline __m512bh rounded_weights(const std::uint8_t* block, int subblock, const BlockScalesBf16<F>& scales, int of_superblock) {
    if constexpr (F::BITS < 6) {
        return look_up<F>(block, subblock, table_of<F>(scales.scale(of_superblock), scales.minimum(of_superblock)));
    } else if constexpr (IS_FLOAT8<F>) {
        Float numbers[2];
        load<SUBBLOCK>(F::numbers(block, subblock), numbers);
        const Float scale = splat(scales.scale(of_superblock));
        return _mm512_cvtne2ps_pbh((__m512)(numbers[1] * scale), (__m512)(numbers[0] * scale));
    } else if constexpr (F::BITS == 8) {
        const auto* integers = reinterpret_cast<const std::int8_t*>(block + 2);
        const float scale = scales.scale(of_superblock);
        return _mm512_cvtne2ps_pbh((__m512)(load(integers + LANES) * scale), (__m512)(load(integers) * scale));
    } else {
        // Even and odd weights are each the upper half of a float, and are interleaved at the end.
        const __m512i integers = (__m512i)look_up<F>(block, subblock, table_of<F>(block)), upper = _mm512_set1_epi32(-65536);
        const Float scale = scales.of_pairs(of_superblock);
        const Float even = (Float)_mm512_slli_epi32(integers, 16) * scale;
        const Float odd = (Float)_mm512_and_si512(integers, upper) * scale;
        alignas(64) static constexpr std::uint16_t IN_TURNS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_load_si512(IN_TURNS), rounded);
    }
}

template <typename F, int TOKENS, bool ROUNDED = false>
void dot_blocks(const Tokens<bf16>& tokens, const BlockByte* const* rows, const RowPrefetch& next, std::int64_t count,
                float* sums, int stride) {
    using D = Dot<bf16, bf16>;
    constexpr int BLOCKS = BlockScalesBf16<F>::BLOCKS, SUBBLOCKS_PER_BLOCK = F::ELEMENTS / SUBBLOCK, TOGETHER = NibblePlaces<F>::TOGETHER;
    Float total[TOKENS][MR];
    clear(total);
    const std::int64_t token_stride = tokens.stride ? tokens.stride : SUBBLOCK;
    const std::int64_t step = tokens.stride ? SUBBLOCK : SUBBLOCK * TOKENS;
    const bf16* x = tokens.x;
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    for (std::int64_t b = 0; b < count; b += BLOCKS) {
        const std::uint8_t* block[MR];
        for (int r = 0; r < MR; ++r) block[r] = &rows[r][b * F::BYTES].byte;
        const int here = static_cast<int>(std::min<std::int64_t>(BLOCKS, count - b));
        next(b * F::BYTES, here * F::BYTES);
        const BlockScalesBf16<F> scales[MR] = {{block[0], here}, {block[1], here}, {block[2], here}, {block[3], here}};
        for (int i = 0; i < here; ++i) {
            Table tables[MR];
            if constexpr (F::BITS < 8 && !ROUNDED) {
                for (int r = 0; r < MR; ++r) tables[r] = table_of<F>(block[r]);
            }
#pragma GCC unroll 1
            for (int first = 0; first < SUBBLOCKS_PER_BLOCK; first += TOGETHER)
#pragma GCC unroll 4
            for (int subblock = first; subblock < first + TOGETHER; ++subblock, x += step) {
                const int of_superblock = i * SUBBLOCKS_PER_BLOCK + subblock;
                __m512bh w[MR];
#pragma GCC unroll 4
                for (int r = 0; r < MR; ++r) {
                    w[r] = ROUNDED ? rounded_weights<F>(block[r], subblock, scales[r], of_superblock)
                                   : integers_of<F>(block[r], subblock, tables[r]);
                }
#pragma GCC unroll 6
                for (int t = 0; t < TOKENS; ++t) {
                    const __m512bh token = D::read(x + t * token_stride);
#pragma GCC unroll 4
                    for (int r = 0; r < MR; ++r) {
                        if constexpr (ROUNDED) {
                            total[t][r] = D::multiply_add(total[t][r], token, w[r]);
                        } else {
                            const Float subblock_sums = D::multiply_add(Float{}, token, w[r]);
                            total[t][r] = fma(subblock_sums, scales[r].of_pairs(of_superblock), total[t][r]);
                        }
                    }
                    if constexpr (F::HAS_MINIMUM && !ROUNDED) {
                        const Float sum = D::multiply_add(Float{}, token, ones);
#pragma GCC unroll 4
                        for (int r = 0; r < MR; ++r) {
                            total[t][r] = fma(sum, splat(scales[r].minimum(of_superblock)), total[t][r]);
                        }
                    }
                }
            }
            for (int r = 0; r < MR; ++r) block[r] += F::BYTES;
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * stride);
}

// A superblock of each of some rows, with its scales.
template <typename F, int ROWS>
struct SuperblockRows {
    static constexpr int TOGETHER = NibblePlaces<F>::TOGETHER, SUBBLOCKS_PER_BLOCK = F::ELEMENTS / SUBBLOCK, BLOCKS = BlockScalesBf16<F>::BLOCKS;
    static constexpr int BYTES = BLOCKS * F::BYTES;
    static_assert(BLOCKS * SUBBLOCKS_PER_BLOCK == SUBBLOCKS);
    const std::uint8_t* block[ROWS];
    BlockScalesBf16<F> scales[ROWS];

    // Prepare a superblock of rows that have `subblocks` subblocks left.
    [[gnu::always_inline]] void prepare(const BlockByte* const* rows, std::int64_t superblock, std::int64_t subblocks) {
        const int here = static_cast<int>(std::min<std::int64_t>(BLOCKS, subblocks / SUBBLOCKS_PER_BLOCK));
        for (int r = 0; r < ROWS; ++r) {
            block[r] = &rows[r][superblock * BYTES].byte;
            scales[r].make(block[r], here);
        }
    }

    [[gnu::always_inline]] __m512bh read(int row, int subblock) const {
        return rounded_weights<F>(block[row] + subblock / SUBBLOCKS_PER_BLOCK * F::BYTES, subblock % SUBBLOCKS_PER_BLOCK, scales[row], subblock);
    }
};

// Tokens from which on rounding a format's weights costs less than scaling its sums token by token. Results depend on
// it; all formats of the same bits share a value, as docs/architecture/integer-products.md says.
template <typename F>
constexpr int MIN_BF16_TOKENS = F::BITS == 6 ? MIN_ROUNDED_TOKENS_6_BITS : MIN_ROUNDED_TOKENS;

template <typename F>
void dot_bf16_blocks(int tokens, const Tokens<bf16>& x, const BlockByte* const* rows, const BlockByte* const* next,
                        int prefetch, std::int64_t count, float* sums, int stride) {
    const RowPrefetch to_come{next, prefetch};
    const auto multiply = [&](auto some) {
        if constexpr (some.value >= MIN_BF16_TOKENS<F>) {
            dot_blocks<F, some.value, true>(x, rows, to_come, count, sums, stride);
        }
    };
    switch (tokens) {
        case 3: return multiply(std::integral_constant<int, 3>{});
        case 4: return multiply(std::integral_constant<int, 4>{});
        default: return multiply(std::integral_constant<int, MAX_BF16_TOKENS>{});
    }
}

// Compute to[i] = weights `begin` to `end` of a row.
template <typename F>
void dequantize_blocks_to_bf16(const BlockByte* row, std::int64_t begin, std::int64_t end, bf16* to) {
    constexpr int BLOCKS = BlockScalesBf16<F>::BLOCKS, SUBBLOCKS_PER_BLOCK = F::ELEMENTS / SUBBLOCK;
    const std::int64_t last = (end + F::ELEMENTS - 1) / F::ELEMENTS;
    for (std::int64_t b = begin / F::ELEMENTS; b < last; b += BLOCKS) {
        const std::uint8_t* block = &row[b * F::BYTES].byte;
        const int here = static_cast<int>(std::min<std::int64_t>(BLOCKS, last - b));
        const BlockScalesBf16<F> scales(block, here);
        for (int i = 0; i < here; ++i, block += F::BYTES) {
            for (int subblock = 0; subblock < SUBBLOCKS_PER_BLOCK; ++subblock) {
                const std::int64_t at = (b + i) * F::ELEMENTS + subblock * SUBBLOCK;
                if (at < begin || at >= end) continue;
                const __m512bh weights = rounded_weights<F>(block, subblock, scales, i * SUBBLOCKS_PER_BLOCK + subblock);
                std::memcpy(to, &weights, sizeof(weights));
                to += SUBBLOCK;
            }
        }
    }
}
#endif

}  // namespace ostinato
