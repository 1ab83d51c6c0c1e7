// Blocked GEMM for many tokens: vectors hold outputs, not inputs, so that nothing is summed across a vector.
//
// A thread packs weights into a panel of its own: PANEL_OUTPUTS outputs by a span of inputs, transposed. The panel
// stays in the L1 cache while all tokens are multiplied with it; their sums are kept from span to span. A unit is 32
// bits of a token or a row: one float, or a pair of bfloat16 that one instruction multiplies and adds. BFMMLA takes two
// rows and two tokens of four bfloat16 each: there a unit is these four, and a vector has two rows.
// gemm/large_m_avx2.h has these products for AVX2, which has fewer registers, and gemm/large_m_i16.h those of integers.
#pragma once

#include "core/thread_group.h"
#include "core/transpose.h"
#include "gemm/epilogue.h"
#include "gemm/lhs.h"
#include "gemm/weights.h"

namespace ostinato {

// 24 sums, 4 vectors of weights and a token: 29 of 32 registers. With AVX2 12, 2 and one: 15 of 16.
constexpr int PANEL_VECTORS = LANES == 8 ? AVX2_PANEL_VECTORS : 4;
constexpr int PANEL_OUTPUTS = PANEL_VECTORS * LANES;
constexpr int PANEL_TOKENS = 6;

template <typename X>
constexpr bool IN_PAIRS_OF_ROWS = LANES == 4 && std::is_same_v<X, bf16>;

template <typename X, typename W>
constexpr int K_UNIT = IN_PAIRS_OF_ROWS<X> ? 4 : Dot<X, W>::STEP / LANES;

// Arrange a step of LANES rows as units.
template <typename X>
inline void arrange_units(Float (&rows)[LANES]) {
    if constexpr (IN_PAIRS_OF_ROWS<X>) {
        const Float a = rows[0], b = rows[1], c = rows[2], d = rows[3];
        rows[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5), rows[1] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
        rows[2] = __builtin_shufflevector(a, b, 2, 3, 6, 7), rows[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
    } else {
        transpose(rows);
    }
}

// Compute panel[unit][vector] = the units of inputs `begin` to `end` of PANEL_OUTPUTS rows, with zeros behind them.
template <typename X, typename W>
inline void pack_panel(const W* const* rows, std::int64_t begin, std::int64_t end, Float* panel) {
    using D = Dot<X, W>;
    for (std::int64_t i = begin; i < end; i += D::STEP, panel += LANES * PANEL_VECTORS) {
        const int count = static_cast<int>(std::min<std::int64_t>(D::STEP, end - i));
        for (int v = 0; v < PANEL_VECTORS; ++v) {
            const W* const* of = rows + v * LANES;
            Float square[LANES];
            if (count == D::STEP) {
                for (int r = 0; r < LANES; ++r) square[r] = bits_as<Float>(D::read(of[r] + i));
            } else {
                for (int r = 0; r < LANES; ++r) square[r] = bits_as<Float>(D::read_first(of[r] + i, count));
            }
            arrange_units<X>(square);
            for (int u = 0; u < LANES; ++u) panel[u * PANEL_VECTORS + v] = square[u];
        }
    }
}

// Pack rows in blocks, which are dequantized a superblock at a time.
template <typename X>
inline void pack_panel_blocks(const BlockFormat& format, const BlockByte* const* rows, std::int64_t begin, std::int64_t end,
                        Float* panel) {
    constexpr int STEP = Dot<X, X>::STEP, SPAN = SUPERBLOCK;
    alignas(64) X wide[LANES][SPAN];
    for (std::int64_t from = begin; from < end; from += SPAN) {
        const std::int64_t to = std::min(end, from + SPAN);
        for (int v = 0; v < PANEL_VECTORS; ++v) {
            for (int r = 0; r < LANES; ++r) format.ops<X>().dequantize(rows[v * LANES + r], from, to, wide[r]);
            for (std::int64_t i = 0; i < to - from; i += STEP) {
                Float square[LANES];
                for (int r = 0; r < LANES; ++r) std::memcpy(&square[r], &wide[r][i], sizeof(Float));
                arrange_units<X>(square);
                Float* units = panel + (from - begin + i) / STEP * LANES * PANEL_VECTORS + v;
                for (int u = 0; u < LANES; ++u) units[u * PANEL_VECTORS] = square[u];
            }
        }
    }
}

#if defined(OSTINATO_HAS_AVX512)
// Read 64 inputs of sixteen int8 rows from `begin` on, with zeros behind `end`: vector u holds four of each row.
inline void read_fours(const std::int8_t* const* rows, std::int64_t begin, std::int64_t end, Float (&fours)[LANES]) {
    const std::int64_t count = std::max<std::int64_t>(end - begin, 0);
    const auto some = count < 64 ? (std::uint64_t{1} << count) - 1 : ~std::uint64_t{0};
    for (int r = 0; r < LANES; ++r) fours[r] = (Float)_mm512_maskz_loadu_epi8(some, rows[r] + begin);
    transpose(fours);
}
#endif

#if defined(OSTINATO_HAS_NEON_BF16)
// Compute total[t][v] of TOKENS tokens in pairs, the last of which may be one token twice.
template <int TOKENS>
inline void multiply_pairs(const bf16* x, std::int64_t stride, const Float* panel, std::int64_t units,
                           Float (&total)[TOKENS][PANEL_VECTORS]) {
    constexpr int PAIRS = (TOKENS + 1) / 2, ROW_PAIRS = 2 * PANEL_VECTORS;
    float32x4_t products[PAIRS][ROW_PAIRS] = {};  // of two tokens with two rows each
    for (std::int64_t u = 0; u < units; ++u, x += 4, panel += ROW_PAIRS) {
#pragma GCC unroll 3
        for (int p = 0; p < PAIRS; ++p) {
            const bf16 *first = x + 2 * p * stride, *second = x + std::min(2 * p + 1, TOKENS - 1) * stride;
            const auto both = vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(&first->bits), vld1_u16(&second->bits)));
#pragma GCC unroll 8
            for (int r = 0; r < ROW_PAIRS; ++r) {
                products[p][r] = vbfmmlaq_f32(products[p][r], both, bits_as<bfloat16x8_t>(panel[r]));
            }
        }
    }
    for (int t = 0; t < TOKENS; ++t) {
        for (int v = 0; v < PANEL_VECTORS; ++v) {
            const auto a = (Float)products[t / 2][v], b = (Float)products[t / 2][PANEL_VECTORS + v];
            total[t][v] = t % 2 ? __builtin_shufflevector(a, b, 2, 3, 6, 7) : __builtin_shufflevector(a, b, 0, 1, 4, 5);
        }
    }
}
#endif

