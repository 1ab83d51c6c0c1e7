// Dot products of a few float32 tokens with a few rows in blocks, and dequantizing of rows.
//
// Tokens are multiplied with a block's integers or float8 numbers. The sum of 32 products is multiplied by their scale;
// with minima, the sum of 32 elements of a token is multiplied by the minimum. So a scale costs one instruction per 32
// weights. Sums run in ascending order in one accumulator: a result depends only on its own token and row.
#pragma once

#include "gemm/block_ops.h"
#include "gemm/ukernels/dot_bf16_block.h"
#include "quant/block_scales.h"

namespace ostinato {

constexpr int VECTORS = SUBBLOCK / LANES;  // per subblock

#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)
// Zero-extend eight bytes to 32 bits.
inline __m256i widened(const std::uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

inline Float low_halves(__m256i bytes) { return (Float)_mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15))); }

inline Float high_halves(__m256i bytes) { return (Float)_mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4)); }
#endif

// The integers of a subblock as floats; without their sign where READS_UNSIGNED.
template <typename F>
struct SubblockF32 {
    Float numbers[VECTORS];

    [[gnu::always_inline]] SubblockF32(const std::uint8_t* block, int subblock) {
        if constexpr (IS_FLOAT8<F>) {
            load<SUBBLOCK>(F::numbers(block, subblock), numbers);
#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)
        } else if constexpr (std::is_same_v<F, Q4_K>) {
            const std::uint8_t* from = block + 16 + subblock / 2 * SUBBLOCK;
            for (int v = 0; v < VECTORS; ++v) {
                const __m256i bytes = widened(from + v * LANES);
                numbers[v] = subblock % 2 ? high_halves(bytes) : low_halves(bytes);
            }
        } else if constexpr (READS_UNSIGNED<F>) {
            for (int v = 0; v < 2; ++v) {
                const __m256i bytes = widened(F::halves(block, subblock) + v * LANES);
                numbers[v] = low_halves(bytes);
                numbers[2 + v] = high_halves(bytes);
            }
#endif
        } else if constexpr (std::is_same_v<F, Q8_0>) {
            const auto* integers = reinterpret_cast<const std::int8_t*>(block + 2);
            for (int v = 0; v < VECTORS; ++v) numbers[v] = load(integers + v * LANES);
        } else {
            const Bytes32 integers = F::integers(block, subblock);
            alignas(SUBBLOCK) std::int8_t each[SUBBLOCK];
            std::memcpy(each, &integers, sizeof(each));
            for (int v = 0; v < VECTORS; ++v) numbers[v] = load(each + v * LANES);
        }
    }
};

template <typename F, typename X>
void dequantize_blocks(const BlockByte* row, std::int64_t begin, std::int64_t end, X* to) {
    constexpr int SUBBLOCKS_PER_BLOCK = F::ELEMENTS / SUBBLOCK;
    for (std::int64_t i = begin; i < end;) {
        const std::int64_t first = i / F::ELEMENTS, last = (end + F::ELEMENTS - 1) / F::ELEMENTS;
        const int here = static_cast<int>(std::min<std::int64_t>(BlockScales<F>::BLOCKS, last - first));
        const auto* block = &row[first * F::BYTES].byte;
        const BlockScales<F> factors(block, here);
        for (int subblock = static_cast<int>(i - first * F::ELEMENTS) / SUBBLOCK; subblock < here * SUBBLOCKS_PER_BLOCK && i < end; ++subblock) {
            const SubblockF32<F> integers(block + subblock / SUBBLOCKS_PER_BLOCK * F::BYTES, subblock % SUBBLOCKS_PER_BLOCK);
            for (int v = 0; v < VECTORS; ++v) {
                const int at = (subblock * SUBBLOCK + v * LANES) / F::SCALED;
                const Float scale = splat(factors.scale[at]);
                if constexpr (BlockScales<F>::HAS_MINIMUM) {
                    store(to + v * LANES, fma(integers.numbers[v], scale, splat(factors.minimum[at])));
                } else {
                    store(to + v * LANES, integers.numbers[v] * scale);
                }
            }
            i += SUBBLOCK;
            to += SUBBLOCK;
        }
    }
}

