// Dot products of tokens in place with rows of a weight, for products in which each thread has rows of its own and
// tokens come in groups that stay in the L2 cache.
#pragma once

#include <algorithm>

#include "gemm/lhs.h"
#include "gemm/weights.h"

namespace ostinato {

static_assert(4 * NR <= MIN_GROUP_TOKENS);

// Return the most tokens of `size` elements in a group.
template <typename X>
inline std::int64_t tokens_in_cache(std::int64_t size) {
    return std::max<std::int64_t>(L2_TOKEN_BYTES / (size * sizeof(X)), 4 * NR);
}

template <int TOKENS, int PREFETCH, typename... Args>
inline void dot_up_to(int tokens, const Args&... args) {
    if constexpr (TOKENS > 0) {
        if (tokens == TOKENS) {
            dot_block<TOKENS, PREFETCH, false>(args...);
        } else {
            dot_up_to<TOKENS - 1, PREFETCH>(tokens, args...);
        }
    }
}

// MR rows from number `row` on, up to `end`, and the rows prefetched meanwhile, which continue at `next`. Behind the
// last row it is the last row again, whose result is not used.
template <typename W>
struct RowGroup {
    std::int64_t number[MR];
    const W *here[MR], *then[MR];

    RowGroup(const WeightView<W>& rows, std::int64_t row, std::int64_t end, const W* next) {
        for (int r = 0; r < MR; ++r) {
            number[r] = std::min(row + r, rows.n - 1);
            here[r] = rows.at(number[r]);
            then[r] = row + MR < end ? here[r] + MR * rows.stride() : next + r * rows.stride();
        }
    }
};

// Compute sums[t * stride + r] = x[t] . row `begin + r`, for all tokens and the rows up to `end`; up to MR - 1 more
// sums are written. Meanwhile the rows from `next` on are prefetched. Rows of another type than X are converted once if
// they are multiplied several times and `wide` is not null: it has room for MR rows, `wide_stride` apart, of whole
// steps.
template <typename X, typename W>
void dot_rows(const WeightView<W>& rows, std::int64_t begin, std::int64_t end, const W* next, std::int64_t tokens, const X* x,
              std::int64_t x_stride, float* sums, int stride, X* wide = nullptr, std::int64_t wide_stride = 0) {
    const TokenBlocks<W> blocks(tokens, MAX_DOT_TOKENS<W>);
    const std::int64_t groups = rows.scales ? (rows.k + rows.group - 1) / rows.group : 0;
    for (std::int64_t row = begin; row < end; row += MR) {
        const RowGroup<W> few(rows, row, end, next);
        const float* scales[MR];
        for (int r = 0; r < MR; ++r) scales[r] = rows.scales + few.number[r] * groups;
        if constexpr (std::is_same_v<X, bf16> && std::is_same_v<W, BlockByte>) {
            if (!rows.fixed_order && tokens >= rows.format->min_bf16_tokens) {
                const EvenBlocks wide_blocks(tokens, MAX_BF16_TOKENS);
                for (int block = 0; block < wide_blocks.count; ++block) {
                    const std::int64_t t = wide_blocks.begin(block);
                    rows.format->dot_bf16(wide_blocks.size(block), {x + t * x_stride, x_stride}, few.here, few.then,
                                             block == 0 ? MR : 0, rows.k / rows.format->elements,
                                             sums + t * stride + (row - begin), stride);
                }
                continue;
            }
        }
        const auto multiply = [&](const auto* const* w) {
            for (int block = 0; block < blocks.count; ++block) {
                const std::int64_t t = blocks.begin(block);
                const int count = blocks.size(block);
                const Tokens<X> some{x + t * x_stride, x_stride};
                float* to = sums + t * stride + (row - begin);
                const float* const* of_groups = rows.scales ? scales : nullptr;
                if constexpr (std::is_same_v<W, BlockByte>) {
                    rows.format->template products<X>().dot(count, some, w, few.then, block == 0 ? MR : 0,
                                                            rows.k / rows.format->elements, to, stride);
                } else if (block == 0) {
                    dot_up_to<NR, MR>(count, some, w, few.then, rows.k, of_groups, rows.group, to, stride);
                } else {
                    dot_up_to<NR, 0>(count, some, w, few.then, rows.k, of_groups, rows.group, to, stride);
                }
            }
        };
        if constexpr (MIN_BLOCKS_TO_WIDEN<X, W> < std::numeric_limits<int>::max()) {
            if (wide && blocks.count >= MIN_BLOCKS_TO_WIDEN<X, W>) {
                const X* widened[MR];
                for (int r = 0; r < MR; ++r) {
                    widen_row(few.here[r], rows.k, wide + r * wide_stride);
                    widened[r] = wide + r * wide_stride;
                }
                multiply(static_cast<const X* const*>(widened));
                continue;
            }
        }
        multiply(few.here);
    }
}

#if defined(OSTINATO_I16)
// Compute `dot_rows` for i16 tokens, `x_stride` apart, with rows in blocks.
inline void dot_rows(const WeightView<BlockByte>& rows, std::int64_t begin, std::int64_t end, const BlockByte* next,
                     std::int64_t tokens, const i16* x, std::int64_t x_stride, float* sums, int stride) {
    const EvenBlocks blocks(tokens, MAX_I16_TOKENS);
    for (std::int64_t row = begin; row < end; row += MR) {
        const RowGroup<BlockByte> few(rows, row, end, next);
        for (int block = 0; block < blocks.count; ++block) {
            const std::int64_t t = blocks.begin(block);
            rows.format->with_i16.dot(blocks.size(block), {x + t * x_stride, x_stride}, few.here, few.then,
                                        block == 0 ? MR : 0, rows.k / rows.format->elements,
                                        sums + t * stride + (row - begin), stride);
        }
    }
}
#endif

}  // namespace ostinato
