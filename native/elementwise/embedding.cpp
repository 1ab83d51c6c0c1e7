// Embeddings of tokens, and media embeddings that replace them.

#include "bind/kernel_binding.h"
#include "core/simd.h"
#include "gemm/block_ops.h"

namespace ostinato {
namespace {

// Dequantize elements `begin` to `begin + count` of a row of int8 weights with one scale, or one per `group` elements.
template <typename T>
void dequantize_int8(const std::int8_t* row, const float* scales, std::int64_t group, std::int64_t begin, std::int64_t count,
            float multiplier, T* to) {
    for (std::int64_t j = 0; j < count; j += LANES) {
        const float scale = scales[group ? (begin + j) / group : 0] * multiplier;
        const int rest = static_cast<int>(count - j);
        if (rest >= LANES) {
            store(to + j, load(row + begin + j) * scale);
        } else {
            store_masked(to + j, load_masked(row + begin + j, rest) * scale, rest);
        }
    }
}

struct Embedding : Arguments {
    FIELD(Array<VALUES>, out);  // [tokens, hidden]
    FIELD(Array<INT64>, token_ids);
    // [vocab, hidden]: floats in the dtype of `out`, or any if that is float32; int8, or bytes of blocks
    FIELD(Strided<ANY>, weight);
    FIELD(float, multiplier);
    FIELD(OptionalTensor<Array<FLOAT32>>, weight_scale);  // [vocab], or one per group of a row
    FIELD(std::optional<std::int64_t>, group_size);  // elements, a multiple of LANES
    FIELD(IgnoredArgument, out_dtype);
    FIELD(BlockParts, blocks);  // one format, if weights are bytes

    void check(const Reader& reader) const {
        reader.expect((weight.dtype == INT8) == bool(weight_scale), "8-bit weights have scales, and no others");
        reader.expect((weight.dtype == UINT8) == (blocks.size() == 1), "weights in blocks have a format, and no others");
        const bool is_float = weight.dtype <= FLOAT16 && (out.dtype == FLOAT32 || out.dtype == weight.dtype);
        reader.expect(is_float || weight.dtype == INT8 || weight.dtype == UINT8, "vectors have the dtype of their weights");
    }
};

// Write rows of `weight` times `multiplier`.
void embedding(const ThreadGroup& threads, std::int64_t tokens, const Embedding& in) {
    const std::int64_t hidden = in.out.shape[1], group = in.group_size.value_or(0);
    const float* scales = in.weight_scale.at<const float>();
    // Threads share the elements, not the tokens: a single token is worth sharing too.
    constexpr std::int64_t GRAIN = 512;
    const std::int64_t parts = (hidden + GRAIN - 1) / GRAIN;
    const Range mine = threads.split(tokens * parts);
    with_dtype(in.out.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t token = i / parts, begin = i % parts * GRAIN;
            const std::int64_t count = std::min(GRAIN, hidden - begin);
            const std::int64_t row = in.token_ids.at<const std::int64_t>()[token];
            T* to = in.out.at<T>() + token * hidden + begin;
            if (!in.blocks.empty()) {
                float wide[GRAIN];
                in.blocks[0].format->with_f32.dequantize(in.weight.row<const BlockByte>(row), begin, begin + count, wide);
                for (std::int64_t j = 0; j < count; j += LANES) store(to + j, load(wide + j) * in.multiplier);
                continue;
            }
            if (scales) {
                const std::int64_t groups = group ? (hidden + group - 1) / group : 1;
                const auto* integers = in.weight.row<const std::int8_t>(row);
                dequantize_int8(integers, scales + row * groups, group, begin, count, in.multiplier, to);
                continue;
            }
            if (in.multiplier == 1.0f && in.weight.dtype == in.out.dtype) {
                std::memcpy(to, in.weight.row<const T>(row) + begin, sizeof(T) * count);
                continue;
            }
            with_dtype(in.weight.dtype, [&](auto of_weight) {
                const auto* from = in.weight.row<const decltype(of_weight)>(row) + begin;
                for (std::int64_t j = 0; j < count; j += LANES) {
                    store_partial(to + j, load_partial(from + j, count - j) * in.multiplier, count - j);
                }
            });
        }
    });
}

struct WeightedEmbedding : Arguments {
    FIELD(Strided<INT64>, ids);  // [tokens, count]
    FIELD(Strided<FLOAT32>, weights);  // [tokens, count]
    FIELD(Array<VALUES>, table);  // [rows, hidden]
    FIELD(Array<VALUES>, out);  // [tokens, hidden]
};

// Write weighted sums of rows of `table`.
void weighted_embedding(const ThreadGroup& threads, std::int64_t tokens, const WeightedEmbedding& in) {
    const std::int64_t count = in.ids.shape[1], hidden = in.table.shape[1];
    const Range mine = threads.split(tokens);
    with_dtype(in.table.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t token = mine.begin; token < mine.end; ++token) {
            for (std::int64_t j = 0; j < hidden; j += LANES) {
                Float total = {};
                for (std::int64_t i = 0; i < count; ++i) {
                    const T* row = in.table.row<const T>(in.ids.row<const std::int64_t>(token)[i]);
                    const Float weight = splat(in.weights.row<const float>(token)[i]);
                    total = fma(load_partial(row + j, hidden - j), weight, total);
                }
                store_partial(in.out.at<T>() + token * hidden + j, total, hidden - j);
            }
        }
    });
}

struct InjectMedia : Arguments {
    FIELD(Array<VALUES>, x);  // [tokens, hidden]
    FIELD(Array<INT64>, media_cells);  // [tokens]
    FIELD(Array<VALUES>, media);  // [cells, rows, hidden]
    FIELD(std::int64_t, row);
    FIELD(bool, add);
    FIELD(Array<VALUES>, out);  // x itself
};

// Replace each token's vector by row `row` of its cell, or with `add` add that row to it. Tokens with cell 0 keep their
// vector.
void inject_media(const ThreadGroup& threads, std::int64_t tokens, const InjectMedia& in) {
    const std::int64_t hidden = in.x.shape[1];
    const Range mine = threads.split(tokens);
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t token = mine.begin; token < mine.end; ++token) {
            const std::int64_t cell = in.media_cells.at<const std::int64_t>()[token];
            if (cell == 0) continue;
            const T* from = in.media.row<const T>(cell) + in.row * in.media.strides[1];
            T* to = in.out.row<T>(token);
            if (!in.add) {
                std::memcpy(to, from, sizeof(T) * hidden);
                continue;
            }
            for (std::int64_t j = 0; j < hidden; j += LANES) {
                store_partial(to + j, load_partial(to + j, hidden - j) + load_partial(from + j, hidden - j), hidden - j);
            }
        }
    });
}

KERNEL(embedding);
KERNEL(inject_media);
KERNEL(weighted_embedding);

}  // namespace
}  // namespace ostinato
