// Attention within segments, for a vision encoder: a token sees all tokens of its segment.
//
// As in causal attention, a token's result depends only on its query and its segment's keys and values. Keys are taken
// in tiles from the segment's first key on, and the tiles' results are added in order.

#include "attention/packed.h"
#include "attention/softmax.h"
#include "bind/kernel_binding.h"

namespace ostinato {
namespace attention {
namespace {

constexpr std::int64_t MOST_ROWS = ATTENTION_UNIT_ROWS;  // query rows of a unit
constexpr std::int64_t LEAST_ROWS = 48;
constexpr std::int64_t UNITS = 4;  // per thread, so that threads end at about the same time

// Inputs [patches, heads, head_dim], and the output.
template <typename T>
struct EncoderOperands {
    const Tensor &q, &k, &v;
    T* out;
    std::int64_t heads;
};

// The segments, read when the kernel runs.
struct Segments {
    std::int64_t tokens, count;
    const std::int32_t* starts;

    Range at(std::int64_t segment) const {
        const std::int64_t begin = std::min<std::int64_t>(tokens, starts[segment]);
        return {begin, std::max(begin, std::min<std::int64_t>(tokens, starts[segment + 1]))};
    }
};

// Queries [begin, end) of one head, and the segment that their keys are in.
struct EncoderUnit {
    Range segment;
    std::int64_t head, begin, end;

    std::int64_t cost() const { return (end - begin + 8) * (segment.end - segment.begin); }
};

template <typename Body>
void each_unit(const Segments& segments, std::int64_t heads, std::int64_t most_rows, Body&& body) {
    for (std::int64_t i = 0; i < segments.count; ++i) {
        const Range segment = segments.at(i);
        for (std::int64_t head = 0; head < heads; ++head) {
            for (std::int64_t begin = segment.begin; begin < segment.end; begin += most_rows) {
                body(EncoderUnit{segment, head, begin, std::min(begin + most_rows, segment.end)});
            }
        }
    }
}

template <typename T>
class EncoderWorker : TileScratch<T> {
  public:
    EncoderWorker(const ThreadGroup& threads, const EncoderOperands<T>& operands, std::int64_t head_dim, float scale)
        : TileScratch<T>(threads, {head_dim}, MOST_ROWS), operands_(operands), head_{head_dim}, factor_(scale * LOG2_E) {}

    void run(const EncoderUnit& unit) {
        const std::int64_t words = head_.padded_words(), dim = head_.padded_dim(), rows = unit.end - unit.begin;
        const std::int64_t within = unit.head * head_.dim;
        for (std::int64_t i = 0; i < rows; ++i) {
            const T* from = operands_.q.template row<const T>(unit.begin + i) + within;
            for (std::int64_t j = 0; j < words; j += LANES) store(queries + i * words + j, head_.load_words(from, j));
        }
        for (std::int64_t begin = unit.segment.begin; begin < unit.segment.end; begin += TILE) {
            tile(begin, std::min<std::int64_t>(TILE, unit.segment.end - begin), within, rows,
                 begin == unit.segment.begin);
        }
        for (std::int64_t i = 0; i < rows; ++i) {
            T* to = operands_.out + (unit.begin + i) * operands_.heads * head_.dim + within;
            finish(running.softmax[i], running.values + i * dim, to, head_.dim);
        }
    }

  private:
    const EncoderOperands<T>& operands_;
    const Head<T> head_;
    const float factor_;
    using TileScratch<T>::keys, TileScratch<T>::values, TileScratch<T>::queries, TileScratch<T>::scores;
    using TileScratch<T>::running, TileScratch<T>::tile_sums;

    // Add the contribution of `count` keys from `begin` on to `rows` queries.
    void tile(std::int64_t begin, std::int64_t count, std::int64_t within, std::int64_t rows, bool first) {
        constexpr int ELEMENTS = LaneOperand<T>::ELEMENTS;
        const std::int64_t words = head_.padded_words(), dim = head_.padded_dim();
        pack(begin, count, within);
        const std::int64_t panels = (count + LANES - 1) / LANES, depth = (count + ELEMENTS - 1) / ELEMENTS;
        each_block(rows, panels, [&](std::int64_t i, std::int64_t block, std::int64_t column, std::int64_t end) {
            product<T>(block, column, end, queries + i * words, words, keys, LANES, words * LANES, head_.words(),
                       scores + i * TILE, TILE);
        });
        const Sums sums = first ? running : tile_sums;
        for (std::int64_t i = 0; i < rows; ++i) sums.softmax[i] = softmax<T>(scores + i * TILE, 0, count, factor_);
        each_block(rows, dim / LANES, [&](std::int64_t i, std::int64_t block, std::int64_t column, std::int64_t end) {
            product<T>(block, column, end, scores + i * TILE, TILE, values, dim, LANES, depth,
                       sums.values + i * dim, dim);
        });
        if (first) return;
        for (std::int64_t i = 0; i < rows; ++i) {
            merge(running.softmax[i], running.values + i * dim, sums.softmax[i], sums.values + i * dim, dim);
        }
    }

