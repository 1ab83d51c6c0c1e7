// Operations on weights in blocks: the dot products and dequantizers of each format. ops/quant/block_formats.py has the
// names and sizes of the formats.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/arguments.h"
#include "core/amx.h"
#include "gemm/ukernels/dot.h"
#include "quant/block_format.h"

namespace ostinato {

// Dot and dequantize for tokens of storage type X. A row has `count` blocks.
template <typename X>
struct BlockOps {
    // Dot product: sums[t * stride + r] = tokens[t] . rows[r] for up to MAX_DOT_TOKENS tokens and MR rows, while the
    // first `prefetch` of the rows `next` are prefetched.
    void (*dot)(int tokens, const Tokens<X>& x, const BlockByte* const* rows, const BlockByte* const* next, int prefetch,
                std::int64_t count, float* sums, int stride);
    // Dequantizer: to[i] = elements `begin` to `end` of a row, both multiples of SUBBLOCK.
    void (*dequantize)(const BlockByte* row, std::int64_t begin, std::int64_t end, X* to);
};

// Rows to prefetch: one line of each for every line of the rows that are multiplied.
struct RowPrefetch {
    const BlockByte* const* rows;
    int count;

    void operator()(std::int64_t from, std::int64_t bytes) const {
        for (int p = 0; p < count; ++p) {
            for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(&rows[p][from + i].byte, 0, 2);
        }
    }
};

constexpr int MAX_BF16_TOKENS = 5;  // the most tokens that one call of `dot_bf16` takes

// Processors with bfloat16 products in vectors but no matrix units use gemm/mid_m_dequant_bf16.h.
#if defined(OSTINATO_HAS_AVX512_BF16) && !defined(OSTINATO_TILES)
#define OSTINATO_DEQUANT_BF16
#endif

// Elements from row to row of a span: an odd number of cache lines.
constexpr int DEQUANT_STRIDE = DEQUANT_SPAN + SUBBLOCK;

// Arguments of dequant_dot: a few tokens times a span of MR rows in bfloat16. Meanwhile this call dequantizes its share
// of the superblocks of the next span, of these rows or of others, and prefetches the rows behind that.
struct DequantStep {
    Tokens<bf16> tokens;
    const bf16* rows;
    bf16* made;
    const BlockByte *next[MR], *to_come[MR];
    int subblocks, next_subblocks;
    int share, shares;
    bool is_first, is_last;  // first or last span of a row
    Float* totals;           // [tokens][MR], carried from span to span
    float* sums;             // [tokens][MR], `sums_stride` from token to token, written by the last span
    int sums_stride;
};

struct BlockFormat {
    const char* name;
    std::int64_t elements, bytes;  // of a block
    BlockOps<float> with_f32;
    BlockOps<bf16> with_bf16;  // `dot` is null without AVX512-BF16
    // The dot product with weights rounded to bfloat16, where `dot` is exact, of 3 to MAX_BF16_TOKENS tokens. Null
    // without AVX512-BF16.
    decltype(with_bf16.dot) dot_bf16 = nullptr;
    // The dot product with rounded weights of 3 to NR tokens, which also dequantizes. Null without
    // OSTINATO_DEQUANT_BF16.
    void (*dequant_dot)(int tokens, const DequantStep& work) = nullptr;
    // Packing of rows: panel[(i - begin) * stride] = elements `begin` to `end` of LANES rows, both multiples of
    // SUBBLOCK. Null but with AVX2 alone.
    void (*pack)(const BlockByte* const* rows, std::int64_t begin, std::int64_t end, int stride, Float* panel) = nullptr;
    // Operations on i16 tokens with one scale per `i16_scale_span` elements; 0: the format has none.
    BlockOps<i16> with_i16 = {};
    int i16_scale_span = 0;
    I16Order i16_order = I16Order::LINEAR;
#if defined(OSTINATO_I16_PANELS)
    // Packed integers in pairs for gemm/large_m_i16.h, otherwise as `pack`: a scale per `i16_sum` elements, and a minimum
    // per subblock if the format has minima. `begin` is a multiple of SUPERBLOCK, `end` at most one further.
    void (*pack_i16)(const BlockByte* const* rows, std::int64_t begin, std::int64_t end, int stride, Int* to,
                     Float* scales, Float* minima) = nullptr;
    int i16_sum = 0;
    bool has_minima = false;
#endif

    std::int64_t row_bytes(std::int64_t in) const { return in / elements * bytes; }

    template <typename X>
    const BlockOps<X>& ops() const {
        if constexpr (std::is_same_v<X, bf16>) {
            return with_bf16;
        } else if constexpr (std::is_same_v<X, i16>) {
            return with_i16;
        } else {
            return with_f32;
        }
    }
};

// Return the format `name`, or null.
const BlockFormat* block_format(const std::string& name);

// Consecutive rows of a matrix that have one format.
struct BlockPart {
    const BlockFormat* format;
    std::int64_t rows;
};

// All rows of a matrix in parts; empty if its weights are not in blocks.
using BlockParts = std::vector<BlockPart>;

inline bool from_python(PyObject* value, BlockParts& to) {
    if (value == Py_None) return true;
    std::vector<std::pair<std::string, std::int64_t>> named;
    if (!nb::try_cast(nb::handle(value), named)) return false;
    for (const auto& [name, rows] : named) {
        const BlockFormat* format = block_format(name);
        if (!format) return false;
        to.push_back({format, rows});
    }
    return true;
}

// Return the bytes, or elements, from row to row of weights [n, k].
template <typename W>
inline std::int64_t row_stride(const BlockFormat* format, std::int64_t in) {
    if constexpr (std::is_same_v<W, BlockByte>) {
        return format->row_bytes(in);
    } else {
        return in;
    }
}

}  // namespace ostinato
