// Products with weights in blocks: a few tokens with a few rows, and rows made plain numbers.
//
// Tokens of bfloat16 are multiplied with a block's integers, which bfloat16 has a place for each of; what 32 elements give
// is multiplied by their scale in float32. Tokens of float32 are multiplied with scale * integer + minimum. In both, sums go
// on in ascending order in one accumulator: a result depends on its own token and row alone.
#pragma once

#include "block_dot_bf16.h"

namespace ostinato {

// The factors of one block: of each `SCALED` elements a scale, and a minimum where there are any.
template <typename F>
struct Factors {
    static constexpr int COUNT = F::ELEMENTS / F::SCALED;
    float scale[COUNT], minimum[F::HAS_MINIMUM ? COUNT : 1];

    explicit Factors(const std::uint8_t* block) { F::scales(block, scale, minimum); }
};

// Vector `v` of the 32 elements of a part.
template <typename F>
inline Float number(const std::int8_t* integers, const Factors<F>& factors, int part, int v) {
    const int at = (part * PART + v * LANES) / F::SCALED;
    const Float integer = load(integers + v * LANES), scale = splat(factors.scale[at]);
    if constexpr (F::HAS_MINIMUM) return fma(integer, scale, splat(factors.minimum[at]));
    return integer * scale;
}

template <typename F, typename X>
void expand_blocks(const InBlocks* row, std::int64_t begin, std::int64_t end, X* to) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(row);
    for (std::int64_t i = begin; i < end;) {
        const std::uint8_t* block = bytes + i / F::ELEMENTS * F::BYTES;
        const Factors<F> factors(block);
        const std::int64_t last = std::min<std::int64_t>(end, (i / F::ELEMENTS + 1) * F::ELEMENTS);
        for (; i < last; i += PART, to += PART) {
            const int part = static_cast<int>(i % F::ELEMENTS) / PART;
            const Bytes integers = F::integers(block, part);
            alignas(PART) std::int8_t each[PART];
            std::memcpy(each, &integers, sizeof(each));
            for (int v = 0; v < PART / LANES; ++v) store(to + v * LANES, number<F>(each, factors, part, v));
        }
    }
}

template <typename F, int TOKENS>
void dot_blocks(const Tokens<float>& tokens, const InBlocks* const* rows, const RowsToCome& next, std::int64_t count,
                float* sums, int stride) {
    Float total[TOKENS][DOT_ROWS];
    clear(total);
    const std::int64_t token_stride = tokens.stride ? tokens.stride : LANES;
    const std::int64_t step = tokens.stride ? LANES : LANES * TOKENS;
    const float* x = tokens.x;
    for (std::int64_t b = 0; b < count; ++b) {
        const std::uint8_t* block[DOT_ROWS];
        for (int r = 0; r < DOT_ROWS; ++r) block[r] = &rows[r][b * F::BYTES].byte;
        next(b * F::BYTES, F::BYTES);
        const Factors<F> factors[DOT_ROWS] = {Factors<F>(block[0]), Factors<F>(block[1]), Factors<F>(block[2]),
                                              Factors<F>(block[3])};
        for (int part = 0; part < F::ELEMENTS / PART; ++part) {
            alignas(PART) std::int8_t integers[DOT_ROWS][PART];
            for (int r = 0; r < DOT_ROWS; ++r) {
                const Bytes each = F::integers(block[r], part);
                std::memcpy(integers[r], &each, PART);
            }
            for (int v = 0; v < PART / LANES; ++v, x += step) {
                Float w[DOT_ROWS];
#pragma GCC unroll 4
                for (int r = 0; r < DOT_ROWS; ++r) w[r] = number<F>(integers[r], factors[r], part, v);
#pragma GCC unroll 6
                for (int t = 0; t < TOKENS; ++t) {
                    const Float token = load(x + t * token_stride);
#pragma GCC unroll 4
                    for (int r = 0; r < DOT_ROWS; ++r) total[t][r] = fma(token, w[r], total[t][r]);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * stride);
}

template <typename F, typename X, int TOKENS = DOT_TOKENS>
void dot_some_blocks(int tokens, const Tokens<X>& x, const InBlocks* const* rows, const InBlocks* const* next, int prefetch,
                     std::int64_t count, float* sums, int stride) {
    if constexpr (TOKENS > 0) {
        const RowsToCome to_come{next, prefetch};
        if (tokens < TOKENS) {
            dot_some_blocks<F, X, TOKENS - 1>(tokens, x, rows, next, prefetch, count, sums, stride);
        } else {
            dot_blocks<F, TOKENS>(x, rows, to_come, count, sums, stride);
        }
    }
}

template <typename F>
BlockFormat make_block_format(const char* name) {
    BlockFormat format{name, F::ELEMENTS, F::BYTES, {dot_some_blocks<F, float>, expand_blocks<F, float>}, {}};
#if defined(__AVX512BF16__)
    format.with_bf16 = {dot_some_blocks<F, bf16>, expand_to_bf16<F>};
    format.dot_rounded = dot_rounded_blocks<F>;
    format.least_rounded = LEAST_ROUNDED<F>;
#else
    format.with_bf16.expand = expand_blocks<F, bf16>;
#endif
    return format;
}

}  // namespace ostinato
