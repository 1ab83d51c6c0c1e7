// Dot products of a few tokens with rows that were dequantized to bfloat16 before, while the next rows are dequantized:
// the two use different units of the processor.
#pragma once

#include "gemm/block_ops.h"

#if defined(OSTINATO_DEQUANT_BF16)
namespace ostinato {

static_assert(NR == 6);

// Compute total[t][r] += x[t] . w[r] for a subblock of MR rows and TOKENS tokens.
template <int TOKENS>
__attribute__((always_inline)) inline void dot_subblock(const Tokens<bf16>& tokens, const bf16* w,
                                                         Float (&total)[TOKENS][MR]) {
    using D = Dot<bf16, bf16>;
    __m512bh rows[MR];
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) rows[r] = D::read(w + r * DEQUANT_STRIDE);
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) {
        const __m512bh token = D::read(tokens.x + t * tokens.stride);
#pragma GCC unroll 4
        for (int r = 0; r < MR; ++r) total[t][r] = D::multiply_add(total[t][r], token, rows[r]);
    }
}

// A Source dequantizes rows. It prepares a superblock of each, of up to SUBBLOCKS subblocks in BYTES bytes, and then
// reads it subblock by subblock; TOGETHER subblocks come from the same bytes.

// Dequantize a subblock of MR rows.
template <typename Source>
__attribute__((always_inline)) inline void dequantize_subblock(const Source& source, int subblock, bf16* to) {
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
        const __m512bh made = source.read(r, subblock);
        std::memcpy(to + r * DEQUANT_STRIDE, &made, sizeof(made));
    }
}

template <typename Source>
void dequantize_superblock(const DequantStep& work, int superblock) {
    const int subblocks = std::min(SUBBLOCKS, work.next_subblocks - superblock * SUBBLOCKS);
    Source source;
    source.prepare(work.next, superblock, subblocks);
    for (int r = 0; r < MR; ++r) {
        for (int at = 0; at < Source::BYTES; at += 64) {
            __builtin_prefetch(work.to_come[r] + superblock * Source::BYTES + at, 0, 2);
        }
    }
    for (int subblock = 0; subblock < subblocks; ++subblock) dequantize_subblock(source, subblock, work.made + (superblock * SUBBLOCKS + subblock) * SUBBLOCK);
}

template <typename Source, int TOKENS>
void dequant_dot(const DequantStep& work) {
    constexpr int TOGETHER = Source::TOGETHER, HALF = Source::BYTES / 2;
    Tokens<bf16> tokens{work.tokens.x, work.tokens.stride ? work.tokens.stride : SUBBLOCK};
    const std::int64_t step = work.tokens.stride ? SUBBLOCK : SUBBLOCK * TOKENS;
    const int subblocks = work.subblocks, next_subblocks = work.next_subblocks;
    const bf16* w = work.rows;
    Float total[TOKENS][MR];
    if (work.is_first) {
        clear(total);
    } else {
#pragma GCC unroll 6
        for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r) total[t][r] = work.totals[t * MR + r];
        }
    }
    int superblock = 0, until_mine = work.share;
    for (int begin = 0; begin < subblocks; begin += SUBBLOCKS, ++superblock, --until_mine) {
        const int end = std::min(begin + SUBBLOCKS, subblocks);
        const bool is_mine = until_mine == 0 && begin < next_subblocks;
        if (until_mine == 0) until_mine = work.shares;
        if (is_mine && begin + SUBBLOCKS <= std::min(subblocks, next_subblocks)) {
            Source source;
            source.prepare(work.next, superblock, SUBBLOCKS);
            bf16* to = work.made + begin * SUBBLOCK;
            const std::int64_t fetched = superblock * std::int64_t{Source::BYTES};
#pragma GCC unroll 1
            for (int first = 0; first < SUBBLOCKS; first += TOGETHER) {
#pragma GCC unroll 4
                for (int i = 0; i < TOGETHER; ++i, tokens.x += step, w += SUBBLOCK, to += SUBBLOCK) {
                    // A few lines at a time: of many at once, the processor drops some.
                    static_assert(SUBBLOCKS == 2 * MR);
                    const BlockByte* come = work.to_come[(first + i) / 2] + fetched + (first + i) % 2 * HALF;
                    for (int at = 0; at < HALF; at += 64) __builtin_prefetch(come + at, 0, 2);
                    dequantize_subblock(source, first + i, to);
                    dot_subblock(tokens, w, total);
                }
            }
            continue;
        }
        if (is_mine) dequantize_superblock<Source>(work, superblock);
#pragma GCC unroll 1
        for (int subblock = begin; subblock < end; ++subblock, tokens.x += step, w += SUBBLOCK) dot_subblock(tokens, w, total);
    }
    if (work.share + 1 == work.shares) {
        for (; superblock * SUBBLOCKS < next_subblocks; ++superblock) dequantize_superblock<Source>(work, superblock);
    }
    if (!work.is_last) {
#pragma GCC unroll 6
        for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r) work.totals[t * MR + r] = total[t][r];
        }
        return;
    }
    float* sums = work.sums;
#pragma GCC unroll 3
    for (int t = 0; t + 1 < TOKENS; t += 2, sums += 2 * work.sums_stride) {
        sum8(total[t], total[t + 1], sums, sums + work.sums_stride);
    }
    if constexpr (TOKENS % 2 == 1) sum4(total[TOKENS - 1], sums);
}

template <typename Source>
void dequant_dot(int tokens, const DequantStep& work) {
    switch (tokens) {
        case 3: return dequant_dot<Source, 3>(work);
        case 4: return dequant_dot<Source, 4>(work);
        case 5: return dequant_dot<Source, 5>(work);
        default: return dequant_dot<Source, 6>(work);
    }
}

}  // namespace ostinato
#endif