// Compute total[t][r] += token t . subblock `subblock` of each row's block, whose scales begin at `at`.
template <typename F, int TOKENS>
[[gnu::always_inline]] inline void multiply_part(const float* x, std::int64_t token_stride, std::int64_t step,
                                                 const std::uint8_t* const* block, const BlockScales<F>* factors, int subblock,
                                                 int at, Float (&total)[TOKENS][MR]) {
    constexpr int SCALES = F::SCALED < SUBBLOCK ? SUBBLOCK / F::SCALED : 1, EACH = VECTORS / SCALES;
    constexpr bool HAS_MINIMUM = BlockScales<F>::HAS_MINIMUM;
    [[maybe_unused]] Float sums[TOKENS];
    if constexpr (HAS_MINIMUM) {
#pragma GCC unroll 6
        for (int t = 0; t < TOKENS; ++t) {
            sums[t] = load(x + t * token_stride);
#pragma GCC unroll 8
            for (int v = 1; v < VECTORS; ++v) sums[t] += load(x + v * step + t * token_stride);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
        const SubblockF32<F> integers(block[r], subblock);
#pragma GCC unroll 6
        for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 2
            for (int s = 0; s < SCALES; ++s) {
                const float* some = x + s * EACH * step + t * token_stride;
                Float sum = integers.numbers[s * EACH] * load(some);
#pragma GCC unroll 8
                for (int v = 1; v < EACH; ++v) sum = fma(integers.numbers[s * EACH + v], load(some + v * step), sum);
                total[t][r] = fma(sum, splat(factors[r].scale[at + s]), total[t][r]);
            }
            if constexpr (HAS_MINIMUM) total[t][r] = fma(sums[t], splat(factors[r].minimum[at]), total[t][r]);
        }
    }
}

template <typename F, int TOKENS>
void dot_blocks(const Tokens<float>& tokens, const BlockByte* const* rows, const RowPrefetch& next, std::int64_t count,
                float* sums, int stride) {
    constexpr int SUBBLOCKS_PER_BLOCK = F::ELEMENTS / SUBBLOCK, BLOCKS = BlockScales<F>::BLOCKS;
    Float total[TOKENS][MR];
    clear(total);
    const std::int64_t token_stride = tokens.stride ? tokens.stride : LANES;
    const std::int64_t step = tokens.stride ? LANES : LANES * TOKENS;
    const float* x = tokens.x;
    for (std::int64_t b = 0; b < count; b += BLOCKS) {
        const int here = static_cast<int>(std::min<std::int64_t>(BLOCKS, count - b));
        const std::uint8_t* block[MR];
        for (int r = 0; r < MR; ++r) block[r] = &rows[r][b * F::BYTES].byte;
        next(b * F::BYTES, here * F::BYTES);
        const BlockScales<F> factors[MR] = {{block[0], here}, {block[1], here}, {block[2], here}, {block[3], here}};
        for (int i = 0; i < here; ++i) {
#pragma GCC unroll 2
            for (int subblock = 0; subblock < SUBBLOCKS_PER_BLOCK; ++subblock, x += VECTORS * step) {
                const int at = (i * SUBBLOCKS_PER_BLOCK + subblock) * SUBBLOCK / F::SCALED;
                multiply_part<F, TOKENS>(x, token_stride, step, block, factors, subblock, at, total);
            }
            for (int r = 0; r < MR; ++r) block[r] += F::BYTES;
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * stride);
}

template <typename F, typename X>
void dot_blocks_up_to(int tokens, const Tokens<X>& x, const BlockByte* const* rows, const BlockByte* const* next, int prefetch,
                     std::int64_t count, float* sums, int stride) {
    const RowPrefetch to_come{next, prefetch};
    with_constant<MAX_DOT_TOKENS<BlockByte>>(
        tokens, [&](auto some) { dot_blocks<F, some.value>(x, rows, to_come, count, sums, stride); });
}

}  // namespace ostinato
