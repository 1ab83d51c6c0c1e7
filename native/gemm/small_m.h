// GEMV-like drivers for few tokens, as in decoding, where reading the weights takes the time; and for all tokens in a
// fixed order.
//
// A thread reads its weights in streams that lie far apart and continue from row to row: the hardware prefetches such
// streams, at nearly full bandwidth. Adjacent rows would be many short streams.
#pragma once

#include "core/thread_group.h"
#include "core/transpose.h"
#include "gemm/epilogue.h"
#include "gemm/lhs.h"
#include "gemm/ukernels/dot_i16_i8.h"
#include "gemm/ukernels/dot_i16_planes.h"
#include "gemm/weights.h"
#include "quant/quantize_tokens_i16.h"

namespace ostinato {

constexpr int ROW_STREAMS = MR;
constexpr int MAX_UNPREFETCHED_TOKENS = 2;  // up to here, prefetches only disturb those of the hardware
// Rows in blocks are prefetched for a few i16 tokens on Intel's processors, which fetch them too late by themselves.
// Modules with bfloat16 products and no matrix units are for AMD's, where it was not measured.
#if defined(OSTINATO_HAS_AVX512) && !defined(OSTINATO_DEQUANT_BF16)
constexpr bool PREFETCHES_I16_ROWS = true;
#else
constexpr bool PREFETCHES_I16_ROWS = false;
#endif
constexpr int MR_PANEL = EPILOGUE_ROWS;  // rows of a stream per epilogue
constexpr std::int64_t L1_ROW_BYTES = 20 * 1024;  // rows per pass of the tokens: they stay in the L1 cache

template <typename X, typename W>
constexpr std::int64_t padded_k(std::int64_t in) {
    constexpr int STEP = Dot<X, W>::STEP;
    return (in + STEP - 1) / STEP * STEP;
}

// Share of the next rows that a block of tokens prefetches: `count` rows from `first` on. The first blocks prefetch all
// of them.
struct PrefetchShare {
    int first, count;
};

inline PrefetchShare prefetch_share(int number, int blocks) {
    constexpr PrefetchShare SHARES[4][4] = {{{0, 4}}, {{0, 2}, {2, 2}}, {{0, 2}, {2, 1}, {3, 1}}, {{0, 1}, {1, 1}, {2, 1}, {3, 1}}};
    return number < 4 ? SHARES[std::min(blocks, 4) - 1][number] : PrefetchShare{0, 0};
}

template <int TOKENS, bool PACKED, typename... Args>
inline void dot_with_prefetch(int prefetch, const Args&... args) {
    if (prefetch == 0 || (!PACKED && TOKENS <= MAX_UNPREFETCHED_TOKENS)) {
        dot_block<TOKENS, 0, PACKED>(args...);
    } else if (!PACKED || prefetch == MR) {
        dot_block<TOKENS, MR, PACKED>(args...);
    } else if (prefetch == 1) {
        dot_block<TOKENS, 1, PACKED>(args...);
    } else {
        dot_block<TOKENS, 2, PACKED>(args...);
    }
}

template <int MOST, bool PACKED, typename... Args>
inline void dot_tokens(int tokens, const Args&... args) {
    with_constant<MOST>(tokens, [&](auto some) { dot_with_prefetch<some.value, PACKED>(args...); });
}

// A part of the outputs, in streams of `length` rows. With gates, half of the streams are gates.
struct RowStreams {
    Range outputs;
    std::int64_t length, size;
    int width;  // streams of distinct outputs

    RowStreams(const ThreadGroup& threads, const Epilogue& o)
        : outputs(threads.split(o.size, MR_PANEL)), size(o.size), width(has_gates(o.activation) ? ROW_STREAMS / 2 : ROW_STREAMS) {
        length = (outputs.end - outputs.begin + width - 1) / width;
        // Odd: streams that lie a multiple of many KiB apart conflict in caches and in memory.
        if (length > MR_PANEL) length |= 1;
    }

    std::int64_t first(int stream) const { return outputs.begin + stream % width * length; }

    std::int64_t last(int stream) const { return outputs.end - 1 + (stream < width ? 0 : size); }

    // Return the index of a row. Behind the last row it is the last row again, whose result is not used.
    std::int64_t row(int stream, std::int64_t number) const {
        return std::min(first(stream) + (stream < width ? 0 : size) + number, last(stream));
    }
};

// Row pointers of all streams from one row on, and of the rows that are prefetched meanwhile.
template <typename W>
struct StreamRowPointers {
    const W* row[2 * MR_PANEL][ROW_STREAMS];
    const float* scales[MR_PANEL][ROW_STREAMS];

