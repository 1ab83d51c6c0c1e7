// Dot products of a few i16 tokens with int8 rows that have one scale, and with rows in blocks, for ARM. SDOT multiplies
// the bytes of a token's upper and lower plane apart and adds them in fours; SMMLA multiplies two rows with 8 bytes of
// both planes. Sums of 32 products, which share a scale, are exact; minima are multiplied with the sums of the elements.
#pragma once

#include "gemm/block_ops.h"
#include "quant/block_scales.h"
#include "quant/quantize_tokens_i16.h"

#if defined(OSTINATO_HAS_DOTPROD)

namespace ostinato {

#if defined(OSTINATO_HAS_I8MM)
constexpr int PLANE_ROWS = 2;  // whose sums share a vector: (upper, lower) of the first row, then of the second
#else
constexpr int PLANE_ROWS = 1;
#endif

// 32 integers of each of PLANE_ROWS rows.
struct PlaneRows {
    int8x16_t parts[2 * PLANE_ROWS];

    [[gnu::always_inline]] explicit PlaneRows(const Bytes32* rows) {
        std::memcpy(parts, rows, sizeof(parts));
#if defined(OSTINATO_HAS_I8MM)
        int64x2_t halves[4];
        std::memcpy(halves, rows, sizeof(halves));
        for (int i = 0; i < 2; ++i) {
            parts[2 * i] = vreinterpretq_s8_s64(vzip1q_s64(halves[i], halves[2 + i]));
            parts[2 * i + 1] = vreinterpretq_s8_s64(vzip2q_s64(halves[i], halves[2 + i]));
        }
#endif
    }

    // Return the sums of their products with part `part` of PARTS of a token's 32 elements.
    template <int PARTS>
    [[gnu::always_inline]] Float multiply(const std::int8_t* planes, int part) const {
        constexpr int EACH = 2 * PLANE_ROWS / PARTS;
        int32x4_t sums = vdupq_n_s32(0);
        [[maybe_unused]] int32x4_t upper = sums;
        for (int i = part * EACH; i < (part + 1) * EACH; ++i) {
#if defined(OSTINATO_HAS_I8MM)
            sums = vmmlaq_s32(sums, parts[i], vld1q_s8(planes + 16 * i));
#else
            upper = vdotq_s32(upper, parts[i], vld1q_s8(planes + 16 * i));
            sums = vdotq_s32(sums, parts[i], vld1q_s8(planes + PLANE_BYTES + 16 * i));
#endif
        }
        return (Float)vcvtq_f32_s32(vaddq_s32(sums, vshlq_n_s32(upper, 8)));
    }

    // Return the factors of such sums for the scales of the rows.
    static Float factors(const float* scales) {
#if defined(OSTINATO_HAS_I8MM)
        return Float{256 * scales[0], scales[0], 256 * scales[1], scales[1]};
#else
        return splat(scales[0]);
#endif
    }
};

// Sums of TOKENS tokens with MR rows.
template <int TOKENS>
struct PlaneSums {
    Float total[TOKENS][MR / PLANE_ROWS] = {};
    float low[TOKENS][MR] = {};  // of minima

    // Add the products of a subblock, PARTS parts of which have scales of their own: scales[part][row].
    template <int PARTS>
    [[gnu::always_inline]] void add(const Tokens<i16>& tokens, const I16TokenLayout& layout, std::int64_t subblock,
                                    const Bytes32* rows, const float (*scales)[MR], const float* minima) {
#pragma GCC unroll 4
        for (int group = 0; group < MR / PLANE_ROWS; ++group) {
            const PlaneRows few(rows + group * PLANE_ROWS);
            for (int t = 0; t < TOKENS; ++t) {
                const i16* token = tokens.x + t * tokens.stride;
                const auto* planes = reinterpret_cast<const std::int8_t*>(token + subblock * SUBBLOCK);
                const Float scale = splat(layout.scales(token)[subblock]);
                for (int part = 0; part < PARTS; ++part) {
                    const Float factors = PlaneRows::factors(scales[part] + group * PLANE_ROWS) * scale;
                    total[t][group] = fma(few.multiply<PARTS>(planes, part), factors, total[t][group]);
                }
            }
        }
        for (int t = 0; minima && t < TOKENS; ++t) {
            const float sum = layout.sums(tokens.x + t * tokens.stride)[subblock];
            for (int r = 0; r < MR; ++r) low[t][r] = __builtin_fmaf(minima[r], sum, low[t][r]);
        }
    }

