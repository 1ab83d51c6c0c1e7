// Dot products of tokens, in place, with rows of a weight: for the products in which each thread has rows of its own and
// tokens pass by in groups that stay in the L2.
#pragma once

#include <algorithm>

#include "product.h"

namespace ostinato {

// Rows [count, size] of a weight, with `scales` [count, size / group] where they are quantised in groups, or of a `format`.
template <typename W>
struct Rows {
    const W* first;
    std::int64_t count, size;
    const float* scales = nullptr;
    std::int64_t group = 0;
    const BlockFormat* format = nullptr;
    bool fixed_order = false;  // blocks are multiplied as they are for any number of tokens

    std::int64_t stride() const { return row_stride<W>(format, size); }
    const W* at(std::int64_t row) const { return first + row * stride(); }
};

static_assert(4 * DOT_TOKENS <= LEAST_GROUP_TOKENS);

// The most tokens of `size` elements that are to pass by at a time.
template <typename X>
inline std::int64_t tokens_in_cache(std::int64_t size) {
    return std::max<std::int64_t>(GROUP_BYTES / (size * sizeof(X)), 4 * DOT_TOKENS);
}

template <int TOKENS, int PREFETCH, typename... Args>
inline void dot_some(int tokens, const Args&... args) {
    if constexpr (TOKENS > 0) {
        if (tokens == TOKENS) {
            dot_block<TOKENS, PREFETCH, false>(args...);
        } else {
            dot_some<TOKENS - 1, PREFETCH>(tokens, args...);
        }
    }
}

// Rows that are multiplied at once, from number `row` on, of those before `end`; and those that are fetched meanwhile, which
// are at `next` behind the last. Behind the last row of all it is computed once more, and thrown away.
template <typename W>
struct FewRows {
    std::int64_t number[DOT_ROWS];
    const W *here[DOT_ROWS], *then[DOT_ROWS];

    FewRows(const Rows<W>& rows, std::int64_t row, std::int64_t end, const W* next) {
        for (int r = 0; r < DOT_ROWS; ++r) {
            number[r] = std::min(row + r, rows.count - 1);
            here[r] = rows.at(number[r]);
            then[r] = row + DOT_ROWS < end ? here[r] + DOT_ROWS * rows.stride() : next + r * rows.stride();
        }
    }
};

// sums[t * stride + r] = x[t] . row `begin + r`, for all tokens and the rows before `end`; up to DOT_ROWS - 1 more sums are
// written. Meanwhile the rows from `next` on, which are to come then, are fetched. Rows of another type than the tokens are
// made theirs once, if they are multiplied several times and `wide` is room for them: DOT_ROWS rows, `wide_stride` apart,
// of whole steps.
template <typename X, typename W>
void dot_rows(const Rows<W>& rows, std::int64_t begin, std::int64_t end, const W* next, std::int64_t tokens, const X* x,
              std::int64_t x_stride, float* sums, int stride, X* wide = nullptr, std::int64_t wide_stride = 0) {
    const TokenBlocks<W> blocks(tokens, AT_ONCE<W>);
    const std::int64_t groups = rows.scales ? (rows.size + rows.group - 1) / rows.group : 0;
    for (std::int64_t row = begin; row < end; row += DOT_ROWS) {
        const FewRows<W> few(rows, row, end, next);
        const float* scales[DOT_ROWS];
        for (int r = 0; r < DOT_ROWS; ++r) scales[r] = rows.scales + few.number[r] * groups;
        if constexpr (std::is_same_v<X, bf16> && std::is_same_v<W, InBlocks>) {
            if (!rows.fixed_order && tokens >= rows.format->least_rounded) {
                const Blocks wide_blocks(tokens, WIDE_TOKENS);
                for (int block = 0; block < wide_blocks.count; ++block) {
                    const std::int64_t t = wide_blocks.begin(block);
                    rows.format->dot_rounded(wide_blocks.size(block), {x + t * x_stride, x_stride}, few.here, few.then,
                                             block == 0 ? DOT_ROWS : 0, rows.size / rows.format->elements,
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
                if constexpr (std::is_same_v<W, InBlocks>) {
                    rows.format->template products<X>().dot(count, some, w, few.then, block == 0 ? DOT_ROWS : 0,
                                                            rows.size / rows.format->elements, to, stride);
                } else if (block == 0) {
                    dot_some<DOT_TOKENS, DOT_ROWS>(count, some, w, few.then, rows.size, of_groups, rows.group, to, stride);
                } else {
                    dot_some<DOT_TOKENS, 0>(count, some, w, few.then, rows.size, of_groups, rows.group, to, stride);
                }
            }
        };
        if constexpr (WIDE_BLOCKS<X, W> < std::numeric_limits<int>::max()) {
            if (wide && blocks.count >= WIDE_BLOCKS<X, W>) {
                const X* widened[DOT_ROWS];
                for (int r = 0; r < DOT_ROWS; ++r) {
                    widen(few.here[r], rows.size, wide + r * wide_stride);
                    widened[r] = wide + r * wide_stride;
                }
                multiply(static_cast<const X* const*>(widened));
                continue;
            }
        }
        multiply(few.here);
    }
}

#if defined(OSTINATO_FIXED)
// The same of tokens that are 16-bit integers, `x_stride` apart, with rows in blocks.
inline void dot_rows(const Rows<InBlocks>& rows, std::int64_t begin, std::int64_t end, const InBlocks* next,
                     std::int64_t tokens, const fixed* x, std::int64_t x_stride, float* sums, int stride) {
    const Blocks blocks(tokens, MOST_FIXED);
    for (std::int64_t row = begin; row < end; row += DOT_ROWS) {
        const FewRows<InBlocks> few(rows, row, end, next);
        for (int block = 0; block < blocks.count; ++block) {
            const std::int64_t t = blocks.begin(block);
            rows.format->with_fixed.dot(blocks.size(block), {x + t * x_stride, x_stride}, few.here, few.then,
                                        block == 0 ? DOT_ROWS : 0, rows.size / rows.format->elements,
                                        sums + t * stride + (row - begin), stride);
        }
    }
}
#endif

}  // namespace ostinato
