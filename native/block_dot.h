// Products with weights in blocks: a few tokens with a few rows, and rows made plain numbers.
//
// Tokens are multiplied with a block's integers, or float8 numbers; what 32 elements give is multiplied by their scale, and
// with minima the sum of 32 elements of a token by theirs. So a scale takes one instruction for 32 weights, not for each.
// Sums go on in ascending order in one accumulator: a result depends on its own token and row alone.
#pragma once

#include "block_dot_bf16.h"
#include "block_factors.h"
#include "block_panel.h"
#include "fixed_blocks.h"
#include "fixed_groups.h"

namespace ostinato {

constexpr int VECTORS = PART / LANES;  // of a part

#if defined(__AVX2__) && !defined(__AVX512F__)
// Eight bytes, each as 32 bits.
inline __m256i widened(const std::uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

inline Float low_halves(__m256i bytes) { return (Float)_mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15))); }

inline Float high_halves(__m256i bytes) { return (Float)_mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4)); }
#endif

// The integers of a part, as floats; those of raw formats as they stand there.
template <typename F>
struct Part {
    Float numbers[VECTORS];

    [[gnu::always_inline]] Part(const std::uint8_t* block, int part) {
        if constexpr (IS_FLOAT8<F>) {
            load<PART>(F::numbers(block, part), numbers);
#if defined(__AVX2__) && !defined(__AVX512F__)
        } else if constexpr (std::is_same_v<F, Q4_K>) {
            const std::uint8_t* from = block + 16 + part / 2 * PART;
            for (int v = 0; v < VECTORS; ++v) {
                const __m256i bytes = widened(from + v * LANES);
                numbers[v] = part % 2 ? high_halves(bytes) : low_halves(bytes);
            }
        } else if constexpr (IS_RAW<F>) {
            for (int v = 0; v < 2; ++v) {
                const __m256i bytes = widened(F::halves(block, part) + v * LANES);
                numbers[v] = low_halves(bytes);
                numbers[2 + v] = high_halves(bytes);
            }
#endif
        } else if constexpr (std::is_same_v<F, Q8_0>) {
            const auto* integers = reinterpret_cast<const std::int8_t*>(block + 2);
            for (int v = 0; v < VECTORS; ++v) numbers[v] = load(integers + v * LANES);
        } else {
            const Bytes integers = F::integers(block, part);
            alignas(PART) std::int8_t each[PART];
            std::memcpy(each, &integers, sizeof(each));
            for (int v = 0; v < VECTORS; ++v) numbers[v] = load(each + v * LANES);
        }
    }
};

template <typename F, typename X>
void expand_blocks(const InBlocks* row, std::int64_t begin, std::int64_t end, X* to) {
    constexpr int PARTS = F::ELEMENTS / PART;
    for (std::int64_t i = begin; i < end;) {
        const std::int64_t first = i / F::ELEMENTS, last = (end + F::ELEMENTS - 1) / F::ELEMENTS;
        const int here = static_cast<int>(std::min<std::int64_t>(Factors<F>::BLOCKS, last - first));
        const auto* block = &row[first * F::BYTES].byte;
        const Factors<F> factors(block, here);
        for (int part = static_cast<int>(i - first * F::ELEMENTS) / PART; part < here * PARTS && i < end; ++part) {
            const Part<F> integers(block + part / PARTS * F::BYTES, part % PARTS);
            for (int v = 0; v < VECTORS; ++v) {
                const int at = (part * PART + v * LANES) / F::SCALED;
                const Float scale = splat(factors.scale[at]);
                if constexpr (Factors<F>::HAS_MINIMUM) {
                    store(to + v * LANES, fma(integers.numbers[v], scale, splat(factors.minimum[at])));
                } else {
                    store(to + v * LANES, integers.numbers[v] * scale);
                }
            }
            i += PART;
            to += PART;
        }
    }
}

