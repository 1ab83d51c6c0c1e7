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

// Compute sums[t * stride + r] of `some` tokens, up to TOKENS, which is even, and MR rows of rounded weights: 24
// accumulators, two rows that are multiplied, two that are dequantized, and a token. Behind the last token it is
// multiplied once more.
//
// Rounding weights uses the multipliers and waits for the multiplications before it, and the products that need the
// weights wait for it. So weights are dequantized a subblock ahead, and their scales a superblock ahead.
template <typename F, int TOKENS>
void dot_bf16_blocks_pairwise(int some, const Tokens<bf16>& tokens, const BlockByte* const* rows, const RowPrefetch& next,
                     std::int64_t count, float* sums, int stride) {
    using D = Dot<bf16, bf16>;
    constexpr int PAIR = 2;
    using Group = SuperblockRows<F, PAIR>;
    constexpr int TOGETHER = Group::TOGETHER;
    const std::int64_t token_stride = tokens.stride ? tokens.stride : SUBBLOCK;
    const std::int64_t step = tokens.stride ? SUBBLOCK : SUBBLOCK * some;
    const std::int64_t last = (some - 1) * token_stride;
    const std::int64_t row_subblocks = count * Group::SUBBLOCKS_PER_BLOCK, superblocks = (row_subblocks + SUBBLOCKS - 1) / SUBBLOCKS;
    for (int first_row = 0; first_row < MR; first_row += PAIR) {
        Float total[TOKENS][PAIR] = {};
        const bf16* x = tokens.x;
        Group here, then;
        here.prepare(rows + first_row, 0, row_subblocks);
        __m512bh w[PAIR];
        for (int r = 0; r < PAIR; ++r) w[r] = here.read(r, 0);
        for (std::int64_t superblock = 0; superblock < superblocks; ++superblock) {
            const std::int64_t begin = superblock * SUBBLOCKS, next_superblock = std::min(superblock + 1, superblocks - 1);
            const int subblocks = static_cast<int>(std::min<std::int64_t>(SUBBLOCKS, row_subblocks - begin));
            if (first_row == 0) next(begin / Group::SUBBLOCKS_PER_BLOCK * F::BYTES, subblocks / Group::SUBBLOCKS_PER_BLOCK * F::BYTES);
            // Behind the last superblock, the last one is prepared once more.
            then.prepare(rows + first_row, next_superblock, row_subblocks - next_superblock * SUBBLOCKS);
#pragma GCC unroll 1
            for (int first = 0; first < subblocks; first += TOGETHER) {
                const bool is_last = first + TOGETHER >= subblocks;
#pragma GCC unroll 4
                for (int i = 0; i < TOGETHER; ++i, x += step) {
                    __m512bh made[PAIR];
#pragma GCC unroll 2
                    for (int r = 0; r < PAIR; ++r) {
                        if (i + 1 < TOGETHER) {
                            made[r] = here.read(r, first + i + 1);
                        } else {
                            made[r] = (is_last ? then : here).read(r, is_last ? 0 : first + TOGETHER);
                        }
                    }
                    // Have the compiler dequantize these before it multiplies the previous ones, not when they are
                    // needed.
                    asm("" : "+v"(total[0][0]), "+v"(total[0][1]) : "v"((__m512i)made[0]), "v"((__m512i)made[1]));
#pragma GCC unroll 12
                    for (int t = 0; t < TOKENS; ++t) {
                        const __m512bh token = D::read(x + (t == TOKENS - 1 ? last : t * token_stride));
                        total[t][0] = D::multiply_add(total[t][0], token, w[0]);
                        total[t][1] = D::multiply_add(total[t][1], token, w[1]);
                    }
                    w[0] = made[0];
                    w[1] = made[1];
                }
            }
            here = then;
        }
#pragma GCC unroll 12
        for (int t = 0; t < TOKENS; t += 2) {
            float of_two[2 * PAIR];
            sum4(total[t], of_two);
            for (int i = 0; i < 2 * PAIR; ++i) {
                if (t + i / PAIR < some) sums[(t + i / PAIR) * stride + first_row + i % PAIR] = of_two[i];
            }
        }
    }
}

// Tokens from which on rounding a format's weights costs less than scaling its sums token by token. Results depend on
// it; all formats of the same bits share a value, as docs/architecture/integer-products.md says.
template <typename F>
constexpr int MIN_BF16_TOKENS = F::BITS == 6 ? MIN_ROUNDED_TOKENS_6_BITS : MIN_ROUNDED_TOKENS;

template <typename F>
void dot_bf16_blocks(int tokens, const Tokens<bf16>& x, const BlockByte* const* rows, const BlockByte* const* next,
                        int prefetch, std::int64_t count, float* sums, int stride) {
    const RowPrefetch to_come{next, prefetch};
    const auto few = [&](auto some) {
        // Blocks of more tokens have at least half of MAX_BF16_TOKENS.
        if constexpr (some.value >= MIN_BF16_TOKENS<F>) {
            dot_blocks<F, some.value, true>(x, rows, to_come, count, sums, stride);
        }
    };
    switch (tokens) {
        case 3: return few(std::integral_constant<int, 3>{});
        case 4: return few(std::integral_constant<int, 4>{});
        case 5: return few(std::integral_constant<int, 5>{});
        case 6: return few(std::integral_constant<int, 6>{});
        case 7:
        case 8: return dot_bf16_blocks_pairwise<F, 8>(tokens, x, rows, to_come, count, sums, stride);
        case 9:
        case 10: return dot_bf16_blocks_pairwise<F, 10>(tokens, x, rows, to_come, count, sums, stride);
        default: return dot_bf16_blocks_pairwise<F, 12>(tokens, x, rows, to_come, count, sums, stride);
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
