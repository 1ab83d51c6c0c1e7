// GEMM on matrix units: the sums of 32 rows of weights with all tokens.
//
// Weights are left operands: 16 rows of [n, k] by 32 inputs, in place, are a tile. Tokens are right operands, packed in
// pairs of inputs. Sums [16 rows, 16 tokens] are carried from tile to tile along the inputs, in ascending order: a
// token's bits depend only on its own inputs, not on the number of tokens or threads.
//
// Both operands are zero behind the last input. Results behind the last row and the last token are not used.
#pragma once

#include "core/amx.h"

#if defined(OSTINATO_TILES)
#include <algorithm>

#include "core/thread_group.h"
#include "core/transpose.h"
#include "gemm/epilogue.h"
#include "gemm/lhs.h"
#include "gemm/weights.h"
#include "quant/int8.h"

namespace ostinato {
namespace tiles {

constexpr int ROWS = 2 * SIDE;  // weight rows multiplied together

inline std::int64_t steps_of(std::int64_t in) { return (in + DEPTH - 1) / DEPTH; }

inline std::int64_t blocks_of(std::int64_t tokens) { return (tokens + SIDE - 1) / SIDE; }

// Return the blocks of tokens that stay in an L2 cache while rows of weights are multiplied with them.
inline std::int64_t blocks_in_cache(std::int64_t steps) {
    return std::max<std::int64_t>(2, TILE_GROUP_BYTES / (steps * ELEMENTS * std::int64_t{sizeof(bf16)}));
}

// Elements E of a tile's row.
template <typename E>
constexpr std::int64_t TILE_DEPTH = ROW_BYTES / sizeof(E);

// Tokens as right operands: a tile [16 pairs of inputs, 16 tokens, 2] for each block of tokens and step of inputs; of
// int8 [16 fours of inputs, 16 tokens, 4].
template <typename E>
struct PackedTiles {
    E* first;
    std::int64_t blocks, steps;

    E* tile(std::int64_t block, std::int64_t step) const { return first + (block * steps + step) * SIDE * TILE_DEPTH<E>; }
};

using Packed = PackedTiles<bf16>;

// Pack one tile of tokens: `count` inputs from `begin` on; `from[t]` is token t, or null.
template <typename E>
inline void pack_tile(const E* const* from, std::int64_t begin, std::int64_t count, E* to) {
    Float square[SIDE];
    for (int t = 0; t < SIDE; ++t) {
        E some[TILE_DEPTH<E>] = {};
        if (from[t]) std::memcpy(some, from[t] + begin, sizeof(E) * std::min(count, TILE_DEPTH<E>));
        std::memcpy(&square[t], some, sizeof(some));
    }
    transpose(square);
    std::memcpy(to, square, sizeof(square));
}

// Pack a block of tokens; `token(t)` returns the address of token t of the block.
template <typename Token>
void pack_block(const Packed& packed, std::int64_t block, std::int64_t tokens, std::int64_t in, Token&& token) {
    const bf16* from[SIDE];
    for (int t = 0; t < SIDE; ++t) from[t] = t < tokens ? token(t) : nullptr;
    for (std::int64_t step = 0; step < packed.steps; ++step) {
        pack_tile(from, step * DEPTH, in - step * DEPTH, packed.tile(block, step));
    }
}

// Weight rows multiplied together, in two halves, with the scales of their groups; null behind the last row.
template <typename W>
struct TileRows {
    const W* row[ROWS] = {};
    const float* scales[ROWS] = {};
    std::int64_t in, group;  // a group has a multiple of 32 inputs; 0: no scales
    const BlockFormat* format = nullptr;

    std::int64_t stride() const { return row_stride<W>(format, in); }

    // Return whether tiles can be loaded from the weights in place. The rows of each half are consecutive.
    bool can_read_in_place() const {
        return std::is_same_v<W, bf16> && group == 0 && in % DEPTH == 0 && row[SIDE - 1] && row[ROWS - 1];
    }

    // Pack inputs `begin` to `end` as tiles [steps][2][16 rows, 32 inputs].
    void pack(std::int64_t begin, std::int64_t end, bf16* panel) const {
        for (int r = 0; r < ROWS; ++r) {
            bf16* to = panel + r * DEPTH;
            if (row[r] && std::is_same_v<W, BlockByte>) {
                if constexpr (std::is_same_v<W, BlockByte>) {
                    for (std::int64_t i = begin; i < end; i += DEPTH, to += ROWS * DEPTH) {
                        format->with_bf16.dequantize(row[r], i, i + DEPTH, to);
                    }
                }
            } else if (row[r]) {
                if constexpr (!std::is_same_v<W, BlockByte>) pack_row(row[r] + begin, end - begin, to);
            } else {
                for (std::int64_t i = 0; i < end - begin; i += DEPTH) std::memset(to + i * ROWS, 0, ROW_BYTES);
            }
        }
    }