// total[t][r] += token t . part `part` of each row's block, whose factors begin at `at`.
template <typename F, int TOKENS>
[[gnu::always_inline]] inline void multiply_part(const float* x, std::int64_t token_stride, std::int64_t step,
                                                 const std::uint8_t* const* block, const Factors<F>* factors, int part,
                                                 int at, Float (&total)[TOKENS][DOT_ROWS]) {
    constexpr int SCALES = F::SCALED < PART ? PART / F::SCALED : 1, EACH = VECTORS / SCALES;
    constexpr bool HAS_MINIMUM = Factors<F>::HAS_MINIMUM;
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
    for (int r = 0; r < DOT_ROWS; ++r) {
        const Part<F> integers(block[r], part);
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
void dot_blocks(const Tokens<float>& tokens, const InBlocks* const* rows, const RowsToCome& next, std::int64_t count,
                float* sums, int stride) {
    constexpr int PARTS = F::ELEMENTS / PART, BLOCKS = Factors<F>::BLOCKS;
    Float total[TOKENS][DOT_ROWS];
    clear(total);
    const std::int64_t token_stride = tokens.stride ? tokens.stride : LANES;
    const std::int64_t step = tokens.stride ? LANES : LANES * TOKENS;
    const float* x = tokens.x;
    for (std::int64_t b = 0; b < count; b += BLOCKS) {
        const int here = static_cast<int>(std::min<std::int64_t>(BLOCKS, count - b));
        const std::uint8_t* block[DOT_ROWS];
        for (int r = 0; r < DOT_ROWS; ++r) block[r] = &rows[r][b * F::BYTES].byte;
        next(b * F::BYTES, here * F::BYTES);
        const Factors<F> factors[DOT_ROWS] = {{block[0], here}, {block[1], here}, {block[2], here}, {block[3], here}};
        for (int i = 0; i < here; ++i) {
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; ++part, x += VECTORS * step) {
                const int at = (i * PARTS + part) * PART / F::SCALED;
                multiply_part<F, TOKENS>(x, token_stride, step, block, factors, part, at, total);
            }
            for (int r = 0; r < DOT_ROWS; ++r) block[r] += F::BYTES;
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * stride);
}

template <typename F, typename X, int TOKENS = AT_ONCE<InBlocks>>
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

#if defined(OSTINATO_FIXED)
template <typename F>
void dot_some_fixed_blocks(int tokens, const Tokens<fixed>& x, const InBlocks* const* rows, const InBlocks* const* next,
                           int prefetch, std::int64_t count, float* sums, int stride) {
    const RowsToCome to_come{next, prefetch};
    with_fixed_tokens<MOST_FIXED>(
        tokens, [&](auto some) { dot_fixed_blocks<F, some.value>(x, rows, to_come, count, sums, stride); });
}
#endif

template <typename F>
BlockFormat make_block_format(const char* name) {
    BlockFormat format{name, F::ELEMENTS, F::BYTES, {dot_some_blocks<F, float>, expand_blocks<F, float>}, {}};
#if defined(__AVX512BF16__)
    format.with_bf16 = {dot_some_blocks<F, bf16>, expand_to_bf16<F>};
    format.dot_rounded = dot_rounded_blocks<F>;
    format.least_rounded = LEAST_ROUNDED<F>;
#if defined(OSTINATO_WIDE_ROWS)
    format.multiply_wide = multiply_wide<GroupOfRows<F, DOT_ROWS>>;
#endif
#else
    format.with_bf16.expand = expand_blocks<F, bf16>;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
    format.pack = pack_blocks<F>;
#endif
#if defined(OSTINATO_FIXED)
    if constexpr (!IS_FLOAT8<F>) {
        format.with_fixed.dot = dot_some_fixed_blocks<F>;
#if defined(__AVX512F__)
        format.fixed_span = PART;
        format.token_order = Words<F>::ORDER;
#else
        format.fixed_span = std::clamp(F::SCALED, PART, FIXED_SPAN);
        format.token_order = FixedRead<F>::IS_SPREAD ? FixedOrder::SPREAD : FixedOrder::OWN;
        format.pack_integers = pack_block_integers<F>;
        format.integer_sum = INTEGER_SUM<F>;
        format.has_minima = F::HAS_MINIMUM;
#endif
    }
#endif
    return format;
}

}  // namespace ostinato
