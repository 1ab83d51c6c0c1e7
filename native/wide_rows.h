// Matrix products of some tokens of bfloat16 with weights that are narrower: rows are made bfloat16 once for a group of tokens,
// a span of four while the span before is multiplied (wide_dot.h). A token's bits are those that 3 to 5 tokens have (5 with
// Q6_K) in few.h: weights are read in the same order, and rounded once if they lie in blocks.
#pragma once

#include "few.h"
#include "wide_dot.h"

#if defined(OSTINATO_WIDE_ROWS)
namespace ostinato {

static_assert(WIDE_SPAN % GROUP == 0 && LEAST_WIDE_TOKENS > 2);

// Rows of 8 bits as `multiply_wide` makes them.
struct EightBitRows {
    static constexpr int TOGETHER = 1, BYTES = GROUP;
    const std::int8_t* rows[DOT_ROWS];

    void prepare(const InBlocks* const* from, std::int64_t group, int) {
        for (int r = 0; r < DOT_ROWS; ++r) rows[r] = reinterpret_cast<const std::int8_t*>(from[r]) + group * BYTES;
    }
    __m512bh read(int r, int part) const { return Dot<bf16, std::int8_t>::read(rows[r] + part * PART); }
};

template <typename W>
inline bool takes_wide_rows(std::int64_t tokens, const Weights<W>& w) {
    const bool whole_parts = w.in % PART == 0 && w.in > 0;
    return !w.fixed_order && !w.scales && whole_parts && tokens >= LEAST_WIDE_TOKENS && tokens < LEAST_PANEL_TOKENS;
}

// The spans of a row, in groups as equal as can be.
struct Spans {
    Blocks groups;
    int parts;

    explicit Spans(std::int64_t in)
        : groups((in + GROUP - 1) / GROUP, WIDE_SPAN / GROUP), parts(static_cast<int>(in / PART)) {}

    int count() const { return groups.count; }
    std::int64_t first_group(int span) const { return groups.begin(span); }
    int first_part(int span) const { return static_cast<int>(groups.begin(span)) * GROUP_PARTS; }
    int size(int span) const { return std::min(groups.size(span) * GROUP_PARTS, parts - first_part(span)); }
};

// This thread's outputs of the tokens `first` to `first + blocks.tokens`, which are `x`; `x_stride` is 0 where they are packed.
template <typename Y, typename W>
void multiply_wide_rows(const Team& team, std::int64_t first, const bf16* x, std::int64_t x_stride, const Blocks& blocks,
                        const Weights<W>& w, const Output& o, Y* y) {
    const Streams streams(team, o);
    if (streams.length == 0) return;
    const Spans spans(w.in);
    const std::int64_t group_size = row_stride<W>(w.format, GROUP);
    const std::int64_t num_sums = blocks.tokens * STREAMS * PANEL;
    const std::int64_t num_totals = blocks.tokens * STREAMS * LANES;
    float* totals = team.own<float>(num_totals + num_sums + STREAMS * WIDE_STRIDE);
    float* sums = totals + num_totals;
    WideWork work;
    bf16* here = reinterpret_cast<bf16*>(sums + num_sums);
    bf16* then = here + STREAMS * WIDE_STRIDE;
    work.shares = blocks.count;
    work.sums_stride = PANEL * STREAMS;
    void (*multiply)(int, const WideWork&) = multiply_wide<EightBitRows>;
    if constexpr (std::is_same_v<W, InBlocks>) multiply = w.format->multiply_wide;
    for (std::int64_t panel = 0; panel < streams.length; panel += PANEL) {
        const StreamRows<W> rows(w, streams, panel, PANEL + 2);
        for (int s = 0; s < STREAMS && panel == 0; ++s) {
            if constexpr (std::is_same_v<W, InBlocks>) {
                w.format->with_bf16.expand(rows.row[0][s], 0, spans.size(0) * PART, here + s * WIDE_STRIDE);
            } else {
                widen(rows.row[0][s], spans.size(0) * PART, here + s * WIDE_STRIDE);
            }
        }
        const int count = static_cast<int>(std::min<std::int64_t>(PANEL, streams.length - panel));
        for (int unit = 0; unit < count * spans.count(); ++unit) {
            const int row = unit / spans.count(), span = unit % spans.count();
            const int next_row = (unit + 1) / spans.count(), next_span = (unit + 1) % spans.count();
            for (int s = 0; s < STREAMS; ++s) {
                const std::int64_t at = spans.first_group(next_span) * group_size;
                work.next[s] = reinterpret_cast<const InBlocks*>(rows.row[next_row][s] + at);
                work.to_come[s] = reinterpret_cast<const InBlocks*>(rows.row[next_row + 1][s] + at);
            }
            work.rows = here;
            work.made = then;
            work.parts = spans.size(span);
            work.next_parts = spans.size(next_span);
            work.is_first = span == 0;
            work.is_last = span + 1 == spans.count();
            for (work.share = 0; work.share < blocks.count; ++work.share) {
                const std::int64_t begin = blocks.begin(work.share), size = blocks.size(work.share);
                const std::int64_t from = spans.first_part(span) * PART;
                work.tokens = {x + (x_stride ? begin * x_stride + from : begin * w.in + size * from), x_stride};
                work.totals = reinterpret_cast<Float*>(totals) + begin * STREAMS;
                work.sums = sums + (begin * PANEL + row) * STREAMS;
                multiply(static_cast<int>(size), work);
            }
            std::swap(here, then);
        }
        put_panel<bf16>(streams, panel, count, blocks.tokens, first, sums, o, y);
    }
}

template <typename Y, typename W>
void multiply_wide_rows(const Team& team, std::int64_t tokens, const bf16* x, std::int64_t x_stride, const Weights<W>& w,
                        const Output& o, Y* y) {
    if (tokens <= DOT_TOKENS) {
        multiply_wide_rows(team, 0, x, x_stride, Blocks(tokens, DOT_TOKENS), w, o, y);
        return;
    }
    const std::int64_t most = tokens_at_once<bf16, W>(w.in);
    const Blocks groups(tokens, static_cast<int>(most));
    for (int group = 0; group < groups.count; ++group) {
        const std::int64_t first = groups.begin(group);
        const Blocks blocks(groups.size(group), DOT_TOKENS);
        const bf16* packed = pack<bf16, W>(team, x + first * x_stride, x_stride, w.in, blocks);
        multiply_wide_rows(team, first, packed, 0, blocks, w, o, y);
    }
}

}  // namespace ostinato
#endif