  private:
    // Pack one row; `to` is its place in the first tile. It gets zeros behind its last input.
    static void pack_row(const W* from, std::int64_t count, bf16* to) {
        constexpr std::int64_t STEP = ROWS * DEPTH;  // to the same row of the next tile
        std::int64_t i = 0;
        if constexpr (std::is_same_v<W, bf16>) {
            for (; i + DEPTH <= count; i += DEPTH, to += STEP) {  // one load and one store: `memcpy` of a known size
                std::memcpy(to, from + i, ROW_BYTES);
            }
            if (i < count) {
                std::memset(to, 0, ROW_BYTES);
                std::memcpy(to, from + i, sizeof(bf16) * (count - i));
            }
        } else {
            for (; i + INT8_STEP <= count; i += INT8_STEP, to += 2 * STEP) int8_to_bf16(from + i, to, to + STEP);
            bf16 unused[DEPTH];
            if (i < count) int8_to_bf16_partial(from + i, count - i, to, i + DEPTH < count ? to + STEP : unused);
        }
    }
};

// Prefetch of the next rows into the L2 cache: line by line in memory order, a share at each call. Few long streams get
// the most bandwidth, and rows of weights would be many short ones.
class StreamPrefetch {
  public:
    template <typename W>
    StreamPrefetch(const TileRows<W>& rows, std::int64_t calls) {
        std::int64_t lines = 0;
        for (int half = 0; half < 2; ++half) {
            int count = 0;
            while (count < SIDE && rows.row[half * SIDE + count]) ++count;
            at_[half] = reinterpret_cast<const char*>(rows.row[half * SIDE]);
            left_[half] = (count * rows.stride() * std::int64_t{sizeof(W)} + ROW_BYTES - 1) / ROW_BYTES;
            lines += left_[half];
        }
        share_ = (lines + calls - 1) / std::max<std::int64_t>(calls, 1);
    }

    void operator()() {
        std::int64_t share = share_;
        for (int half = 0; half < 2; ++half) {
            const std::int64_t here = std::min(share, left_[half]);
            for (std::int64_t i = 0; i < here; ++i) __builtin_prefetch(at_[half] + i * ROW_BYTES, 0, 2);
            at_[half] += here * ROW_BYTES;
            left_[half] -= here;
            share -= here;
        }
    }

  private:
    const char* at_[2];
    std::int64_t left_[2], share_;
};

// Left operands of some steps: two tiles each.
template <typename E>
struct WeightTiles {
    const E *low, *high;
    std::int64_t row_bytes, step;  // bytes from row to row, elements from step to step
};

// Compute sums [blocks of tokens][2][16 rows, 16 tokens] of one or two blocks over `count` steps, added to the present
// sums or not. `at_step(i)` is called before each step.
template <int BLOCKS, typename E, typename Sum, typename AtStep>
inline void multiply_blocks(const WeightTiles<E>& weights, const PackedTiles<E>& tokens, std::int64_t block, std::int64_t step,
                            std::int64_t count, bool adds, Sum* sums, AtStep&& at_step) {
    constexpr std::int64_t SUMS = SIDE * SIDE;
    const auto each = [&](auto&& body) {
        body(std::integral_constant<int, 0>{}, 0), body(std::integral_constant<int, 2>{}, 1);
        if constexpr (BLOCKS == 2) body(std::integral_constant<int, 1>{}, 2), body(std::integral_constant<int, 3>{}, 3);
    };
    each([&](auto tile, int at) { adds ? load<tile.value>(sums + at * SUMS, ROW_BYTES) : zero<tile.value>(); });
    for (std::int64_t i = 0; i < count; ++i) {
        at_step(i);
        load<6>(tokens.tile(block, step + i), ROW_BYTES);
        load<4>(weights.low + i * weights.step, weights.row_bytes);
        multiply_add<0, 0, E>();
        load<5>(weights.high + i * weights.step, weights.row_bytes);
        multiply_add<1, 0, E>();
        if constexpr (BLOCKS == 2) {
            load<7>(tokens.tile(block + 1, step + i), ROW_BYTES);
            multiply_add<0, 1, E>();
            multiply_add<1, 1, E>();
        }
    }
    each([&](auto tile, int at) { store<tile.value>(sums + at * SUMS, ROW_BYTES); });
}

// Scratch memory of one thread: a panel of weights, the products of a span, and the sums of all tokens.
struct Work {
    bf16* panel;
    float *part, *sums;

    static constexpr std::int64_t PANEL = ROWS * AMX_PANEL_K / 2, PART = 2 * ROWS * SIDE;