    // Call `body` for each block of registers. Columns are the outer loop, so that a block's columns stay in the L1
    // cache for all rows.
    template <typename Body>
    void each_block(std::int64_t rows, std::int64_t columns, Body&& body) {
        for (std::int64_t column = 0; column < columns; column += BLOCK_COLUMNS) {
            for (std::int64_t i = 0; i < rows; i += BLOCK_ROWS) {
                body(i, std::min<std::int64_t>(BLOCK_ROWS, rows - i), column,
                     std::min<std::int64_t>(column + BLOCK_COLUMNS, columns));
            }
        }
    }

    // Pack keys and values. Lanes behind the last key repeat it: their scores are not used, and their weights are 0.
    void pack(std::int64_t begin, std::int64_t count, std::int64_t within) {
        std::int64_t key_offsets[TILE], value_offsets[TILE];
        for (std::int64_t i = 0; i < TILE; ++i) {
            const std::int64_t token = begin + std::min(i, count - 1);
            key_offsets[i] = token * operands_.k.strides[0] + within;
            value_offsets[i] = token * operands_.v.strides[0] + within;
        }
        const T *k = operands_.k.template at<const T>(), *v = operands_.v.template at<const T>();
        HeadPrefetch nothing(k, nullptr, head_.dim, 1);
        for (std::int64_t i = 0; i < count; i += LANES) {
            pack_keys(head_, k, key_offsets + i, keys + i * head_.padded_words(), nothing);
        }
        for (std::int64_t i = 0; i < count; i += LaneOperand<T>::ELEMENTS) {
            pack_values(head_, v, value_offsets + i, values + i / LaneOperand<T>::ELEMENTS * head_.padded_dim());
        }
    }
};

template <typename T>
void attend(const ThreadGroup& threads, const Segments& segments, const EncoderOperands<T>& operands, std::int64_t head_dim,
            float scale) {
    // Tokens before the first segment and behind the last get zeros.
    const std::int64_t size = operands.heads * head_dim;
    const auto clear = [&](std::int64_t begin, std::int64_t end) {
        const Range mine = threads.split(end - begin);
        if (mine.begin == mine.end) return;  // without patches there is no output either
        std::memset(operands.out + (begin + mine.begin) * size, 0, sizeof(T) * (mine.end - mine.begin) * size);
    };
    if (segments.count == 0) return clear(0, segments.tokens);
    clear(0, segments.at(0).begin);
    clear(segments.at(segments.count - 1).end, segments.tokens);

    std::int64_t most_rows = MOST_ROWS, units = 0, total = 0;
    for (;; most_rows /= 2) {
        units = total = 0;
        each_unit(segments, operands.heads, most_rows, [&](const EncoderUnit& unit) {
            ++units;
            total += unit.cost();
        });
        if (units >= UNITS * threads.size || most_rows / 2 < LEAST_ROWS) break;
    }
    EncoderWorker<T> worker(threads, operands, head_dim, scale);
    std::int64_t before = 0;
    each_unit(segments, operands.heads, most_rows, [&](const EncoderUnit& unit) {
        // The thread in whose share the middle of the unit's cost lies computes it.
        if ((2 * before + unit.cost()) * threads.size / (2 * total) == threads.rank) worker.run(unit);
        before += unit.cost();
    });
}

struct EncoderAttention : Arguments {
    FIELD(Strided<VALUES>, q);  // [tokens, heads, head_dim], as k and v
    FIELD(Strided<VALUES>, k);
    FIELD(Strided<VALUES>, v);
    FIELD(Array<INT32>, starts);  // [segments + 1]
    FIELD(Array<VALUES>, out);  // [tokens, heads, head_dim]
};

void encoder_attention(const ThreadGroup& threads, std::int64_t tokens, const EncoderAttention& in) {
    const Segments segments{tokens, in.starts.shape[0] - 1, in.starts.at<const std::int32_t>()};
    const auto scale = static_cast<float>(std::pow(static_cast<double>(in.q.shape[2]), -0.5));
    with_dtype(in.q.dtype, [&](auto type) {
        using T = decltype(type);
        attend(threads, segments, EncoderOperands<T>{in.q, in.k, in.v, in.out.at<T>(), in.q.shape[1]}, in.q.shape[2], scale);
    });
}

KERNEL(encoder_attention);

}  // namespace
}  // namespace attention
}  // namespace ostinato
