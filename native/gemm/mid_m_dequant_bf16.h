// Driver for a medium number of bfloat16 tokens with int8 weights or blocks: rows are dequantized to bfloat16 once for
// a group of tokens, a span of four rows while the span before is multiplied (gemm/ukernels/dequant_dot_bf16.h). A
// token has the bits that 3 to 5 tokens (5 with Q6_K) have in gemm/small_m.h: weights are read in the same order, and
// block weights are rounded once.
#pragma once

#include "gemm/small_m.h"
#include "gemm/ukernels/dequant_dot_bf16.h"

#if defined(OSTINATO_DEQUANT_BF16)
namespace ostinato {

static_assert(DEQUANT_SPAN % SUPERBLOCK == 0);

// int8 rows as a source of dequant_dot.
struct Int8Rows {
    static constexpr int TOGETHER = 1, BYTES = SUPERBLOCK;
    const std::int8_t* rows[MR];

    void prepare(const BlockByte* const* from, std::int64_t group, int) {
        for (int r = 0; r < MR; ++r) rows[r] = reinterpret_cast<const std::int8_t*>(from[r]) + group * BYTES;
    }
    __m512bh read(int r, int subblock) const { return Dot<bf16, std::int8_t>::read(rows[r] + subblock * SUBBLOCK); }
};

// Spans of a row, in superblocks, as equal as possible.
struct Spans {
    EvenBlocks superblocks;
    int subblocks;

    explicit Spans(std::int64_t in)
        : superblocks((in + SUPERBLOCK - 1) / SUPERBLOCK, DEQUANT_SPAN / SUPERBLOCK), subblocks(static_cast<int>(in / SUBBLOCK)) {}

    int count() const { return superblocks.count; }
    std::int64_t first_superblock(int span) const { return superblocks.begin(span); }
    int first_subblock(int span) const { return static_cast<int>(superblocks.begin(span)) * SUBBLOCKS; }
    int size(int span) const { return std::min(superblocks.size(span) * SUBBLOCKS, subblocks - first_subblock(span)); }
};

// Compute the outputs that this thread claims, of the tokens `first` to `first + blocks.tokens`, which are at `x`;
// `x_stride` is 0 if they are packed.
template <typename Y, typename W>
void gemm_mid_m_dequant_bf16(const ThreadGroup& threads, std::int64_t first, const bf16* x, std::int64_t x_stride, const EvenBlocks& blocks,
                        const WeightView<W>& w, const Epilogue& o, Y* y) {
    const Spans spans(w.k);
    const std::int64_t superblock_stride = row_stride<W>(w.format, SUPERBLOCK);
    const std::int64_t num_sums = blocks.tokens * ROW_STREAMS * MR_PANEL;
    const std::int64_t num_totals = blocks.tokens * ROW_STREAMS * LANES;
    float* totals = threads.thread_scratch<float>(num_totals + num_sums + ROW_STREAMS * DEQUANT_STRIDE);
    float* sums = totals + num_totals;
    DequantStep work;
    bf16* here = reinterpret_cast<bf16*>(sums + num_sums);
    bf16* then = here + ROW_STREAMS * DEQUANT_STRIDE;
    work.shares = blocks.count;
    work.sums_stride = MR_PANEL * ROW_STREAMS;
    void (*multiply)(int, const DequantStep&) = dequant_dot<Int8Rows>;
    if constexpr (std::is_same_v<W, BlockByte>) multiply = w.format->dequant_dot;
    threads.each_part(o.size, [&](const ThreadGroup& part) {
        const RowStreams streams(part, o);
        for (std::int64_t panel = 0; panel < streams.length; panel += MR_PANEL) {
            const StreamRowPointers<W> rows(w, streams, panel, MR_PANEL + 2);
            for (int s = 0; s < ROW_STREAMS && panel == 0; ++s) {
                if constexpr (std::is_same_v<W, BlockByte>) {
                    w.format->with_bf16.dequantize(rows.row[0][s], 0, spans.size(0) * SUBBLOCK, here + s * DEQUANT_STRIDE);
                } else {
                    widen_row(rows.row[0][s], spans.size(0) * SUBBLOCK, here + s * DEQUANT_STRIDE);
                }
            }
            const int count = static_cast<int>(std::min<std::int64_t>(MR_PANEL, streams.length - panel));
            for (int unit = 0; unit < count * spans.count(); ++unit) {
                const int row = unit / spans.count(), span = unit % spans.count();
                const int next_row = (unit + 1) / spans.count(), next_span = (unit + 1) % spans.count();
                for (int s = 0; s < ROW_STREAMS; ++s) {
                    const std::int64_t at = spans.first_superblock(next_span) * superblock_stride;
                    work.next[s] = reinterpret_cast<const BlockByte*>(rows.row[next_row][s] + at);
                    work.to_come[s] = reinterpret_cast<const BlockByte*>(rows.row[next_row + 1][s] + at);
                }
                work.rows = here;
                work.made = then;
                work.subblocks = spans.size(span);
                work.next_subblocks = spans.size(next_span);
                work.is_first = span == 0;
                work.is_last = span + 1 == spans.count();
                for (work.share = 0; work.share < blocks.count; ++work.share) {
                    const std::int64_t begin = blocks.begin(work.share), size = blocks.size(work.share);
                    const std::int64_t from = spans.first_subblock(span) * SUBBLOCK;
                    work.tokens = {x + (x_stride ? begin * x_stride + from : begin * w.k + size * from), x_stride};
                    work.totals = reinterpret_cast<Float*>(totals) + begin * ROW_STREAMS;
                    work.sums = sums + (begin * MR_PANEL + row) * ROW_STREAMS;
                    multiply(static_cast<int>(size), work);
                }
                std::swap(here, then);
            }
            store_panel<bf16>(streams, panel, count, blocks.tokens, first, sums, o, y);
        }
    });
}

template <typename Y, typename W>
void gemm_mid_m_dequant_bf16(const ThreadGroup& threads, std::int64_t tokens, const bf16* x, std::int64_t x_stride, const WeightView<W>& w,
                        const Epilogue& o, Y* y) {
    if (tokens <= NR) {
        gemm_mid_m_dequant_bf16(threads, 0, x, x_stride, EvenBlocks(tokens, NR), w, o, y);
        return;
    }
    const std::int64_t most = tokens_per_pack<bf16, W>(w.k);
    const EvenBlocks groups(tokens, static_cast<int>(most));
    for (int group = 0; group < groups.count; ++group) {
        const std::int64_t first = groups.begin(group);
        const EvenBlocks blocks(groups.size(group), NR);
        const bf16* packed = pack_tokens<bf16, W>(threads, x + first * x_stride, x_stride, w.k, blocks);
        gemm_mid_m_dequant_bf16(threads, first, packed, 0, blocks, w, o, y);
    }
}

}  // namespace ostinato
#endif