    // Return the floats for `blocks` blocks of tokens.
    static std::int64_t size(std::int64_t blocks) { return PANEL + PART + blocks * ROWS * SIDE; }

    explicit Work(float* first) : panel(reinterpret_cast<bf16*>(first)), part(first + PANEL), sums(part + PART) {}

    // Return the sums of a row of weights with the tokens of a block.
    float* row(std::int64_t block, int row) const { return sums + (block * ROWS + row) * SIDE; }
};

// Call `body` with the number of blocks that are multiplied together from `block` on.
template <typename E, typename Body>
inline void with_blocks(const PackedTiles<E>& tokens, std::int64_t block, Body&& body) {
    if (block + 1 < tokens.blocks) {
        body(std::integral_constant<int, 2>{});
    } else {
        body(std::integral_constant<int, 1>{});
    }
}

// Compute work.sums [blocks][32 rows][16 tokens] = rows x tokens. Meanwhile the next rows are prefetched.
template <typename W>
void multiply_rows(const TileRows<W>& rows, const TileRows<W>& next, const Packed& tokens, const Work& work) {
    if constexpr (std::is_same_v<W, bf16>) {
        // Tiles that are loaded more often are copied: rows in place may evict each other from the L1 cache.
        if (tokens.blocks <= 2 && rows.can_read_in_place()) {
            const WeightTiles<bf16> all{rows.row[0], rows.row[SIDE], rows.in * std::int64_t{sizeof(bf16)}, DEPTH};
            StreamPrefetch fetch(next, tokens.steps);
            with_blocks(tokens, 0, [&](auto blocks) {
                multiply_blocks<blocks.value>(all, tokens, 0, 0, tokens.steps, false, work.sums,
                                              [&](std::int64_t) { fetch(); });
            });
            return;
        }
    }
    const std::int64_t span = rows.group ? std::min<std::int64_t>(rows.group, AMX_PANEL_K) : AMX_PANEL_K;
    const std::int64_t pairs = (tokens.blocks + 1) / 2;
    StreamPrefetch fetch(next, tokens.steps * pairs);
    const auto then = [&](std::int64_t) { fetch(); };
    const WeightTiles<bf16> panel{work.panel, work.panel + ELEMENTS, ROW_BYTES, 2 * ELEMENTS};
    std::int64_t end;
    for (std::int64_t begin = 0; begin < rows.in; begin = end) {
        const std::int64_t of_group = rows.group ? begin / rows.group : 0;
        end = std::min(rows.in, begin + span);
        if (rows.group) end = std::min(end, (of_group + 1) * rows.group);
        rows.pack(begin, end, work.panel);
        const std::int64_t step = begin / DEPTH, count = steps_of(end - begin);
        for (std::int64_t block = 0; block < tokens.blocks; block += 2) {
            with_blocks(tokens, block, [&](auto blocks) {
                float* sums = work.row(block, 0);
                if (rows.group == 0) {
                    multiply_blocks<blocks.value>(panel, tokens, block, step, count, begin > 0, sums, then);
                    return;
                }
                // The products of a span, times the scale of its group, are added in float32.
                multiply_blocks<blocks.value>(panel, tokens, block, step, count, false, work.part, then);
                for (int i = 0; i < blocks.value * ROWS; ++i) {
                    const float* scales = rows.scales[i % ROWS];
                    const Float part = ostinato::load(work.part + i * SIDE);
                    const Float scale = splat(scales ? scales[of_group] : 0.0f);
                    ostinato::store(sums + i * SIDE, begin == 0 ? part * scale
                                                                : fma(part, scale, ostinato::load(sums + i * SIDE)));
                }
            });
        }
    }
}

// Rows of some outputs of a linear: 32, or 16 with the rows that they gate.
template <typename W>
struct OutputRows : TileRows<W> {
    std::int64_t first, count;

    OutputRows(const WeightView<W>& w, const Epilogue& o, std::int64_t number) {
        const bool gated = has_gates(o.activation);
        const std::int64_t width = gated ? SIDE : ROWS, groups = w.scales ? (w.k + w.group - 1) / w.group : 0;
        this->in = w.k;
        this->group = w.scales ? w.group : 0;
        this->format = w.format;
        first = number * width;
        count = std::min(width, o.size - first);
        for (int r = 0; r < ROWS; ++r) {
            const std::int64_t within = gated ? r % SIDE : r;
            if (within >= count) continue;
            const std::int64_t row = first + within + (gated && r >= SIDE ? o.size : 0);
            this->row[r] = w.first + row * w.stride();
            if (w.scales) this->scales[r] = w.scales + row * groups;
        }
    }
};

// Epilogue of sums [32 rows][16 tokens]: `count` outputs of each token from `first` on. Whole vectors of outputs
// without scales and bias stay in registers.
template <typename Y>
class TileEpilogue {
  public:
    TileEpilogue(const Epilogue& o, std::int64_t first, int count)
        : o_(o), first_(first), count_(count), width_(has_gates(o.activation) ? SIDE : ROWS),
          is_plain_(count == width_ && o.is_plain()) {}