// Compute sums[t][output] += scale[output] * sum_i x[t][i] * w[output][i] for TOKENS tokens and the units of a panel.
// Scales are optional; the first span assigns instead of adding.
template <int TOKENS, typename X, typename W>
inline void multiply_panel(const X* x, std::int64_t stride, const Float* panel, std::int64_t units, const float* scales,
                           bool first, float* sums) {
    Float total[TOKENS][PANEL_VECTORS] = {};
    if constexpr (IN_PAIRS_OF_ROWS<X>) {
        multiply_pairs(x, stride, panel, units, total);
    } else {
        using D = Dot<X, W>;
        for (std::int64_t u = 0; u < units; ++u, x += K_UNIT<X, W>, panel += PANEL_VECTORS) {
            typename D::Vector rows[PANEL_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; ++v) rows[v] = bits_as<typename D::Vector>(panel[v]);
#pragma GCC unroll 6
            for (int t = 0; t < TOKENS; ++t) {
                std::int32_t unit;
                std::memcpy(&unit, x + t * stride, sizeof(unit));
                const auto token = bits_as<typename D::Vector>(Int{} + unit);
#pragma GCC unroll 4
                for (int v = 0; v < PANEL_VECTORS; ++v) total[t][v] = D::multiply_add(total[t][v], token, rows[v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; ++v) {
            float* to = sums + t * PANEL_OUTPUTS + v * LANES;
            if (scales) total[t][v] *= load(scales + v * LANES);
            store(to, first ? total[t][v] : load(to) + total[t][v]);
        }
    }
}

// Return the outputs that a panel computes, after the activation.
inline int panel_width(const Epilogue& o) { return has_gates(o.activation) ? PANEL_OUTPUTS / 2 : PANEL_OUTPUTS; }

// Row pointers of a panel. With gates, half of its rows are gates of the other half.
template <typename W>
struct PanelRowPointers {
    std::int64_t first, count;  // outputs after the activation
    std::int64_t number[PANEL_OUTPUTS];  // behind the last row, the last row again, whose result is not used
    const W* row[PANEL_OUTPUTS];

    PanelRowPointers(const WeightView<W>& w, const Epilogue& o, std::int64_t panel) {
        const int width = panel_width(o);
        first = panel * width;
        count = std::min<std::int64_t>(width, o.size - first);
        for (int r = 0; r < PANEL_OUTPUTS; ++r) {
            const std::int64_t of_half = std::min(first + r % width, o.size - 1);
            number[r] = r < width ? of_half : o.size + of_half;
            row[r] = w.first + number[r] * w.stride();
        }
    }
};

// Prefetch of the next span, some lines at each step of the present work: many at once would wait for each other, and
// delay later loads.
template <typename W>
class LinePrefetch {
  public:
    // Prefetch bytes `begin` to `end` of `count` rows, over `steps` steps.
    LinePrefetch(const W* const* rows, int count, std::int64_t begin, std::int64_t end, std::int64_t steps)
        : row_(rows), last_(rows + count), begin_(begin), end_(end), at_(begin) {
        const std::int64_t lines = count * ((end - begin + LINE - 1) / LINE);
        at_once_ = static_cast<int>((lines + steps - 1) / steps);
    }

    [[gnu::always_inline]] void step() {
        for (int i = 0; i < at_once_ && row_ < last_; ++i) {
            __builtin_prefetch(reinterpret_cast<const char*>(*row_) + at_, 0, 2);
            at_ += LINE;
            if (at_ >= end_) ++row_, at_ = begin_;
        }
    }

  private:
    static constexpr std::int64_t LINE = 64;
    const W* const* row_;
    const W* const* last_;
    std::int64_t begin_, end_;
    std::int64_t at_;
    int at_once_;
};

constexpr int PREFETCH_STEP = 8;  // inputs

template <typename W>
inline std::int64_t row_bytes_of(const WeightView<W>& w, std::int64_t inputs) {
    if constexpr (std::is_same_v<W, BlockByte>) {
        return inputs / w.format->elements * w.format->bytes;
    } else {
        return inputs * sizeof(W);
    }
}

// Compute this thread's outputs of the tokens from `first` on, which are at `x`, among `all` tokens there, by a class that
// packs weights and multiplies tokens with them.
template <typename Panel, typename T, typename Y, typename W>
void multiply_panels(const ThreadGroup& threads, std::int64_t first, std::int64_t tokens, const typename Panel::Token* x,
                     std::int64_t all, const WeightView<W>& w, const Epilogue& o, Y* y) {
    const int width = panel_width(o);
    const EvenBlocks blocks(tokens, PANEL_TOKENS);
    Float* memory = threads.thread_scratch<Float>(Panel::SIZE + tokens * PANEL_VECTORS);
    float* sums = reinterpret_cast<float*>(memory + Panel::SIZE);
    Panel panel(w, x, all, memory);
    for (const std::int64_t number : threads.claims((o.size + width - 1) / width)) {
        const PanelRowPointers<W> rows(w, o, number), next_rows(w, o, number + 1);
        for (std::int64_t begin = 0, end; begin < w.k; begin = end) {
            end = panel.end_of(begin);
            panel.pack(rows, begin, end);
            const bool last = end == w.k;
            const W* const* next = last ? next_rows.row : rows.row;
            const std::int64_t next_begin = last ? 0 : end;
            LinePrefetch<W> fetch(next, PANEL_OUTPUTS, row_bytes_of(w, next_begin), row_bytes_of(w, panel.end_of(next_begin)),
                           blocks.count * std::max<std::int64_t>((end - begin) / PREFETCH_STEP, 1));
            for (int block = 0; block < blocks.count; ++block) {
                const std::int64_t t = blocks.begin(block);
                panel.multiply(t, blocks.size(block), sums + t * PANEL_OUTPUTS, fetch);
                if (!last) continue;
                for (std::int64_t i = t; i < blocks.begin(block + 1); ++i) {
                    const float* of_token = sums + i * PANEL_OUTPUTS;
                    put_outputs<T>(of_token, of_token + width % PANEL_OUTPUTS, o, first + i, rows.first,
                                   static_cast<int>(rows.count), y);
                }
            }
        }
    }
}

// Prefetch the `block`th of `blocks` parts of the next span: inputs `begin` to `end` of some rows.
template <typename W>
inline void prefetch_rows(const WeightView<W>& w, const PanelRowPointers<W>& rows, std::int64_t begin, std::int64_t end, int block,
                       int blocks) {
    if constexpr (std::is_same_v<W, BlockByte>) {
        begin = begin * w.format->bytes / w.format->elements;
        end = end * w.format->bytes / w.format->elements;
    }
    constexpr int LINE = 64 / sizeof(W);
    for (int r = PANEL_OUTPUTS * block / blocks; r < PANEL_OUTPUTS * (block + 1) / blocks; ++r) {
        for (std::int64_t i = begin; i < end; i += LINE) __builtin_prefetch(rows.row[r] + i);
    }
}

// Prefetch `count` inputs of the tokens of a block, if there is one: all tokens of a group may not fit the L2 cache, and
// their rows lie too far apart for the hardware to predict. Inlined, since GCC drops calls of what only prefetches.
template <typename X>
[[gnu::always_inline]] inline void prefetch_tokens(const X* x, std::int64_t stride, const EvenBlocks& blocks, int block,
                                                   std::int64_t count) {
    if (block == blocks.count) return;
    for (std::int64_t t = blocks.begin(block); t < blocks.begin(block + 1); ++t) {
        for (std::int64_t i = 0; i < count; i += 64 / sizeof(X)) __builtin_prefetch(x + t * stride + i);
    }
}

// Compute the outputs of tokens `first` to `first + tokens`; `x` has these tokens, each a whole number of units.
template <typename T, typename Y, typename X, typename W>
void multiply_group(const ThreadGroup& threads, std::int64_t first, std::int64_t tokens, const X* x, std::int64_t x_stride,
                    const WeightView<W>& w, const Epilogue& o, Y* y) {
    constexpr int STEP = Dot<X, W>::STEP;
    const std::int64_t span = w.scales ? w.group : PANEL_BYTES / sizeof(Float) / PANEL_VECTORS * (STEP / LANES);
    const std::int64_t groups = w.scales ? (w.k + w.group - 1) / w.group : 0;
    const int width = panel_width(o);
    const EvenBlocks blocks(tokens, PANEL_TOKENS);  // 5 and 6 tokens, if there are 20 or more
    const std::int64_t panel_size = (span + STEP - 1) / STEP * LANES * PANEL_VECTORS;
    Float* panel = threads.thread_scratch<Float>(panel_size + tokens * PANEL_VECTORS);
    float* sums = reinterpret_cast<float*>(panel + panel_size);
    for (const std::int64_t number : threads.claims((o.size + width - 1) / width)) {
        const PanelRowPointers<W> rows(w, o, number), next_rows(w, o, number + 1);
        for (std::int64_t begin = 0; begin < w.k; begin += span) {
            const std::int64_t end = std::min(w.k, begin + span);
            const bool last = end == w.k;
            const std::int64_t next = last ? 0 : end, next_end = std::min(w.k, next + span);
            const std::int64_t units = (end - begin + K_UNIT<X, W> - 1) / K_UNIT<X, W>;
            if constexpr (std::is_same_v<W, BlockByte>) {
                pack_panel_blocks<X>(*w.format, rows.row, begin, end, panel);
            } else {
                pack_panel<X>(rows.row, begin, end, panel);
            }
            float scales[PANEL_OUTPUTS];
            if (w.scales) {
                for (int r = 0; r < PANEL_OUTPUTS; ++r) scales[r] = w.scales[rows.number[r] * groups + begin / span];
            }
            for (int block = 0; block < blocks.count; ++block) {
                prefetch_rows(w, last ? next_rows : rows, next, next_end, block, blocks.count);
                const std::int64_t t = blocks.begin(block);
                prefetch_tokens(x + begin, x_stride, blocks, block + 1, end - begin);
                const auto multiply = [&](auto size) {
                    const X* from = x + t * x_stride + begin;
                    multiply_panel<size.value, X, W>(from, x_stride, panel, units, w.scales ? scales : nullptr,
                                                     begin == 0, sums + t * PANEL_OUTPUTS);
                };
                if (blocks.size(block) == PANEL_TOKENS) {
                    multiply(std::integral_constant<int, PANEL_TOKENS>{});
                } else {
                    multiply(std::integral_constant<int, PANEL_TOKENS - 1>{});
                }
                if (!last) continue;
                for (std::int64_t i = t; i < blocks.begin(block + 1); ++i) {
                    const float* of_token = sums + i * PANEL_OUTPUTS;
                    put_outputs<T>(of_token, of_token + width, o, first + i, rows.first, static_cast<int>(rows.count),
                                   y);
                }
            }
        }
    }
}

// Copy tokens in the type that is multiplied, `stride` elements apart and padded with zeros, for all threads.
template <typename X, typename T>
inline const X* copy_tokens(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride, std::int64_t in,
                            std::int64_t stride) {
    X* copies = threads.group_scratch<X>(tokens * stride);
    const Range mine = threads.split_shared(tokens);
    for (std::int64_t t = mine.begin; t < mine.end; ++t) {
        const T* from = x + t * x_stride;
        X* to = copies + t * stride;
        if constexpr (std::is_same_v<X, T>) {
            std::memcpy(to, from, in * sizeof(X));
            std::memset(to + in, 0, (stride - in) * sizeof(X));
        } else {
            std::int64_t i = 0;
            for (; i + LANES <= in; i += LANES) store(to + i, load(from + i));
            for (; i < stride; ++i) to[i] = i < in ? to_float(from[i]) : 0.0f;
        }
    }
    threads.barrier();
    return copies;
}

// Compute all outputs of many tokens.
template <typename T, typename Y, typename W>
void gemm_large_m(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride, const WeightView<W>& w,
                   const Epilogue& o, Y* y) {
    using X = LhsType<T>;
    const EvenBlocks groups(tokens, MAX_GROUP_TOKENS);
    for (int group = 0; group < groups.count; ++group) {
        const std::int64_t first = groups.begin(group), count = groups.size(group);
        const T* from = x + first * x_stride;
        if constexpr (std::is_same_v<X, T>) {
            if (w.k % K_UNIT<X, W> == 0) {
                multiply_group<T>(threads, first, count, from, x_stride, w, o, y);
                continue;
            }
        }
        const std::int64_t stride = (w.k + K_UNIT<X, W> - 1) / K_UNIT<X, W> * K_UNIT<X, W>;
        multiply_group<T>(threads, first, count, copy_tokens<X>(threads, count, from, x_stride, w.k, stride), stride, w, o,
                          y);
    }
}

}  // namespace ostinato