    StreamRowPointers(const WeightView<W>& w, const RowStreams& streams, std::int64_t begin, int count) {
        for (int s = 0; s < ROW_STREAMS; ++s) {
            const std::int64_t stride = w.stride();
            const W* const last = w.first + streams.last(s) * stride;
            const W* at = w.first + streams.row(s, begin) * stride;
            for (int i = 0; i < count; ++i) {
                row[i][s] = at;
                at = std::min(at + stride, last);
            }
            if (w.scales) {
                const std::int64_t groups = (w.k + w.group - 1) / w.group;
                for (int i = 0; i < MR_PANEL; ++i) scales[i][s] = w.scales + streams.row(s, begin + i) * groups;
            }
        }
    }
};

// Return whether rows are converted to the type that is multiplied, once for all blocks of tokens.
template <typename X, typename W>
inline bool dequantizes_once(const FullBlocks& blocks, const WeightView<W>& w) {
    if constexpr (std::is_same_v<W, BlockByte>) return std::is_same_v<X, float> && blocks.count > 1 && !w.fixed_order;
    return blocks.count >= MIN_BLOCKS_TO_WIDEN<X, W>;
}

// Return false: products of even blocks take rows as they lie.
template <typename X, typename W>
inline bool dequantizes_once(const EvenBlocks&, const WeightView<W>&) {
    return false;
}

// Return the dot product of a format: with rounded weights for RoundedBlocks, else with the weights as they are.
template <typename X, typename B>
inline auto block_dot(const BlockFormat& format) {
    if constexpr (std::is_same_v<B, RoundedBlocks>) {
        return format.dot_bf16;
    } else {
        return format.template ops<X>().dot;
    }
}

// Return the rows of each stream that one pass of the tokens takes.
template <typename X, typename W, typename B>
inline int rows_per_pass(const B& blocks, const WeightView<W>& w) {
    if (blocks.count == 1 || dequantizes_once<X>(blocks, w)) return 1;
    return std::clamp<int>(L1_ROW_BYTES / (ROW_STREAMS * w.stride() * sizeof(W)), 1, MR_PANEL);
}

// Compute sums[t][row][stream] of all tokens and rows `begin` to `end`, while as many next rows are prefetched.
// Converted rows, one of each stream, are kept in `wide`, [ROW_STREAMS][padded k].
template <bool PACKED, typename X, typename W, typename B>
void multiply_stream_rows(const WeightView<W>& w, const StreamRowPointers<W>& rows, int begin, int end, const X* x,
                   std::int64_t x_stride, const B& blocks, X* wide, float* sums) {
    const std::int64_t padded = padded_k<X, W>(w.k);
    const auto multiply = [&](const auto& row_of) {
        for (int number = 0; number < blocks.count; ++number) {
            const PrefetchShare fetch = prefetch_share(number, blocks.count);
            const std::int64_t first = blocks.begin(number);
            const int size = blocks.size(number);
            const Tokens<X> tokens{x + first * (PACKED ? padded : x_stride), x_stride};
            if constexpr (std::is_same_v<decltype(row_of(0)), const BlockByte* const*>) {
                const int prefetch = PACKED || (PREFETCHES_I16_ROWS && std::is_same_v<X, i16>) ? fetch.count : 0;
                for (int row = begin; row < end; ++row) {
                    block_dot<X, B>(*w.format)(size, tokens, row_of(row), rows.row[row + end - begin] + fetch.first,
                                               prefetch, w.k / w.format->elements,
                                               sums + (first * MR_PANEL + row) * ROW_STREAMS, MR_PANEL * ROW_STREAMS);
                }
#if defined(OSTINATO_I16)
            } else if constexpr (std::is_same_v<X, i16>) {
                for (int row = begin; row < end; ++row) {
                    dot_i16_i8_up_to(size, tokens, row_of(row), rows.row[row + end - begin] + fetch.first, fetch.count, w.k,
                                   sums + (first * MR_PANEL + row) * ROW_STREAMS, MR_PANEL * ROW_STREAMS);
                }
#endif
            } else {
                for (int row = begin; row < end; ++row) {
                    dot_tokens<NR, PACKED>(size, fetch.count, tokens, row_of(row),
                                                   rows.row[row + end - begin] + fetch.first, w.k,
                                                   w.scales ? rows.scales[row] : nullptr, w.group,
                                                   sums + (first * MR_PANEL + row) * ROW_STREAMS, MR_PANEL * ROW_STREAMS);
                }
            }
        }
    };
    if constexpr (PACKED && (std::is_same_v<W, BlockByte> || MIN_BLOCKS_TO_WIDEN<X, W> < std::numeric_limits<int>::max())) {
        if (dequantizes_once<X>(blocks, w)) {
            const X* wide_rows[ROW_STREAMS];
            for (int s = 0; s < ROW_STREAMS; ++s) {
                wide_rows[s] = wide + s * padded;
                if constexpr (std::is_same_v<W, BlockByte>) {
                    w.format->template ops<X>().dequantize(rows.row[begin][s], 0, w.k, wide + s * padded);
                } else {
                    widen_row(rows.row[begin][s], w.k, wide + s * padded);
                }
            }
            multiply([&](int) { return static_cast<const X* const*>(wide_rows); });
            return;
        }
    }
    multiply([&](int row) { return rows.row[row]; });
}

// Apply the epilogue to sums[tokens][MR_PANEL][ROW_STREAMS] of `count` rows of each stream from row `panel` on, for the
// tokens from `first` on.
template <typename T, typename Y>
void store_panel(const RowStreams& streams, std::int64_t panel, int count, std::int64_t tokens, std::int64_t first,
               const float* sums, const Epilogue& o, Y* y) {
    for (std::int64_t t = 0; t < tokens; ++t) {
        float of_token[ROW_STREAMS * MR_PANEL];
        for (int i = 0; i < MR_PANEL; i += LANES) {
            Float some[ROW_STREAMS];
            for (int s = 0; s < ROW_STREAMS; ++s) some[s] = load(sums + (t * MR_PANEL + i) * ROW_STREAMS + s * LANES);
            transpose(some);
            for (int s = 0; s < ROW_STREAMS; ++s) store(of_token + s * MR_PANEL + i, some[s]);
        }
        for (int s = 0; s < streams.width; ++s) {
            const std::int64_t output = streams.first(s) + panel;
            const std::int64_t here = std::min<std::int64_t>(count, streams.outputs.end - output);
            const float* gated = of_token + (s + streams.width) % ROW_STREAMS * MR_PANEL;
            put_outputs<T>(of_token + s * MR_PANEL, gated, o, first + t, output, static_cast<int>(here), y);
        }
    }
}

// Compute the outputs that this thread claims, of the tokens `first` to `first + blocks.tokens`, which are at `x`.
template <bool PACKED, typename T, typename Y, typename X, typename W, typename B>
void multiply_streams(const ThreadGroup& threads, std::int64_t first, const X* x, std::int64_t x_stride, const B& blocks,
              const WeightView<W>& w, const Epilogue& o, Y* y) {
    const int near = rows_per_pass<X>(blocks, w);
    const std::int64_t num_sums = blocks.tokens * ROW_STREAMS * MR_PANEL;
    const std::int64_t num_wide = dequantizes_once<X>(blocks, w) ? ROW_STREAMS * padded_k<X, W>(w.k) : 0;
    float* sums = threads.thread_scratch<float>(num_sums + num_wide);  // an element of X is no larger than a float
    X* wide = reinterpret_cast<X*>(sums + num_sums);
    threads.each_part(o.size, [&](const ThreadGroup& part) {
        const RowStreams streams(part, o);
        for (std::int64_t panel = 0; panel < streams.length; panel += MR_PANEL) {
            const StreamRowPointers<W> rows(w, streams, panel, MR_PANEL + near);
            const int count = static_cast<int>(std::min<std::int64_t>(MR_PANEL, streams.length - panel));
            for (int row = 0; row < count; row += near) {
                multiply_stream_rows<PACKED>(w, rows, row, std::min(row + near, count), x, x_stride, blocks, wide, sums);
            }
            store_panel<T>(streams, panel, count, blocks.tokens, first, sums, o, y);
        }
    });
}

// Pack tokens as `Tokens` describes, block after block, for all threads.
template <typename X, typename W, typename T, typename B>
const X* pack_tokens(const ThreadGroup& threads, const T* x, std::int64_t x_stride, std::int64_t in, const B& blocks) {
    constexpr int STEP = Dot<X, W>::STEP;
    const std::int64_t padded = padded_k<X, W>(in);
    X* packed = threads.group_scratch<X>(blocks.tokens * padded);
    const Range mine = threads.split_shared(blocks.tokens);
    for (int number = 0; number < blocks.count; ++number) {
        const int size = blocks.size(number);
        for (int t = 0; t < size; ++t) {
            const std::int64_t token = blocks.begin(number) + t;
            if (token < mine.begin || token >= mine.end) continue;
            X* to = packed + blocks.begin(number) * padded + t * STEP;
            for (std::int64_t i = 0; i < in; i += STEP, to += size * STEP) {
                const T* from = x + token * x_stride + i;
                const int count = static_cast<int>(std::min<std::int64_t>(STEP, in - i));
                if constexpr (std::is_same_v<X, T>) {
                    if (count == STEP) {
                        std::memcpy(to, from, STEP * sizeof(X));
                    } else {
                        std::memset(to, 0, STEP * sizeof(X));
                        std::memcpy(to, from, count * sizeof(X));
                    }
                } else {
                    store(to, count == STEP ? load(from) : load_masked(from, count));
                }
            }
        }
    }
    threads.barrier();
    return packed;
}

static_assert(4 * NR <= MIN_GROUP_TOKENS);

// Return the tokens that are packed at a time: they stay in the L2 cache.
template <typename X, typename W>
inline std::int64_t tokens_per_pack(std::int64_t in) {
    return std::max<std::int64_t>(L2_TOKEN_BYTES / (in * sizeof(X)) / MAX_DOT_TOKENS<W>, 4) * MAX_DOT_TOKENS<W>;
}

// Multiply with weights in row streams. Sums have a fixed order: a token's bits do not depend on m. Only rows in blocks
// that are dequantized once for several blocks of tokens are an exception.
template <typename T, typename Y, typename W>
void gemm_small_m(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride, const WeightView<W>& w,
                  const Epilogue& o, Y* y) {
    using X = InPlaceLhsType<T, W>;
    if constexpr (std::is_same_v<T, X>) {
        if (tokens <= MAX_DOT_TOKENS<W>) {
            multiply_streams<false, T>(threads, 0, x, x_stride, TokenBlocks<W>(tokens, MAX_DOT_TOKENS<W>), w, o, y);
            return;
        }
    }
    const std::int64_t most = tokens_per_pack<X, W>(w.k);
    for (std::int64_t first = 0; first < tokens; first += most) {
        const TokenBlocks<W> blocks(std::min(most, tokens - first), MAX_DOT_TOKENS<W>);
        const bool alone = blocks.tokens * w.k <= MAX_PACKED_ALONE;
        const X* packed = pack_tokens<X, W>(alone ? threads.alone(0, 1) : threads, x + first * x_stride, x_stride, w.k, blocks);
        multiply_streams<true, T>(threads, first, packed, 0, blocks, w, o, y);
    }
}

#if defined(OSTINATO_HAS_AVX512_BF16)
// Multiply a few tokens with weights in blocks that are rounded to bfloat16.
template <typename Y>
void gemm_small_m_rounded(const ThreadGroup& threads, std::int64_t tokens, const bf16* x, std::int64_t x_stride,
                          const WeightView<BlockByte>& w, const Epilogue& o, Y* y) {
    multiply_streams<false, bf16>(threads, 0, x, x_stride, RoundedBlocks(tokens, MAX_BF16_TOKENS), w, o, y);
}
#endif

#if defined(OSTINATO_I16)
// Return the inputs of an i16 token that share a scale for these weights.
template <typename W>
inline int i16_scale_span(const WeightView<W>& w) {
    if constexpr (std::is_same_v<W, BlockByte>) return w.format->i16_scale_span;
    return I16_SCALE_SPAN;
}

// Multiply a few tokens that are quantised to 16-bit integers with int8 rows that have one scale, or with rows in
// blocks. Each thread quantises for itself, which is faster than waiting for others. Tokens with an element that is not
// finite go to `gemm_small_m`; the others are computed as without them.
template <typename T, typename Y, typename W>
void gemv_i16(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride, const WeightView<W>& w,
                    const Epilogue& o, Y* y) {
    I16Order order = I16Order::LINEAR;
    if constexpr (std::is_same_v<W, BlockByte>) order = w.format->i16_order;
    const std::int64_t stride = I16TokenLayout(w.k).token_size();
    i16* made = threads.thread_scratch<i16>(tokens * stride);
    const auto run = [&](std::int64_t begin, std::int64_t end) {
        if (begin == end) return;
        const EvenBlocks blocks(end - begin, std::is_same_v<W, BlockByte> ? MAX_I16_TOKENS : I16_NR);
        multiply_streams<false, T>(threads, begin, made + begin * stride, stride, blocks, w, o, y);
    };
    std::int64_t begin = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
        if (quantize_token_i16(i16_scale_span(w), order, x + t * x_stride, w.k, made + t * stride)) continue;
        run(begin, t);
        begin = t + 1;
        gemm_small_m(threads, 1, x + t * x_stride, x_stride, w, from_token<Y>(o, t), y + t * o.y_stride);
    }
    run(begin, tokens);
}
#endif

}  // namespace ostinato