    void write(float* sums, int stride) const {
        for (int t = 0; t < TOKENS; ++t) {
            for (int r = 0; r < MR; ++r) {
                const Float of_row = total[t][r / PLANE_ROWS];
                const int at = r % PLANE_ROWS * 2;
                sums[t * stride + r] = low[t][r] + (PLANE_ROWS == 1 ? sum(of_row) : of_row[at] + of_row[at + 1]);
            }
        }
    }
};

template <typename F, int TOKENS>
void dot_i16_blocks(const Tokens<i16>& tokens, const BlockByte* const* rows, const RowPrefetch& next, std::int64_t count,
                    float* sums, int stride) {
    using Scales = BlockScales<F>;
    constexpr int SUBBLOCKS_PER_BLOCK = F::ELEMENTS / SUBBLOCK, PARTS = F::SCALED < SUBBLOCK ? SUBBLOCK / F::SCALED : 1;
    const I16TokenLayout layout(count * F::ELEMENTS);
    PlaneSums<TOKENS> products;
    for (std::int64_t b = 0; b < count; b += Scales::BLOCKS) {
        const int here = static_cast<int>(std::min<std::int64_t>(Scales::BLOCKS, count - b));
        const auto block = [&](int r, int i) { return &rows[r][(b + i) * F::BYTES].byte; };
        next(b * F::BYTES, here * F::BYTES);
        const Scales factors[MR] = {{block(0, 0), here}, {block(1, 0), here}, {block(2, 0), here}, {block(3, 0), here}};
        for (int i = 0; i < here * SUBBLOCKS_PER_BLOCK; ++i) {
            const int at = i * SUBBLOCK / F::SCALED;
            Bytes32 integers[MR];
            float scales[PARTS][MR], minima[MR];
            for (int r = 0; r < MR; ++r) {
                integers[r] = F::integers(block(r, i / SUBBLOCKS_PER_BLOCK), i % SUBBLOCKS_PER_BLOCK);
                for (int part = 0; part < PARTS; ++part) scales[part][r] = factors[r].scale[at + part];
                if constexpr (F::HAS_MINIMUM) minima[r] = factors[r].minimum[at];
            }
            products.template add<PARTS>(tokens, layout, b * SUBBLOCKS_PER_BLOCK + i, integers, scales,
                                         F::HAS_MINIMUM ? minima : nullptr);
        }
    }
    products.write(sums, stride);
}

// Compute sums[t * stride + r] = tokens[t] . rows[r] for int8 weights without their scales.
inline void dot_i16_i8_up_to(int tokens, const Tokens<i16>& x, const std::int8_t* const* rows, const std::int8_t* const*, int,
                             std::int64_t in, float* sums, int stride) {
    constexpr float ONES[1][MR] = {{1, 1, 1, 1}};
    const I16TokenLayout layout(in);
    with_constant<I16_NR>(tokens, [&](auto some) {
        PlaneSums<some.value> products;
        for (std::int64_t begin = 0; begin < in; begin += SUBBLOCK) {
            Bytes32 integers[MR] = {};
            for (int r = 0; r < MR; ++r) std::memcpy(&integers[r], rows[r] + begin, std::min<std::int64_t>(SUBBLOCK, in - begin));
            products.template add<1>(x, layout, begin / SUBBLOCK, integers, ONES, nullptr);
        }
        products.write(sums, stride);
    });
}

}  // namespace ostinato

#endif
