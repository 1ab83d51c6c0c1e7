// Dot products of a few i16 tokens with rows in blocks, for AVX2. Products that share a scale are added in integers;
// minima are multiplied with the sums of the token's elements.
#pragma once

#include "gemm/block_ops.h"
#include "quant/unpack_i16_avx2.h"

#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)

namespace ostinato {

static_assert(SUPERBLOCK == I16_TOKEN_PADDING);

// Keep `value` in a register. Otherwise compilers delay additions until all addends are there, and run out of
// registers.
inline void keep_in_register(__m256i& value) { asm("" : "+x"(value)); }

// Rows multiplied with TOKENS tokens at once: their sums stay in registers.
template <int TOKENS>
constexpr int I16_MR = TOKENS == 1 ? MR : 2;

inline Float placed(Float values, int a, int b, int c, int d) {
    return (Float)_mm256_permutevar8x32_ps((__m256)values, _mm256_setr_epi32(a, a, b, b, c, c, d, d));
}

// Spread scales, one per SCALED elements, to the subblocks of a superblock.
template <typename F>
inline Float per_subblock(const float* each) {
    const Float all = load(each);
    if constexpr (F::SCALED == 2 * SUBBLOCK) return placed(all, 0, 1, 2, 3);
    if constexpr (F::SCALED == 4 * SUBBLOCK) return placed(all, 0, 0, 1, 1);
    return all;
}

// Scales per subblock. If there are two, each half of a vector holds the integers of one, as `spread` orders them.
template <typename F>
constexpr int SCALES_PER_SUBBLOCK = F::SCALED < SUBBLOCK ? 2 : 1;

template <int SCALES>
inline Float scale_at(const float* scales, int subblock) {
    if constexpr (SCALES == 1) return splat(scales[subblock]);
    return (Float)_mm256_blend_ps((__m256)splat(scales[2 * subblock]), (__m256)splat(scales[2 * subblock + 1]), 0xF0);
}

// Blocks of a superblock of each row, and the factors of the sums of each subblock and token.
template <typename F, int TOKENS>
struct I16Superblock {
    const std::uint8_t* block[MR];
    alignas(32) float scales[MR][TOKENS][SCALES_PER_SUBBLOCK<F> * SUPERBLOCK / SUBBLOCK];
};

template <typename F, int TOKENS>
void dot_i16_blocks(const Tokens<i16>& tokens, const BlockByte* const* rows, const RowPrefetch& next,
                      std::int64_t count, float* sums, int stride) {
    constexpr int BLOCKS = BlockScales<F>::BLOCKS, SUBBLOCKS_PER_BLOCK = F::ELEMENTS / SUBBLOCK;
    constexpr int TOGETHER = std::clamp(F::SCALED, SUBBLOCK, I16_SCALE_SPAN) / SUBBLOCK;  // subblocks added in integers
    constexpr int READ = UnpackI16Avx2<F>::TOGETHER, STEP = std::max(TOGETHER, READ);
    constexpr int ROWS = I16_MR<TOKENS>, SCALES = SCALES_PER_SUBBLOCK<F>;
    constexpr bool HAS_MINIMUM = F::HAS_MINIMUM || F::HAS_ZERO, HAS_LEAST = UnpackI16Avx2<F>::LEAST != 0;
    const I16TokenLayout layout(count * F::ELEMENTS);
    Float total[MR][TOKENS], low[MR][TOKENS];
    clear(total);
    clear(low);
    std::uint8_t rest[MR][BLOCKS * F::BYTES];  // last blocks of rows that are no whole superblocks, then zeros
    I16Superblock<F, TOKENS> superblocks[2];
    const auto prepare = [&](std::int64_t b, I16Superblock<F, TOKENS>& superblock) __attribute__((always_inline)) {
        for (int r = 0; r < MR; ++r) superblock.block[r] = &rows[r][b * F::BYTES].byte;
        if (count - b < BLOCKS) {
            std::memset(rest, 0, sizeof(rest));
            for (int r = 0; r < MR; ++r) {
                std::memcpy(rest[r], superblock.block[r], (count - b) * F::BYTES);
                superblock.block[r] = rest[r];
            }
        }
        const std::int64_t subblock = b * SUBBLOCKS_PER_BLOCK;
#pragma GCC unroll 4
        for (int r = 0; r < MR; ++r) {
            const BlockScales<F> factors(superblock.block[r], BLOCKS);
            const Float scale = per_subblock<F>(factors.scale);
            Float minimum{};
            if constexpr (HAS_MINIMUM) minimum = per_subblock<F>(factors.minimum);
            if constexpr (HAS_LEAST) minimum = scale;
            for (int t = 0; t < TOKENS; ++t) {
                const i16* token = tokens.x + t * tokens.stride;
                const Float of_token = load(layout.scales(token) + subblock) * (1 / UnpackI16Avx2<F>::UNIT);
                if constexpr (SCALES == 2) {
                    store(superblock.scales[r][t], scale * placed(of_token, 0, 1, 2, 3));
                    store(superblock.scales[r][t] + LANES, load(factors.scale + LANES) * placed(of_token, 4, 5, 6, 7));
                    continue;
                }
                store(superblock.scales[r][t], scale * of_token);
                if constexpr (HAS_MINIMUM || HAS_LEAST) low[r][t] = fma(minimum, load(layout.sums(token) + subblock), low[r][t]);
            }
        }
    };
    prepare(0, superblocks[0]);
    const i16* x = tokens.x;
    int now = 0;
    for (std::int64_t b = 0; b < count; b += BLOCKS, x += SUPERBLOCK, now ^= 1) {
        // The next superblock is prepared early, as that takes many instructions that wait for each other.
        if (b + BLOCKS < count) prepare(b + BLOCKS, superblocks[now ^ 1]);
        next(b * F::BYTES, std::min<std::int64_t>(BLOCKS, count - b) * F::BYTES);
        const I16Superblock<F, TOKENS>& superblock = superblocks[now];
#pragma GCC unroll 4
        for (int first = 0; first < MR; first += ROWS) {
            Float sum[ROWS][TOKENS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
                for (int t = 0; t < TOKENS; ++t) sum[r][t] = total[first + r][t];
            }
            unrolled<SUPERBLOCK / SUBBLOCK / STEP>([&](auto step) __attribute__((always_inline)) {
                constexpr int at = step * STEP;
                __m256i products[ROWS][TOKENS];
                unrolled<STEP / READ>([&](auto reading) __attribute__((always_inline)) {
                    constexpr int i = reading * READ, of_superblock = at + i;
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) {
                        __m256i integers[2 * READ];
                        const std::uint8_t* block = superblock.block[first + r] + of_superblock / SUBBLOCKS_PER_BLOCK * F::BYTES;
                        UnpackI16Avx2<F>::template read<of_superblock % SUBBLOCKS_PER_BLOCK>(block, integers);
#pragma GCC unroll 2
                        for (int p = 0; p < READ; ++p) {
#pragma GCC unroll 8
                            for (int t = 0; t < TOKENS; ++t) {
                                const i16* from = x + t * tokens.stride + (of_superblock + p) * SUBBLOCK;
                                const __m256i low_half = _mm256_madd_epi16(integers[2 * p], load_i16(from));
                                const __m256i high_half = _mm256_madd_epi16(integers[2 * p + 1], load_i16(from + 16));
                                const __m256i both = _mm256_add_epi32(low_half, high_half);
                                const bool begins = TOGETHER == 1 || i == 0;
                                products[r][t] = begins ? both : _mm256_add_epi32(products[r][t], both);
                                keep_in_register(products[r][t]);
                                if (TOGETHER == 1 || i == TOGETHER - 1) {
                                    const Float scale = scale_at<SCALES>(superblock.scales[first + r][t], of_superblock + p);
                                    sum[r][t] = fma((Float)_mm256_cvtepi32_ps(products[r][t]), scale, sum[r][t]);
                                }
                            }
                        }
                    }
                });
            });
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
                for (int t = 0; t < TOKENS; ++t) total[first + r][t] = sum[r][t];
            }
        }
    }
    for (int t = 0; t < TOKENS; ++t) {
        Float of_rows[MR];
        for (int r = 0; r < MR; ++r) {
            of_rows[r] = total[r][t];
            if constexpr (HAS_MINIMUM) of_rows[r] += low[r][t];
            if constexpr (HAS_LEAST) of_rows[r] = fma(low[r][t], splat(UnpackI16Avx2<F>::LEAST), of_rows[r]);
        }
        sum4(of_rows, sums + t * stride);
    }
}

}  // namespace ostinato

#endif