    void put(const float* sums, std::int64_t token, std::int64_t tokens, Y* y) const {
        if (tokens <= 2) {  // cheaper than a transpose
            for (std::int64_t t = 0; t < tokens; ++t) {
                float of_token[ROWS];
                for (int r = 0; r < ROWS; ++r) of_token[r] = sums[r * SIDE + t];
                put_outputs<bf16>(of_token, of_token + SIDE, o_, token + t, first_, count_, y);
            }
            return;
        }
        Float halves[2][SIDE];
        for (int r = 0; r < ROWS; ++r) halves[r / SIDE][r % SIDE] = ostinato::load(sums + r * SIDE);
        transpose(halves[0]);
        transpose(halves[1]);
        if (!is_plain_) {
            for (std::int64_t t = 0; t < tokens; ++t) {
                float of_token[ROWS];
                ostinato::store(of_token, halves[0][t]);
                ostinato::store(of_token + SIDE, halves[1][t]);
                put_outputs<bf16>(of_token, of_token + SIDE, o_, token + t, first_, count_, y);
            }
            return;
        }
        for (std::int64_t t = 0; t < tokens; ++t) {
            const Float low = halves[0][t], high = halves[1][t];
            put_vector(activated(o_.activation, low, high), token + t, first_, y);
            if (width_ == ROWS) put_vector(activated(o_.activation, high, high), token + t, first_ + SIDE, y);
        }
    }

  private:
    void put_vector(Float value, std::int64_t token, std::int64_t row, Y* y) const {
        if (o_.residual) value += ostinato::load(static_cast<const Y*>(o_.residual) + token * o_.residual_stride + row);
        ostinato::store(y + token * o_.y_stride + row, value);
    }

    const Epilogue& o_;
    std::int64_t first_;
    int count_, width_;
    bool is_plain_;
};

// Compute the outputs of tokens `first` to `first + tokens`.
template <typename Y, typename W>
void multiply_group(const ThreadGroup& threads, std::int64_t first, std::int64_t tokens, const Packed& packed, const WeightView<W>& w,
                    const Epilogue& o, Y* y) {
    const std::int64_t width = has_gates(o.activation) ? SIDE : ROWS;
    const Work work(threads.thread_scratch<float>(Work::size(packed.blocks)));
    const Scope scope;
    for (const std::int64_t number : threads.claims((o.size + width - 1) / width)) {
        const OutputRows<W> rows(w, o, number), next(w, o, number + 1);
        multiply_rows(rows, next, packed, work);
        const TileEpilogue<Y> output(o, rows.first, static_cast<int>(rows.count));
        for (std::int64_t block = 0; block < packed.blocks; ++block) {
            output.put(work.row(block, 0), first + block * SIDE, std::min<std::int64_t>(SIDE, tokens - block * SIDE), y);
        }
    }
}

// Compute all outputs of any number of tokens, in groups that stay in an L2 cache.
template <typename Y, typename W>
void gemm_large_m(const ThreadGroup& threads, std::int64_t tokens, const bf16* x, std::int64_t x_stride, const WeightView<W>& w,
              const Epilogue& o, Y* y) {
    const std::int64_t steps = steps_of(w.k), blocks = blocks_of(tokens);
    const std::int64_t most = blocks_in_cache(steps), groups = (blocks + most - 1) / most;
    for (std::int64_t number = 0; number < groups; ++number) {
        const std::int64_t begin = blocks * number / groups, end = blocks * (number + 1) / groups;
        const std::int64_t first = begin * SIDE, count = std::min(tokens, end * SIDE) - first;
        const Packed packed{threads.group_scratch<bf16>((end - begin) * steps * ELEMENTS), end - begin, steps};
        const Range mine = threads.split_shared(packed.blocks * steps);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t block = i / steps, step = i % steps;
            const bf16* from[SIDE];
            for (std::int64_t t = 0; t < SIDE; ++t) {
                const std::int64_t token = block * SIDE + t;
                from[t] = token < count ? x + (first + token) * x_stride : nullptr;
            }
            pack_tile(from, step * DEPTH, w.k - step * DEPTH, packed.tile(block, step));
        }
        threads.barrier();
        multiply_group(threads, first, count, packed, w, o, y);
    }
}

}  // namespace tiles
}  // namespace ostinato
#endif
